"""Checkpoints on disk: what is in them, how they are written, and how they are read again.

A file is written under a temporary name, flushed and renamed, so a kill at any moment leaves the older file or the
newer one, whole. It holds plain tensors and plain data under plain parameter names, the same for every lever, and is
read with `weights_only=True`: loading never runs code. It ends in a digest of its bytes, which reading checks.
"""

import hashlib
import io
import mmap
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .refusal import Refusal, at_least

FOLDER = "checkpoints"
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
MARK = b"fulcrum sha256 "  # and 64 hexadecimal digits: the comment that a zip archive, which a checkpoint is, may end in
NUM_DIGITS = 64
ALIGNED_BYTES = 64


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
        """Writes last.pt, best.pt where `is_best`, and step-<n>.pt where the option numbers them; where it does not, the
        last.pt of before stays as previous.pt. Raises OSError; the files of before are there then."""
        checkpoints = folder / FOLDER
        checkpoints.mkdir(parents=True, exist_ok=True)
        content = serialised(checkpoint)
        if is_best:  # before last.pt, which says how good the best one is
            write_bytes(content, checkpoints / BEST)
        write_bytes(content, checkpoints / LAST, older=None if self.numbered else checkpoints / PREVIOUS)
        if self.numbered:
            write_bytes(content, checkpoints / f"step-{checkpoint['step']}.pt")
        outdated = _numbered(checkpoints)[self.keep :] if self.numbered else []
        for path in [*outdated, *checkpoints.glob("*.pt.partial")]:  # a kill leaves partial ones
            path.unlink()


@dataclass(kw_only=True, slots=True)
class SaveLast(Saving):
    """last.pt, the one before it as previous.pt, and best.pt."""

    unused: ClassVar[tuple[str, ...]] = ("keep",)
    writes: ClassVar[bool] = True


@dataclass(kw_only=True, slots=True)
class SaveAll(Saving):
    """last.pt, best.pt, and the `keep` newest as step-<n>.pt."""

    unused: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[bool] = True
    numbered: ClassVar[bool] = True


def _numbered(checkpoints: Path) -> list[Path]:
    """step-<n>.pt files, newest first."""
    found = [path for path in checkpoints.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


class NothingSaved(OSError):
    """A run has ended and not one of its checkpoints could be written."""


class Writer:
    """Writes the checkpoints of a run in a thread of its own, one at a time, from copies: training goes on meanwhile.

    on_failure gets a sentence about a checkpoint that could not be written, at the next save or at the end.
    """

    def __init__(self, saving: Saving, folder: Path, *, on_failure: Callable[[str], None]) -> None:
        self.saving, self.folder, self.on_failure = saving, folder, on_failure
        self.snapshot = Snapshot()
        self.thread = ThreadPoolExecutor(1, "saving")
        self.pending: tuple[int, Future[None]] | None = None
        self.num_saved = 0
        self.failure: str | None = None

    def save(self, checkpoint: dict[str, Any], *, is_best: bool) -> None:
        """Waits for the one before, copies, and returns."""
        if self.saving.writes:
            self.wait()
            copy = self.snapshot.take(checkpoint)
            self.pending = checkpoint["step"], self.thread.submit(self.saving.write, copy, self.folder, is_best=is_best)

    def wait(self) -> None:
        """Until what was handed over is written, or is known not to be."""
        if self.pending is None:
            return
        (step, written), self.pending = self.pending, None
        try:
            written.result()
            self.num_saved += 1
        except OSError as error:
            self.failure = f"the checkpoint of step {step} could not be saved ({error})"
            self.on_failure(f"{self.failure}; those before it are as they were, and training goes on")

    def finish(self) -> None:
        """Waits. Raises NothingSaved where nothing could be."""
        self.wait()
        if self.failure is not None and self.num_saved == 0:
            raise NothingSaved(f"nothing of this run is saved: {self.failure}")


class Snapshot:
    """Copies tensors into host memory of its own, the same at every call: copies are valid until the next one.

    The memory is neither torch's, whose peak is measured, nor private, which memory_limit_mib limits.
    """

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ALIGNED_BYTES)
        self.used_bytes = 0

    def take(self, value: Any) -> Any:
        """A copy of plain data, with the tensors in it in host memory."""
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in _tensors(value))
        if num_bytes > len(self.memory):
            self.memory = mmap.mmap(-1, num_bytes)
        self.used_bytes = 0
        return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._place(value).copy_(value)
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._copy, value))
        return value

    def _place(self, tensor: Tensor) -> Tensor:
        """Room for a tensor of this shape and layout, with a storage of its own: torch.save writes storages whole."""
        strides = torch.empty_like(tensor, device="meta").stride()
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        flat = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=self.used_bytes)
        self.used_bytes += _aligned(tensor.nbytes)
        return flat.as_strided(tensor.shape, strides)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def serialised(checkpoint: dict[str, Any]) -> bytes:
    """What `torch.load` reads, with the digest of it as the comment of the archive.

    In memory: torch's own writer may end the process where a disk is full.
    """
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(-2, io.SEEK_END)  # an archive ends in the length of its comment, which is none so far
    file.write((len(MARK) + NUM_DIGITS).to_bytes(2, "little"))
    file.write(MARK + hashlib.sha256(file.getbuffer()).hexdigest().encode())
    return file.getvalue()


