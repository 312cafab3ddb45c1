"""Between a run and its files: what a checkpoint holds, and how a network or a whole run is put back from one.

Loading is strict and whole: a file of another network is refused naming the first difference, never half loaded.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import saving
from .config import Experiment
from .data import Splits
from .levers.lora import split_state
from .logbook import Summary
from .refusal import Refusal
from .trainer import Trainer


def checkpoint(trainer: Trainer, splits: Splits, summary: Summary) -> dict[str, Any]:
    """Plain tensors and plain data. `model` has the names of the plain network under every lever."""
    base, adapter = split_state(trainer.network.state_dict())
    metrics = {key: value for key, value in summary.metrics.items() if value is not None}
    history = {"evaluations": summary.evaluations, "train_s": trainer.logbook.train_s_before + trainer.stopwatch.seconds["train"]}
    normalisation = {"mean": splits.mean_C.tolist(), "std": splits.std_C.tolist()}
    return {"model": base, "adapter": adapter, **trainer.state(), "metrics": metrics, "data": normalisation, **history}


def write_adapter(network: nn.Module, folder: Path) -> None:
    """adapter.safetensors: all that a LoRA run changed: adapters, head and BatchNorm statistics."""
    state = network.state_dict()
    _, adapter = split_state(state)
    if not adapter:
        return
    from safetensors.torch import save_file

    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    changed = {name: tensor.contiguous() for name, tensor in state.items() if name not in frozen}
    path = folder / saving.FOLDER / "adapter.safetensors"
    temporary = path.with_name(f"{path.name}.partial")
    save_file(changed, temporary)
    os.replace(temporary, path)


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
    path = saving.find(experiment.lora.base, key="lora.base")
    load_weights(network, saving.read(path, key="lora.base")["model"], f"lora.base={path}")


def load_weights(network: nn.Module, weights: dict[str, Any], source: str) -> None:
    """Loads strictly, or refuses naming the first keys that differ; never half a file."""
    own = {name: tensor.shape for name, tensor in split_state(network.state_dict())[0].items()}
    theirs = {name: tensor.shape for name, tensor in weights.items()}
    if differing := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        raise Refusal(
            f"{source} is of another network: {len(differing)} tensors differ, the first is {differing[0]} "
            f"({shape(theirs, differing[0])} there, {shape(own, differing[0])} here); use the same model settings"
        )
    network.load_state_dict(weights, strict=False)  # all plain names are there; adapters are loaded beside


def shape(shapes: dict[str, torch.Size], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "a number" if name in shapes else "missing"
