"""Several processes: started by us, by torchrun, apart in time, failing, on two nodes."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

from helpers import ROOT, TINY, largest_difference, summary, torchrun, train_py, weights

LATE_RANK_1 = "import os, time\nif os.environ.get('RANK') == '1': time.sleep(2)\n"
FAILING_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import fulcrum.trainer as trainer
    step = trainer.Trainer.step
    def failing(self, batch):
        if self.progress.step == 2:
            raise RuntimeError("rank 1 has had enough")
        return step(self, batch)
    trainer.Trainer.step = failing
"""
DRIFTING_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import torch
    import fulcrum.trainer as trainer
    step = trainer.Trainer.step
    def drifting(self, batch):
        result = step(self, batch)
        with torch.no_grad():
            self.network.fc.bias[0] += 1e-6
        return result
    trainer.Trainer.step = drifting
"""


def test_ranks_that_start_seconds_apart_share_one_directory_and_one_set_of_files(tmp_path):
    done = torchrun(*TINY, "parallelism=ddp", cwd=tmp_path, sitecustomize=LATE_RANK_1)
    assert done.returncode == 0, done.stderr
    runs = list((tmp_path / "outputs" / "runs").glob("*/*"))
    assert len(runs) == 1
    assert re.fullmatch(r"[\w.-]+", runs[0].name)
    assert len(list(runs[0].glob("events*"))) == 1
    assert (runs[0] / "train.log").read_text().count("completed after") == 1
    assert done.stdout.count("completed after") == 1
    assert summary(runs[0])["batch"]["world_size"] == 2


def test_a_plain_command_starts_its_processes_and_equals_a_foreign_torchrun(tmp_path):
    done = train_py(*TINY, "parallelism=ddp", "hydra.run.dir=own", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    torchrun(*TINY, "parallelism=ddp", "hydra.run.dir=foreign", cwd=tmp_path)
    assert largest_difference(weights(tmp_path / "own"), weights(tmp_path / "foreign")) == 0
    assert summary(tmp_path / "own")["command"].endswith("parallelism=ddp hydra.run.dir=own")
    assert (tmp_path / "own" / ".hydra" / "overrides.yaml").is_file()
    evaluate = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "own"]
    alone = json.loads(subprocess.run(evaluate, capture_output=True, text=True, cwd=tmp_path, check=True).stdout)
    metrics = summary(tmp_path / "own")["metrics"]
    assert alone["eval_accuracy"] == metrics["eval_accuracy"]  # with rank 0's BatchNorm statistics, on one process
    assert abs(alone["eval_loss"] - metrics["eval_loss"]) < 1e-6


def test_torchrun_without_ddp_is_refused_in_a_sentence(tmp_path):
    done = torchrun(*TINY, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("refused: parallelism=single under torchrun would train 2 times") == 1
    assert not (tmp_path / "outputs").exists()


def test_one_failing_rank_ends_all_within_a_minute_with_its_error_visible(tmp_path):
    start = time.monotonic()
    done = torchrun(*TINY, "parallelism=ddp", "hydra.run.dir=run", cwd=tmp_path, sitecustomize=FAILING_RANK_1)
    assert done.returncode != 0
    assert time.monotonic() - start < 60
    assert "RuntimeError: rank 1 has had enough" in done.stderr
    record = summary(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["error"] == "rank 1: RuntimeError: rank 1 has had enough"


def test_ranks_that_drift_apart_are_an_error_at_the_end_of_the_epoch(tmp_path):
    done = torchrun(*TINY, "parallelism=ddp", "hydra.run.dir=run", cwd=tmp_path, sitecustomize=DRIFTING_RANK_1)
    assert done.returncode != 0
    record = summary(tmp_path / "run")
    assert record["status"] == "failed"
    assert "have drifted apart" in record["error"]
    assert record["epochs"] == 1


def test_ctrl_c_ends_a_run_as_interrupted_with_exit_code_130(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "epochs=100000", "hydra.run.dir=run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not (tmp_path / "run" / "checkpoints" / "last.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    record = summary(tmp_path / "run")
    assert record["status"] == "interrupted"
    assert record["optimizer_steps"] > 0
    assert process.stdout is not None
    process.stdout.close()
    assert weights(tmp_path / "run")


def test_two_nodes_of_one_process_equal_one_node_of_two(tmp_path):
    train_py(*TINY, "parallelism=ddp", "hydra.run.dir=one", cwd=tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    words = [*TINY, "parallelism=ddp", "hydra.run.dir=two"]
    nodes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *rendezvous,
                f"--node_rank={node}",
                str(ROOT / "train.py"),
                *words,
            ],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in (0, 1)
    ]
    assert [node.wait(60) for node in nodes] == [0, 0]
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "two")) == 0