def write_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """Whole under its own name, or not at all."""
    write_bytes(serialised(checkpoint), path)


def write_bytes(content: bytes, path: Path, *, older: Path | None = None) -> None:
    """Whole under its own name, on the disk, or not at all. What was there before is then `older`, where that is given."""
    temporary = path.with_name(f"{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if older is not None and path.exists():
            _rename_copy(path, older)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the names are on the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _rename_copy(path: Path, older: Path) -> None:
    """Gives a file a second name, at no cost; where the file system knows no links, another name."""
    second = older.with_name(f"{older.name}.partial")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:
        second = path
    os.replace(second, older)


class Damaged(ValueError):
    """A file is no whole checkpoint of Fulcrum's."""


def read(path: Path, *, key: str) -> dict[str, Any]:
    """A checkpoint, on the CPU. Refuses, naming `key`, what is not a whole checkpoint of Fulcrum's."""
    try:
        return _load(path)
    except Damaged as damage:
        raise Refusal(f"{key}={path} {damage}; use another one") from damage


def _load(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    if not content:
        raise Damaged("is empty")
    covered, digest = content[: -len(MARK) - NUM_DIGITS], content[-NUM_DIGITS:]
    if content[len(covered) : -NUM_DIGITS] == MARK and hashlib.sha256(covered).hexdigest().encode() != digest:
        raise Damaged("is damaged: its bytes are not those that were written")
    try:
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f"cannot be read as a checkpoint ({reason})") from error
    missing = {"model", "optimizer", "scaler", "step", "epoch"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise Damaged(f"is no checkpoint of Fulcrum's, it lacks {', '.join(sorted(missing))}")
    return checkpoint


def files(where: Path) -> list[Path]:
    """The checkpoint files that a run directory, its folder of checkpoints or a file names; last.pt first."""
    if where.is_file():
        return [where]
    for folder in (where / FOLDER, where):
        named = [folder / name for name in (LAST, PREVIOUS, BEST)]
        if found := [path for path in [named[0], *_numbered(folder), *named[1:]] if path.is_file()]:
            return found
    return []


def find(where: str, *, key: str) -> Path:
    """The checkpoint file that a run directory or a file names."""
    if found := files(Path(where)):
        return found[0]
    raise Refusal(f"{key}={where} is no checkpoint and no run directory with one; give the path of either")


def newest(where: str, *, key: str) -> tuple[Path, dict[str, Any], list[str]]:
    """(file, checkpoint, a sentence on each damaged file): last.pt where it is whole, else the one with the most steps.

    A file that is named itself is read or refused.
    """
    first = find(where, key=key)
    if Path(where).is_file():
        return first, read(first, key=key), []
    whole: list[tuple[Path, dict[str, Any]]] = []
    damaged: list[str] = []
    for path in files(Path(where)):
        try:
            whole.append((path, _load(path)))
        except Damaged as damage:
            damaged.append(f"{path} {damage}")
        if whole and path.name == LAST:
            break
    if not whole:
        raise Refusal(f"{key}={where} has no whole checkpoint: {'; '.join(damaged)}; use another one")
    return *max(whole, key=lambda found: found[1]["step"]), damaged
