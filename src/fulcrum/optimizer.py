"""Optimizers, and the learning rate that belongs to a batch size."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import nn

from .refusal import above, at_least, fraction


class LrScaling(Enum):
    linear = "linear"  # Goyal et al. (2017): k times the batch, k times the rate
    sqrt = "sqrt"  # keeps the variance of an update; usual for adaptive methods
    none = "none"


@dataclass(kw_only=True, slots=True)
class Optimizer:
    """`lr` is meant for a batch of `lr_batch`; what is used follows the effective batch by `lr_scaling`."""

    lr: float = 0.1
    lr_batch: int = 128
    lr_scaling: LrScaling = LrScaling.linear
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip_norm: float | None = None

    unused: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        above("optimizer.lr", self.lr, 0)
        at_least("optimizer.lr_batch", self.lr_batch, 1)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        above("optimizer.clip_norm", self.clip_norm, 0)
        fraction("optimizer.momentum", self.momentum)

    def scaled_lr(self, effective_batch: int) -> float:
        ratio = effective_batch / self.lr_batch
        return self.lr * {LrScaling.linear: ratio, LrScaling.sqrt: ratio**0.5, LrScaling.none: 1.0}[self.lr_scaling]

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Sgd(Optimizer):
    """Momentum SGD in Nesterov's form; without momentum plain SGD."""

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters := list(parameters),
            lr=lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
            fused=_on_cuda(parameters),
        )


@dataclass(kw_only=True, slots=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter, 2019): `momentum` is its beta1; beta2 = 0.999."""

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters := list(parameters),
            lr=lr,
            betas=(self.momentum, 0.999),
            weight_decay=self.weight_decay,
            fused=_on_cuda(parameters),
        )


def _on_cuda(parameters: list[nn.Parameter]) -> bool:
    """One kernel for the whole update where there is a GPU."""
    return parameters[0].is_cuda


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> None:
    """Scales all gradients by one factor so that their joint 2-norm is at most `clip_norm`, exactly: no epsilon.

    Nothing is read on the host. A norm that is not finite leaves gradients that are not finite, for the scaler to see.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (clip_norm / norm).clamp(max=1.0))
