"""What every data option shares: its settings, and the form in which it gives its images."""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..refusal import at_least

SAMPLE = 100  # images of a split whose pixels its fingerprint reads


@dataclass(frozen=True)
class Images:
    """One split. images_NCHW: uint8, labels_N: int64 in [0, classes)."""

    images_NCHW: Tensor
    labels_N: Tensor

    def __post_init__(self) -> None:
        assert len(self.images_NCHW) == len(self.labels_N)

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def num_bytes(self) -> int:
        return self.images_NCHW.nbytes + self.labels_N.nbytes

    def to(self, device: torch.device) -> "Images":
        return Images(self.images_NCHW.to(device), self.labels_N.to(device))


@dataclass(frozen=True)
class Splits:
    """Training and test images, and the mean and standard deviation per channel of the training images (0 to 255)."""

    train: Images
    test: Images
    mean_C: Tensor
    std_C: Tensor

    def fingerprint(self) -> str:
        """sha256 over all labels and the pixels of about a hundred images, spread over each split."""
        digest = hashlib.sha256()
        for images in (self.train, self.test):
            sample_NCHW = images.images_NCHW[:: max(1, len(images) // SAMPLE)]
            digest.update(f"{tuple(images.images_NCHW.shape)}\n".encode())
            for tensor in (images.labels_N, sample_NCHW):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(kw_only=True, slots=True)
class Data:
    """The settings of the group, shared by its options so that sweeps can mix them."""

    root: str = "data"
    download: bool = True
    train_size: int = 8192
    test_size: int = 2048
    image_size: int = 32
    classes: int = 10
    augment: bool = True
    padding: int = 4
    drop_last: bool = False

    unused: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuses what can be known to be wrong without reading an image."""
        at_least("data.train_size", self.train_size, 1)
        at_least("data.test_size", self.test_size, 1)
        at_least("data.image_size", self.image_size, 8)
        at_least("data.classes", self.classes, 2)
        at_least("data.padding", self.padding, 0)

    def num_classes(self) -> int:
        """Known before any image is read."""
        raise NotImplementedError

    def load(self, seed: int) -> Splits:
        raise NotImplementedError


def channel_statistics(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, exact up to float64, in little memory: sums over 1000 images at a time."""
    total_C = torch.zeros(images_NCHW.shape[1], dtype=torch.float64)
    squares_C = torch.zeros_like(total_C)
    for chunk_NCHW in images_NCHW.split(1000):
        values_NCHW = chunk_NCHW.to(torch.float64)
        total_C += values_NCHW.sum(dim=(0, 2, 3))
        squares_C += values_NCHW.square().sum(dim=(0, 2, 3))
    num_values = images_NCHW.numel() // images_NCHW.shape[1]
    mean_C = total_C / num_values
    std_C = (squares_C / num_values - mean_C**2).clamp(min=1e-6).sqrt()
    return mean_C.to(torch.get_default_dtype()), std_C.to(torch.get_default_dtype())
