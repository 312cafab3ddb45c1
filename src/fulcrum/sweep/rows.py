"""The rows of a comparison: one for every run found on disk, read from its summary.json, failed ones too."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..refusal import Refusal, parse_overrides

SUMMARY = "summary.json"  # not imported from the logbook: that would load torch, for seconds

# The five levers, and the option of each that pulls nothing.
OFF = {"precision": "fp32", "parallelism": "single", "accumulation": "none", "checkpointing": "none", "lora": "none"}

RATIOS = ("wall_s", "train_s", "step_ms", "image_ms", "images_per_s", "peak_mib")  # compared as ratios to a baseline

NOT_RUNS = {"earlier", ".hydra", "checkpoints", "comparison"}  # earlier: attempts that a later one replaced


BLOCKS = ("parameters_mib", "gradients_mib", "optimizer_mib", "activations_mib", "buffers_mib", "data_mib")

# What is copied from the sections time, memory and metrics of a summary under the same name.
MEASURED = {
    *("startup_s", "wall_s", "setup_s", "train_s", "eval_s", "save_s", "job_s", "step_ms", "images_per_s"),
    *("peak_mib", *BLOCKS, "predicted_peak_mib"),
    *("eval_accuracy", "best_eval_accuracy"),
}


@dataclass(kw_only=True, slots=True)
class Row:
    """One run. None: not known, or not measured. The fields are the keys of a row in comparison.json."""

    run: str
    status: str = "failed"
    choices: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    order: int = 0  # the position in which it ran
    started: str | None = None
    seed: int | None = None
    batch: dict[str, int] = field(default_factory=dict)
    epochs: int | None = None
    optimizer_steps: int | None = None
    skipped_steps: int | None = None
    precision_in_force: str | None = None
    device: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    startup_s: float | None = None  # before the run began: interpreter, imports, composing; not in wall_s
    wall_s: float | None = None
    setup_s: float | None = None
    train_s: float | None = None
    eval_s: float | None = None
    save_s: float | None = None
    job_s: float | None = None  # what a sweep waited for the job, all of it
    other_s: float | None = None  # of that, before and after all the above: torchrun, the end of the process
    step_ms: float | None = None
    image_ms: float | None = None  # step_ms for each image of the effective batch
    images_per_s: float | None = None
    peak_mib: float | None = None
    parameters_mib: float | None = None
    gradients_mib: float | None = None
    optimizer_mib: float | None = None
    activations_mib: float | None = None
    buffers_mib: float | None = None
    data_mib: float | None = None
    predicted_peak_mib: float | None = None
    predicted: dict[str, float | None] = field(default_factory=dict)  # the same blocks as told before training
    prediction_error: float | None = None  # predicted / measured peak - 1, of a completed run
    memory_method: str | None = None
    eval_accuracy: float | None = None
    best_eval_accuracy: float | None = None
    target_accuracy: float | None = None
    time_to_target_s: float | None = None  # seconds of training until the first evaluation that reached the target
    evaluations: list[dict[str, float | None]] = field(default_factory=list)
    error: str | None = None
    ratio: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(RATIOS))  # to the baseline

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    def option(self, lever: str) -> str:
        return self.choices.get(lever, OFF[lever])

    def asked(self) -> list[str]:
        """What was asked for but for the five levers and the seed: the other groups and the keys typed, as key=value.

        Of experiment=classic/bf16 the folder counts: the experiments in one differ by levers alone. The name of a sweep
        says which jobs there are, not what one does.
        """
        groups = {group: option for group, option in self.choices.items() if group not in {*OFF, "sweep"}}
        if "experiment" in groups:
            groups["experiment"] = groups["experiment"].rpartition("/")[0] or groups["experiment"]
        typed = {key: value for key, value in parse_overrides(self.overrides).items() if key not in {*self.choices, "seed"}}
        return [f"{key}={value}" for key, value in {**groups, **typed}.items()]

    def machine(self) -> list[str]:
        known = {"device": self.device, **{key: self.environment.get(key) for key in ("torch", "platform")}}
        return [f"{key}={value}" for key, value in known.items() if value is not None]

    def setting(self) -> list[str]:
        """All that must be equal for a lever to be the only difference."""
        return [*self.asked(), *self.machine()]


def levers(choices: Mapping[str, str]) -> str:
    """The levers pulled, as in the name of a job's directory: fp32-x4-block."""
    return "-".join(choices[lever] for lever in OFF if choices.get(lever, "none") not in ("none", "single"))


def read(folders: Sequence[Path], *, target_accuracy: float | None = None) -> list[Row]:
    """A row for every run in or below `folders`, by name. Refuses a folder without one.

    target_accuracy: instead of each run's own.
    """
    runs: dict[Path, None] = {}
    for folder in folders:
        found = list(find(folder.resolve()))
        if not found:
            raise Refusal(f"DIR={folder} holds no run ({SUMMARY}) at any depth; give the directory of a run or of a sweep")
        runs |= dict.fromkeys(found)
    root = os.path.commonpath([run.parent for run in runs])
    rows = [read_row(run, run.relative_to(root).as_posix(), target_accuracy=target_accuracy) for run in runs]
    rows.sort(key=lambda row: natural(row.run))
    for position, row in enumerate(sorted(rows, key=lambda row: (row.started is None, seconds(row.started), natural(row.run)))):
        row.order = position
    return rows


