"""Parallelism: one process, or one process a device that share every step (DistributedDataParallel).

Every process holds the whole model and takes its part of each step's samples; gradients are averaged once per
optimizer step, while the backward pass is still running. Memory per device falls only by the smaller part of the
batch; time falls with the number of devices as long as the all-reduce hides behind the backward.

BatchNorm: each process normalises with its own part. Rank 0's running statistics are the model's: they are sent to
all before an evaluation and saved. (SyncBatchNorm shares them in every forward, on GPUs, at a price in time.)
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..refusal import Refusal, at_least

# torch 2.14 gave the argument a new name and warns about the old one; drop this with torch < 2.14.
_DDP_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"


class Backend(Enum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


@dataclass(kw_only=True, slots=True)
class Parallelism:
    """A single process, the harmless default. Holds the keys of the group so that sweeps can mix its options."""

    processes: int | None = None
    sync_batchnorm: bool = False
    backend: Backend = Backend.auto

    unused: ClassVar[tuple[str, ...]] = ("processes", "sync_batchnorm", "backend")
    distributed: ClassVar[bool] = False

    def check(self, device: torch.device) -> None:
        at_least("parallelism.processes", self.processes, 1)

    def num_processes(self, device: torch.device) -> int:
        return 1

    def backend_for(self, device: torch.device) -> str | None:
        """The communication backend of the process group; None: no group."""
        return None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Surrounds forward and backward of one micro-batch; gradients travel only in the last one of a step."""
        return nullcontext()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over processes."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        return values

    def any_asks(self, asked: bool, device: torch.device, *, at_log_point: bool) -> bool:
        """Whether any process was asked to stop: the same answer, after the same step, on all of them."""
        return asked

    def share_buffers(self, model: nn.Module) -> None:
        """Gives every process the buffers of rank 0."""

    def check_drift(self, model: nn.Module) -> None:
        """Raises RuntimeError where the parameters of the processes are no longer the same bits."""


@dataclass(kw_only=True, slots=True)
class Ddp(Parallelism):
    """One process a device, gradients averaged by all-reduce."""

    unused: ClassVar[tuple[str, ...]] = ()
    distributed: ClassVar[bool] = True

    def check(self, device: torch.device) -> None:
        at_least("parallelism.processes", self.processes, 1)
        if device.type == "cpu" and self.sync_batchnorm:
            raise Refusal("parallelism.sync_batchnorm=true works on GPUs only and this run is on cpu; use false")
        if device.type == "cpu" and self.backend is Backend.nccl:
            raise Refusal("parallelism.backend=nccl works on GPUs only and this run is on cpu; use gloo")
        if device.type == "cuda" and (self.processes or 0) > torch.cuda.device_count():
            raise Refusal(
                f"parallelism.processes={self.processes} is more than the {torch.cuda.device_count()} visible GPUs; "
                "use one process a GPU, or device=cpu"
            )

    def num_processes(self, device: torch.device) -> int:
        return self.processes or (torch.cuda.device_count() if device.type == "cuda" else 2)

    def backend_for(self, device: torch.device) -> str | None:
        if self.backend is not Backend.auto:
            return self.backend.name
        return "nccl" if device.type == "cuda" else "gloo"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # one copy of the gradients instead of two
            **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]  # rank 0's are the model's, see share_buffers: no traffic in the step
        )

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        return nullcontext() if last else model.no_sync()

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / dist.get_world_size()

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    def any_asks(self, asked: bool, device: torch.device, *, at_log_point: bool) -> bool:
        if device.type == "cuda" and not at_log_point:  # the host would wait for the device in every step
            return False
        flag = torch.tensor(asked, dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def share_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def check_drift(self, model: nn.Module) -> None:
        mine = fingerprint(model)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, mine)
        different = [rank for rank, theirs in enumerate(everyones) if not torch.equal(theirs, everyones[0])]
        if different:
            raise RuntimeError(f"the parameters of rank 0 and of ranks {different} have drifted apart; results are void")


@torch.no_grad()
def fingerprint(model: nn.Module) -> Tensor:
    """Two wrapping integers over the bits of all parameters: their sum, and their sum weighted by position.

    Any single changed bit changes the first. Cost: two passes over the parameters, on the device.
    """
    bits = torch.cat([parameter.detach().flatten().view(torch.int32) for parameter in model.parameters()]).long()
    return torch.stack([bits.sum(), (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()])
