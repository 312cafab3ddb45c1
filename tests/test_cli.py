"""What a person types: refusals in one sentence with exit code 2, and what a run leaves behind."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from fulcrum import launch
from helpers import ROOT, TINY, summary, train_py

REFUSED = [
    # mistyped keys and options
    ("precison=bf16", "precison=bf16", "did you mean 'precision'?"),
    ("epoch=3", "epoch=3", "did you mean 'epochs'?"),
    ("lr=0.1", "lr=0.1", "did you mean 'optimizer.lr'?"),
    ("optimizer.learning_rate=0.1", "optimizer.learning_rate=0.1", "optimizer.lr"),
    ("lora.rnak=4", "lora.rnak=4", "did you mean 'lora.rank'?"),
    ("batch=64", "batch=64", "batch.effective"),
    ("+train.epoch=3", "+train", "there is no key"),
    ("+foo=1", "+foo", "there is no key"),
    ("+lora.foo=1", "lora.foo=1", "there is no key"),
    ("hydra.run.dri=x", "hydra.run.dri=x", "Hydra has no key"),
    ("precision=bf61", "precision=bf61", "did you mean 'bf16'?"),
    ("precision=float32", "precision=float32", "fp32"),
    ("accumulation=4", "accumulation=4", "did you mean 'x4'?"),
    ("accumulation=x3", "accumulation=x3", "no option of accumulation"),
    ("lora=8", "lora=8", "r8"),
    ("model=resnet19", "model=resnet19", "resnet"),
    ("experiment=nope", "experiment=nope", "quickstart"),
    ("checkpointing=true", "checkpointing=true", "block"),
    ("optimizer=sgd,adamw", "optimizer=sgd,adamw", "-m"),
    ("precision=[fp32,bf16]", "precision", "-m"),
    ("precision=null", "precision=null", "fp32"),
    ("~optimizer", "~optimizer", "cannot be taken out"),
    ("epochs", "epochs", "a value is missing"),
    # types
    ("optimizer.lr=abc", "optimizer.lr=abc", "a number is needed"),
    ("optimizer.lr=null", "optimizer.lr=null", "give a value"),
    ("epochs=2.5", "epochs=2.5", "a whole number is needed"),
    ("epochs=", "epochs=", "a whole number is needed"),
    ("epochs=1 epochs=abc", "epochs=abc", "a whole number is needed"),
    ("seed=one", "seed=one", "a whole number is needed"),
    ("parallelism.processes=two", "parallelism.processes=two", "a whole number is needed"),
    ("model.compile=maybe", "model.compile=maybe", "true or false is needed"),
    ("model.norm=layer", "model.norm=layer", "one of batch, group, none"),
    ("device=tpu", "device=tpu", "one of auto, cpu, cuda"),
    ("optimizer.lr_scaling=log", "optimizer.lr_scaling=log", "linear, sqrt, none"),
    ("parallelism.backend=mpi", "parallelism.backend=mpi", "gloo"),
    ("lora.targets=conv1", "lora.targets=conv1", "a list is needed"),
    ("optimizer.lr=${nope}", "optimizer.lr=${nope}", "does not exist"),
    # ranges
    ("optimizer.lr=nan", "optimizer.lr=nan", "finite number"),
    ("optimizer.lr=inf", "optimizer.lr=inf", "finite number"),
    ("optimizer.lr=-1", "optimizer.lr=-1", "above 0"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm=0", "above 0"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1", "at least 0"),
    ("optimizer.momentum=1", "optimizer.momentum=1", "[0, 1)"),
    ("optimizer.lr_batch=0", "optimizer.lr_batch=0", "at least 1"),
    ("epochs=0", "epochs=0", "at least 1"),
    ("max_steps=0", "max_steps=0", "at least 1"),
    ("seed=-1", "seed=-1", "at least 0"),
    ("threads=0", "threads=0", "at least 1"),
    ("eval_every_epochs=0", "eval_every_epochs=0", "at least 1"),
    ("logging.every_steps=0", "logging.every_steps=0", "at least 1"),
    ("saving.keep=0", "saving.keep=0", "at least 1"),
    ("saving.every_steps=-1", "saving.every_steps=-1", "at least 1"),
    ("accumulation.steps=0", "accumulation.steps=0", "at least 1"),
    ("lora=r4 lora.rank=0", "lora.rank=0", "at least 1"),
    ("lora=r4 lora.alpha=-2", "lora.alpha=-2", "above 0"),
    ("lora=r4 lora.dropout=1.5", "lora.dropout=1.5", "[0, 1)"),
    ("model.dropout=1", "model.dropout=1", "[0, 1)"),
    ("model.depth=9", "model.depth=9", "6n + 2"),
    ("model=resnet18 model.depth=20", "model.depth=20", "18, 34, 50"),
    ("precision=fp16 precision.init_scale=0", "precision.init_scale=0", "above 0"),
    ("precision=fp16 precision.growth_interval=0", "precision.growth_interval=0", "at least 1"),
    ("data.train_size=0", "data.train_size=0", "at least 1"),
    ("data.test_size=0", "data.test_size=0", "at least 1"),
    ("data.classes=1", "data.classes=1", "at least 2"),
    ("data.image_size=4", "data.image_size=4", "at least 8"),
    ("schedule.warmup_epochs=-1", "schedule.warmup_epochs=-1", "at least 0"),
    ("schedule=onecycle schedule.peak_at=1", "schedule.peak_at=1", "between 0 and 1"),
    ("schedule=multistep schedule.milestones=[0.7,0.5]", "schedule.milestones=[0.7, 0.5]", "must rise"),
    # combinations
    ("batch.effective=100 accumulation=x8", "batch.effective=100", "multiple of 8"),
    ("batch.effective=7 parallelism=ddp", "batch.effective=7", "multiple of 2"),
    ("batch.effective=64 batch.per_device=16", "batch.effective=64", "give one of the two"),
    ("batch.effective=null", "batch.effective=null", "batch.per_device"),
    ("schedule.warmup_epochs=10", "schedule.warmup_epochs=10", "within the run"),
    ("lora=r4 lora.targets=[layer9]", "lora.targets=['layer9']", "did you mean"),
    ("data.drop_last=true data.train_size=5", "data.drop_last=true", "5 training images"),
    ("parallelism=ddp parallelism.sync_batchnorm=true device=cpu", "parallelism.sync_batchnorm=true", "GPUs only"),
    ("parallelism=ddp parallelism.backend=nccl device=cpu", "parallelism.backend=nccl", "gloo"),
    # places
    ("data=image_folder data.root=/nowhere", "data.root=/nowhere", "has no folder 'train'"),
    ("data=cifar10 data.root=/nowhere data.download=false", "data.root=/nowhere", "data.download=true"),
    ("resume=/nowhere", "resume=/nowhere", "no checkpoint"),
    ("lora=r4 lora.base=/nowhere", "lora.base=/nowhere", "no checkpoint"),
]


def train_function():
    """The function of train.py, imported from its file."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.train.__wrapped__.__module__ = "__main__"  # where Hydra looks for conf/: beside the file
    return module.train


