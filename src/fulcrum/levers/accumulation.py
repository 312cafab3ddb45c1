"""Gradient accumulation: one optimizer step from several small forward and backward passes.

Activations of one micro-batch at a time are alive, so the largest block of memory shrinks by the number of
micro-batches; the price is smaller, less efficient kernels. Each micro-batch counts by its share of the samples of the
step, so a remainder of any size gives exactly the gradient of the whole batch. BatchNorm sees micro-batches: with it,
accumulation is not the same as a large batch, whoever implements it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..data.feed import Batch
from ..refusal import at_least


@dataclass(kw_only=True, slots=True)
class Accumulation:
    """`steps` micro-batches make one optimizer step; 1 is no accumulation."""

    steps: int = 1

    def check(self) -> None:
        at_least("accumulation.steps", self.steps, 1)

    def split(self, batch: Batch) -> Iterator[tuple[Batch, float, bool]]:
        """Yields (micro-batch, share, last): near-equal parts of this process's part of a step.

        share = samples here / samples an average process has in this step. The gradient of a step is the mean over
        processes of the sum over micro-batches of share × mean loss, which is the mean over all samples of the step.
        A short step has fewer micro-batches, the same number on every process.
        """
        smallest_part = max(1, batch.step_size // batch.num_processes)
        num_parts = min(-(-batch.step_size * self.steps // batch.full_size), smallest_part)
        per_process = batch.step_size / batch.num_processes
        start = 0
        for part in range(num_parts):
            size = len(batch) // num_parts + (part < len(batch) % num_parts)
            samples = size if batch.counts else 0
            yield batch[start : start + size], samples / per_process, part == num_parts - 1
            start += size
