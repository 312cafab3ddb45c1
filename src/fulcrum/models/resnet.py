"""ResNet-8, -20, -56 as He et al. built them for CIFAR-10, and torchvision's ResNet-18, -50 with a stem for 32x32.

Legend: N images, C channels, H × W pixels, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..refusal import Refusal, fraction

HEAD = "fc"
NUM_GROUPS = 8  # divides every width used here; Wu & He (2018) use 32 on networks whose narrowest layer has 64


class Norm(Enum):
    batch = "batch"
    group = "group"
    none = "none"


@dataclass(kw_only=True, slots=True)
class Model:
    """What all networks share; `build` gives the network, on the current default device."""

    depth: int = 20
    norm: Norm = Norm.batch
    dropout: float = 0.0
    channels_last: bool = True
    compile: bool = False

    depths: ClassVar[str] = ""

    def check(self) -> None:
        fraction("model.dropout", self.dropout)
        if not self.has_depth():
            raise Refusal(f"model.depth={self.depth} is no depth of this family; use {self.depths}")

    def has_depth(self) -> bool:
        raise NotImplementedError

    def build(self, num_classes: int) -> nn.Module:
        raise NotImplementedError

    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(kw_only=True, slots=True)
class CifarResNet(Model):
    """He et al. (2015), section 4.2: three stages of n blocks, 16, 32, 64 channels, depth 6n + 2."""

    depths: ClassVar[str] = "6n + 2: 8, 14, 20, 32, 44, 56, 110"

    def has_depth(self) -> bool:
        return self.depth >= 8 and self.depth % 6 == 2

    def build(self, num_classes: int) -> nn.Module:
        return ResNet(self.depth, norm=self.norm, num_classes=num_classes, dropout=self.dropout)


@dataclass(kw_only=True, slots=True)
class TorchvisionResNet(Model):
    """torchvision's ImageNet networks; the stem is a 3x3 convolution of stride 1 and there is no max-pool."""

    depths: ClassVar[str] = "18, 34, 50, 101 or 152"

    def has_depth(self) -> bool:
        return self.depth in (18, 34, 50, 101, 152)

    def build(self, num_classes: int) -> nn.Module:
        import torchvision  # 1.6 s that the small networks do not need

        norm_layer = partial(normalisation, self.norm)
        model = getattr(torchvision.models, f"resnet{self.depth}")(num_classes=num_classes, norm_layer=norm_layer)
        model.conv1 = convolution(3, 64, stride=1)
        model.maxpool = nn.Identity()
        model.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(self.dropout))
        initialise(model, self.norm)
        return model


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters: option A of He et al., every second pixel and zeros
    for the new channels."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, out_channels, stride=stride)
        self.bn1 = norm(out_channels)
        self.conv2 = convolution(out_channels, out_channels, stride=1)
        self.bn2 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        y_NCHW = self.bn2(self.conv2(y_NCHW))
        if self.stride > 1:
            x_NCHW = x_NCHW[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            x_NCHW = F.pad(x_NCHW, (0, 0, 0, 0, 0, self.new_channels))
        return self.relu(y_NCHW + x_NCHW)


class ResNet(nn.Module):
    """The network of He et al., section 4.2, for images of any size; parameter names follow torchvision's."""

    def __init__(self, depth: int, *, norm: Norm, num_classes: int, dropout: float) -> None:
        super().__init__()
        norm_layer = partial(normalisation, norm)
        num_blocks = (depth - 2) // 6
        self.conv1 = convolution(3, 16, stride=1)
        self.bn1 = norm_layer(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(16, 16, num_blocks, stride=1, norm=norm_layer)
        self.layer2 = stage(16, 32, num_blocks, stride=2, norm=norm_layer)
        self.layer3 = stage(32, 64, num_blocks, stride=2, norm=norm_layer)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(64, num_classes)
        initialise(self, norm)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Logits, N × K."""
        x_NCHW = self.relu(self.bn1(self.conv1(images_NCHW)))
        x_NCHW = self.layer3(self.layer2(self.layer1(x_NCHW)))
        return self.fc(self.dropout(x_NCHW.mean(dim=(2, 3))))


def stage(
    in_channels: int, out_channels: int, num_blocks: int, *, stride: int, norm: Callable[[int], nn.Module]
) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride=stride, norm=norm)
    rest = [BasicBlock(out_channels, out_channels, stride=1, norm=norm) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *rest)


def convolution(in_channels: int, out_channels: int, *, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def normalisation(norm: Norm, num_channels: int) -> nn.Module:
    if norm is Norm.batch:
        return nn.BatchNorm2d(num_channels)
    return nn.GroupNorm(NUM_GROUPS, num_channels) if norm is Norm.group else nn.Identity()


@torch.no_grad()
def initialise(model: nn.Module, norm: Norm) -> None:
    """He et al. (2015b) for convolutions. Without normalisation the last convolution of each of L blocks is scaled by
    L^-1/2, so that the variance of the sum over blocks does not grow with depth."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if norm is Norm.none:
        for block in blocks(model):
            last = [module for name, module in block.named_children() if name.startswith("conv")][-1]
            assert isinstance(last, nn.Conv2d)
            last.weight *= len(blocks(model)) ** -0.5


def stages(model: nn.Module) -> list[nn.Module]:
    """The runs of blocks at one resolution: layer1, layer2 …"""
    return [child for name, child in model.named_children() if name.startswith("layer")]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Every residual block, in order."""
    return [block for stage in stages(model) for block in stage.children()]
