"""Adapters as files: all that a LoRA run changed, and a fingerprint of the base that it belongs to.

`adapter.safetensors` holds adapters, head and BatchNorm statistics under the names of the network; beside the tensors
it says rank, alpha, dropout, targets, the network and the normalisation of its pixels. An adapter is put onto a base,
and only onto its own: on another one the same numbers mean something else.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import levers, tensorfile
from .config import GROUPS, Experiment
from .levers.lora import adapt
from .models import HEAD, Norm
from .refusal import Refusal
from .restoring import check_shapes, plain_weights
from .saving import FOLDER

FILE = "adapter.safetensors"
FORMAT = 1  # raise it when what the file holds changes
A = ".lora_A.weight"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """tensors: by their names in the adapted network; base_sha256 and model: None where the file does not say."""

    tensors: dict[str, Tensor]
    rank: int
    alpha: float
    dropout: float
    base_sha256: str | None = None
    model: dict[str, Any] | None = None

    def layers(self) -> list[str]:
        return [name.removesuffix(A) for name in self.tensors if name.endswith(A)]


def of_network(network: nn.Module, lora: levers.Lora) -> Adapter:
    """The adapter of a network that `lora` was applied to."""
    state = network.state_dict()
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    return Adapter(
        tensors={name: tensor for name, tensor in state.items() if name not in frozen},
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        base_sha256=fingerprint(state, frozen),
    )


def fingerprint(weights: dict[str, Tensor], names: Iterable[str]) -> str:
    """sha256 over names, types, shapes and values of some weights, whatever device and memory format they are in."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(experiment: Experiment, network: nn.Module, normalisation: dict[str, list[float]], folder: Path) -> None:
    """`checkpoints/adapter.safetensors` of a LoRA run; nothing for another run."""
    if not isinstance(experiment.lora, levers.Lora):
        return
    adapter = of_network(network, experiment.lora)
    about = {
        "format": FORMAT,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "dropout": adapter.dropout,
        "targets": experiment.lora.targets,
        "base_sha256": adapter.base_sha256,
        **about_network(experiment, network.state_dict(), normalisation),
    }
    tensorfile.write(folder / FOLDER / FILE, adapter.tensors, about)


def about_network(experiment: Experiment, weights: dict[str, Tensor], normalisation: dict[str, list[float]]) -> dict[str, Any]:
    """What it takes to use weights without the run they come from: the network, and how its pixels (0 to 255) are scaled."""
    model = experiment.model
    settings = {"family": type(model).__name__, "depth": model.depth, "norm": model.norm.name, "dropout": model.dropout}
    return {"model": {**settings, "classes": num_classes(weights)}, "data": normalisation}


def num_classes(weights: dict[str, Tensor]) -> int:
    return len(weights[f"{HEAD}.weight"])


def build(model: dict[str, Any]) -> nn.Module:
    """The plain network that `about_network` describes."""
    families = {cls.__name__: cls for cls in GROUPS["model"]}
    settings = {"depth": model["depth"], "norm": Norm[model["norm"]], "dropout": model["dropout"]}
    return families[model["family"]](**settings).build(model["classes"])


def read(path: Path, *, key: str) -> Adapter:
    """The adapter of a file that a run wrote."""
    tensors, about = tensorfile.read(path, key=key)
    if about.get("format") != FORMAT or not any(name.endswith(A) for name in tensors):
        raise Refusal(f"{key}={path} is no adapter of this version of Fulcrum; give an {FILE} that a run of it has written")
    known = {name: about[name] for name in ("rank", "alpha", "dropout", "base_sha256", "model")}
    return Adapter(tensors=tensors, **known)


def onto(network: nn.Module, base: dict[str, Tensor], adapter: Adapter, *, source: str) -> None:
    """Puts a base and an adapter into a plain network; refuses a base that the adapter was not made for.

    source: the two as typed, for the refusal.
    """
    layers = dict(network.named_modules())
    strangers = [name for name in adapter.layers() if not isinstance(layers.get(name), (nn.Conv2d, nn.Linear))]
    if strangers:
        raise Refusal(f"{source} is of another network: it has no layer {strangers[0]}; use the same model settings")
    adapt(network, adapter.layers(), rank=adapter.rank, alpha=adapter.alpha, dropout=adapter.dropout)
    weights = {**base, **adapter.tensors}
    check_shapes(network.state_dict(), weights, source)
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    if adapter.base_sha256 not in (None, fingerprint(base, frozen)):
        raise Refusal(f"{source}: the adapter was trained on another base, whose weights differ; use the base it was trained on")
    network.load_state_dict(weights)


def load(path: Path, base: str) -> nn.Module:
    """The adapted network of an adapter's file and its base: a run directory, a checkpoint, or exported weights."""
    adapter = read(path, key="adapter")
    assert adapter.model is not None
    network = build(adapter.model)
    onto(network, plain_weights(base, key="base"), adapter, source=f"base={base} with adapter={path}")
    return network
