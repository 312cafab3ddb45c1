"""From the command line to a run or a sweep: composing, refusing, and starting it here or in fresh processes.

The story: `main` lets Hydra compose; `Callbacks` checks the result before Hydra makes a directory; `start` runs it in
this process, hands it to torchrun (parallelism=ddp), or runs the job of a sweep as the command a person would type.
"""

import gc
import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from . import config, distributed
from .logbook.summary import Summary
from .prediction import predict
from .preflight import as_typed, as_typed_for_hydra, check_folder, choices, num_processes, preflight, split
from .processes import (
    COMMAND,
    INTERRUPTED,
    NOT_COMPLETED,
    PREDICTED,
    REFUSED,
    command_line,
    run_job,
    run_under_torchrun,
    start_server,
)
from .refusal import Refusal, parse_overrides
from .signals import NUMBERS, ignore_signals
from .sweep.rows import levers

CONF = Path(__file__).resolve().parents[2] / "conf"
QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def main(train: Callable[[], Any]) -> NoReturn:
    """Runs Hydra's main function. Exit codes: 0 completed, 1 not completed, 2 refused, 130 interrupted."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors over instead of printing them
    os.environ.setdefault(COMMAND, command_line(sys.argv[1:]))
    typed = list(sys.argv[1:])
    if not distributed.world().is_main:
        sys.argv += QUIET
    try:
        train()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        refuse(explained(error, [word for word in typed if not word.startswith("-")]))
    except KeyboardInterrupt:
        if Callbacks.sweep_folder:
            end_sweep(Callbacks.sweep_folder)
        sys.exit(INTERRUPTED)
    sys.exit(0)


def register() -> None:
    """Makes the option classes known to Hydra, and the two words that directory names are made of."""
    config.register()
    OmegaConf.register_new_resolver("start", start_time, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("levers", levers, replace=True)


def explained(error: Exception, overrides: list[str]) -> str:
    from .explain import explain  # needed once something is wrong

    return explain(error, overrides, CONF)


def refuse(sentence: str) -> NoReturn:
    if distributed.world().is_main:
        print(f"refused: {sentence}", file=sys.stderr)
    sys.exit(REFUSED)


def start_time() -> str:
    """<date>/<time to the microsecond>: the same for every process of a run, another for every start."""
    return distributed.agree("start", time.strftime("%Y-%m-%d/%H-%M-%S-") + f"{time.time_ns() // 1000 % 10**6:06d}")


class Callbacks(Callback):
    """Hydra calls these around a run and around a sweep. Refusals leave as SystemExit: Hydra turns any other
    exception of a callback into a warning."""

    sweep_folder: ClassVar[Path | None] = None  # of the sweep that this process leads
    predicted: ClassVar[dict[tuple[str, ...], dict[str, Any]]] = {}  # the memory of its jobs, by their overrides

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reached in the workers of joblib and submitit, which compose the configuration of their job."""
        register()
        self.__dict__.update(state)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks a run before its directory is made."""
        try:
            check_folder(preflight(*split(config)), Path(config.hydra.run.dir))
        except Refusal as refusal:
            refuse(str(refusal))
        except (OmegaConfBaseException, AttributeError) as error:
            refuse(explained(error, as_typed(config.hydra)))
        except Exception:
            traceback.print_exc()
            sys.exit(NOT_COMPLETED)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks all points of a sweep before the first one starts, and tells what is going to run."""
        try:
            lead_from_torchrun(config)
            start_sweep(config)
        except (Refusal, HydraException) as error:
            refuse(str(error))
        except Exception:
            traceback.print_exc()
            sys.exit(NOT_COMPLETED)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            all_completed = end_sweep(Path(config.hydra.sweep.dir))
        except Exception:
            traceback.print_exc()
            sys.exit(NOT_COMPLETED)
        if not all_completed:
            sys.exit(NOT_COMPLETED)


def lead_from_torchrun(master: DictConfig) -> None:
    """`torchrun --nproc_per_node=2 train.py -m …`: rank 0 leads one sweep, whose ddp jobs get that many processes each;
    the other ranks have nothing to do."""
    here = distributed.world()
    if not here.under_torchrun:
        return
    if here.size != here.local_size:
        raise Refusal("torchrun with -m and several nodes: a sweep runs on one; use hydra/launcher=submitit_slurm for more")
    if not here.is_main:
        sys.exit(0)
    distributed.leave_torchrun()
    with read_write(master), open_dict(master):
        if "parallelism.processes" not in parse_overrides(as_typed(master.hydra)):
            master.hydra.overrides.task.append(f"parallelism.processes={here.size}")


def start_sweep(master: DictConfig) -> None:
    """Refuses a sweep with points that cannot work; prints the plan of the others."""
    from .sweep import points

    start_server()  # imports what the jobs need while their configurations are checked
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler)  # each ends a sweep as Ctrl-C does
    folder = Path(master.hydra.sweep.dir).absolute()
    if master.hydra.sweeper._target_ == points.BASIC_SWEEPER:
        points.interleave(master)
        all_points = points.points_of(master, CONF)
        skip = parse_overrides(as_typed(master.hydra)).get("skip_refused", "false")
        points.check(all_points, skip_refused=skip.lower() == "true")
        all_points = points.with_predictions(all_points)
        print("\n".join(points.plan(all_points, folder)), flush=True)
        Callbacks.predicted = {tuple(point.overrides): point.predicted for point in all_points if point.predicted}
    Callbacks.sweep_folder = folder


