"""What a run directory says about how to run it again: its whole configuration as a command, and what is different now."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from . import config, launch
from .logbook import Summary
from .logbook.card import environment
from .logbook.source import source
from .run import describe_data


def overrides(folder: Path) -> list[str]:
    """Every option and key of a run as words for train.py, so that no default of today counts; what the run drew or found
    out by itself (seed, device, threads, processes) is fixed to what it was."""
    experiment, record = launch.experiment_of(folder), Summary.read(folder)
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    found: dict[str, Any] = {"seed": record["seed"], "device": "cpu" if record["device"] == "cpu" else "cuda"}
    found["threads"] = record["environment"]["threads"]
    if experiment.parallelism.distributed:
        found["parallelism.processes"] = record["batch"]["world_size"]
    if experiment.resume == "auto":
        found["resume"] = "none"  # in one go it ends where the resumed one ended
    if experiment.batch.per_device is not None:
        found["batch.effective"] = None  # follows
    for key, value in found.items():
        OmegaConf.update(saved, key, value)
    words = [f"{group}={record['choices'][group]}" for group in config.GROUPS]
    configuration: Any = OmegaConf.to_container(saved)
    for name, value in configuration.items():
        if isinstance(value, dict):
            unused = getattr(getattr(experiment, name), "unused", ())
            words += [f"{name}.{key}={quoted(leaf)}" for key, leaf in value.items() if key not in unused]
        else:
            words.append(f"{name}={quoted(value)}")
    return words


def quoted(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def differences(folder: Path) -> list[str]:
    """What this machine, this source tree or the data have otherwise than when the run was made, a line each."""
    experiment, record = launch.experiment_of(folder), Summary.read(folder)
    splits = experiment.data.load(record["seed"])
    here = environment(experiment.resolved_device())
    now = {"environment": here, "source": source(), "data": describe_data(experiment, splits)}
    lines = []
    for part, values in now.items():
        then = record.get(part, {})
        for key in sorted(values.keys() | then.keys()):
            was, is_now = then.get(key), values.get(key)
            if was != is_now:
                lines.append(f"{part}.{key}: {was} then, {is_now} now" + (f"; {was} is used" if key == "threads" else ""))
    if record.get("source", {}).get("dirty"):
        lines.append("source.dirty: the code had changes then that its commit does not hold")
    return lines
