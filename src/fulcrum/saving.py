"""Checkpoints on disk: what is in them, how they are written, and how they are read again.

A file is written under a temporary name, flushed and renamed, so a kill at any moment leaves the older file or the
newer one, whole. It holds plain tensors and plain data under plain parameter names, the same for every lever, and is
read with `weights_only=True`: loading never runs code.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from .refusal import Refusal, at_least

FOLDER = "checkpoints"


@dataclass(kw_only=True, slots=True)
class Saving:
    """No checkpoints, the harmless default. Holds the keys of the group so that sweeps can mix its options."""

    every_epochs: int = 1
    every_steps: int | None = None
    keep: int = 3

    unused: ClassVar[tuple[str, ...]] = ("every_epochs", "every_steps", "keep")
    writes: ClassVar[bool] = False
    numbered: ClassVar[bool] = False

    def check(self) -> None:
        at_least("saving.every_epochs", self.every_epochs, 1)
        at_least("saving.every_steps", self.every_steps, 1)
        at_least("saving.keep", self.keep, 1)

    def due_at_step(self, step: int) -> bool:
        return self.writes and self.every_steps is not None and step % self.every_steps == 0

    def due_at_epoch(self, epoch: int) -> bool:
        return self.writes and epoch % self.every_epochs == 0

    def write(self, checkpoint: dict[str, Any], folder: Path, *, is_best: bool = False) -> None:
        """Writes last.pt, best.pt where `is_best`, and step-<n>.pt where the option numbers them."""
        if not self.writes:
            return
        checkpoints = folder / FOLDER
        checkpoints.mkdir(exist_ok=True)
        if self.numbered:
            write_atomically(checkpoint, checkpoints / f"step-{checkpoint['step']}.pt")
        if is_best:  # before last.pt, which says how good the best one is
            write_atomically(checkpoint, checkpoints / "best.pt")
        write_atomically(checkpoint, checkpoints / "last.pt")
        if self.numbered:
            for old in _numbered(checkpoints)[: -self.keep]:
                old.unlink()


@dataclass(kw_only=True, slots=True)
class SaveLast(Saving):
    """last.pt and best.pt."""

    unused: ClassVar[tuple[str, ...]] = ("keep",)
    writes: ClassVar[bool] = True


@dataclass(kw_only=True, slots=True)
class SaveAll(Saving):
    """last.pt, best.pt, and the `keep` newest as step-<n>.pt."""

    unused: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[bool] = True
    numbered: ClassVar[bool] = True


def _numbered(checkpoints: Path) -> list[Path]:
    """step-<n>.pt files, oldest first."""
    found = [path for path in checkpoints.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))


def write_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """Whole under its own name, or not at all."""
    temporary = path.with_name(f"{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, *, key: str) -> dict[str, Any]:
    """A checkpoint, on the CPU. Refuses, naming `key`, what is not a whole checkpoint of Fulcrum's."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refusal(f"{key}={path} cannot be read as a checkpoint ({reason}); use another one") from error
    missing = {"model", "optimizer", "scaler", "step", "epoch"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise Refusal(f"{key}={path} is no checkpoint of Fulcrum's, it lacks {', '.join(sorted(missing))}; use another")
    return checkpoint


def find(where: str, *, key: str) -> Path:
    """The checkpoint file that a run directory or a file names."""
    path = Path(where)
    candidates = [path] if path.is_file() else [path / FOLDER / "last.pt", path / "last.pt"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise Refusal(f"{key}={where} is no checkpoint and no run directory with one; give the path of either")
