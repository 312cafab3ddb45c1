"""Memory in MiB = 2^20 bytes. What could not be measured is None, never 0.

The peak counts what torch's allocator holds on the device while training and evaluating. CUDA's allocator keeps its own
peak. The CPU's keeps none, but reports each allocation and release to a profiler: the meter listens during the first
steps and the first evaluation batches, which later ones repeat, and adds the largest running sum of what it heard to the
tensors that were there before. That is exact and repeats to the byte, which resident memory does not; what libraries
allocate past torch (scratch space of oneDNN, buffers of gloo) is in neither device's number.
"""

import ctypes
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")

MIB = 2**20
NUM_STEPS = 2  # applied optimizer steps to listen to: in the second one the optimizer's state is there from the start
NUM_EVAL_BATCHES = 2  # the second one is prepared while the first is still held
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGER_BYTES = 2**16


def tensor_mib(tensors: Iterable[Tensor | None]) -> float:
    """What the elements of the tensors take."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) / MIB


def blocks_mib(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The blocks that are there between steps: parameters, gradients as a step makes them, optimizer state."""
    parameters = list(model.parameters())
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters_mib": tensor_mib(parameters),
        "gradients_mib": tensor_mib(parameter for parameter in parameters if parameter.requires_grad),
        "optimizer_mib": tensor_mib(value for value in states if isinstance(value, Tensor)),
    }


