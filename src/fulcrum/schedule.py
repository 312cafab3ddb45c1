"""Schedules: the learning rate as a closed function of the number of applied optimizer steps.

Nothing is remembered between steps, so a resumed run cannot start from a wrong value. The horizon is
epochs × steps per epoch; `max_steps` stops a run early and does not bend its schedule.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from .refusal import Refusal, at_least


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Constant after a linear warm-up, the harmless default. Holds the keys of the group for all its options."""

    warmup_epochs: float = 0.0
    peak_at: float = 0.25
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])

    unused: ClassVar[tuple[str, ...]] = ("peak_at", "milestones")

    def check(self, epochs: int) -> None:
        at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        if self.warmup_epochs >= epochs:
            raise Refusal(
                f"schedule.warmup_epochs={self.warmup_epochs:g} must end within the run of epochs={epochs}; "
                "use fewer warm-up epochs or more epochs"
            )
        if not 0 < self.peak_at < 1:
            raise Refusal(f"schedule.peak_at={self.peak_at} must lie between 0 and 1; use 0.25")
        bounds = [0.0, *self.milestones, 1.0]
        if not all(left < right for left, right in pairwise(bounds)):
            raise Refusal(
                f"schedule.milestones={self.milestones} must rise between 0 and 1 (fractions of the run); use [0.5,0.75]"
            )

    def factor(self, step: int, *, num_steps: int, steps_per_epoch: int) -> float:
        """What the peak learning rate is multiplied by in the step after `step` applied ones."""
        warmup_steps = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return self.after_warmup(min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))

    def after_warmup(self, progress: float) -> float:
        """The factor at a progress from 0 (end of the warm-up) to 1 (end of the run)."""
        return 1.0


@dataclass(kw_only=True, slots=True)
class Cosine(Schedule):
    """Half a cosine from the peak to 0 (Loshchilov & Hutter, 2017, without restarts)."""

    def after_warmup(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(kw_only=True, slots=True)
class OneCycle(Schedule):
    """Linear from 1/25 of the peak up to it at `peak_at` of the run, then linear to 0 (after Smith & Topin, 2018)."""

    unused: ClassVar[tuple[str, ...]] = ("milestones",)

    def after_warmup(self, progress: float) -> float:
        if progress < self.peak_at:
            return 0.04 + 0.96 * progress / self.peak_at
        return (1 - progress) / (1 - self.peak_at)


@dataclass(kw_only=True, slots=True)
class MultiStep(Schedule):
    """A tenth after each milestone, as in He et al."""

    unused: ClassVar[tuple[str, ...]] = ("peak_at",)

    def after_warmup(self, progress: float) -> float:
        return 0.1 ** sum(progress >= milestone for milestone in self.milestones)
