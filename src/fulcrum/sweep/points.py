"""The points of a sweep, all of them composed and checked before the first one starts."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ..config import Experiment
from ..distributed import total_memory_mib
from ..explain import explain
from ..logbook.summary import SUMMARY, Summary
from ..prediction import Predictions
from ..preflight import num_processes, preflight, split
from ..refusal import Refusal

MOST_PREDICTED = 40  # configurations, 0.3 s each or more; the jobs of a larger sweep trace theirs themselves
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One job to be. `refusal`: why it cannot work; `mistyped`: it cannot even be composed."""

    number: int
    overrides: list[str]
    folder: Path | None = None
    experiment: Experiment | None = None
    processes: int = 1
    refusal: str | None = None
    mistyped: bool = False
    predicted: dict[str, Any] | None = None  # the keys of its summary's memory, where it was predicted
    status: str | None = None  # of the same job in an earlier attempt at this sweep


def interleave(master: DictConfig) -> None:
    """Puts a sweep over `seed` outermost, so that a drift of the machine falls on all points alike and not on one.

    Hydra varies the last key of a sweep fastest, and takes the keys of hydra.sweeper.params before those typed.
    """
    typed = next((word for word in master.hydra.overrides.task if word.startswith("seed=")), None)
    params = {str(key): value for key, value in (master.hydra.sweeper.params or {}).items()}
    seed = typed.partition("=")[2] if typed else params.get("seed")
    if seed is not None:
        with read_write(master), open_dict(master):
            master.hydra.sweeper.params = {"seed": seed, **{key: value for key, value in params.items() if key != "seed"}}


