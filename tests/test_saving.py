"""Nothing is lost: damaged files, failing disks, signals, dying ranks, other processes, longer runs."""

import errno
import io
import logging
import os
import pickle
import shutil
import signal
import zipfile

import pytest
import torch
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fulcrum import saving
from fulcrum.refusal import Refusal
from fulcrum.saving import FOLDER, Saving, Snapshot
from fulcrum.signals import Interrupted, Stop
from fulcrum.trainer import Trainer
from helpers import TINY, WITHOUT_STATISTICS, checkpoint, largest_difference, run_here, run_on_ranks, summary, torchrun, weights

EVERY_STEP = [*TINY, "model.dropout=0.3", "saving.every_steps=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of EVERY_STEP: 6 steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_here(EVERY_STEP, folder)
    return folder


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def foreign(content: bytes) -> bytes:
    file = io.BytesIO()
    torch.save({"weights": torch.zeros(3)}, file)
    return file.getvalue()


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


def malicious(content: bytes) -> bytes:
    return pickle.dumps({"model": Malicious()})


DAMAGES = {
    "truncated": (lambda content: content[: len(content) // 2], "cannot be read as a checkpoint"),
    "bit-flipped": (flipped, "is damaged: its bytes are not those that were written"),
    "empty": (lambda content: b"", "is empty"),
    "foreign": (foreign, "is no checkpoint of Fulcrum's, it lacks"),
    "malicious": (malicious, "cannot be read as a checkpoint"),
}


@pytest.mark.parametrize("option", ["last", "all"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_after_a_damaged_newest_file_the_one_before_it_is_used_and_the_log_says_so(
    tmp_path, monkeypatch, caplog, whole, damage, option
):
    monkeypatch.chdir(tmp_path)
    change, words = DAMAGES[damage]
    run_here([*EVERY_STEP, f"saving={option}", "max_steps=4", "eval_every_epochs=9"], tmp_path / "run")
    last = tmp_path / "run" / FOLDER / "last.pt"
    last.write_bytes(change(last.read_bytes()))
    with caplog.at_level(logging.INFO):
        resumed = run_here([*EVERY_STEP, f"saving={option}", "resume=auto"], tmp_path / "run")
    assert resumed.status == "completed", resumed.error
    assert f"last.pt {words}" in caplog.text
    assert "instead" in caplog.text
    assert largest_difference(weights(whole), weights(tmp_path / "run")) == 0
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_that_is_named_itself_is_refused_in_a_sentence(tmp_path, monkeypatch, whole, damage):
    monkeypatch.chdir(tmp_path)
    change, words = DAMAGES[damage]
    (tmp_path / "file.pt").write_bytes(change((whole / FOLDER / "last.pt").read_bytes()))
    refused = run_here([*TINY, "resume=file.pt"], tmp_path / "run")
    assert refused.status == "refused"
    assert refused.error.startswith(f"resume=file.pt {words}")
    assert not (tmp_path / "executed").exists()


def test_a_directory_without_a_whole_file_is_refused(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / FOLDER).iterdir():
        path.write_bytes(b"")
    refused = run_here([*EVERY_STEP, "resume=auto"], tmp_path / "run")
    assert refused.status == "refused"
    assert refused.error.count("is empty") == 3


def test_no_flipped_byte_goes_unnoticed(tmp_path, whole):
    content = (whole / FOLDER / "last.pt").read_bytes()
    path = tmp_path / "flipped.pt"
    for place in [*range(0, len(content) - 79, len(content) // 50), *range(len(content) - 90, len(content) - 79)]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with pytest.raises(Refusal, match=r"flipped\.pt (is damaged|cannot be read)"):
            saving.read(path, key="resume")


def test_a_checkpoint_is_a_plain_archive_that_torch_and_zip_tools_read(whole):
    for path in (whole / FOLDER).iterdir():
        assert zipfile.ZipFile(path).testzip() is None
        assert torch.load(path, weights_only=True)["step"] > 0


def test_a_snapshot_keeps_values_layout_and_types_apart_from_the_original(tmp_path):
    original = {
        "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "half": torch.randn(7).bfloat16(),
        "none": torch.empty(0, 3),
        "number": torch.tensor(5),
        "part": torch.arange(12).reshape(3, 4)[:, 1:3],
        "plain": [1, 2.5, {"key": (None, "text")}],
    }
    expected = {name: value.clone() for name, value in original.items() if isinstance(value, torch.Tensor)}
    snapshot = Snapshot()
    snapshot.take({"another": torch.randn(3)})
    copy = snapshot.take(original)
    assert copy["image"].stride() == original["image"].stride()
    for name in expected:
        original[name].zero_()
        assert copy[name].dtype == expected[name].dtype
        assert torch.equal(copy[name], expected[name])
    assert copy["plain"] == original["plain"]
    saving.write_atomically(copy, tmp_path / "file.pt")
    assert (tmp_path / "file.pt").stat().st_size < 10_000  # each tensor with its own storage, none with all of them


@pytest.fixture
def at_step(monkeypatch):
    """at_step(n, action): calls action() in the n-th optimizer step of this process, counted from 1."""

    def patch(number, action):
        step, calls = Trainer.step, []

        def patched(self, batch):
            calls.append(None)
            if len(calls) == number:
                action()
            return step(self, batch)

        monkeypatch.setattr(Trainer, "step", patched)

    return patch


@pytest.fixture
def before_saving(monkeypatch):
    """before_saving(n, action): calls action() before the first checkpoint of step n is written."""

    def patch(number, action):
        write, calls = Saving.write, []

        def patched(self, checkpoint, folder, *, is_best=False):
            if checkpoint["step"] == number and not calls:
                calls.append(None)
                action()
            write(self, checkpoint, folder, is_best=is_best)

        monkeypatch.setattr(Saving, "write", patched)

    return patch


def test_a_full_disk_leaves_earlier_checkpoints_and_the_run_goes_on(tmp_path, monkeypatch, caplog, before_saving, whole):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before_saving(4, lambda: monkeypatch.setattr(os, "fsync", full))
    with caplog.at_level(logging.INFO):
        ended = run_here([*EVERY_STEP, "saving=all"], tmp_path)
    assert ended.status == "completed"
    assert ended.failed_saves == summary(tmp_path)["failed_saves"] == 4  # steps 4 to 6 and the end of the run
    assert "the checkpoint of step 4 could not be saved ([Errno 28] No space left on device)" in caplog.text
    names = {"last.pt": 3, "best.pt": 3, "step-1.pt": 1, "step-2.pt": 2, "step-3.pt": 3}
    assert {path.name: torch.load(path, weights_only=True)["step"] for path in (tmp_path / FOLDER).iterdir()} == names
    monkeypatch.undo()
    run_here([*EVERY_STEP, "saving=all", "resume=auto"], tmp_path)
    assert largest_difference(weights(whole), weights(tmp_path)) == 0


def test_a_run_of_which_nothing_could_be_saved_has_failed(tmp_path):
    resource = pytest.importorskip("resource")  # Unix only
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # files end there, as on a disk that is full
    try:
        ended = run_here(TINY, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.status == "failed"
    assert ended.optimizer_steps == 6
    assert ended.error.startswith("NothingSaved: nothing of this run is saved: the checkpoint of step 6 could not be saved")
    assert [*(tmp_path / FOLDER).iterdir()] == []


def test_an_event_file_that_cannot_be_written_ends_the_curves_and_not_the_run(tmp_path, monkeypatch, caplog, at_step):
    def full(self, event):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at_step(2, lambda: monkeypatch.setattr(EventFileWriter, "add_event", full))
    with caplog.at_level(logging.INFO):
        assert run_here(TINY, tmp_path).status == "completed"
    assert caplog.text.count("the event file cannot be written ([Errno 28] No space left on device)") == 1


@pytest.mark.parametrize("part", ["checkpoints", "."])
def test_a_directory_that_vanishes_is_made_again(tmp_path, before_saving, whole, part):
    before_saving(3, lambda: shutil.rmtree(tmp_path / "run" / part))
    ended = run_here(EVERY_STEP, tmp_path / "run")
    assert ended.status == summary(tmp_path / "run")["status"] == "completed"
    assert largest_difference(weights(whole), weights(tmp_path / "run")) == 0


def test_a_directory_that_cannot_be_written_is_a_warning_each_time(tmp_path, before_saving):
    def block():
        shutil.move(tmp_path / FOLDER, tmp_path / "elsewhere")
        (tmp_path / FOLDER).touch()

    before_saving(3, block)
    ended = run_here(EVERY_STEP, tmp_path)
    assert (ended.status, ended.failed_saves) == ("completed", 6)  # steps 3 to 6 and the ends of both epochs
    assert saving.read(tmp_path / "elsewhere" / "last.pt", key="resume")["step"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_a_run_at_the_next_step_boundary_saved(tmp_path, at_step, whole, number):
    overrides = [word for word in EVERY_STEP if word != "saving.every_steps=1"]
    at_step(2, lambda: os.kill(os.getpid(), number))
    ended = run_here(overrides, tmp_path)
    assert (ended.status, ended.error, ended.optimizer_steps) == ("interrupted", "stopped by a signal", 2)
    assert checkpoint(tmp_path)["step"] == 2
    resumed = run_here([*overrides, "resume=auto"], tmp_path)
    assert resumed.status == "completed"
    assert largest_difference(weights(whole), weights(tmp_path)) == 0
    assert resumed.metrics == summary(whole)["metrics"]


def test_a_second_ctrl_c_ends_a_run_where_it_is_but_not_the_echo_of_the_first():
    stop = Stop()
    with pytest.raises(Interrupted):
        stop.ask(signal.SIGTERM, None)  # there is no step boundary to wait for
    stop.can_wait = True
    stop.ask(signal.SIGINT, None)
    stop.ask(signal.SIGINT, None)
    stop.asked_s -= 2
    stop.ask(signal.SIGTERM, None)
    with pytest.raises(Interrupted):
        stop.ask(signal.SIGINT, None)


def test_a_run_stopped_after_its_last_step_is_evaluated_when_it_goes_on(tmp_path, at_step, whole):
    for number, folder, extra in ((3, "epoch", []), (4, "max_steps", ["max_steps=4"])):
        at_step(number, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_here([*EVERY_STEP, *extra], tmp_path / folder).optimizer_steps == number
        assert len(run_here([*EVERY_STEP, *extra, "resume=auto"], tmp_path / folder).evaluations) == 2
    assert largest_difference(weights(whole), weights(tmp_path / "epoch")) == 0


def test_finite_losses_with_weights_that_are_not_leave_the_last_good_checkpoint(tmp_path, monkeypatch):
    step = Trainer.step

    def poisoned(self, batch):
        result = step(self, batch)
        if self.progress.step == 3:
            self.network.fc.bias.data[0] = float("inf")
        return result

    monkeypatch.setattr(Trainer, "step", poisoned)
    ended = run_here(EVERY_STEP, tmp_path)
    assert (ended.status, ended.optimizer_steps) == ("diverged", 4)
    assert "the weights are not finite after step 4" in ended.error
    assert checkpoint(tmp_path)["step"] == 3


def on_rank_1(at_step: int, action: str) -> str:
    """sitecustomize: rank 1, unless restarted, does something in the step after so many."""
    return f"""
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    import fulcrum.trainer as trainer
    step = trainer.Trainer.step
    def patched(self, batch):
        if self.progress.step == {at_step}:
            {action}
        return step(self, batch)
    trainer.Trainer.step = patched
"""


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    """The uninterrupted run of EVERY_STEP on two ranks."""
    folder = tmp_path_factory.mktemp("two") / "run"
    run_on_ranks([([*EVERY_STEP, "parallelism=ddp"], folder)], ranks=2)
    return folder


TWO = [*EVERY_STEP, "parallelism=ddp", "hydra.run.dir=run"]


def test_a_signal_to_one_rank_stops_all_at_the_same_step_saved(tmp_path, whole_of_two):
    words = [word for word in TWO if word != "saving.every_steps=1"]
    done = torchrun(*words, cwd=tmp_path, sitecustomize=on_rank_1(1, "os.kill(os.getpid(), signal.SIGTERM)"))
    assert done.returncode != 0
    record = summary(tmp_path / "run")
    assert (record["status"], record["error"], record["optimizer_steps"]) == ("interrupted", "stopped by a signal", 2)
    assert checkpoint(tmp_path / "run")["step"] == 2
    run_on_ranks([([*words[:-1], "resume=auto"], tmp_path / "run")], ranks=2)
    assert largest_difference(weights(whole_of_two), weights(tmp_path / "run")) == 0


def test_a_rank_that_dies_is_restarted_and_no_saved_step_is_lost(tmp_path, whole_of_two):
    dying = on_rank_1(4, "os.kill(os.getpid(), signal.SIGKILL)")
    done = torchrun(*TWO, cwd=tmp_path, options=["--max-restarts=3"], sitecustomize=dying)
    assert done.returncode == 0, done.stderr
    record, uninterrupted = summary(tmp_path / "run"), summary(whole_of_two)
    for key in ("status", "optimizer_steps", "skipped_steps", "epochs", "metrics", "failed_saves"):
        assert record[key] == uninterrupted[key], key
    assert "1 epochs, 4 steps done" in (tmp_path / "run" / "train.log").read_text()
    assert largest_difference(weights(whole_of_two), weights(tmp_path / "run")) == 0


def test_nan_on_one_rank_ends_all_at_that_step_with_the_last_good_checkpoint(tmp_path):
    poison = on_rank_1(3, "self.network.fc.weight.data.fill_(float('nan'))")
    done = torchrun(*TWO, cwd=tmp_path, sitecustomize=poison)
    assert done.returncode != 0
    record = summary(tmp_path / "run")
    assert record["status"] == "diverged"
    assert "the loss is nan at step 4" in record["error"]
    assert checkpoint(tmp_path / "run")["step"] == 3
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_another_number_of_processes_goes_on_with_the_same_batch_and_says_so(tmp_path, caplog):
    overrides = [*WITHOUT_STATISTICS, "eval_every_epochs=9"]
    run_here(overrides, tmp_path / "whole")
    run_on_ranks([([*overrides, "max_steps=4", "parallelism=ddp"], tmp_path / "run")], ranks=2)
    with caplog.at_level(logging.INFO):
        run_here([*overrides, "accumulation=x2", "resume=auto"], tmp_path / "run")
    assert "processes=2 there and 1 here, accumulation.steps=1 there and 2 here" in caplog.text
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "run")) <= 2e-6


def test_a_longer_run_names_both_horizons_and_stays_below_the_peak(tmp_path, caplog):
    run_here(TINY, tmp_path / "run")
    with caplog.at_level(logging.INFO):
        longer = run_here([*TINY, "epochs=4", "resume=auto"], tmp_path / "run")
    assert longer.optimizer_steps == 12
    assert "the schedule ends after 12 steps instead of 6: at step 6 the learning rate goes on" in caplog.text
    assert checkpoint(tmp_path / "run")["optimizer"]["param_groups"][0]["lr"] <= longer.learning_rate["effective"]


def test_a_checkpoint_of_other_settings_is_refused_key_by_key(tmp_path, whole):
    other = ["model.norm=group", "seed=5", "model.dropout=0.1", "lora=r4", "optimizer=adamw"]
    refused = run_here([*TINY, *other, f"resume={whole}"], tmp_path)
    assert refused.status == "refused"
    for words in ("seed=0 there and 5 here", "model.dropout=0.3 there and 0.1 here", "model.norm=batch there and group here"):
        assert words in refused.error
    for words in ("lora.rank=unset there and 4 here", "optimizer=sgd there and adamw here"):
        assert words in refused.error


KINDS = {
    "single": [],
    "checkpointed": ["checkpointing=block"],
    "compiled": ["model.compile=true"],
    "accumulated": ["accumulation=x2"],
}


def test_files_have_the_same_keys_under_every_lever_and_load_strictly_crosswise(tmp_path, monkeypatch):
    compiler = torch.compile  # what it puts around a network is there, the minute that machine code takes is not
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, backend="eager"))
    first, second = ([*TINY, "saving=all", f"max_steps={steps}"] for steps in (1, 2))
    from_single = f"resume={tmp_path / 'single'}"
    for kind, words in KINDS.items():
        run_here([*first, *words], tmp_path / kind)
    ddp = [
        ([*first, "parallelism=ddp"], tmp_path / "ddp"),
        ([*second, "parallelism=ddp", from_single], tmp_path / "single-ddp"),
    ]
    run_on_ranks(ddp, ranks=2)
    files = [path for kind in (*KINDS, "ddp") for path in (tmp_path / kind / FOLDER).iterdir()]
    loaded = [torch.load(path, weights_only=True) for path in files]
    assert {path.name for path in files} == {"last.pt", "best.pt", "step-1.pt"}
    assert len({tuple(file) for file in loaded}) == len({tuple(file["model"]) for file in loaded}) == 1
    assert summary(tmp_path / "single-ddp")["optimizer_steps"] == 2
    for kind, words in KINDS.items():
        assert run_here([*second, *words, from_single], tmp_path / f"single-{kind}").optimizer_steps == 2
    for kind in (*KINDS, "ddp"):
        assert run_here([*second, f"resume={tmp_path / kind}"], tmp_path / f"from-{kind}").optimizer_steps == 2