@pytest.fixture
def typed(monkeypatch, tmp_path, capsys):
    """Types overrides after `python train.py data=synthetic`; gives (exit code, what stood on stderr)."""
    train = train_function()
    monkeypatch.chdir(tmp_path)

    def typed(words: str) -> tuple[int, str]:
        GlobalHydra.instance().clear()
        data = [] if "data=" in words.split(" ")[0] else ["data=synthetic"]
        quiet = ["hydra/hydra_logging=none", "hydra/job_logging=none"]  # Hydra cannot log to a captured stdout
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *data, *words.split(" "), *quiet])
        for name in ("HYDRA_FULL_ERROR", launch.COMMAND):
            monkeypatch.setenv(name, "1")  # main sets both; this puts them back
        with pytest.raises(SystemExit) as end:
            launch.main(train)
        return end.value.code, capsys.readouterr().err

    return typed


@pytest.mark.parametrize(("words", "key", "rule"), REFUSED, ids=[words for words, *_ in REFUSED])
def test_bad_input_ends_in_one_sentence_before_any_directory_is_made(typed, tmp_path, words, key, rule):
    code, stderr = typed(words)
    assert code == 2
    assert stderr.startswith(f"refused: {key}"), stderr
    assert rule in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(typed):
    code, stderr = typed("device=cuda")
    assert code == 2
    assert "device=cuda" in stderr


