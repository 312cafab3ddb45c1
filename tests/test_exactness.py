"""Levers that must not change the result do not: accumulation, processes and activation checkpointing against none."""

from pathlib import Path

import pytest
import torch

from helpers import TINY, WITHOUT_STATISTICS, largest_difference, run_here, run_on_ranks, summary, weights

ACCUMULATIONS = {"none": [], "x2": ["accumulation=x2"], "x4": ["accumulation=x4"], "3": ["accumulation.steps=3"]}


def runs(folder: Path, dtype: str) -> dict[str, Path]:
    """Every mix of accumulation and number of processes, {name: run directory}."""
    torch.set_default_dtype(getattr(torch, dtype))
    folders = {}
    for name, overrides in ACCUMULATIONS.items():
        folders[f"1 process, {name}"] = folder / f"1-{name}"
        assert run_here([*WITHOUT_STATISTICS, *overrides], folder / f"1-{name}").status == "completed"
        folders[f"2 processes, {name}"] = folder / f"2-{name}"
    jobs = [
        ([*WITHOUT_STATISTICS, "parallelism=ddp", *overrides], folder / f"2-{name}") for name, overrides in ACCUMULATIONS.items()
    ]
    run_on_ranks(jobs, ranks=2, default_dtype=dtype)
    return folders


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-12)])
def test_accumulation_and_processes_end_with_the_same_parameters(tmp_path, dtype, tolerance):
    folders = runs(tmp_path, dtype)
    plain = weights(folders.pop("1 process, none"))
    assert plain["conv1.weight"].dtype == getattr(torch, dtype)
    differences = {name: largest_difference(plain, weights(folder)) for name, folder in folders.items()}
    assert max(differences.values()) <= tolerance, differences
    losses = {summary(folder)["metrics"]["train_loss"] for folder in folders.values()}
    assert max(losses) - min(losses) < 1e-5
    assert {summary(folder)["optimizer_steps"] for folder in folders.values()} == {6}


@pytest.mark.parametrize("extra", [[], ["precision=bf16"], ["lora=r4", "lora.dropout=0.5"], ["accumulation=x2"]], ids=str)
@pytest.mark.parametrize("option", ["block", "stage"])
def test_checkpointing_is_bit_equal_with_batchnorm_and_dropout(tmp_path, option, extra):
    overrides = [*TINY, "model.dropout=0.5", *extra]
    run_here(overrides, tmp_path / "none")
    run_here([*overrides, f"checkpointing={option}"], tmp_path / option)
    plain, recomputed = weights(tmp_path / "none"), weights(tmp_path / option)
    assert plain["bn1.num_batches_tracked"] > 0
    assert largest_difference(plain, recomputed) == 0


def test_looking_more_often_changes_no_bit(tmp_path):
    run_here([*TINY, "saving=all"], tmp_path / "often")
    rarely = ["eval_every_epochs=2", "logging.every_steps=100", "saving.every_epochs=2"]
    run_here([*TINY, *rarely], tmp_path / "rarely")
    assert largest_difference(weights(tmp_path / "often"), weights(tmp_path / "rarely")) == 0


def test_a_run_repeats_bit_for_bit_and_another_seed_does_not(tmp_path):
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        run_here([*TINY, f"seed={seed}"], tmp_path / name)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "again")) == 0
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "other")) > 0


def test_a_resumed_run_ends_bit_equal_even_from_the_middle_of_an_epoch(tmp_path):
    overrides = [*TINY, "model.dropout=0.3", "accumulation=x2"]
    run_here(overrides, tmp_path / "whole")
    run_here([*overrides, "max_steps=4"], tmp_path / "stopped")
    assert summary(tmp_path / "stopped")["optimizer_steps"] == 4
    run_here([*overrides, "resume=auto"], tmp_path / "stopped")
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "stopped")) == 0
    assert summary(tmp_path / "stopped")["optimizer_steps"] == 6


OTHER_SETTINGS = [
    "batch.effective=12",
    "seed=5",
    "data.train_size=20",
    "optimizer=adamw",
    "precision=fp16",
    "lora=r4",
    "model.norm=group",
]


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_a_checkpoint_of_other_settings_is_refused_whole(tmp_path, setting):
    run_here([*TINY, "max_steps=1"], tmp_path / "run")
    resumed = run_here([*TINY, setting, f"resume={tmp_path / 'run'}"], tmp_path / "resumed")
    assert resumed.status == "refused"
    assert f"resume={tmp_path / 'run' / 'checkpoints' / 'last.pt'}" in resumed.error
    assert resumed.optimizer_steps == 0


def test_resuming_a_finished_run_trains_no_step_and_changes_no_file(tmp_path):
    run_here(TINY, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    again = run_here([*TINY, "resume=auto"], tmp_path)
    assert again.status == "completed"
    assert again.optimizer_steps == 6
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}


def test_evaluation_counts_every_image_once_on_any_number_of_ranks(tmp_path):
    overrides = [*WITHOUT_STATISTICS, "max_steps=1"]
    run_here(overrides, tmp_path / "1")
    for ranks in (2, 3):
        run_on_ranks([([*overrides, "parallelism=ddp"], tmp_path / str(ranks))], ranks=ranks)
    accuracies = [summary(tmp_path / name)["metrics"]["eval_accuracy"] for name in ("1", "2", "3")]
    assert accuracies[0] == accuracies[1] == accuracies[2]
    assert accuracies[0] * 101 == pytest.approx(round(accuracies[0] * 101), abs=1e-9)


@pytest.mark.parametrize("train_size", [1, 2, 5])
def test_a_set_smaller_than_the_processes_and_micro_batches_still_trains(tmp_path, train_size):
    overrides = [*WITHOUT_STATISTICS, f"data.train_size={train_size}", "data.test_size=1", "accumulation=x4"]
    run_here(overrides, tmp_path / "1")
    run_on_ranks([([*overrides, "parallelism=ddp"], tmp_path / "3")], ranks=3)
    assert summary(tmp_path / "1")["optimizer_steps"] == 2
    assert largest_difference(weights(tmp_path / "1"), weights(tmp_path / "3")) <= 2e-6
