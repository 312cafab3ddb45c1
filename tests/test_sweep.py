"""Sweeps through the real command: jobs as they would be alone, failures as rows, all points checked beforehand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from fulcrum.processes import last_line, record_end
from helpers import ROOT, TINY, checkpoint, largest_difference, summary, train_py, weights


def comparison(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


def statuses(folder: Path) -> dict[str, str]:
    return {row["run"]: row["status"] for row in comparison(folder)["rows"]}


@contextmanager
def started(*words: str, cwd: Path) -> Iterator[subprocess.Popen]:
    """`python train.py …`, which does not outlive the block."""
    command = [sys.executable, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen, timeout_s: float = 60) -> None:
    began = time.monotonic()
    while not is_so():
        assert process.poll() is None
        assert time.monotonic() - began < timeout_s
        time.sleep(0.05)


def process_that_writes(log: Path) -> int:
    """The process whose standard output is `log`."""
    for stdout in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if stdout.resolve() == log.resolve():
                return int(stdout.parts[2])
        except OSError:  # ended meanwhile
            continue
    raise AssertionError(f"no process writes {log}")


def test_a_job_equals_the_same_command_typed_alone_in_any_order_and_has_the_same_peak(tmp_path):
    words = [*TINY, "saving=all"]
    for order in ("x2,none", "none,x2"):  # small and big, big and small
        done = train_py("-m", *words, f"accumulation={order}", f"hydra.sweep.dir={order[:2]}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    train_py(*words, "accumulation=x2", "hydra.run.dir=alone", cwd=tmp_path)
    first, second, alone = tmp_path / "x2" / "0-fp32-x2", tmp_path / "no" / "1-fp32-x2", tmp_path / "alone"
    for job in (first, second):
        assert largest_difference(weights(job), weights(alone)) == 0
        assert checkpoint(job)["optimizer"]["param_groups"] == checkpoint(alone)["optimizer"]["param_groups"]
        assert summary(job)["metrics"] == summary(alone)["metrics"]
        assert summary(job)["memory"] == summary(alone)["memory"]
        assert summary(job)["command"] == summary(alone)["command"].removesuffix(" hydra.run.dir=alone")
    assert summary(alone)["memory"]["peak_mib"] > 0
    assert "completed after 6 steps" in (first / "train.log").read_text()


# Points that a product of keys cannot make: named in a folder of one's own.
SMALL = "data: {image_size: 8, train_size: 53, test_size: 101}\n"
FAULTS = {
    "good": SMALL + "epochs: 2",
    "diverges": SMALL + "optimizer: {lr: 1e30}",
    "hungry": "data: {train_size: 1024, test_size: 101}\nmemory_limit_mib: 40\nbatch: {effective: 1024}",
    "killed": SMALL + "epochs: 100000",
    "broken": "data: {root: images}",
    "fine": SMALL + "seed: 5",
}


def test_one_that_diverges_one_out_of_memory_one_killed_and_one_that_cannot_start_are_four_rows(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for name, body in FAULTS.items():
        group = "image_folder" if name == "broken" else "synthetic"
        text = f"# @package _global_\ndefaults: [override /data: {group}, override /model: resnet8]\n{body}\n"
        (tmp_path / "conf" / "experiment" / f"{name}.yaml").write_text(text)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / split / name / "0.png")
    (tmp_path / "images" / "train" / "dog" / "1.png").write_bytes(b"no image")
    words = ["-m", "hydra.searchpath=[file://conf]", f"experiment={','.join(FAULTS)}", "device=cpu", "threads=1"]
    sweep, victim = tmp_path / "sweep", tmp_path / "sweep" / "3-fp32"

    def run_and_kill(attempt: int) -> int:
        with started(*words, "hydra.sweep.dir=sweep", cwd=tmp_path) as process:
            wait_for(lambda: len([*victim.glob("earlier/*")]) == attempt - 1, process)
            wait_for((victim / "checkpoints" / "last.pt").exists, process)
            os.kill(process_that_writes(victim / "train.log"), signal.SIGKILL)
            return process.wait(60)

    assert run_and_kill(1) == 1
    ends = ["completed", "diverged", "oom", "killed", "refused", "completed"]
    rows = comparison(sweep)["rows"]
    assert [row["status"] for row in rows] == ends
    assert "signal SIGKILL" in rows[3]["error"]
    assert "images/train/dog/1.png cannot be read" in rows[4]["error"]
    assert all(row["error"] is None for row in rows if row["status"] == "completed")
    assert "Traceback" in (sweep / "2-fp32" / "train.log").read_text()
    good = (sweep / "0-fp32" / "summary.json").read_bytes()

    assert run_and_kill(2) == 1  # the same command again
    assert [row["status"] for row in comparison(sweep)["rows"]] == ends
    assert (sweep / "0-fp32" / "summary.json").read_bytes() == good
    again = {job.name for job in sweep.iterdir() if (job / "earlier" / "1" / "summary.json").exists()}
    assert again == {"1-fp32", "2-fp32", "3-fp32", "4-fp32"}
    assert not [*sweep.glob("**/earlier/**/*tfevents*")]  # TensorBoard sees the last attempt alone


def test_single_and_ddp_jobs_mix_in_one_sweep_and_its_folder_belongs_to_it(tmp_path):
    words = ["-m", *TINY, "hydra.sweep.dir=sweep"]
    done = train_py(*words, "parallelism=single,ddp", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = [summary(tmp_path / "sweep" / job)["batch"]["world_size"] for job in ("0-fp32", "1-fp32-ddp")]
    assert worlds == [1, 2]
    other = train_py(*words, "parallelism=ddp,single", cwd=tmp_path)
    assert other.returncode == 2
    assert "hydra.sweep.dir=" in other.stderr
    assert "holds another sweep: its job 0-fp32 is" in other.stderr
    assert statuses(tmp_path / "sweep") == {"0-fp32": "completed", "1-fp32-ddp": "completed"}


def test_torchrun_with_m_is_one_sweep_whose_ddp_jobs_have_its_number_of_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py")]
    words = ["-m", *TINY, "precision=fp32,bf16", "parallelism=ddp", "hydra.sweep.dir=sweep"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path / "sweep") == {"0-fp32-ddp": "completed", "1-bf16-ddp": "completed"}
    assert summary(tmp_path / "sweep" / "0-fp32-ddp")["batch"]["world_size"] == 2
    assert done.stdout.count("sweep of 2 jobs") == 1


def test_the_plan_tells_the_memory_of_each_job_and_which_cannot_fit(tmp_path):
    done = train_py(
        "-m", *TINY, "accumulation=none,x4", "max_steps=2", "memory_limit_mib=1.8", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    plan = done.stdout.splitlines()[2:4]
    assert plan[0].endswith("MiB: does not fit 1.8 MiB"), plan
    assert "does not fit" not in plan[1]
    rows = comparison(tmp_path / "sweep")["rows"]
    assert f"{rows[0]['predicted_peak_mib']:.4g} MiB" in plan[0]
    assert rows[0]["predicted_peak_mib"] > 1.8 > rows[1]["predicted_peak_mib"]


def test_forty_illegal_points_of_a_hundred_are_all_named_before_anything_starts(tmp_path):
    steps, seeds = ",".join(map(str, range(1, 11))), ",".join(map(str, range(10)))
    done = train_py("-m", *TINY, f"accumulation.steps={steps}", f"seed={seeds}", cwd=tmp_path)
    assert done.returncode == 2
    assert "40 of 100 points of the sweep cannot work; nothing was started" in done.stderr
    assert done.stderr.count("does not divide into accumulation.steps=") == 40
    assert not (tmp_path / "outputs").exists()


def test_a_point_refused_in_meaning_can_be_a_row_and_one_mistyped_cannot(tmp_path):
    words = ["-m", *TINY, "max_steps=1", "skip_refused=true", "hydra.sweep.dir=sweep"]
    done = train_py(*words, "accumulation.steps=1,5", cwd=tmp_path)
    assert done.returncode == 1
    assert statuses(tmp_path / "sweep") == {"0-fp32": "completed", "1-fp32": "refused"}
    assert "use a multiple of 5" in comparison(tmp_path / "sweep")["rows"][1]["error"]
    mistyped = train_py(*words, "accumulation.steps=1,two", cwd=tmp_path)
    assert mistyped.returncode == 2
    assert "accumulation.steps=two: a whole number is needed" in mistyped.stderr


def test_seeds_are_outermost_and_repeats_tell_the_noise(tmp_path):
    done = train_py("-m", *TINY, "precision=fp32,bf16", "seed=0,0", r"hydra.sweep.dir='it\'s a=b, c'", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "it's a=b, c").rename(tmp_path / "sweep")
    ran = [
        (row["choices"]["precision"], row["seed"])
        for row in sorted(comparison(tmp_path / "sweep")["rows"], key=lambda r: r["order"])
    ]
    assert ran == [("fp32", 0), ("bf16", 0), ("fp32", 0), ("bf16", 0)]
    assert [len(group["runs"]) for group in comparison(tmp_path / "sweep")["groups"]] == [2, 2]
    assert comparison(tmp_path / "sweep")["noise"]["peak_mib"]["deviation"] == 0


def test_launchers_of_hydra_run_jobs_as_the_basic_one_does(tmp_path):
    joblib = train_py(
        "-m", *TINY, "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=a", cwd=tmp_path
    )
    submitit = train_py("-m", *TINY, "seed=0", "hydra/launcher=submitit_local", "hydra.sweep.dir=b", cwd=tmp_path)
    alone = train_py(*TINY, "seed=0", "hydra.run.dir=c", cwd=tmp_path)
    assert (joblib.returncode, submitit.returncode, alone.returncode) == (0, 0, 0), joblib.stderr + submitit.stderr
    assert statuses(tmp_path / "a") == {"0-fp32": "completed", "1-fp32": "completed"}
    for launcher in ("a", "b"):
        assert largest_difference(weights(tmp_path / launcher / "0-fp32"), weights(tmp_path / "c")) == 0


def test_ctrl_c_ends_the_job_keeps_finished_rows_and_starts_no_further_one(tmp_path):
    with started("-m", *TINY, "epochs=1,100000", "seed=1,2", "hydra.sweep.dir=sweep", cwd=tmp_path) as process:
        wait_for((tmp_path / "sweep" / "1-fp32" / "checkpoints" / "last.pt").exists, process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert statuses(tmp_path / "sweep") == {"0-fp32": "completed", "1-fp32": "interrupted"}


def test_a_run_that_could_not_say_how_it_ended_is_named_by_its_exit_code_and_last_line(tmp_path):
    (tmp_path / "train.log").write_text("one\nModuleNotFoundError: No module named 'torch'\n\n")
    record = record_end(tmp_path, None, 1, kills=0)
    assert (record["status"], record["error"]) == ("failed", "ModuleNotFoundError: No module named 'torch'")
    assert summary(tmp_path)["status"] == "failed"
    assert last_line(tmp_path / "nothing.log") is None


def test_a_process_that_the_system_killed_for_want_of_memory_is_out_of_memory(tmp_path):
    record = record_end(tmp_path, None, -signal.SIGKILL, kills=-1)  # one more now than at its start
    assert record["status"] == "oom"
    assert record_end(tmp_path / "other", None, -signal.SIGKILL, kills=10**9)["status"] == "killed"
