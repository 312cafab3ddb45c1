"""A run in fresh processes of its own: started as the command a person would type, watched, its end recorded.

`run_job` runs one point of a sweep, `run_under_torchrun` one run on several processes. However such a run ends, its
summary.json says so: written by the run itself, or, where it could not, here.
"""

import json
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .logbook.events import end_session_of
from .logbook.summary import SUMMARY, Summary, set_aside
from .signals import ignore_signals

REFUSED, NOT_COMPLETED, INTERRUPTED = 2, 1, 130
COMMAND = "FULCRUM_COMMAND"  # what the person typed, handed to the processes of a run
PREDICTED = "FULCRUM_PREDICTED"  # the memory that the plan of a sweep predicted for this job, as JSON
LOG = "train.log"
STOP_S = 20  # how long an interrupted job may take to write its end
TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def start_server() -> None:
    """On Linux jobs are forks of a server that has imported what they need, 3 s sooner than a new interpreter would have.
    It starts now, beside whatever this process does next."""
    if isinstance(context := _context(), ForkServerContext):
        from multiprocessing.forkserver import ensure_running

        context.set_forkserver_preload(["fulcrum.preloaded"])
        ensure_running()


def _context() -> ForkServerContext | SpawnContext:
    method = "forkserver" if sys.platform == "linux" else "spawn"
    multiprocessing.set_start_method(method, force=True)  # a worker of joblib has one that a fresh process does not know
    context = multiprocessing.get_context(method)
    assert isinstance(context, (ForkServerContext, SpawnContext))
    return context


def run_job(asked: Summary, words: list[str], folder: Path, *, predicted: dict[str, Any] | None) -> dict[str, Any]:
    """The record of one job of a sweep, `train.py words…` in a fresh process; what it prints goes to its own train.log.

    asked: what its summary says where it cannot write one itself. predicted: its memory, where that was predicted.
    A job that is already there, complete, is not run again; another attempt that is there is set aside.
    """
    if finished := completed_record(folder, asked.overrides):
        return finished
    set_aside(folder)
    words = [*words, *goes_to(folder), "hydra/job_logging=stdout"]
    environment = {**os.environ, COMMAND: asked.command, **({PREDICTED: json.dumps(predicted)} if predicted else {})}
    start_server()
    process = _context().Process(target=_become, args=(words, environment, folder / LOG))
    kills, started = num_kernel_kills(), time.monotonic()
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        ignore_signals()
        process.terminate()  # the job writes how far it came; no further one is started
        process.join(STOP_S)
        process.kill()
        process.join()
        record_end(folder, asked, code_of(process), kills=kills, was_interrupted=True)
        raise
    return record_end(folder, asked, code_of(process), kills=kills, job_s=time.monotonic() - started)


def goes_to(folder: Path) -> list[str]:
    """The overrides for a run into a directory that is there already; its name may hold anything."""
    quoted = str(folder).replace("'", "\\'")
    return [f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]


def code_of(process: BaseProcess) -> int:
    """Of a process that has ended; below 0: the signal."""
    assert process.exitcode is not None
    return process.exitcode


def _become(words: list[str], environment: dict[str, str], log: Path) -> None:
    """Turns this fresh process into the command `python train.py words…`."""
    if sys.platform == "linux":
        end_with_parent()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(TRAIN), *words]
    runpy.run_path(str(TRAIN), run_name="__main__")


def end_with_parent() -> None:
    """Asks Linux for a SIGTERM when the parent ends: a sweep that is killed leaves no job behind."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def completed_record(folder: Path, overrides: list[str]) -> dict[str, Any] | None:
    """What is recorded of this very job, where it was run before and completed."""
    if (folder / SUMMARY).exists():
        record = Summary.read(folder)
        if record["status"] == "completed" and record["overrides"] == overrides:
            return record
    return None


def record_end(
    folder: Path,
    asked: Summary | None,
    code: int,
    *,
    kills: int,
    rank: int | None = None,
    was_interrupted: bool = False,
    job_s: float | None = None,
) -> dict[str, Any]:
    """What the summary of a run that has ended says; a run that could not say it is named by its exit code.

    asked: what is known of a run that may have died before it wrote anything. kills: `num_kernel_kills` at its start.
    """
    record = Summary.read(folder) if (folder / SUMMARY).exists() else (asked or Summary()).to_dict()
    status, error = record["status"], record["error"]
    was_told = status != "running"
    if status == "running" or (status == "completed" and code != 0):
        status = {REFUSED: "refused", INTERRUPTED: "interrupted"}.get(code, "failed")
        error = last_line(folder / LOG) or f"exit code {code}"
    if code < 0 and (status in ("failed", "interrupted")):
        of_rank = "" if rank is None else f"rank {rank}: "
        status, error = "killed", f"{of_rank}signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and num_kernel_kills() > kills:
            status, error = "oom", f"{of_rank}ended by the system, which ran out of memory"
    if was_interrupted and status in ("killed", "failed"):
        status, error = "interrupted", "stopped by a signal"
    if job_s is not None:
        record["time"]["job_s"] = job_s
    if (status, error) != (record["status"], record["error"]) or job_s is not None:
        record |= {"status": status, "error": error}
        folder.mkdir(parents=True, exist_ok=True)
        Summary.amend(folder, record)
        if not was_told:
            end_session_of(folder, completed=False, end_time=time.time())
    return record


def last_line(log: Path) -> str | None:
    """The last line that a process printed: where it died, the reason."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip().removeprefix("refused: ") for line in reversed(lines) if line.strip()), None)


def num_kernel_kills() -> int:
    """Processes that the kernel has killed for want of memory since the machine started."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:  # not Linux
        return 0
    return int(counters.get("oom_kill", 0))


def run_under_torchrun(words: list[str], folder: Path, *, count: int, threads: int | None) -> tuple[str, str | None]:
    """Starts `train.py words…` on `count` processes, as `torchrun --standalone` would, and waits.

    threads: CPU threads a process. Returns status and error of the run.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(threads or max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its tables bury the error of the rank
    code, rank, kills = 0, None, num_kernel_kills()
    try:
        passed_on = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        run(parse_args(["--standalone", passed_on, f"--nproc_per_node={count}", str(TRAIN), *words, *goes_to(folder)]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in (REFUSED, INTERRUPTED):
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr)
    except (SignalException, KeyboardInterrupt):
        code = INTERRUPTED
    record = record_end(folder, None, code, kills=kills, rank=rank)
    return record["status"], record["error"]


def command_line(words: list[str]) -> str:
    """The command as a person would type it."""
    return shlex.join(["python", "train.py", *words])
