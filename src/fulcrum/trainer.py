"""The loop, in the words of the maths: step (one optimizer step), fit (all of them), evaluate.

Counting is in optimizer steps everywhere. `step` waits for nothing on the device; `fit` reads the losses every
`logging.every_steps` steps, and that is when a loss that is not finite ends the run, on every process at the same step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.feed import Batch, Feed
from .data.plan import derived_seed
from .levers import Accumulation, Parallelism, Precision
from .levers.precision import Scaler
from .logbook import Logbook
from .meters.memory import MemoryMeter, held_bytes
from .meters.time import StepClock, Stopwatch
from .optimizer import clip_gradients
from .saving import Saving
from .schedule import Schedule
from .signals import Interrupted, Stop


class Diverged(ArithmeticError):
    """The loss, or the gradients at any scale, are not finite: nothing after this step means anything."""


@dataclass
class Progress:
    """Where a run is. step: applied optimizer steps; skipped: those an overflow undid; epoch: whole epochs done."""

    step: int = 0
    skipped: int = 0
    epoch: int = 0
    tried_in_epoch: int = 0


@dataclass
class Window:
    """The steps since the last log point: losses on the device, what is known of them on the host."""

    losses: list[Tensor] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def add(self, loss: Tensor, applied: bool, samples: int) -> None:
        self.losses.append(loss)
        self.applied.append(applied)
        self.samples.append(samples)


@dataclass(kw_only=True)
class Trainer:
    """One run in the making. model: as the levers left it, perhaps wrapped; network: the same without the wrapper."""

    model: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    peak_lr: float
    clip_norm: float | None
    schedule: Schedule
    precision: Precision
    parallelism: Parallelism
    accumulation: Accumulation
    train_feed: Feed
    test_feed: Feed
    epochs: int
    device: torch.device
    seed: int
    rank: int
    logbook: Logbook
    stopwatch: Stopwatch
    clock: StepClock
    memory: MemoryMeter
    progress: Progress = field(default_factory=Progress)
    epoch_loss: "WeightedMean" = field(default_factory=lambda: WeightedMean())

    def step(self, batch: Batch) -> tuple[Tensor, bool]:
        """One optimizer step on this process's part of a batch.

        Returns the mean loss (0-dim, on the device; its mean over processes is the loss of the whole step) and whether
        the step was applied.
        """
        self.set_learning_rate()
        step_loss = torch.zeros((), device=self.device)
        for micro_batch, share, last in self.accumulation.split(batch):
            images_NCHW = self.train_feed.inputs(micro_batch)
            with self.parallelism.sync(self.model, last):
                with self.precision.autocast(self.device):
                    loss = F.cross_entropy(self.model(images_NCHW), micro_batch.labels_N) * share
                self.scaler.scale(loss).backward()
            step_loss += loss.detach()
        self.scaler.unscale(self.optimizer)  # clipping means something only in the units of the loss
        if self.clip_norm is not None:
            clip_gradients(self.network.parameters(), self.clip_norm)
        applied = self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        return step_loss, applied

    def set_learning_rate(self) -> float:
        """The schedule moves with applied steps only."""
        learning_rate = self.learning_rate(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all epochs: the horizon of the schedule."""
        return self.epochs * self.train_feed.num_steps

    def learning_rate(self, num_steps: int) -> float:
        """Of the next step, under a schedule that ends after `num_steps`."""
        steps_per_epoch = self.train_feed.num_steps
        return self.peak_lr * self.schedule.factor(self.progress.step, num_steps=num_steps, steps_per_epoch=steps_per_epoch)

    def fit(self, *, max_steps: int | None, log_every: int, eval_every: int, saving: Saving, save: Callable, stop: Stop) -> None:
        """Trains from `progress` to the end: `epochs`, or `max_steps` applied steps. save(is_best) writes a checkpoint.

        Raises Interrupted, after saving, at the step boundary that follows a `stop` asked of any process.
        """
        stop.can_wait = True
        window = Window()
        batch: Batch | None = None
        while self.progress.epoch < self.epochs and not self._reached(max_steps):
            self.model.train()
            self.memory.start_epoch(self.held_bytes())
            self.clock.restart()
            for batch in self.train_feed.epoch(self.progress.epoch, first_step=self.progress.tried_in_epoch):
                tried = self.progress.step + self.progress.skipped
                torch.manual_seed(derived_seed(self.seed, "step", tried, self.rank))  # dropout, the same after a resume
                self.memory.start_step()
                loss, applied = self.step(batch)
                self.memory.end_step(applied)
                self.clock.mark(batch.step_size)
                self.progress.tried_in_epoch += 1
                self.progress.step += applied
                self.progress.skipped += not applied
                window.add(loss, applied, batch.step_size)
                log_due = (tried + 1) % log_every == 0
                stopping = self.parallelism.any_asks(stop.asked, self.device, at_log_point=log_due)
                save_due = stopping or (applied and saving.due_at_step(self.progress.step))
                if log_due or save_due:
                    self._log(window)
                    window = Window()
                if save_due:
                    self._save(save, is_best=False)
                    self.clock.restart()
                if stopping:
                    raise Interrupted
                if self._reached(max_steps):
                    break
            batch = None  # is not held while evaluating
            self.memory.stop()
            self._log(window)
            window = Window()
            self._end_epoch(max_steps, eval_every, saving, save)
        if self._reached(max_steps) and not self._is_evaluated():  # a run that was killed in between goes on here
            self._end_epoch(max_steps, eval_every, saving, save)
        if self.progress.step == 0:
            raise Diverged(f"all {self.progress.skipped} steps overflowed; use a lower precision.init_scale or more epochs")

    def _reached(self, max_steps: int | None) -> bool:
        return max_steps is not None and self.progress.step >= max_steps

    def _is_evaluated(self) -> bool:
        evaluations = self.logbook.summary.evaluations
        return bool(evaluations) and evaluations[-1]["step"] == self.progress.step

    def _save(self, save: Callable, *, is_best: bool) -> None:
        """Leaves the last good checkpoint where the losses were finite and the weights no longer are."""
        if not math.isfinite(torch.nn.utils.get_total_norm(self.network.parameters())):
            raise Diverged(f"the weights are not finite after step {self.progress.step}; use a lower optimizer.lr")
        save(is_best=is_best)

    def _end_epoch(self, max_steps: int | None, eval_every: int, saving: Saving, save: Callable) -> None:
        """What comes after the last step of an epoch, or of the run."""
        if self.epoch_loss.weight:
            self.logbook.summary.metrics["train_loss"] = self.epoch_loss.value()
        epoch = self.progress.epoch + 1  # the one just trained, counted from 1
        if self.progress.tried_in_epoch >= self.train_feed.num_steps:
            self.progress.epoch, self.progress.tried_in_epoch = epoch, 0
            self.epoch_loss = WeightedMean()
        self.parallelism.check_drift(self.network)
        at_end = self.progress.epoch == self.epochs or self._reached(max_steps)
        is_best = False
        if at_end or epoch % eval_every == 0:
            with self.stopwatch.section("eval"):
                loss, correct = self.evaluate()
            images = len(self.test_feed.images)
            if not math.isfinite(loss):
                raise Diverged(f"the evaluation loss is {loss} after step {self.progress.step}; use a lower optimizer.lr")
            is_best = self.logbook.evaluated(
                step=self.progress.step,
                epoch=epoch,
                loss=loss,
                accuracy=correct / images,
                correct=correct,
                images=images,
                samples=self.progress.epoch * self.train_feed.samples_per_epoch
                + self.progress.tried_in_epoch * self.train_feed.batch_size,
                train_s=self.stopwatch.seconds["train"],
            )
        if at_end or is_best or saving.due_at_epoch(epoch):
            self._save(save, is_best=is_best)

    def _log(self, window: Window) -> None:
        """A log point: reads the losses since the last one, the one wait of the loop for the device."""
        if not window.losses:
            return
        losses = self.parallelism.mean(torch.stack(window.losses)).tolist()
        first_step = self.progress.step + self.progress.skipped - len(losses) + 1
        window_loss = WeightedMean()
        for index, (loss, applied, samples) in enumerate(zip(losses, window.applied, window.samples, strict=True)):
            if applied and not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} at step {first_step + index}; use a lower optimizer.lr")
            if applied:
                window_loss.add(loss, samples)
                self.epoch_loss.add(loss, samples)
        if self.scaler.value is not None and self.scaler.value < 1:
            raise Diverged(
                f"gradients overflow fp16 at any scale at step {first_step + len(losses) - 1}; "
                "use a lower optimizer.lr or precision=bf16"
            )
        self.logbook.steps(
            step=self.progress.step,
            epoch=self.progress.epoch + 1,
            loss=window_loss.value(),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            loss_scale=self.scaler.value,
            timed=self.clock.read(),
            peak_mib=self.memory.peak_mib(),
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[float, int]:
        """(mean loss, number of right answers) over the test split, each image counted once on any number of processes."""
        self.parallelism.share_buffers(self.network)
        batches = self.memory.first_batches(self.test_feed.in_order(), self.held_bytes())
        return evaluate(self.network, self.test_feed, self.precision, self.parallelism, self.device, batches=batches)

    def held_bytes(self) -> int:
        """What is there between steps, on the device."""
        held = held_bytes(self.network, self.optimizer.state, self.scaler, self.train_feed, self.test_feed)
        if self.model is self.network:
            return held
        return held + sum(p.nbytes for p in self.network.parameters() if p.requires_grad)  # the buckets of DDP

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of the loop, as plain data."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.progress.step,
            "skipped": self.progress.skipped,
            "epoch": self.progress.epoch,
            "tried_in_epoch": self.progress.tried_in_epoch,
            "epoch_loss": [self.epoch_loss.total, self.epoch_loss.weight],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state belongs to another optimizer or precision; nothing is loaded then."""
        own, saved = self.optimizer.param_groups, state["optimizer"]["param_groups"]
        if [group.keys() for group in own] != [group.keys() for group in saved]:
            raise ValueError("another optimizer")
        if self.scaler.state_dict().keys() != state["scaler"].keys():
            raise ValueError("another precision: a loss scale belongs to fp16 alone")
        # The settings are this run's, the parameters, their state and the learning rate of the last step the checkpoint's.
        groups = [{**mine, "params": theirs["params"], "lr": theirs["lr"]} for mine, theirs in zip(own, saved, strict=True)]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(state["step"], state["skipped"], state["epoch"], state["tried_in_epoch"])
        self.epoch_loss = WeightedMean(*state["epoch_loss"])


@torch.no_grad()
def evaluate(
    network: nn.Module,
    feed: Feed,
    precision: Precision,
    parallelism: Parallelism,
    device: torch.device,
    *,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> tuple[float, int]:
    """(mean loss, number of right answers) of `network` over all images of `feed`, summed over processes.

    batches: those of `feed`, where somebody measures them on their way.
    """
    was_training = network.training
    network.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images_NCHW, labels_N in feed.in_order() if batches is None else batches:
        with precision.autocast(device):
            logits_NK = network(images_NCHW)
        loss_sum += F.cross_entropy(logits_NK.to(torch.get_default_dtype()), labels_N, reduction="sum")
        correct += (logits_NK.argmax(dim=1) == labels_N).sum()
    network.train(was_training)
    return parallelism.sum(loss_sum).item() / len(feed.images), int(parallelism.sum(correct).item())


class WeightedMean:
    """A mean over samples, absent where there were none."""

    def __init__(self, total: float = 0.0, weight: int = 0) -> None:
        self.total, self.weight = total, weight

    def add(self, value: float, weight: int) -> None:
        self.total += value * weight
        self.weight += weight

    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None
