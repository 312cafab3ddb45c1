"""What a run is, told once at its start: the facts for the summary, the lines of the card, the row of HParams."""

import platform
import re
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .events import without_seed
from .summary import BLOCKS, Summary


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
        *predicted_line(summary.memory),
        f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}",
    ]


def predicted_line(memory: dict[str, Any]) -> list[str]:
    if memory["predicted_peak_mib"] is None:
        return []
    blocks = ", ".join(f"{name.removesuffix('_mib')} {mib:.1f}" for name, mib in (memory["predicted"] or {}).items())
    return [f"memory           predicted peak {memory['predicted_peak_mib']:.1f} MiB a process ({blocks})"]


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """Where the memory went, in MiB: the peak and its blocks, and beside each what was predicted, where it was."""
    names = [name for name in ("peak_mib", *BLOCKS) if memory[name] is not None]
    if not names:
        return []
    if memory["predicted_peak_mib"] is None:
        blocks = ", ".join(f"{name.removesuffix('_mib')} {memory[name]:.1f}" for name in names if name != "peak_mib")
        peak = "not measured" if memory["peak_mib"] is None else f"{memory['peak_mib']:.1f} MiB"
        return [f"peak memory {peak}; its blocks: {blocks}"]
    predicted = {"peak_mib": memory["predicted_peak_mib"], **(memory["predicted"] or {})}
    lines = [f"{'memory, MiB':12} {'measured':>10} {'predicted':>10} {'error':>9}"]
    for name in names:
        measured, told = memory[name], predicted.get(name)
        error = "-"
        if told is not None and measured:
            error = f"{round(100 * (told / measured - 1), 1) + 0.0:+.1f} %"  # adding 0.0 makes -0.0 positive
        foretold = "-" if told is None else f"{told:.1f}"
        lines.append(f"{name.removesuffix('_mib'):12} {measured:10.1f} {foretold:>10} {error:>9}")
    return lines


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
        "cpu": processor(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str | None:
    """The name of the CPU; None where the system does not tell."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", path.read_text(), flags=re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor() or None


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
