"""Kills runs at random moments, also while they save, resumes each until its end, and compares the bits of that end.

python scripts/kills.py [--kills 100] [--seed 0]
"""

import argparse
import logging
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from fulcrum import config, launch, run, saving
from fulcrum.preflight import choices, split

TINY = ["model=resnet8", "data=synthetic", "data.image_size=8", "data.train_size=53", "data.test_size=101"]
TINY += ["batch.effective=24", "epochs=8", "device=cpu", "threads=1", "resume=auto", "saving.every_steps=1"]
HARD = [*TINY, "accumulation.steps=3", "model.dropout=0.3"]  # BatchNorm is there anyway
CASES = {
    "1 process, saving=last": ([*HARD, "saving=last"], 1),
    "1 process, saving=all": ([*HARD, "saving=all"], 1),
    "2 ranks, saving=last": ([*HARD, "saving=last", "parallelism=ddp"], 2),
    "2 ranks, saving=all": ([*HARD, "saving=all", "parallelism=ddp"], 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="at least so many, shared among the cases")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    started = time.monotonic()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, (overrides, ranks) in CASES.items():
            kills = kill(Path(folder) / name.replace(" ", "-"), overrides, ranks, asked.kills // len(CASES), draw)
            print(f"{name}: {told(kills)}", flush=True)
            total += kills
    print(f"in all: {told(total)}, in {time.monotonic() - started:.0f} s on {os.cpu_count()} cores")
    sys.exit(0 if total["runs"] == total["equal"] else 1)


def told(kills: Counter[str]) -> str:
    return (
        f"{kills['kills']} kills ({kills['early']} before a checkpoint was there, {kills['saving']} with a file half written) "
        f"in {kills['runs']} runs, {kills['equal']} of them ended bit-equal to the uninterrupted run"
    )


def kill(folder: Path, overrides: list[str], ranks: int, num_kills: int, draw: random.Random) -> Counter[str]:
    """Runs to the end, over and over, until so many kills have been survived."""
    folder.mkdir()
    for name in ("warm-up", "whole"):
        started = time.monotonic()
        ended = [wait(process) for process in start(folder / name, overrides, ranks)]
        whole_s = time.monotonic() - started
        assert not any(ended), (folder / f"{name}.log").read_text()
    counts: Counter[str] = Counter()
    while counts["kills"] < num_kills:
        here = folder / str(counts["runs"])
        while not attempt(here, start(here, overrides, ranks), draw.uniform(0, whole_s), draw, counts):
            pass
        counts["runs"] += 1
        differs = difference(end_of(folder / "whole"), end_of(here))
        counts["equal"] += differs is None
        if differs:
            print(f"{here.name} differs, {differs}")
    return counts


def attempt(folder: Path, processes: list[BaseProcess], seconds: float, draw: random.Random, counts: Counter[str]) -> bool:
    """Whether a run reaches its end within so many seconds; else it is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        time.sleep(0.001)
    is_over = not any(process.is_alive() for process in processes)
    for process in draw.sample(processes, len(processes)):
        process.kill()  # nothing to one that has ended
    codes = [wait(process) for process in processes]
    if is_over:
        assert not any(codes), Path(f"{folder}.log").read_text()
    else:
        counts["kills"] += 1
        counts["early"] += not saving.files(folder)
        counts["saving"] += any(folder.glob(f"{saving.FOLDER}/*.partial"))
    return is_over


def wait(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


def start(folder: Path, overrides: list[str], ranks: int) -> list[BaseProcess]:
    """The processes of one run, forks of a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fulcrum.preloaded"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    told = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        own = {**told, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "kills"} if ranks > 1 else {}
        processes.append(context.Process(target=train, args=(folder, overrides, own)))
        processes[-1].start()
    return processes


def train(folder: Path, overrides: list[str], environment: dict[str, str]) -> None:
    """One process of a run, in a process of its own."""
    os.environ.update(environment)
    logging.basicConfig(filename=f"{folder}.log", level=logging.INFO, format="%(message)s")
    with initialize_config_dir(str(launch.CONF), version_base="1.3"):
        task, hydra = split(compose("config", overrides, return_hydra_config=True))
    experiment = config.load(task)
    summary = run.run(experiment, folder, run.Invocation(choices(hydra), overrides, __doc__ or "", 0, []))
    sys.exit(summary.status != "completed")


def end_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run, without its times."""
    checkpoint = saving.read(saving.find(str(folder), key="RUN"), key="RUN")
    del checkpoint["train_s"]
    for evaluation in checkpoint["evaluations"]:
        del evaluation["train_s"]
    return checkpoint


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Where two values differ first, in any bit."""
    if isinstance(one, Tensor):
        return None if torch.equal(one, other) else f"{place}: by {(one - other).abs().max().item():.3g} at most"
    if isinstance(one, dict) and one.keys() == other.keys():
        return next(filter(None, (difference(one[key], other[key], f"{place}/{key}") for key in one)), None)
    if isinstance(one, list):
        return difference(dict(enumerate(one)), dict(enumerate(other)), place)
    return None if one == other else f"{place}: {one} and {other}"


if __name__ == "__main__":
    main()
