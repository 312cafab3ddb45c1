"""Precision: which number format the matrix products and convolutions of a step run in.

Weights, gradients and optimizer state stay fp32 under every option; autocast converts the operands of the heavy
operations, so what shrinks is time and the activations kept for the backward pass. fp16 has few exponent bits: its
loss is multiplied by a scale so that small gradients do not vanish, and a step whose gradients overflow is skipped
(Micikevicius et al., "Mixed precision training", 2018). bf16 has the exponent of fp32 and needs no scale.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..refusal import Refusal, above, at_least


@dataclass(kw_only=True, slots=True)
class Precision:
    """fp32, the harmless default: no autocast, no scaler, TF32 off for products and convolutions alike."""

    init_scale: float = 2.0**16
    growth_interval: int = 2000

    name: ClassVar[str] = "fp32"
    unused: ClassVar[tuple[str, ...]] = ("init_scale", "growth_interval")
    dtype: ClassVar[torch.dtype | None] = None
    allow_tf32: ClassVar[bool] = False

    def check(self, device: torch.device) -> None:
        above("precision.init_scale", self.init_scale, 0)
        at_least("precision.growth_interval", self.growth_interval, 1)
        if self.dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
            raise Refusal("precision=bf16 needs an NVIDIA GPU of the Ampere generation or newer; use precision=fp16")

    def in_force(self, device: torch.device) -> str:
        """The name of the format that really runs on `device`."""
        return self.name

    def configure(self, device: torch.device) -> None:
        """Sets the backend switches. Convolutions use TF32 by default on Ampere and later while products do not, so
        both are set, whichever way the option wants them."""
        if device.type == "cuda":
            mode = "tf32" if self.allow_tf32 else "ieee"
            torch.backends.cuda.matmul.fp32_precision = mode
            torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(device.type, self.dtype)

    def scaler(self, model: nn.Module, device: torch.device) -> "Scaler":
        return Scaler()


@dataclass(kw_only=True, slots=True)
class Tf32(Precision):
    """Products and convolutions of fp32 tensors on tensor cores, with 10 bits of mantissa (NVIDIA, from Ampere on)."""

    name: ClassVar[str] = "tf32"
    allow_tf32: ClassVar[bool] = True

    def in_force(self, device: torch.device) -> str:
        has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return "tf32" if has_tf32 else "fp32"


@dataclass(kw_only=True, slots=True)
class Bf16(Precision):
    """Autocast to bfloat16: the range of fp32 with 7 bits of mantissa."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype | None] = torch.bfloat16


@dataclass(kw_only=True, slots=True)
class Fp16(Precision):
    """Autocast to float16 with a scaled loss."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype | None] = torch.float16
    unused: ClassVar[tuple[str, ...]] = ()

    def scaler(self, model: nn.Module, device: torch.device) -> "Scaler":
        return LossScaler(model, device, init_scale=self.init_scale, growth_interval=self.growth_interval)


class Scaler:
    """The scaler that does nothing: every step is applied."""

    value: float | None = None

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer) -> bool:
        """Steps, and says whether the step was applied."""
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class LossScaler(Scaler):
    """torch's GradScaler, and a memory of the model's buffers: a skipped step moves neither weights nor statistics.

    It reads one number from the device in each step, the only wait of a step: the schedule has to know on the host
    whether the step was applied.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, init_scale: float, growth_interval: int) -> None:
        self.scaler = torch.amp.GradScaler(device.type, init_scale=init_scale, growth_interval=growth_interval)
        self.value = init_scale
        self.buffers = list(model.buffers())
        self.buffers_applied = [buffer.clone() for buffer in self.buffers]

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        before, had_state = self.value, bool(optimizer.state)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.value = self.scaler.get_scale()  # waits for the device
        assert self.value is not None and before is not None
        applied = self.value >= before  # the scale falls only where gradients were not finite
        if not applied and not had_state:
            optimizer.state.clear()  # the fused SGD kernel makes its first momentum, and leaves it unset when it skips
        with torch.no_grad():
            kept, stale = self.buffers_applied, self.buffers
            for to, source in zip(kept, stale, strict=True) if applied else zip(stale, kept, strict=True):
                to.copy_(source)
        return applied

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
        self.value = state["scale"]
        self.buffers_applied = [buffer.clone() for buffer in self.buffers]
