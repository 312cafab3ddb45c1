"""Runs as the tests need them: composed like a person's, in this process or on ranks of a real torchrun."""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from fulcrum import config, launch
from fulcrum.config import Experiment
from fulcrum.logbook import Summary
from fulcrum.run import Invocation, run

ROOT = Path(__file__).resolve().parents[1]

# 53 images in steps of 24: two full steps and a last one of 5, which no number of processes or micro-batches divides.
TINY = ["model=resnet8", "data=synthetic", "data.image_size=8", "data.train_size=53", "data.test_size=101"]
TINY += ["batch.effective=24", "epochs=2", "device=cpu", "logging.every_steps=1", "threads=1"]
WITHOUT_STATISTICS = [*TINY, "model.norm=none"]


def composed(overrides: list[str]) -> tuple[Experiment, dict[str, str]]:
    """(experiment, choices) of these overrides."""
    launch.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides, return_hydra_config=True)
    choices = {k: str(v) for k, v in cfg.hydra.runtime.choices.items() if not k.startswith("hydra")}
    with open_dict(cfg):
        del cfg["hydra"]
    return config.load(cfg), choices


def run_here(overrides: list[str], folder: Path) -> Summary:
    """One run in this process."""
    experiment, choices = composed(overrides)
    return run(experiment, folder, Invocation(choices, overrides, "test", experiment.seed or 0, []))


def run_recorded(overrides: list[str], folder: Path) -> Summary:
    """One run in this process that leaves .hydra/ too, as train.py does."""
    summary = run_here(overrides, folder)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        (folder / ".hydra").mkdir()
        OmegaConf.save(compose("config", overrides), folder / ".hydra" / "config.yaml")
    OmegaConf.save({"hydra": {"runtime": {"cwd": str(Path.cwd())}}}, folder / ".hydra" / "hydra.yaml")
    return summary


def script(name: str, *words: object) -> int:
    """The exit code of `python scripts/<name>.py words…`, in this process."""
    GlobalHydra.instance().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        patch.chdir(Path.cwd())  # comes back where the script goes elsewhere
        try:
            runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        except SystemExit as exit:
            if isinstance(exit.code, str):
                raise AssertionError(exit.code) from exit
            return exit.code or 0
    return 0


def run_on_ranks(jobs: list[tuple[list[str], Path]], *, ranks: int, default_dtype: str = "float32") -> None:
    """Runs one after the other on the same ranks, started once by torchrun on a port of its own."""
    words = [json.dumps([overrides, str(folder)]) for overrides, folder in jobs]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*torchrun, str(ROOT / "tests" / "ranks.py"), default_dtype, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as process:
        try:
            _, stderr = process.communicate(timeout=240)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun takes its ranks with it
            raise
    assert process.returncode == 0, stderr[-9000:]


def train_py(*words: str, cwd: Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py …` as a person types it, in a folder of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env={**os.environ, **environment})


def torchrun(*words: str, cwd: Path, ranks: int = 2, options: Sequence[str] = (), sitecustomize: str = "", timeout: float = 60):
    """A foreign `torchrun … train.py …`; `sitecustomize` is code that every process runs first."""
    (cwd / "site").mkdir(exist_ok=True)
    (cwd / "site" / "sitecustomize.py").write_text(sitecustomize)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    path = os.pathsep.join([str(cwd / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*command, str(ROOT / "train.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=environment)


def checkpoint(folder: Path, name: str = "last") -> dict:
    return torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters, buffers and adapters that a run ended with."""
    loaded = checkpoint(folder)
    return {**loaded["model"], **loaded["adapter"]}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())
