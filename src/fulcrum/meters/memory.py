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
    """The blocks that are there between steps: parameters, buffers, gradients as a step makes them, optimizer state."""
    parameters = list(model.parameters())
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters_mib": tensor_mib(parameters),
        "buffers_mib": tensor_mib(model.buffers()),
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
    """The peak of one run on one device. On a CPU it listens between the calls below, which cost nothing afterwards.

    The first applied step and the second have peaks of their own: autotuning and the first requests of libraries fall into
    the first, optimizer state is there from the start in the second, and later ones repeat that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.activation_bytes: int | None = None
        self.step_peak_bytes = 0  # of the step that is being listened to
        self.step_peaks_bytes: list[int] = []  # of the first applied ones
        self.rank_peaks_bytes: list[int] | None = None
        self.current_bytes = 0
        self.num_applied = 0
        self.has_evaluated = False
        self.listening = False
        self.can_listen = device.type == "cpu" and hasattr(torch.autograd, "_enable_profiler_legacy")
        if self.on_cuda:
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
            self.step_peak_bytes = self.current_bytes
            _record()
        elif self.on_cuda and self.num_applied < NUM_STEPS:
            self._keep_cuda_peaks()

    def end_step(self, applied: bool) -> None:
        """Counts the step, and what its first and largest forward pass left alive when the backward pass began."""
        if self.on_cuda and self.num_applied < NUM_STEPS:
            self._count_step(applied, torch.cuda.max_memory_allocated(self.device))
        if not self.listening:
            return
        records = _recorded()
        names = [record.name() for record in records]  # those of the backward engine begin with its C++ namespace
        backward = next((place for place, name in enumerate(names) if name.startswith("autograd::engine")), len(names))
        before_bytes = self.current_bytes
        self._add(records[:backward])
        self.activation_bytes = max(self.activation_bytes or 0, self.current_bytes - before_bytes)
        self._add(records[backward:])
        self._count_step(applied, self.step_peak_bytes)
        self.listening = self.num_applied < NUM_STEPS
        if self.listening:
            _record()

    def _count_step(self, applied: bool, peak_bytes: int) -> None:
        if applied:
            self.num_applied += 1
            self.step_peaks_bytes.append(peak_bytes)

    def _keep_cuda_peaks(self) -> None:
        """Lets the allocator begin new peaks. It counts on the host when memory is asked for: nothing waits for the device."""
        self.peak_bytes, self.reserved_bytes = self._own_peak_bytes(), self._own_reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)

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
                self.step_peak_bytes = max(self.step_peak_bytes, self.current_bytes)
                self.peak_bytes = max(self.peak_bytes or 0, self.current_bytes)

    def agree(self) -> None:
        """Gathers the peaks of all processes and makes the largest that of each; all of them must call it."""
        peak_bytes = self._own_peak_bytes()
        if dist.is_initialized() and peak_bytes is not None:
            mine = torch.tensor([peak_bytes], device=self.device)
            everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, mine)
            self.rank_peaks_bytes = [int(each) for each in everyones]
            self.peak_bytes = max(self.rank_peaks_bytes)

    def _own_peak_bytes(self) -> int | None:
        if not self.on_cuda:
            return self.peak_bytes
        return max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))

    def _own_reserved_bytes(self) -> int | None:
        return max(self.reserved_bytes or 0, torch.cuda.max_memory_reserved(self.device)) if self.on_cuda else None

    def peak_mib(self) -> float | None:
        """None as long as the meter listens."""
        return None if self.listening else _mib(self._own_peak_bytes())

    def activations_mib(self) -> float | None:
        """What the forward pass of one micro-batch leaves alive for its backward pass, its input included."""
        return _mib(self.activation_bytes)

    def measured(self) -> dict[str, Any]:
        """What the meter adds to the memory of a summary."""
        first, steady = [*self.step_peaks_bytes, None, None][:2]
        return {
            "peak_mib": self.peak_mib(),
            "first_step_peak_mib": _mib(first),
            "steady_peak_mib": _mib(steady),
            "reserved_mib": _mib(self._own_reserved_bytes()),
            "rank_peaks_mib": self.rank_peaks_bytes and [each / MIB for each in self.rank_peaks_bytes],
            "activations_mib": self.activations_mib(),
            "method": self.method,
        }

    @property
    def method(self) -> str:
        if self.on_cuda:
            return "CUDA allocator, peak allocated"
        if not self.can_listen:
            return "sizes of tensors; this torch reports no allocations on cpu"
        return "CPU allocator events of the first steps and evaluation batches, plus what was there before"


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


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