def end_sweep(folder: Path) -> bool:
    """Compares the jobs of a sweep that is over; says whether all of them completed."""
    from . import sweep

    ignore_signals()  # a second one must not cut off the comparison
    comparison = sweep.compare([folder])
    sweep.write(comparison, folder)
    sweep.show(comparison)
    print(f"the comparison is in {folder / 'comparison.html'}")
    return all(row.status == "completed" for row in comparison.rows)


def start(composed: DictConfig) -> dict[str, Any]:
    """The task of Hydra's main: one run, wherever it takes place. Exits with its code; in a sweep returns its record."""
    hydra: Any = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = list(hydra.overrides.task)
    if hydra.mode == RunMode.MULTIRUN:
        return job(composed, hydra, folder)
    experiment = config.load(composed)
    if experiment.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    if experiment.parallelism.distributed and not distributed.world().under_torchrun:
        words = [*overrides, *as_typed_for_hydra(hydra), *(word for word in hydra.overrides.hydra if "/job_logging=" in word)]
        ended = run_under_torchrun(words, folder, count=num_processes(experiment), threads=experiment.threads)
        sys.exit(exit_code(*ended))

    from . import run

    gc.freeze()  # what is loaded by now stays: collections need not walk through it
    seed = experiment.seed
    if seed is None:
        seed = int(distributed.agree("seed", str(secrets.randbelow(2**31))))
    warnings = config.check(experiment, num_processes=num_processes(experiment), typed=parse_overrides(overrides))
    predicted, doubts = predicted_memory(experiment)
    invocation = run.Invocation(choices(hydra), overrides, os.environ[COMMAND], seed, warnings + doubts, predicted)
    summary = run.run(experiment, folder, invocation)
    sys.exit(exit_code(summary.status, summary.error))


def predicted_memory(experiment: config.Experiment) -> tuple[dict[str, Any], list[str]]:
    """(the predicted keys of the summary's memory, warnings): as the plan of the sweep had them, or traced here."""
    if not distributed.world().is_main:
        return {}, []
    if PREDICTED in os.environ:
        return json.loads(os.environ[PREDICTED]), []
    try:
        return predict(experiment, num_processes=num_processes(experiment)), []
    except Exception as error:  # a network that cannot be traced trains all the same
        return {}, [f"memory was not predicted ({' '.join(str(error).split())[:200]})"]


def job(composed: DictConfig, hydra: DictConfig, folder: Path) -> dict[str, Any]:
    """One job of a sweep, whatever launcher it came by: its record, never an exception."""
    overrides = as_typed(hydra)
    words = [*overrides, *as_typed_for_hydra(hydra)]
    asked = Summary(choices=choices(hydra), overrides=overrides, command=command_line(words))
    try:
        experiment = preflight(composed, hydra)
        asked.seed = experiment.seed
    except Refusal as refusal:
        asked.status, asked.error = "refused", str(refusal)
        asked.write(folder)
        record = asked.to_dict()
    else:
        record = run_job(asked, words, folder, predicted=Callbacks.predicted.get(tuple(overrides)))
    print(job_line(folder.name, record), flush=True)
    return record


def job_line(name: str, record: dict[str, Any]) -> str:
    """How a job ended, in one line."""
    if record["status"] != "completed":
        return f"{name}: {record['status']}: {record['error']}"
    time, peak, accuracy = record["time"], record["memory"]["peak_mib"], record["metrics"]["eval_accuracy"]
    facts = [
        None if time["step_ms"] is None else f"{time['step_ms']:.1f} ms a step",
        None if peak is None else f"peak {peak:.0f} MiB",
        None if accuracy is None else f"accuracy {100 * accuracy:.2f} %",
        f"{time['wall_s']:.1f} s",
    ]
    return f"{name}: completed: " + ", ".join(fact for fact in facts if fact)


def exit_code(status: str, error: str | None = None) -> int:
    if status == "refused":
        refuse(str(error))
    return {"completed": 0, "interrupted": INTERRUPTED}.get(status, NOT_COMPLETED)


def experiment_of(folder: Path) -> config.Experiment:
    """The experiment that a run directory was made by, from its .hydra/ and summary.json."""
    from hydra import compose, initialize_config_dir

    register()
    try:
        saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
        choices = Summary.read(folder)["choices"]
    except (OSError, ValueError, KeyError) as error:
        raise Refusal(f"RUN={folder} is no run directory ({error}); give the path of one") from error
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", [f"{group}={choices[group]}" for group in config.GROUPS])
    merged = OmegaConf.merge(composed, saved)
    assert isinstance(merged, DictConfig)
    return config.load(merged)