def find(folder: Path) -> Iterator[Path]:
    """The run directories at `folder` and below it; superseded attempts are left out."""
    for path, names, _ in os.walk(folder):
        if is_run(Path(path)):
            yield Path(path)
        names[:] = sorted(set(names) - NOT_RUNS)


def is_run(folder: Path) -> bool:
    """A run that died early may have left no summary; Hydra's files are there before it starts."""
    return any((folder / name).exists() for name in (SUMMARY, ".hydra", "train.log"))


def read_row(folder: Path, name: str, *, target_accuracy: float | None) -> Row:
    """The row of one run directory, whatever state it is in."""
    record, error = read_summary(folder)
    time, memory, metrics = (section(record, key) for key in ("time", "memory", "metrics"))
    batch = {key: int(value) for key, value in numbers(section(record, "batch")).items() if value is not None}
    target = target_accuracy if target_accuracy is not None else number(record.get("target_accuracy"))
    evaluations = [numbers(each) for each in listed(record, "evaluations") if isinstance(each, dict)]
    row = Row(
        run=name,
        status=text(record.get("status")) or "failed",
        choices={str(k): str(v) for k, v in section(record, "choices").items() if v not in (None, "None")},
        overrides=[str(word) for word in listed(record, "overrides")],
        started=text(record.get("started")),
        seed=whole(record.get("seed")),
        batch=batch,
        epochs=whole(record.get("epochs")),
        optimizer_steps=whole(record.get("optimizer_steps")),
        skipped_steps=whole(record.get("skipped_steps")),
        precision_in_force=text(section(record, "precision").get("in_force")),
        device=text(record.get("device")),
        environment=section(record, "environment"),
        predicted=numbers(section(memory, "predicted")),
        memory_method=text(memory.get("method")),
        target_accuracy=target,
        evaluations=evaluations,
        error=error or text(record.get("error")),
    )
    for source in (time, memory, metrics):
        for key, value in numbers(source).items():
            if key in MEASURED:
                setattr(row, key, value)
    if row.step_ms is not None and batch.get("effective"):
        row.image_ms = row.step_ms / batch["effective"]
    if row.job_s is not None and row.startup_s is not None and row.wall_s is not None:
        row.other_s = row.job_s - row.startup_s - row.wall_s
    if row.completed and row.peak_mib and row.predicted_peak_mib is not None:
        row.prediction_error = row.predicted_peak_mib / row.peak_mib - 1
    row.time_to_target_s = time_to_target(evaluations, target)
    if not row.choices:
        row.choices, row.overrides = from_hydra(folder)
    return row


def read_summary(folder: Path) -> tuple[dict[str, Any], str | None]:
    """(summary, what is wrong with the file)."""
    try:
        record = json.loads((folder / SUMMARY).read_text())
    except FileNotFoundError:
        return {}, f"{SUMMARY} is missing: the run ended before it could write one"
    except (OSError, ValueError) as error:
        return {}, f"{SUMMARY} cannot be read: {error}"
    if not isinstance(record, dict) or not isinstance(record.get("status"), str):
        return {}, f"{SUMMARY} is damaged: it has no status"
    return record, None


def from_hydra(folder: Path) -> tuple[dict[str, str], list[str]]:
    """(choices, overrides) as Hydra noted them before the run; empty where it did not."""
    path = folder / ".hydra" / "hydra.yaml"
    if not path.exists():
        return {}, []
    from omegaconf import OmegaConf  # here: needed for a run that died early only

    try:
        noted = OmegaConf.load(path).hydra
        choices = {str(k): str(v) for k, v in noted.runtime.choices.items() if v and not str(k).startswith("hydra")}
        return choices, [str(word) for word in noted.overrides.task]
    except Exception:  # whatever is wrong with a file that was cut off, its run stays a row
        return {}, []


def time_to_target(evaluations: Sequence[dict[str, float | None]], target: float | None) -> float | None:
    if target is None:
        return None
    reached = (each for each in evaluations if (each.get("accuracy") or 0) >= target)
    return next((each.get("train_s") for each in reached), None)


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts 2-bf16 before 10-fp32."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def seconds(started: str | None) -> float:
    """An ISO time as a number to sort by; what is no time comes first."""
    try:
        return datetime.fromisoformat(started).timestamp() if started else 0.0
    except ValueError:
        return 0.0


def section(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def listed(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A finite number, or None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def numbers(values: dict[str, Any]) -> dict[str, float | None]:
    return {key: number(value) for key, value in values.items()}


def whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None
