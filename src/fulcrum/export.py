"""A finished network for use elsewhere: adapters merged, weights as safetensors, the inference graph by torch.export.

Each form is compared with the network it came from before anybody relies on it.
"""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import tensorfile
from .data.augment import normalise
from .levers.lora import merge

TOLERANCE = 1e-5  # of the largest logit: what float32 allows for the same sum in another order


class Classifier(nn.Module):
    """From raw pixels to logits: the normalisation of the training images, then the network."""

    mean_C: Tensor
    std_C: Tensor

    def __init__(self, network: nn.Module, *, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean_C", torch.tensor(mean))
        self.register_buffer("std_C", torch.tensor(std))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """images_NCHW: uint8."""
        return self.network(normalise(images_NCHW, self.mean_C, self.std_C))


def merged(network: nn.Module) -> nn.Module:
    """A copy with plain layers only, in evaluation mode."""
    return merge(copy.deepcopy(network)).eval()


def write_program(path: Path, classifier: Classifier, *, image_size: int) -> None:
    """The inference graph for uint8 images, any number of them, as torch.export.load reads it."""
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(classifier.eval(), (examples(2, image_size),), dynamic_shapes=(batch,))
    temporary = path.with_name(f"partial-{path.name}")
    torch.export.save(program, temporary)
    os.replace(temporary, path)


def read_weights(path: Path, network: nn.Module) -> nn.Module:
    """A file of exported weights in a plain network, strictly."""
    network.load_state_dict(tensorfile.read(path, key="export")[0])
    return network.eval()


def examples(count: int, image_size: int) -> Tensor:
    """Random pixels, the same each time: enough to tell two networks apart."""
    return torch.randint(0, 256, (count, 3, image_size, image_size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@torch.no_grad()
def difference(one: Any, other: Any, images_NCHW: Tensor) -> float:
    """The largest difference between two sets of logits, as a fraction of the largest logit."""
    ours, theirs = one(images_NCHW), other(images_NCHW)
    return ((ours - theirs).abs().max() / ours.abs().max()).item()
