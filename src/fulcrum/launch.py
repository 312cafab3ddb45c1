"""From the command line to a run: composing, refusing, and starting it here or in fresh processes of its own.

The story: `main` lets Hydra compose; `Callbacks` checks the result before Hydra makes a directory; `start` runs it in
this process, hands it to torchrun (parallelism=ddp), or starts the job of a sweep as the command a person would type.
"""

import copy
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from . import config, distributed
from .logbook.summary import SUMMARY, Summary, taken
from .refusal import Refusal, parse_overrides

REFUSED, NOT_COMPLETED, INTERRUPTED = 2, 1, 130
COMMAND = "FULCRUM_COMMAND"  # what the person typed, handed to the processes of a run
CONF = Path(__file__).resolve().parents[2] / "conf"
QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def main(train: Callable[[], Any]) -> NoReturn:
    """Runs Hydra's main function. Exit codes: 0 completed, 1 not completed, 2 refused, 130 interrupted."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors over instead of printing them
    os.environ.setdefault(COMMAND, shlex.join(["python", *sys.argv]))
    typed = list(sys.argv[1:])
    if not distributed.world().is_main:
        sys.argv += QUIET
    try:
        train()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        refuse(explained(error, [word for word in typed if not word.startswith("-")]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def register() -> None:
    """Makes the option classes known to Hydra, and the two words that directory names are made of."""
    config.register()
    OmegaConf.register_new_resolver("start", start_time, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("levers", levers_pulled, replace=True)


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


def levers_pulled(choices: Mapping[str, str]) -> str:
    """The levers of a job for its directory name: fp32-x4-block."""
    groups = ("precision", "parallelism", "accumulation", "checkpointing", "lora")
    return "-".join(choices[group] for group in groups if choices[group] not in ("none", "single"))


class Callbacks(Callback):
    """Hydra calls these around a run and around a sweep. Refusals leave as SystemExit: Hydra turns any other
    exception of a callback into a warning."""

    def __init__(self) -> None:
        self.all_completed = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Checks a run before its directory is made."""
        try:
            preflight(config)
        except Refusal as refusal:
            refuse(str(refusal))
        except (OmegaConfBaseException, AttributeError) as error:
            refuse(explained(error, as_typed(config)))
        except Exception:
            traceback.print_exc()
            sys.exit(NOT_COMPLETED)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if distributed.world().under_torchrun:
            refuse("torchrun with -m: a sweep starts torchrun for each of its jobs; type python train.py -m …")

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        record = job_return.return_value
        self.all_completed &= isinstance(record, dict) and record.get("status") == "completed"

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.all_completed:
            sys.exit(NOT_COMPLETED)


def preflight(composed: DictConfig) -> None:
    """Refuses what cannot work, and a directory that holds another run."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    experiment = config.load(task)
    here = distributed.world()
    if here.under_torchrun and not experiment.parallelism.distributed:
        raise Refusal(f"parallelism=single under torchrun would train {here.size} times; use parallelism=ddp, or python train.py")
    config.check(
        experiment,
        num_processes=num_processes(experiment),
        typed=parse_overrides(as_typed(composed)),
    )
    if here.under_torchrun and experiment.resolved_device().type == "cuda" and here.local_size > distributed.num_gpus():
        raise Refusal(
            f"--nproc_per_node={here.local_size} is more than the {distributed.num_gpus()} visible GPUs; "
            "use one process a GPU, or device=cpu"
        )
    for group in config.GROUPS:
        if not isinstance(composed.hydra.runtime.choices.get(group), str):
            raise Refusal(f"{group}: one option is needed; several are a sweep: python train.py -m {group}=…,…")
    folder = Path(composed.hydra.run.dir)
    if here.is_main and experiment.resume != "auto" and here.restarts == 0 and (folder / SUMMARY).exists():
        raise taken(folder)


def as_typed(composed: DictConfig) -> list[str]:
    """The overrides of a run, with nothing in them resolved."""
    words = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def num_processes(experiment: config.Experiment) -> int:
    """Processes of the run: torchrun's own number, or what the configuration asks for."""
    here = distributed.world()
    return here.size if here.under_torchrun else experiment.parallelism.num_processes(experiment.resolved_device())


def start(composed: DictConfig) -> dict[str, Any]:
    """The task of Hydra's main: one run, wherever it takes place. Exits with its code; in a sweep returns its record."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = list(hydra.overrides.task)
    if hydra.mode == RunMode.MULTIRUN:
        return run_job(overrides, folder)
    experiment = config.load(composed)
    if experiment.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    if experiment.parallelism.distributed and not distributed.world().under_torchrun:
        sys.exit(exit_code(*run_under_torchrun(experiment, overrides, folder)))

    from . import run

    choices = {group: str(option) for group, option in hydra.runtime.choices.items() if not group.startswith("hydra")}
    seed = experiment.seed
    if seed is None:
        seed = int(distributed.agree("seed", str(secrets.randbelow(2**31))))
    warnings = config.check(experiment, num_processes=num_processes(experiment), typed=parse_overrides(overrides))
    invocation = run.Invocation(choices, overrides, os.environ[COMMAND], seed, warnings)
    summary = run.run(experiment, folder, invocation)
    sys.exit(exit_code(summary.status, summary.error))


def exit_code(status: str, error: str | None = None) -> int:
    if status == "refused":
        refuse(str(error))
    return {"completed": 0, "interrupted": INTERRUPTED}.get(status, NOT_COMPLETED)


def run_job(overrides: list[str], folder: Path) -> dict[str, Any]:
    """One job of a sweep, as the command a person would type, in a fresh process."""
    command = [sys.executable, sys.argv[0], *overrides, f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    environment = {**os.environ, COMMAND: shlex.join(["python", "train.py", *overrides])}
    with subprocess.Popen(command, env=environment) as job:
        try:
            code = job.wait()
        except KeyboardInterrupt:
            job.terminate()  # the job writes how far it came; no further one is started
            finished_record(folder, job.wait())
            raise
    return finished_record(folder, code)


def finished_record(folder: Path, code: int) -> dict[str, Any]:
    """What the summary of a run that has ended says; a run that could not say it is named by its exit code."""
    record: dict[str, Any] = {"status": "running", "error": None}
    path = folder / SUMMARY
    if path.exists():
        record = Summary.read(folder)
    if record["status"] == "running" or (record["status"] == "completed" and code != 0):
        record["status"] = {REFUSED: "refused", INTERRUPTED: "interrupted"}.get(code, "killed" if code < 0 else "failed")
        record["error"] = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        folder.mkdir(parents=True, exist_ok=True)
        Summary.amend(folder, record)
    return record


def run_under_torchrun(experiment: config.Experiment, overrides: list[str], folder: Path) -> tuple[str, str | None]:
    """Starts the run on its processes, as `torchrun --standalone` would, and waits. Returns its status and error."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    count = num_processes(experiment)
    threads = experiment.threads or max(1, (os.cpu_count() or 1) // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its tables bury the error of the rank
    own = [f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    code = rank = 0
    try:
        run(parse_args(["--standalone", f"--nproc_per_node={count}", sys.argv[0], *overrides, *own]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in (REFUSED, INTERRUPTED):
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr)
    except (SignalException, KeyboardInterrupt):
        code = INTERRUPTED
    record = finished_record(folder, code)
    if code < 0 and record["status"] in ("failed", "interrupted"):
        record |= {"status": "killed", "error": f"rank {rank}: signal {signal.Signals(-code).name}"}
        Summary.amend(folder, record)
    return record["status"], record["error"]


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
