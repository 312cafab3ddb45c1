"""LoRA: freeze the network and learn a low-rank correction of each layer (Hu et al., 2021).

A layer with weight W (out × in) gets two small matrices, A (r × in, random) and B (out × r, zero), and computes
W x + alpha / r · B A x. B = 0 makes the adapted network equal the base at the start. What shrinks is gradients and
optimizer state, which exist for the adapters alone; a convolution's A keeps the kernel, stride, padding and dilation
of the layer, its B is 1x1, so the correction merges into the weight exactly.

The policy: the head (`fc`) is new to the task, so it trains in full. Every other base parameter is frozen, out of the
optimizer, and stays bitwise as it was. BatchNorm's running statistics are no parameters: they follow the data as in a
full run and are saved with the adapter.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..models import HEAD
from ..refusal import Refusal, above, at_least, did_you_mean, fraction


@dataclass(kw_only=True, slots=True)
class NoLora:
    """Every parameter trains, the harmless default. Holds the keys of the group so that sweeps can mix its options."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)
    base: str | None = None

    unused: ClassVar[tuple[str, ...]] = ("rank", "alpha", "dropout", "targets", "base")

    def check(self) -> None:
        at_least("lora.rank", self.rank, 1)
        above("lora.alpha", self.alpha, 0)
        fraction("lora.dropout", self.dropout)

    def apply(self, model: nn.Module) -> None:
        pass


@dataclass(kw_only=True, slots=True)
class Lora(NoLora):
    """Adapters of one rank on every targeted layer; `targets` empty means every convolution and linear layer."""

    unused: ClassVar[tuple[str, ...]] = ()

    def targeted(self, model: nn.Module) -> list[str]:
        """The dotted names of the layers that get an adapter, the head left out. Refuses a target that matches none."""
        layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
        layers.remove(HEAD)
        unmatched = [target for target in self.targets if not any(_names(target, layer) for layer in layers)]
        if unmatched:
            words = {part for layer in layers for part in layer.split(".") if not part.isdigit()}
            raise Refusal(
                f"lora.targets={self.targets}: '{unmatched[0]}' matches no convolution or linear layer; "
                + did_you_mean(unmatched[0], words)
            )
        return [layer for layer in layers if not self.targets or any(_names(target, layer) for target in self.targets)]

    def apply(self, model: nn.Module) -> None:
        """Freezes the base and puts adapters in place; parameter names of the base stay as they are."""
        adapt(model, self.targeted(model), rank=self.rank, alpha=self.alpha, dropout=self.dropout)


def adapt(model: nn.Module, layers: list[str], *, rank: int, alpha: float, dropout: float) -> None:
    """Freezes all but the head and puts an adapter beside each of the named layers."""
    model.requires_grad_(False)
    model.get_submodule(HEAD).requires_grad_(True)
    for name in layers:
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        adapted = LoraConv2d if isinstance(layer, nn.Conv2d) else LoraLinear
        setattr(model.get_submodule(parent), child, adapted(layer, rank=rank, alpha=alpha, dropout=dropout))  # type: ignore[arg-type]


def _names(target: str, layer: str) -> bool:
    """Whether `target` is a run of whole components of the dotted name: layer1, layer1.0, conv2, layer1.0.conv2."""
    return f".{target}." in f".{layer}."


class LoraConv2d(nn.Conv2d):
    """A convolution, frozen, plus a trained low-rank branch beside it. Takes over the parameters of `base`."""

    def __init__(self, base: nn.Conv2d, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        shape: dict[str, Any] = {
            "kernel_size": base.kernel_size,
            "stride": base.stride,
            "padding": base.padding,
            "dilation": base.dilation,
            "padding_mode": base.padding_mode,
        }
        super().__init__(base.in_channels, base.out_channels, groups=base.groups, bias=False, device="meta", **shape)
        if rank % base.groups:
            raise Refusal(f"lora.rank={rank} must be a multiple of the {base.groups} groups of the convolution")
        self.weight, self.bias = base.weight, base.bias
        place: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Conv2d(base.in_channels, rank, groups=base.groups, bias=False, **shape, **place)
        self.lora_B = nn.Conv2d(rank, base.out_channels, 1, groups=base.groups, bias=False, **place)
        self.dropout = nn.Dropout(dropout)
        self.scaling = alpha / rank
        _initialise(self.lora_A.weight, self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scaling * self.lora_B(self.lora_A(self.dropout(input)))

    def delta(self) -> Tensor:
        """The correction as a weight: alpha / r · B A within each group, in the shape of `weight`."""
        groups = self.groups
        up = self.lora_B.weight.reshape(groups, self.out_channels // groups, -1)
        down = self.lora_A.weight.reshape(groups, up.shape[2], -1)
        return self.scaling * (up @ down).reshape(self.weight.shape)


class LoraLinear(nn.Linear):
    """A linear layer, frozen, plus a trained low-rank branch beside it. Takes over the parameters of `base`."""

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        place: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **place)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **place)
        self.dropout = nn.Dropout(dropout)
        self.scaling = alpha / rank
        _initialise(self.lora_A.weight, self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scaling * self.lora_B(self.lora_A(self.dropout(input)))

    def delta(self) -> Tensor:
        """The correction as a weight: alpha / r · B A."""
        return self.scaling * self.lora_B.weight @ self.lora_A.weight


def _initialise(a: Tensor, b: Tensor) -> None:
    """A as the layer itself would start, B zero (Hu et al., section 4.1; the same draw as peft's)."""
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    nn.init.zeros_(b)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Adds every correction to its weight and puts plain layers back, in place; a model without adapters is unchanged."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, (LoraConv2d, LoraLinear)):
                layer.weight += layer.delta()
                setattr(parent, name, _plain(layer))
    return model


def _plain(layer: LoraConv2d | LoraLinear) -> nn.Module:
    """A plain layer over the weight and bias of `layer`."""
    plain: nn.Conv2d | nn.Linear
    if isinstance(layer, LoraConv2d):
        plain = nn.Conv2d(
            layer.in_channels,
            layer.out_channels,
            kernel_size=layer.kernel_size,  # type: ignore[arg-type]
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            dilation=layer.dilation,  # type: ignore[arg-type]
            groups=layer.groups,
            bias=False,
            padding_mode=layer.padding_mode,
            device="meta",
        )
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(base, adapters) of a state dict: the base has the names of the plain model."""
    adapters = {name: tensor for name, tensor in state.items() if ".lora_" in f".{name}"}
    return {name: tensor for name, tensor in state.items() if name not in adapters}, adapters
