"""The processes of a run: what torchrun tells each of them, the group they form, and what they agree on before it.

With launch.py and processes.py the only file that reads environment variables.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    under_torchrun: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world() -> World:
    """Read from the variables that torchrun sets; one process where there are none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return World()
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        under_torchrun=True,
    )


def leave_torchrun() -> None:
    """Makes this process one that torchrun did not start, for what it starts in turn."""
    told = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "GROUP_RANK")
    for name in [*os.environ]:
        if name.startswith(("TORCHELASTIC_", "LOCAL_", "GROUP_WORLD_SIZE")) or name in told:
            del os.environ[name]


def num_gpus() -> int:
    return torch.cuda.device_count()


def total_memory_mib() -> float:
    """Of the first visible GPU."""
    return torch.cuda.get_device_properties(0).total_memory / 2**20


def agree(key: str, mine: str) -> str:
    """The value under `key` of whichever process came first, whenever the others start; also after a restart."""
    if not world().under_torchrun:
        return mine
    return _store().compare_set(f"fulcrum/{key}", "", mine).decode()


def report_end(status: str, error: str) -> None:
    """Leaves word of the first failure for rank 0, which writes the summary."""
    if world().under_torchrun:
        with suppress(Exception):  # the store dies with its agent; the error itself is printed anyway
            _store().compare_set(f"fulcrum/end/{world().restarts}", "", f"{status} rank {world().rank}: {error}")


def reported_end() -> tuple[str, str] | None:
    """(status, error) of the first failure that any process of the run reported."""
    if world().under_torchrun:
        with suppress(Exception):
            key = f"fulcrum/end/{world().restarts}"
            if _store().check([key]):
                status, _, error = _store().get(key).decode().partition(" ")
                return status, error
    return None


@cache
def _store() -> dist.TCPStore:
    """A connection to the store of the torchrun agent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))


@contextmanager
def process_group(backend: str | None, device: torch.device) -> Iterator[None]:
    """The group that gradients travel in; `backend` None: a single process, no group. One that is there is used.

    Left by an exception, the group is not torn down: that would wait for processes that may never come.
    """
    if backend is None or dist.is_initialized():
        yield
        return
    patience = timedelta(hours=2)  # rank 0 may have a data set to download while the others wait
    dist.init_process_group(backend, timeout=patience, device_id=device if backend == "nccl" else None)
    yield
    dist.barrier()  # all are done: nobody's connection is closed while it is in use
    dist.destroy_process_group()


@contextmanager
def main_process_first(distributed: bool) -> Iterator[None]:
    """Lets rank 0 go through the block before the others: it prepares files that they then read."""
    if distributed and not world().is_main:
        dist.barrier()
    yield
    if distributed and world().is_main:
        dist.barrier()
