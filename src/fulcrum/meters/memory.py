"""Memory in MiB = 2^20 bytes. What could not be measured is None, never 0."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


def tensor_mib(tensors: Iterable[Tensor | None]) -> float:
    """What the elements of the tensors take."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) / MIB


class MemoryMeter:
    """The peak of one run on one device, from its creation (before the model is built) to `read`.

    CUDA: the allocator's own peak of allocated bytes. CPU: no peak is reported; its resident size is not the tensors'.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak_mib(self) -> float | None:
        return torch.cuda.max_memory_allocated(self.device) / MIB if self.device.type == "cuda" else None

    @property
    def method(self) -> str:
        return "CUDA allocator, peak allocated" if self.device.type == "cuda" else "sizes of tensors; no peak on cpu"


def blocks_mib(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The blocks that are there between steps: parameters, gradients as a step makes them, optimizer state."""
    parameters = list(model.parameters())
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters_mib": tensor_mib(parameters),
        "gradients_mib": tensor_mib(parameter for parameter in parameters if parameter.requires_grad),
        "optimizer_mib": tensor_mib(value for value in states if isinstance(value, Tensor)),
    }
