"""Honest time: the device is waited for at both ends of a section, first steps are told apart from steady ones.

The reads of the device in fit (one a logging interval) and in LossScaler are the only other waits.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import torch

NUM_FIRST_STEPS = 3  # compilation, autotuning, optimizer state and the allocator's first requests fall into these


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_age_s() -> float | None:
    """Seconds since this process started, by the system's clock (10 ms fine); None where it does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may hold anything
    except OSError:  # not Linux
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Splits the time since its start into named sections that add up to it: a section stops the one around it."""

    def __init__(self, device: torch.device, *, first_section: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.open = [first_section]
        self.start = self.since = time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._close()
        self.open.append(name)
        try:
            yield
        finally:
            self._close()
            self.open.pop()

    def _close(self) -> None:
        with suppress(RuntimeError):  # a broken device is reported by what broke it
            wait_for(self.device)
        now = time.perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def read(self) -> dict[str, float]:
        """Seconds of every section up to now; their sum is `wall`."""
        self._close()
        return {**self.seconds, "wall": self.since - self.start}


class StepClock:
    """The duration of each optimizer step, without a wait: on CUDA by events that are read at log points."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []
        self.pending: list[int] = []
        self.steps: list[tuple[float, int]] = []  # (seconds, images) of every step read so far

    def restart(self) -> None:
        """Marks the start of a run of steps; what happened since the last step is nobody's."""
        self.read()
        self.marks = [self._now()]

    def mark(self, images: int) -> None:
        """Marks the end of a step over `images` images."""
        self.marks.append(self._now())
        self.pending.append(images)

    def read(self) -> list[tuple[float, int]]:
        """(seconds, images) of the steps since the last read. On CUDA the last step must be complete."""
        durations = [self._between(*pair) for pair in zip(self.marks, self.marks[1:], strict=False)]
        new = list(zip(durations, self.pending, strict=True))
        self.marks, self.pending = self.marks[-1:], []
        self.steps += new
        return new

    def _now(self) -> "float | torch.cuda.Event":
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1000
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def steady(self) -> list[tuple[float, int]]:
        """All steps but the first three (the first half where a run has fewer than six; none where it has one)."""
        if len(self.steps) < 2:
            return []
        return self.steps[min(NUM_FIRST_STEPS, len(self.steps) // 2) :]


def step_ms(steps: list[tuple[float, int]]) -> float | None:
    """The median duration; None where no step was timed."""
    return 1000 * median(seconds for seconds, _ in steps) if steps else None


def images_per_s(steps: list[tuple[float, int]]) -> float | None:
    """All images over all seconds; None where no step was timed."""
    seconds = sum(seconds for seconds, _ in steps)
    return sum(images for _, images in steps) / seconds if seconds else None
