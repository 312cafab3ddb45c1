"""Between a run and its files: what a checkpoint holds, and how a network or a whole run is put back from one.

Loading is strict and whole: a file of another network is refused naming the first difference, never half loaded.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
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

# A resume refuses other values of these, under the keys as typed or all below a group; of any other setting it tells.
FIXED = ("seed", "batch.effective", "steps of an epoch", "data", "model", "lora", "optimizer")
RATES = ("optimizer.lr", "optimizer.lr_batch", "optimizer.lr_scaling")
FREE = (*RATES, "optimizer.weight_decay", "optimizer.momentum", "optimizer.clip_norm", "model.compile", "model.channels_last")
WHEREABOUTS = ("data.root", "data.download", "lora.base")


def checkpoint(experiment: Experiment, trainer: Trainer, splits: Splits, summary: Summary) -> dict[str, Any]:
    """Plain tensors and plain data. `model` has the names of the plain network under every lever."""
    base, adapter = split_state(trainer.network.state_dict())
    metrics = {key: value for key, value in summary.metrics.items() if value is not None}
    history = {"evaluations": summary.evaluations, "train_s": trainer.logbook.train_s_before + trainer.stopwatch.seconds["train"]}
    state = {**trainer.state(), "settings": settings(experiment, trainer)}
    return {"model": base, "adapter": adapter, **state, "metrics": metrics, "data": normalisation(splits), **history}


def settings(experiment: Experiment, trainer: Trainer) -> dict[str, Any]:
    """All that the course of a run depends on, as plain data under the keys as typed."""
    feed, choices = trainer.train_feed, trainer.logbook.summary.choices
    found: dict[str, Any] = {"seed": trainer.seed, "batch.effective": feed.batch_size, "steps of an epoch": feed.num_steps}
    found |= {"epochs": trainer.epochs, "processes": feed.num_processes, "device": trainer.device.type}
    found |= {group: choices.get(group) for group in ("precision", "checkpointing", "data", "optimizer", "schedule")}
    for group in ("accumulation", "lora", "model", "data", "optimizer", "schedule"):
        option = getattr(experiment, group)
        names = {field.name for field in fields(option)} - set(getattr(option, "unused", ()))
        values = {f"{group}.{name}": getattr(option, name) for name in sorted(names)}
        found |= {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}
    return {key: value for key, value in found.items() if key not in WHEREABOUTS}


def normalisation(splits: Splits) -> dict[str, list[float]]:
    """How pixels from 0 to 255 are scaled, as plain data."""
    return {"mean": splits.mean_C.tolist(), "std": splits.std_C.tolist()}


def resume(experiment: Experiment, folder: Path, trainer: Trainer, *, restarts: int) -> None:
    """Goes on from the checkpoint that `resume` names; `auto`, and after a restart: this directory's newest, if there is one."""
    source = experiment.resume
    if saving.files(folder) and (source == "auto" or restarts > 0):
        source = str(folder)
    elif source in ("none", "auto"):
        return
    path, loaded, damaged = saving.newest(source, key="resume")
    for sentence in damaged:
        trainer.logbook.warn(f"{sentence}; going on from {path.name} instead")
    compare_settings(loaded.get("settings", {}), settings(experiment, trainer), path, trainer.logbook.say)
    restore(trainer.network, loaded, f"resume={path}")
    try:
        trainer.load_state(loaded)
    except (KeyError, ValueError, RuntimeError) as error:
        raise Refusal(f"resume={path} was saved under other settings ({error}); use the same settings") from error
    announce_horizon(loaded["settings"]["epochs"], trainer)
    metrics = dict(loaded.get("metrics", {}))
    if path.parent != folder / saving.FOLDER:  # the best checkpoint stays in the other directory
        metrics |= {"best_eval_accuracy": None, "best_epoch": None}
    trainer.logbook.summary.metrics.update(metrics)
    trainer.logbook.summary.evaluations[:] = loaded.get("evaluations", [])
    trainer.logbook.train_s_before = loaded.get("train_s", 0.0)
    trainer.logbook.say(f"resuming from {path}: {trainer.progress.epoch} epochs, {trainer.progress.step} steps done")


def compare_settings(theirs: dict[str, Any], ours: dict[str, Any], path: Path, say: Callable[[str], None]) -> None:
    """Refuses a checkpoint of other settings key by key; says which ones change where a run can go on under others."""
    different = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    changes = {key: f"{key}={_typed(theirs.get(key))} there and {_typed(ours.get(key))} here" for key in different}
    if refused := [changes[key] for key in different if key not in FREE and key.startswith(FIXED)]:
        raise Refusal(f"resume={path} was saved under other settings: {', '.join(refused)}; use the same, or another checkpoint")
    if different:
        say(f"from here on under other settings than {path.name} was saved under: {', '.join(changes.values())}")


def _typed(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def announce_horizon(epochs_before: int, trainer: Trainer) -> None:
    """The learning rate is a function of the step and the horizon: another horizon moves it, which is said."""
    before, now = epochs_before * trainer.train_feed.num_steps, trainer.num_steps
    if before != now:
        step = trainer.progress.step
        trainer.logbook.warn(
            f"the schedule ends after {now} steps instead of {before}: at step {step} the learning rate goes on "
            f"from {trainer.learning_rate(now):.4g} instead of {trainer.learning_rate(before):.4g}, never above its peak"
        )


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