def held_bytes(*holders: object) -> int:
    """The storages of all tensors that are reached through attributes and containers, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(holders, set())}
    return sum(storages.values())


def _tensors(holder: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    parts: Iterable[Any] = ()
    if isinstance(holder, Tensor):
        yield holder
        parts = (holder.grad,) if holder.is_leaf else ()
    elif isinstance(holder, nn.Module):
        parts = (*holder.parameters(), *holder.buffers())
    elif isinstance(holder, Mapping):
        parts = holder.values()
    elif isinstance(holder, (list, tuple)):
        parts = holder
    elif not callable(holder):
        parts = getattr(holder, "__dict__", {}).values()
    for part in parts:
        yield from _tensors(part, seen)


class MemoryMeter:
    """The peak of one run on one device. On a CPU it listens between the calls below, which cost nothing afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes: int | None = None
        self.activation_bytes: int | None = None
        self.current_bytes = 0
        self.num_applied = 0
        self.has_evaluated = False
        self.listening = False
        self.can_listen = device.type == "cpu" and hasattr(torch.autograd, "_enable_profiler_legacy")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self.can_listen:
            gc.collect()  # what others left must not be released while the meter listens

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of the model. A release is reported only where the allocation was: DDP makes buckets here
        that it replaces in the second step."""
        self.start_epoch(held_bytes=0)
        try:
            yield
        finally:
            self.stop()
            self.peak_bytes = None

    def start_epoch(self, held_bytes: int) -> None:
        """Before the plan of an epoch is made. held_bytes: what is there already."""
        if self.can_listen and self.num_applied < NUM_STEPS:
            self._start(held_bytes)

    def start_step(self) -> None:
        if self.listening:
            self._add(_recorded())
            _record()

    def end_step(self, applied: bool) -> None:
        """Counts the step, and what its first and largest forward pass left alive when the backward pass began."""
        if not self.listening:
            return
        records = _recorded()
        names = [record.name() for record in records]  # those of the backward engine begin with its C++ namespace
        backward = next((place for place, name in enumerate(names) if name.startswith("autograd::engine")), len(names))
        before_bytes = self.current_bytes
        self._add(records[:backward])
        self.activation_bytes = max(self.activation_bytes or 0, self.current_bytes - before_bytes)
        self._add(records[backward:])
        self.num_applied += applied
        self.listening = self.num_applied < NUM_STEPS
        if self.listening:
            _record()

    def stop(self) -> None:
        """At the end of an epoch and of the run, whatever it is."""
        if self.listening:
            self.listening = False
            self._add(_recorded())

    def first_batches(self, batches: Iterable[T], held_bytes: int) -> Iterator[T]:
        """The batches as they come; in the first evaluation the first ones are measured."""
        if self.can_listen and not self.has_evaluated:
            self.has_evaluated = True
            self._start(held_bytes)
        for index, batch in enumerate(batches):
            if index == NUM_EVAL_BATCHES:
                self.stop()
            yield batch
        self.stop()

    def _start(self, held_bytes: int) -> None:
        self.current_bytes = held_bytes
        self.peak_bytes = max(self.peak_bytes or 0, held_bytes)
        self.listening = True
        _record()

    def _add(self, records: list[Any]) -> None:
        for record in records:
            if record.kind() == "memory_alloc":
                self.current_bytes += record.cpu_memory_usage()
                self.peak_bytes = max(self.peak_bytes or 0, self.current_bytes)

    def agree(self) -> None:
        """Makes the largest peak of all processes that of each; all of them must call it."""
        peak_bytes = self._own_peak_bytes()
        if dist.is_initialized() and peak_bytes is not None:
            largest = torch.tensor(peak_bytes, device=self.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.peak_bytes = int(largest)

    def _own_peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self.peak_bytes

    def peak_mib(self) -> float | None:
        """None as long as the meter listens."""
        peak_bytes = self._own_peak_bytes() if self.peak_bytes is None else self.peak_bytes
        return None if self.listening or peak_bytes is None else peak_bytes / MIB

    def activations_mib(self) -> float | None:
        """What the forward pass of one micro-batch leaves alive for its backward pass, its input included."""
        return None if self.activation_bytes is None else self.activation_bytes / MIB

    @property
    def method(self) -> str:
        if self.device.type == "cuda":
            return "CUDA allocator, peak allocated"
        if not self.can_listen:
            return "sizes of tensors; this torch reports no allocations on cpu"
        return "CPU allocator events of the first steps and evaluation batches, plus what was there before"


def _record() -> None:
    """Starts to record this thread's events, with the profiler that came before Kineto: torch.profiler takes a second to
    start and writes to the console. Deprecated; replace it once torch.profiler does neither."""
    shapes = stack = flops = modules = False
    cpu, details = torch.autograd.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
    torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(cpu, shapes, True, stack, flops, modules, details))


def _recorded() -> list[Any]:
    """Stops, and gives what was recorded, in order."""
    return [record for thread in torch.autograd._disable_profiler_legacy() for record in thread]


def return_memory_at_once() -> None:
    """Makes the C library hand every larger block back when it is freed, so that a limit meets what is in use. Costs time:
    each of them is mapped and zeroed again by the system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_TRIM_THRESHOLD, LARGER_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, LARGER_BYTES)


def _make_room() -> None:
    """Leaves 4 MiB of gaps on the heap, too short for larger blocks: a small one that cannot be had may end the process
    without a word, inside C++."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    gaps_and_walls = [libc.malloc(size) for size in (LARGER_BYTES - 4096, 32) * 64]
    for gap in gaps_and_walls[::2]:
        libc.free(gap)


@contextmanager
def limited(limit_mib: float | None, device: torch.device, held_bytes: int) -> Iterator[None]:
    """Inside, tensors cannot take more than the limit, of which held_bytes are taken already. None: no limit.

    On a CPU it is one on all private memory of the process: what is in use now for other things comes on top, what
    libraries allocate from here on counts.
    """
    if limit_mib is None:
        yield
        return
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_mib * MIB / total_bytes), device)
        yield
        return
    import resource  # Unix only

    _make_room()
    torch.zeros(2**20).add_(1)  # starts the threads of OpenMP: their stacks are private memory too
    status = Path("/proc/self/status").read_text()
    private_bytes = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (max(0, private_bytes - held_bytes + int(limit_mib * MIB)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))  # the end of the run is told without it
