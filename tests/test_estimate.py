"""The memory of a run, predicted by a trace: the blocks exact, the peak close, nothing allocated, and what fits a budget."""

import json
import subprocess
import sys

import pytest

from fulcrum.budget import largest, largest_per_device, ways_to_fit
from fulcrum.estimate import Sizes, estimate, sizes_of
from fulcrum.logbook.summary import BLOCKS
from fulcrum.run import Invocation, run
from helpers import ROOT, TINY, composed, run_here, run_on_ranks, summary, train_py

SMALL = [*TINY, "data.image_size=16", "data.train_size=96", "batch.effective=48", "max_steps=2", "precision.init_scale=4"]


def predicted_and_measured(overrides: list[str], folder) -> tuple[dict, dict]:
    experiment, _ = composed(overrides)
    predicted = estimate(experiment)
    run_here(overrides, folder)
    record = summary(folder)
    assert record["status"] == "completed", record["error"]
    return {"peak_mib": predicted.peak_mib, **predicted.blocks()}, record["memory"]


@pytest.mark.parametrize(
    "levers",
    [
        [],
        ["precision=bf16"],
        ["precision=fp16", "data.image_size=8"],
        ["accumulation=x4"],
        ["checkpointing=block"],
        ["checkpointing=stage", "precision=bf16"],
        ["lora=r4", "optimizer=adamw"],
        ["optimizer=adamw", "optimizer.clip_norm=1"],
        ["model.channels_last=false"],
        ["model.norm=group", "model.dropout=0.1"],
        ["model=resnet20", "checkpointing=block", "lora=r4", "accumulation=x2", "precision=bf16"],
    ],
    ids=" ".join,
)
def test_blocks_are_exact_and_the_peak_is_close(tmp_path, levers):
    predicted, measured = predicted_and_measured([*SMALL, *levers], tmp_path)
    for block in BLOCKS:
        if measured.get(block) is not None and block != "activations_mib":
            assert predicted[block] == measured[block], block
    assert predicted["activations_mib"] == pytest.approx(measured["activations_mib"], rel=0.03)
    assert predicted["peak_mib"] == pytest.approx(measured["peak_mib"], rel=0.05)


@pytest.mark.parametrize("levers", [[], ["accumulation=x2"]], ids=" ".join)
def test_the_buckets_of_ddp_are_predicted(tmp_path, levers):
    overrides = [*SMALL, "parallelism=ddp", *levers]
    run_on_ranks([(overrides, tmp_path)], ranks=2)
    experiment, _ = composed(overrides)
    assert estimate(experiment, num_processes=2).peak_mib == pytest.approx(summary(tmp_path)["memory"]["peak_mib"], rel=0.05)


def test_only_the_micro_batches_that_differ_are_traced():
    experiment, _ = composed([*SMALL, "accumulation=x4"])
    four = estimate(experiment)
    experiment, _ = composed([*SMALL, "accumulation.steps=8", "batch.effective=96"])
    assert len(estimate(experiment).timeline) < 1.1 * len(four.timeline)
    assert estimate(experiment).flops_per_image == four.flops_per_image


def test_checkpointing_repeats_forward_operations_and_accumulation_none():
    flops = {}
    for lever in ("checkpointing=none", "checkpointing=block", "accumulation=x4"):
        experiment, _ = composed([*SMALL, lever])
        flops[lever] = estimate(experiment).flops_per_image
    assert 1.2 < flops["checkpointing=block"] / flops["checkpointing=none"] < 4 / 3
    assert flops["accumulation=x4"] == flops["checkpointing=none"]


def test_the_parts_of_the_activation_block_add_up_to_it():
    experiment, _ = composed(SMALL)
    predicted = estimate(experiment)
    assert sum(part.mib for part in predicted.held) == pytest.approx(predicted.activations_mib)
    assert {part.layer.partition(".")[0] for part in predicted.held} >= {"input", "conv1", "layer1", "layer2", "layer3"}
    assert max(moment.mib for moment in predicted.timeline) == predicted.peak_mib


