"""What fits a budget of memory: the largest micro-batch, and the levers that make a configuration fit, cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, count, product
from typing import Any

import torch

from .config import BatchSize, Experiment
from .estimate import Sizes, estimate, sizes_of
from .levers import Accumulation, Bf16, BlockCheckpointing, Lora, StageCheckpointing

# What a person would type, and the settings it stands for, in the order to try them in: LoRA trains another model.
LEVERS: dict[str, dict[str, Any]] = {
    "precision": {"bf16": Bf16()},
    "accumulation": {f"x{steps}": Accumulation(steps=steps) for steps in (2, 4, 8)},
    "checkpointing": {"stage": StageCheckpointing(), "block": BlockCheckpointing()},
    "lora": {"r8": Lora(rank=8)},
}


@dataclass(frozen=True)
class Way:
    """Levers that make a configuration fit. flops_ratio: floating-point operations of a step, to those without them."""

    overrides: list[str]
    peak_mib: float
    flops_ratio: float


def largest_per_device(
    experiment: Experiment,
    budget_mib: float,
    *,
    num_processes: int = 1,
    device: torch.device | None = None,
    sizes: Sizes | None = None,
) -> int | None:
    """The largest batch.per_device whose predicted peak fits; None where not even one image does. No more than there are
    images: a larger batch would not be filled."""
    sizes = sizes or sizes_of(experiment.data)

    def peak_mib(per_device: int) -> float:
        asked = replace(experiment, batch=BatchSize(effective=None, per_device=per_device))
        return estimate(asked, num_processes=num_processes, device=device, sizes=sizes).peak_mib

    most = max(1, sizes.num_train // (num_processes * experiment.accumulation.steps))
    return largest(peak_mib, budget_mib, most=most)


def largest(peak_mib: Callable[[int], float], budget_mib: float, *, most: int) -> int | None:
    """The largest number up to `most` that fits, of a peak that grows with it.

    It grows in a straight line but for its kinks (evaluation, rounding), so a guess lies where the line through both ends
    meets the budget; every third halves what is left. It ends between neighbours of which one fits and one does not.
    """
    low, low_mib = 1, peak_mib(1)
    if low_mib > budget_mib:
        return None
    high, high_mib = most, peak_mib(most)
    if high_mib <= budget_mib:
        return most
    for turn in count():
        if high - low == 1:
            return low
        share = 0.5 if turn % 3 == 2 else (budget_mib - low_mib) / (high_mib - low_mib)
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        guess_mib = peak_mib(guess)
        if guess_mib <= budget_mib:
            low, low_mib = guess, guess_mib
        else:
            high, high_mib = guess, guess_mib
    raise AssertionError("count() has no end")


def ways_to_fit(
    experiment: Experiment,
    budget_mib: float,
    *,
    num_processes: int = 1,
    device: torch.device | None = None,
    sizes: Sizes | None = None,
) -> list[Way]:
    """The fewest levers that make it fit, those that add the fewest floating-point operations first; none where nothing
    does.

    The effective batch stays. Operations are counted in the trace: checkpointing repeats forward ones, accumulation adds
    none. How fast a format or a smaller kernel is they do not tell.
    """
    place: dict[str, Any] = {"num_processes": num_processes, "device": device, "sizes": sizes or sizes_of(experiment.data)}
    now = estimate(experiment, **place)
    if now.parameters_mib + now.buffers_mib + now.data_mib > budget_mib:
        return []  # no lever makes these smaller
    off = [lever for lever in LEVERS if is_off(experiment, lever)]
    for num_levers in range(1, len(off) + 1):
        ways = []
        for levers in combinations(off, num_levers):
            for options in product(*(LEVERS[lever] for lever in levers)):
                pulled = dict(zip(levers, options, strict=True))
                if (asked := with_levers(experiment, pulled, num_processes)) is None:
                    continue
                predicted = estimate(asked, **place)
                if predicted.peak_mib <= budget_mib:
                    ways.append(
                        Way(
                            list(words(experiment, asked, pulled)),
                            predicted.peak_mib,
                            predicted.flops_per_image / now.flops_per_image,
                        )
                    )
        if ways:
            return sorted(ways, key=lambda way: round(way.flops_ratio, 2))
    return []


def is_off(experiment: Experiment, lever: str) -> bool:
    if lever == "accumulation":
        return experiment.accumulation.steps == 1
    if lever == "precision":
        return experiment.precision.dtype is None
    return not isinstance(getattr(experiment, lever), (BlockCheckpointing, StageCheckpointing, Lora))


def with_levers(experiment: Experiment, pulled: dict[str, str], num_processes: int) -> Experiment | None:
    """The experiment with these options and the same effective batch; None where that does not divide."""
    effective, _ = experiment.batch_sizes(num_processes)
    asked = replace(experiment, **{lever: LEVERS[lever][option] for lever, option in pulled.items()})
    parts = num_processes * asked.accumulation.steps
    if effective % parts:
        return None
    per_device = None if experiment.batch.per_device is None else effective // parts
    return replace(asked, batch=BatchSize(effective=effective, per_device=per_device))


def words(experiment: Experiment, asked: Experiment, pulled: dict[str, str]) -> Iterator[str]:
    """What to type for it."""
    yield from (f"{lever}={option}" for lever, option in pulled.items())
    if asked.batch.per_device != experiment.batch.per_device:
        yield f"batch.per_device={asked.batch.per_device}"
