"""What a run is, told once at its start: the facts for the summary, the lines of the card, the row of HParams."""

import platform
from typing import Any

import torch

from .. import __version__
from .events import without_seed
from .summary import Summary


def card(
    summary: Summary, *, lr_batch: int, lr_scaling: str, images: tuple[int, int], steps_per_epoch: int, epochs: int
) -> list[str]:
    """The lines of the start-up card. images: (to train on, to test on)."""
    batch, lr = summary.batch, summary.learning_rate
    sizes = f"{batch['per_device']} per device x {batch['world_size']} processes x {batch['accumulation']} accumulated"
    trainable, total = summary.model["trainable"], summary.model["parameters"]
    return [
        f"device           {summary.device}, {summary.environment['threads']} CPU threads a process",
        f"precision        {summary.precision['requested']}, in force: {summary.precision['in_force']}",
        f"effective batch  {batch['effective']} = {sizes}",
        f"learning rate    {lr['effective']:g} = {lr['base']:g} for a batch of {lr_batch}, "
        f"scaled {lr_scaling} to {batch['effective']}",
        f"images           {images[0]} to train on, {images[1]} to test on",
        f"steps            {steps_per_epoch} an epoch, {epochs} epochs",
        f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}",
    ]


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "fulcrum": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),  # other ones add in another order
        "machine": platform.machine(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def hparams(summary: Summary) -> dict[str, Any]:
    """A value for every HParams column, and the seed: the seeds of a sweep share a row, so no column can show it."""
    return {
        **summary.choices,
        "batch.effective": summary.batch["effective"],
        "batch.per_device": summary.batch["per_device"],
        "world_size": summary.batch["world_size"],
        "learning_rate": summary.learning_rate["effective"],
        "overrides": without_seed(summary.overrides),
        "seed": summary.seed,
    }