def test_nothing_is_allocated_however_large_the_run():
    code = (
        "import resource, sys; sys.path.insert(0, 'tests')\n"
        "from helpers import composed\n"
        "from fulcrum.estimate import estimate\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "experiment, _ = composed(['model=resnet50', 'data=synthetic', 'batch.effective=4096', 'device=cpu'])\n"
        "print(estimate(experiment).peak_mib, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    predicted_mib, resident_mib = map(float, ended.stdout.split())
    assert predicted_mib > 100_000
    assert resident_mib < 1024


def test_estimating_changes_nothing_of_the_run_after_it(tmp_path):
    run_here(TINY, tmp_path / "one")
    experiment, choices = composed(TINY)
    estimate(experiment)
    run(experiment, tmp_path / "two", Invocation(choices, TINY, "test", 0, []))
    one, two = summary(tmp_path / "one"), summary(tmp_path / "two")
    assert one["metrics"] == two["metrics"]
    assert one["memory"] == two["memory"]


@pytest.mark.parametrize("kink", [0, 7, 60])
def test_the_search_finds_what_brute_force_finds(kink):
    def peak_mib(number: int) -> float:
        return 3 + 1.5 * number + 4 * max(0, number - kink) + number % 3 * 0.4

    for budget_mib in (1, 4.7, 20, 100, 333, 5000):
        fitting = [number for number in range(1, 101) if peak_mib(number) <= budget_mib]
        assert largest(peak_mib, budget_mib, most=100) == (max(fitting) if fitting else None)


def test_the_largest_batch_fits_and_the_next_one_does_not():
    experiment, _ = composed([*SMALL, "data.train_size=4096"])
    number = largest_per_device(experiment, 30)
    peaks = []
    for per_device in (number, number + 1):
        experiment, _ = composed([*SMALL, "data.train_size=4096", "batch.effective=null", f"batch.per_device={per_device}"])
        peaks.append(estimate(experiment).peak_mib)
    assert peaks[0] <= 30 < peaks[1]
    assert largest_per_device(experiment, 1) is None
    assert largest_per_device(experiment, 1e6) == 4096


def test_ways_to_fit_are_ranked_by_what_they_add():
    experiment, _ = composed(SMALL)
    peak_mib = estimate(experiment).peak_mib
    ways = ways_to_fit(experiment, 0.75 * peak_mib)
    assert ways
    for way in ways:
        asked, _ = composed([*SMALL, *way.overrides])
        assert estimate(asked).peak_mib == way.peak_mib <= 0.75 * peak_mib
    assert [round(way.flops_ratio, 2) for way in ways] == sorted(round(way.flops_ratio, 2) for way in ways)
    assert ways_to_fit(experiment, 0.1) == []


def test_the_answer_to_a_budget_agrees_with_a_limit(tmp_path):
    """Of the process's private memory, which is about a tenth more than what tensors take."""
    wide = [*TINY, "data.image_size=32", "data.train_size=1024", "data.test_size=64", "max_steps=2", "saving=none"]
    experiment, _ = composed(wide)
    number = largest_per_device(experiment, 150)
    for per_device, status in ((int(0.8 * number), "completed"), (int(1.2 * number), "oom")):
        batch = ["batch.effective=null", f"batch.per_device={per_device}"]
        train_py(*wide, *batch, "memory_limit_mib=150", f"hydra.run.dir={status}", cwd=tmp_path)
        assert summary(tmp_path / status)["status"] == status


def test_images_are_counted_without_being_read(tmp_path):
    for split, number in (("train", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            (tmp_path / split / kind).mkdir(parents=True)
            for index in range(number):
                (tmp_path / split / kind / f"{index}.JPG").touch()
            (tmp_path / split / kind / "notes.txt").touch()
    experiment, _ = composed(["data=image_folder", f"data.root={tmp_path}", "data.image_size=24", "device=cpu"])
    assert sizes_of(experiment.data) == Sizes(6, 4, 24)
    assert sizes_of(composed(["device=cpu"])[0].data) == Sizes(50_000, 10_000, 32)


def script(*words: str, cwd) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "estimate.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_json_has_the_keys_of_the_summary_and_the_answer_to_a_budget(tmp_path):
    ended = script(*SMALL, "--json", "--budget-gib", "0.05", "--figure", "step.png", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = json.loads(ended.stdout)
    run_here(SMALL, tmp_path / "run")
    assert printed.keys() >= summary(tmp_path / "run")["memory"].keys()
    assert printed["peak_mib"] is None
    assert 0 < printed["activations_mib"] < printed["predicted_peak_mib"]
    assert printed["largest_per_device"] > 1
    assert (tmp_path / "step.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["precison=bf16"], "did you mean 'precision'"),
        (["batch.effective=100", "accumulation=x8"], "use a multiple of 8"),
        (["--budget-gib=0"], "--budget-gib=0 must be"),
        (["--figure=step.doc"], ".png, .svg or .pdf"),
        (["--parameters=-1"], "parameters=-1"),
        (["--parameters=7e9", "--lora-rank=8", "--lora-matrices", "4096"], "OUTxIN"),
        (["--budget-gig=1"], "--help"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tmp_path, words, expected):
    ended = script(*words, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert expected in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_textbook_answers_for_any_number_of_parameters(tmp_path):
    ended = script("--parameters", "7e9", cwd=tmp_path)
    assert "104.3" in ended.stdout