def test_refusals_of_the_real_command_have_no_traceback(tmp_path):
    for words in ("precison=bf16", "optimizer.lr=nan", "optimizer.lr=abc"):
        done = train_py(words, "data=synthetic", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_a_corrupt_image_is_refused_by_name(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / split / name / "0.png")
    (tmp_path / "images" / "train" / "dog" / "1.png").write_bytes(b"no image")
    done = train_py("data=image_folder", "data.root=images", "hydra.run.dir=run", "model=resnet8", cwd=tmp_path)
    assert done.returncode == 2
    assert "images/train/dog/1.png cannot be read" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert summary(tmp_path / "run")["status"] == "refused"


def test_a_run_leaves_the_files_and_keys_of_the_contract(tmp_path):
    done = train_py(*TINY, "hydra.run.dir=run", "saving=all", "lora=r4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = tmp_path / "run"
    record = summary(run)
    assert record["status"] == "completed"
    assert record["choices"]["lora"] == "r4"
    assert record["command"].endswith("saving=all lora=r4")
    assert record["batch"] == {"effective": 24, "per_device": 24, "world_size": 1, "accumulation": 1}
    assert record["optimizer_steps"] == 6
    parts = [record["time"][f"{name}_s"] for name in ("setup", "train", "eval", "save")]
    assert sum(parts) == pytest.approx(record["time"]["wall_s"], rel=0.05)
    assert record["time"]["step_ms"] > 0
    assert record["memory"]["peak_mib"] is None or record["memory"]["peak_mib"] > 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "last.pt", "best.pt", "step-3.pt", "step-6.pt", "adapter.safetensors"
    }  # fmt: skip
    assert (run / ".hydra" / "config.yaml").is_file()
    assert "eval accuracy" in (run / "train.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_event_file_has_every_tag_on_the_axis_of_optimizer_steps_and_one_session(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_py(*TINY, "hydra.run.dir=run", cwd=tmp_path)
    assert len(list((tmp_path / "run").glob("events.out.tfevents*"))) == 1
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "eval/loss", "eval/accuracy", "time/step_ms"} <= tags
    assert [point.step for point in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in events.Scalars("eval/accuracy")] == [3, 6]
    assert set(events.summary_metadata) >= {
        "_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"
    }  # fmt: skip


def test_a_directory_with_a_run_is_not_taken_by_another_and_stays_as_it_was(tmp_path):
    assert train_py(*TINY, "hydra.run.dir=run", cwd=tmp_path).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = train_py(*TINY, "hydra.run.dir=run", "seed=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "already holds a run; use resume=auto" in done.stderr
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_evaluate_reproduces_the_accuracy_of_a_run_from_its_files(tmp_path):
    train_py(*TINY, "hydra.run.dir=run", "lora=r4", "precision=bf16", cwd=tmp_path)
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = summary(tmp_path / "run")["metrics"]
    assert json.loads(done.stdout) == {key: metrics[key] for key in ("eval_accuracy", "eval_loss")}
    assert Path(tmp_path / "run" / "checkpoints" / "adapter.safetensors").is_file()