def points_of(master: DictConfig, conf: Path) -> list[Point]:
    """Every point of a sweep in the order of its jobs, checked. master: the configuration that the sweep starts from."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    compose = Composer(master)
    (batch,) = BasicSweeper.split_arguments(compose.parser.parse_overrides([*params, *master.hydra.overrides.task]), None)
    return [_point(compose, number, overrides, conf) for number, overrides in enumerate(batch)]


class Composer:
    """Composes the points of a sweep as Hydra does, each choice of options once (0.2 s): points that differ in values
    alone are copies with other values."""

    def __init__(self, master: DictConfig) -> None:
        self.master = master
        self.loader: Any = GlobalHydra.instance().config_loader()
        self.parser = OverridesParser.create(self.loader)
        self.bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: list[str]) -> DictConfig:
        parsed = self.parser.parse_overrides(overrides)
        options = [each for each in parsed if self.loader.repository.group_exists(each.key_or_group)]
        key = tuple(str(each.input_line) for each in options)
        try:
            if key not in self.bases:
                self.bases[key] = self.loader.load_sweep_config(self.master, list(key))
            composed = copy.deepcopy(self.bases[key])
            self.loader._apply_overrides_to_config([each for each in parsed if each not in options], composed)
        except (HydraException, OmegaConfBaseException, AttributeError):
            return self.loader.load_sweep_config(self.master, overrides)  # whose error it then is
        composed.hydra.overrides.task = overrides
        return composed


def _point(compose: Composer, number: int, overrides: list[str], conf: Path) -> Point:
    try:
        composed = compose(overrides)
        with open_dict(composed):
            composed.hydra.job.num = number
        folder = Path(composed.hydra.sweep.dir, composed.hydra.sweep.subdir)
    except (HydraException, OmegaConfBaseException, AttributeError) as error:
        return Point(number=number, overrides=overrides, refusal=explain(error, overrides, conf), mistyped=True)
    try:
        experiment = preflight(*split(composed))
    except Refusal as refusal:
        return Point(number=number, overrides=overrides, folder=folder, refusal=str(refusal))
    except (OmegaConfBaseException, AttributeError) as error:
        return Point(number=number, overrides=overrides, refusal=explain(error, overrides, conf), mistyped=True)
    return Point(
        number=number,
        overrides=overrides,
        folder=folder,
        experiment=experiment,
        processes=num_processes(experiment),
        status=_earlier_status(folder, overrides),
    )


def _earlier_status(folder: Path, overrides: list[str]) -> str | None:
    """How this job ended in an earlier attempt. Refuses a directory where another job has its place."""
    for other in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
        if (other / SUMMARY).exists():
            record = Summary.read(other)
            if record["overrides"] != overrides:
                raise Refusal(
                    f"hydra.sweep.dir={folder.parent} holds another sweep: its job {other.name} is "
                    f"{' '.join(record['overrides'])}; use the same command to go on with it, or another directory"
                )
            return record["status"]
    return None


def check(points: list[Point], *, skip_refused: bool) -> None:
    """Refuses the sweep where a point cannot work, naming all of them with their reasons."""
    stopping = [point for point in points if point.refusal and (point.mistyped or not skip_refused)]
    if not stopping:
        return
    reasons = dict.fromkeys(str(point.refusal) for point in stopping)
    if len(reasons) == 1 and len(stopping) == len(points):
        raise Refusal(next(iter(reasons)))
    varying = _varying(points)
    lines = [f"  {point.number:3}  {_label(point, varying)}: {point.refusal}" for point in stopping]
    hint = "" if any(point.mistyped for point in stopping) else " (skip_refused=true makes them rows of the comparison)"
    raise Refusal(
        f"{len(stopping)} of {len(points)} points of the sweep cannot work; nothing was started{hint}\n" + "\n".join(lines)
    )


def with_predictions(points: list[Point]) -> list[Point]:
    """The points with the memory that each will need, traced once for every configuration but for the seed."""
    predict = Predictions(most=MOST_PREDICTED)
    return [
        replace(point, predicted=predict(point.experiment, num_processes=point.processes)) if point.experiment else point
        for point in points
    ]


def plan(points: list[Point], sweep_folder: Path) -> list[str]:
    """The lines that tell what a sweep is going to do."""
    todo = [point for point in points if not point.refusal and point.status != "completed"]
    lines = [f"sweep of {len(points)} jobs, {len(todo)} to run, in {sweep_folder}"]
    varying = _varying(points)
    labels = [_label(point, varying) for point in points]
    width = max(map(len, labels))
    columns = "effective batch = per device x processes x accumulated, predicted peak memory a process"
    lines.append(f"{'job':>5}  {'levers and values':{width}}  {columns}")
    lines += [f"{point.number:5}  {label:{width}}  {_outlook(point)}" for point, label in zip(points, labels, strict=True)]
    return lines


def _outlook(point: Point) -> str:
    if point.experiment is None:
        return f"refused: {point.refusal}"
    effective, per_device = point.experiment.batch_sizes(point.processes)
    facts = [f"{effective} = {per_device} x {point.processes} x {point.experiment.accumulation.steps}"]
    if point.predicted:
        peak_mib, limit_mib = point.predicted["predicted_peak_mib"], _limit_mib(point.experiment)
        fits = limit_mib is None or peak_mib <= limit_mib
        facts.append(f"{peak_mib:.4g} MiB" + ("" if fits else f": does not fit {limit_mib:.4g} MiB"))
    if point.status:
        facts.append("completed before" if point.status == "completed" else f"{point.status} before, runs again")
    return ", ".join(facts)


def _limit_mib(experiment: Experiment) -> float | None:
    """What a process may allocate, where something says so."""
    if experiment.memory_limit_mib is not None or experiment.resolved_device().type == "cpu":
        return experiment.memory_limit_mib
    return total_memory_mib()


def _varying(points: list[Point]) -> set[str]:
    """The overrides that not all points share."""
    words = [set(point.overrides) for point in points]
    return set().union(*words) - words[0].intersection(*words)


def _label(point: Point, varying: set[str]) -> str:
    return " ".join(word for word in point.overrides if word in varying) or "(the same point)"
