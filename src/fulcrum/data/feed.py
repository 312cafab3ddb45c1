"""From a split to the batches of one process: which samples, in which order, where they are kept, ready for a model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .augment import crop_and_flip, normalise
from .dataset import Images
from .plan import EpochPlan, plan_epoch

EVAL_BATCH = 256  # images at most in one evaluation batch, whatever the levers


@dataclass(frozen=True)
class Batch:
    """This process's part of one optimizer step, as raw pixels on the device, with each sample's augmentation.

    `counts` is False for the one stand-in sample of a process that has no part in a short step: it keeps the
    collectives of the processes in step and weighs nothing in the loss.
    """

    images_NCHW: Tensor
    labels_N: Tensor
    offsets_N2: Tensor
    flips_N: Tensor
    step_size: int  # samples of this step over all processes
    full_size: int  # samples of a step that is not cut short by the end of the epoch
    num_processes: int
    counts: bool = True

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, part: slice) -> "Batch":
        return replace(
            self,
            images_NCHW=self.images_NCHW[part],
            labels_N=self.labels_N[part],
            offsets_N2=self.offsets_N2[part],
            flips_N=self.flips_N[part],
        )


class Feed:
    """Serves one split on one device.

    The split lives on the device as one uint8 tensor. Where it does not fit (`resident=False`) it stays in host
    memory, and each batch is gathered there while the step before it is computed, and sent from pinned memory.
    padding: pixels around an image before it is cropped back to its size; None: no augmentation.
    """

    def __init__(
        self,
        images: Images,
        *,
        mean_C: Tensor,
        std_C: Tensor,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        padding: int | None = None,
        drop_last: bool = False,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        num_processes: int = 1,
        resident: bool = True,
    ) -> None:
        self.images = images.to(device) if resident else images
        self.mean_C, self.std_C = mean_C.to(device), std_C.to(device)
        self.device, self.memory_format, self.padding = device, memory_format, padding
        self.batch_size, self.drop_last, self.seed = batch_size, drop_last, seed
        self.rank, self.num_processes = rank, num_processes

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        full_steps, remainder = divmod(len(self.images), self.batch_size)
        return full_steps + (remainder > 0 and not self.drop_last)

    @property
    def samples_per_epoch(self) -> int:
        return min(len(self.images), self.num_steps * self.batch_size)

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        """This process's part of every step of an epoch, from `first_step` on; one batch is prepared ahead."""
        plan = plan_epoch(self.seed, epoch, len(self.images), padding=self.padding or 0, device=self.images.labels_N.device)
        upcoming = None
        for step in range(first_step, self.num_steps):
            following = self._gather(plan, step)
            if upcoming is not None:
                yield upcoming
            upcoming = following
        if upcoming is not None:
            yield upcoming

    def _gather(self, plan: EpochPlan, step: int) -> Batch:
        whole = plan.order_N[step * self.batch_size : (step + 1) * self.batch_size]
        mine = whole.tensor_split(self.num_processes)[self.rank]  # sizes differ by one at most
        samples = mine if len(mine) else whole[:1]
        return Batch(
            images_NCHW=self._send(self.images.images_NCHW[samples]),
            labels_N=self._send(self.images.labels_N[samples]),
            offsets_N2=self._send(plan.offsets_N2[samples]),
            flips_N=self._send(plan.flips_N[samples]),
            step_size=len(whole),
            full_size=self.batch_size,
            num_processes=self.num_processes,
            counts=len(mine) > 0,
        )

    def _send(self, part: Tensor) -> Tensor:
        if part.device == self.device or self.device.type == "cpu":
            return part
        return part.pin_memory().to(self.device, non_blocking=True)

    def inputs(self, batch: Batch) -> Tensor:
        """Augmented, normalised images_NCHW, in the memory format of the model."""
        images = batch.images_NCHW
        if self.padding is not None:
            images = crop_and_flip(images, batch.offsets_N2, batch.flips_N, padding=self.padding)
        return normalise(images, self.mean_C, self.std_C).contiguous(memory_format=self.memory_format)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of every sample once, as stored, for evaluation.

        The batches are the same for any number of processes and are dealt out whole, none padded: a sum over processes
        counts each image exactly once and no rounding depends on their number.
        """
        size = min(self.batch_size, EVAL_BATCH)
        for start in range(self.rank * size, len(self.images), self.num_processes * size):
            part = slice(start, start + size)
            images, labels = self._send(self.images.images_NCHW[part]), self._send(self.images.labels_N[part])
            inputs = normalise(images, self.mean_C, self.std_C).contiguous(memory_format=self.memory_format)
            yield inputs, labels


def fits(num_bytes: int, device: torch.device) -> bool:
    """Whether a data set of this size may live on the device: at most half of what is free there."""
    return device.type != "cuda" or num_bytes <= torch.cuda.mem_get_info(device)[0] // 2
