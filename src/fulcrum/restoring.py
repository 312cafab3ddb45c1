"""Between a run and its files: what a checkpoint holds, and how a network or a whole run is put back from one.

Loading is strict and whole: a file of another network is refused naming the first difference, never half loaded.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import saving, tensorfile
from .config import Experiment
from .data import Splits
from .levers.lora import split_state
from .logbook import Summary
from .models import HEAD
from .refusal import Refusal
from .trainer import Trainer


def checkpoint(trainer: Trainer, splits: Splits, summary: Summary) -> dict[str, Any]:
    """Plain tensors and plain data. `model` has the names of the plain network under every lever."""
    base, adapter = split_state(trainer.network.state_dict())
    metrics = {key: value for key, value in summary.metrics.items() if value is not None}
    history = {"evaluations": summary.evaluations, "train_s": trainer.logbook.train_s_before + trainer.stopwatch.seconds["train"]}
    return {"model": base, "adapter": adapter, **trainer.state(), "metrics": metrics, "data": normalisation(splits), **history}


def normalisation(splits: Splits) -> dict[str, list[float]]:
    """How pixels from 0 to 255 are scaled, as plain data."""
    return {"mean": splits.mean_C.tolist(), "std": splits.std_C.tolist()}


def resume(experiment: Experiment, folder: Path, trainer: Trainer, *, restarts: int) -> None:
    """Goes on from the checkpoint that `resume` names; `auto`: this directory's newest, where it has one."""
    if experiment.resume == "none" and restarts == 0:
        return
    if experiment.resume in ("none", "auto"):
        path = folder / saving.FOLDER / "last.pt"
        if not path.is_file():
            return
    else:
        path = saving.find(experiment.resume, key="resume")
    loaded = saving.read(path, key="resume")
    restore(trainer.network, loaded, f"resume={path}")
    try:
        trainer.load_state(loaded)
    except (KeyError, ValueError, RuntimeError) as error:
        raise Refusal(f"resume={path} was saved under other settings ({error}); use the same settings") from error
    metrics = dict(loaded.get("metrics", {}))
    if path.parent != folder / saving.FOLDER:  # the best checkpoint stays in the other directory
        metrics |= {"best_eval_accuracy": None, "best_epoch": None}
    trainer.logbook.summary.metrics.update(metrics)
    trainer.logbook.summary.evaluations[:] = loaded.get("evaluations", [])
    trainer.logbook.train_s_before = loaded.get("train_s", 0.0)
    trainer.logbook.say(f"resuming from {path}: {trainer.progress.epoch} epochs, {trainer.progress.step} steps done")


def restore(network: nn.Module, checkpoint: dict[str, Any], source: str) -> None:
    """Puts the base and the adapters of a checkpoint into a network that has the same, or refuses."""
    load_weights(network, checkpoint["model"], source)
    adapter = checkpoint.get("adapter", {})
    if split_state(network.state_dict())[1].keys() != adapter.keys():
        raise Refusal(f"{source} holds other adapters than lora asks for; use the same lora settings")
    network.load_state_dict(adapter, strict=False)


def load_base(experiment: Experiment, network: nn.Module) -> None:
    """Puts the weights of `lora.base` under the adapters; a head of another size stays as it was made."""
    if experiment.lora.base is None or "base" in experiment.lora.unused:
        return
    weights = plain_weights(experiment.lora.base, key="lora.base")
    head = {f"{HEAD}.{name}": tensor for name, tensor in network.get_submodule(HEAD).state_dict().items()}
    if any(name in weights and weights[name].shape != tensor.shape for name, tensor in head.items()):
        weights = {**weights, **head}
    load_weights(network, weights, f"lora.base={experiment.lora.base}")


def plain_weights(where: str, *, key: str) -> dict[str, torch.Tensor]:
    """The weights of a run directory, of a checkpoint, or of a file as `scripts/export.py` writes it."""
    if where.endswith(".safetensors"):
        return tensorfile.read(Path(where), key=key)[0]
    loaded = saving.read(saving.find(where, key=key), key=key)
    if loaded.get("adapter"):
        raise Refusal(f"{key}={where} holds adapters, a base cannot; use what python scripts/merge.py {where} writes")
    return loaded["model"]


def load_weights(network: nn.Module, weights: dict[str, Any], source: str) -> None:
    """Loads strictly, or refuses naming the first keys that differ; never half a file."""
    check_shapes(split_state(network.state_dict())[0], weights, source)
    network.load_state_dict(weights, strict=False)  # all plain names are there; adapters are loaded beside


def check_shapes(expected: dict[str, torch.Tensor], given: dict[str, torch.Tensor], source: str) -> None:
    """Refuses names and shapes that differ, naming the first."""
    own = {name: tensor.shape for name, tensor in expected.items()}
    theirs = {name: tensor.shape for name, tensor in given.items()}
    if differing := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        raise Refusal(
            f"{source} is of another network: {len(differing)} tensors differ, the first is {differing[0]} "
            f"({shape(theirs, differing[0])} there, {shape(own, differing[0])} here); use the same model settings"
        )


def shape(shapes: dict[str, torch.Size], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "a number" if name in shapes else "missing"
