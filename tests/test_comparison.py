"""The comparison of runs: numbers against those worked out by hand, the words it finds, and the files it leaves."""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fulcrum.refusal import Refusal
from fulcrum.sweep import Comparison, compare, rows, show, write
from fulcrum.sweep.figures import memory as draw_memory
from fulcrum.sweep.groups import frontier
from fulcrum.sweep.noise import counts, measured, noise_of, student_t
from helpers import ROOT

STATUSES = ("running", "completed", "failed", "oom", "diverged", "interrupted", "killed", "refused")
OFF = {"precision": "fp32", "parallelism": "single", "accumulation": "none", "checkpointing": "none", "lora": "none"}


def make_run(folder: Path, *, status: str = "completed", seed: int = 0, overrides: tuple[str, ...] = (), **changed) -> Path:
    """A run directory with a summary alone. changed: options of levers, or numbers of the summary."""
    levers = {key: value for key, value in changed.items() if key in OFF}
    numbers = {"step_ms": 100.0, "wall_s": 10.0, "peak_mib": 1000.0, "eval_accuracy": 0.5, **changed}
    times = {
        key: numbers.get(key) for key in ("startup_s", "wall_s", "setup_s", "train_s", "eval_s", "save_s", "job_s", "step_ms")
    }
    step_ms = numbers["step_ms"]
    record = {
        "status": status,
        "choices": {**OFF, "model": "resnet8", "data": "synthetic", "experiment": "None", **levers},
        "overrides": [*overrides, f"seed={seed}"],
        "seed": seed,
        "started": numbers.get("started"),
        "batch": {"effective": 128, "per_device": 128, "world_size": 1, "accumulation": 1},
        "epochs": 2,
        "precision": {"requested": levers.get("precision", "fp32"), "in_force": levers.get("precision", "fp32")},
        "device": numbers.get("device", "cpu"),
        "metrics": {"eval_accuracy": numbers["eval_accuracy"]},
        "time": {**times, "images_per_s": None if step_ms is None else 128_000 / step_ms},
        "memory": {"peak_mib": numbers["peak_mib"], "method": "counted", **numbers.get("memory", {})},
        "environment": {}
        if numbers.get("device", "cpu") is None
        else {"torch": "2.14.1", "python": "3.11.7", "platform": "Linux", "threads": 1},
        "error": numbers.get("error"),
        "evaluations": numbers.get("evaluations", []),
        "target_accuracy": numbers.get("target_accuracy"),
    }
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(record))
    return folder


def said(comparison: Comparison, *words: str) -> bool:
    """Whether one sentence of the verdict holds all of the words."""
    return any(all(word in sentence for word in words) for sentence in comparison.verdict)


def square(folder: Path) -> Path:
    """Two levers, all four combinations."""
    make_run(folder / "0-fp32", step_ms=100.0, peak_mib=1000.0, eval_accuracy=0.50)
    make_run(folder / "1-fp32-x4", accumulation="x4", step_ms=120.0, peak_mib=400.0, eval_accuracy=0.52)
    make_run(folder / "2-bf16", precision="bf16", step_ms=50.0, peak_mib=600.0, eval_accuracy=0.49)
    make_run(folder / "3-bf16-x4", precision="bf16", accumulation="x4", step_ms=90.0, peak_mib=240.0, eval_accuracy=0.53)
    return folder


def test_ratios_are_to_the_run_with_the_fewest_levers_pulled(tmp_path):
    comparison = compare([square(tmp_path)])
    assert comparison.baseline == "0-fp32"
    assert comparison.rows[1].ratio["step_ms"] == pytest.approx(1.2)
    assert comparison.rows[2].ratio["peak_mib"] == pytest.approx(0.6)
    assert comparison.rows[3].ratio["images_per_s"] == pytest.approx(100 / 90)


def test_an_effect_is_the_geometric_mean_over_pairs_that_differ_in_one_lever(tmp_path):
    precision, accumulation = compare([square(tmp_path)]).effects
    assert (precision.lever, precision.option, precision.num_pairs) == ("precision", "bf16", 2)
    assert precision.ratio["step_ms"] == pytest.approx(math.sqrt(0.5 * 0.75))
    assert precision.extremes["step_ms"] == pytest.approx((0.5, 0.75))
    assert precision.accuracy_difference == pytest.approx(0.0)
    assert accumulation.ratio["peak_mib"] == pytest.approx(0.4)
    assert accumulation.accuracy_difference == pytest.approx(0.03)


def test_a_lever_that_is_added_to_the_list_alone_is_compared_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(rows.OFF, "freezing", "none")
    monkeypatch.setitem(OFF, "freezing", "none")
    make_run(tmp_path / "0-fp32")
    make_run(tmp_path / "1-fp32-first", freezing="first", step_ms=50.0)
    comparison = compare([tmp_path])
    write(comparison, tmp_path)
    assert said(comparison, "freezing=first against none", "0.50 × the step time")
    assert "freezing" in (tmp_path / "comparison.html").read_text()


def test_every_job_is_a_row_whatever_its_status(tmp_path):
    for number, status in enumerate(STATUSES):
        make_run(tmp_path / f"{number}-{status}", status=status, error=None if status == "completed" else "why")
    comparison = compare([tmp_path])
    assert [row.status for row in comparison.rows] == list(STATUSES)
    assert said(comparison, "7 of 8 runs did not complete", "1 oom (3-oom)", "1 killed (6-killed)")


def test_rows_come_in_the_order_of_their_numbers_and_say_in_which_order_they_ran(tmp_path):
    for number, minute in ((0, 30), (2, 10), (10, 20)):
        make_run(tmp_path / f"{number}-fp32", started=f"2026-11-30T08:{minute}:00+00:00")
    assert [(row.run, row.order) for row in compare([tmp_path]).rows] == [("0-fp32", 2), ("2-fp32", 0), ("10-fp32", 1)]


def test_experiments_of_one_folder_differ_by_their_levers_alone(tmp_path):
    for number, (name, option) in enumerate((("classic/fp32", "fp32"), ("classic/bf16", "bf16"))):
        folder = make_run(tmp_path / f"{number}-{option}", precision=option, overrides=(f"experiment={name}",))
        record = json.loads((folder / "summary.json").read_text())
        record["choices"] |= {"experiment": name, "sweep": "classic"}
        (folder / "summary.json").write_text(json.dumps(record))
    comparison = compare([tmp_path])
    assert [each.label for each in comparison.groups] == ["fp32", "bf16"]
    assert [each.num_pairs for each in comparison.effects] == [1]


def test_a_damaged_or_missing_summary_is_a_failed_row_that_says_so(tmp_path):
    make_run(tmp_path / "0-fp32")
    (make_run(tmp_path / "1-cut") / "summary.json").write_text('{"status": "comp')
    (make_run(tmp_path / "2-list") / "summary.json").write_text("[]")
    (tmp_path / "3-bf16" / ".hydra").mkdir(parents=True)
    noted = "hydra: {runtime: {choices: {precision: bf16, lora: none}}, overrides: {task: [precision=bf16]}}"
    (tmp_path / "3-bf16" / ".hydra" / "hydra.yaml").write_text(noted)
    _, cut, other, missing = compare([tmp_path]).rows
    assert [row.status for row in (cut, other, missing)] == ["failed"] * 3
    assert "cannot be read" in cut.error and "damaged" in other.error and "missing" in missing.error
    assert missing.choices == {"precision": "bf16", "lora": "none"}


def test_numbers_that_are_not_finite_or_not_numbers_are_not_measured(tmp_path):
    make_run(tmp_path / "0-fp32", step_ms=float("nan"), wall_s=float("inf"), peak_mib="much")
    (row,) = compare([tmp_path]).rows
    assert row.step_ms is row.wall_s is row.peak_mib is None


def test_superseded_attempts_and_checkpoints_are_no_rows(tmp_path):
    make_run(tmp_path / "0-fp32")
    make_run(tmp_path / "0-fp32" / "earlier" / "1")
    assert [row.run for row in compare([tmp_path]).rows] == ["0-fp32"]


def test_several_folders_name_their_runs_from_the_parent_they_share(tmp_path):
    make_run(tmp_path / "a" / "0-fp32")
    make_run(tmp_path / "b" / "deep" / "0-bf16", precision="bf16")
    rows = compare([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "0-fp32"]).rows
    assert [row.run for row in rows] == ["a/0-fp32", "b/deep/0-bf16"]


# -- repeats and noise


def test_runs_that_differ_by_the_seed_alone_or_by_nothing_are_one_combination(tmp_path):
    for number, (seed, step_ms) in enumerate(((0, 90.0), (1, 100.0), (1, 110.0))):
        make_run(tmp_path / f"{number}-fp32", seed=seed, step_ms=step_ms)
    make_run(tmp_path / "3-fp32", overrides=("optimizer.lr=0.2",))
    make_run(tmp_path / "4-fp32", status="oom", step_ms=None)
    first, second = compare([tmp_path]).groups
    assert first.runs == ["0-fp32", "1-fp32", "2-fp32", "4-fp32"]
    assert (first.measured["step_ms"].mean, first.measured["step_ms"].spread) == (100.0, 10.0)
    assert (first.measured["step_ms"].count, first.statuses) == (3, {"completed": 3, "oom": 1})
    assert second.label == "fp32 optimizer.lr=0.2"
    assert second.measured["step_ms"].spread is None


def test_a_run_that_ended_before_it_knew_its_machine_is_one_of_its_combination(tmp_path):
    make_run(tmp_path / "0-fp32", seed=0, status="killed", device=None)
    make_run(tmp_path / "1-fp32", seed=1)
    (group,) = compare([tmp_path]).groups
    assert (group.label, set(group.runs)) == ("fp32", {"0-fp32", "1-fp32"})


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (30, 2.042), (120, 1.980)])
def test_students_quantile_agrees_with_the_printed_tables(degrees, quantile):
    assert student_t(degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_noise_floor_is_that_of_students_test_with_pooled_variance():
    repeats = [measured([99.0, 101.0]), measured([196.0, 200.0, 204.0]), measured([50.0])]
    noise = noise_of(repeats)
    deviation = math.sqrt((1 * (math.sqrt(2) / 100) ** 2 + 2 * (4 / 200) ** 2) / 3)
    assert (noise.degrees, noise.runs) == (3, 2)
    assert noise.deviation == pytest.approx(deviation)
    limit = 3.1824 * deviation * math.sqrt(1 / 2 + 1 / 3)
    assert counts(math.exp(1.01 * limit), noise, [(2, 3)]) and not counts(math.exp(0.99 * limit), noise, [(2, 3)])
    assert counts(math.exp(-1.01 * limit), noise, [(2, 3)])
    assert noise.floor == pytest.approx(math.expm1(3.1824 * deviation))
    assert counts(math.exp(0.8 * limit), noise, [(2, 3), (2, 3)])  # a mean over two pairs is surer by the root of two


def test_equal_combinations_rarely_come_out_as_different():
    draw = random.Random(0)
    wrong = 0
    for _ in range(1000):
        one, other = (measured([draw.gauss(100, 5) for _ in range(3)]) for _ in range(2))
        wrong += counts(one.mean / other.mean, noise_of([one, other]), [(3, 3)])
    assert 30 <= wrong <= 70  # one in twenty


def test_without_repeats_noise_is_said_not_to_be_measured(tmp_path):
    comparison = compare([square(tmp_path)])
    assert comparison.noise["step_ms"] is None
    assert said(comparison, "Noise not measured", "seed=0,0,0")
    assert "≈" not in json.dumps(comparison.verdict)


def test_a_difference_within_the_noise_is_no_win(tmp_path):
    for number, (option, step_ms) in enumerate((("fp32", 90.0), ("fp32", 110.0), ("bf16", 85.0), ("bf16", 105.0))):
        make_run(tmp_path / f"{number}-{option}", precision=option, step_ms=step_ms)
    comparison = compare([tmp_path])
    assert said(comparison, "Nothing is faster than the baseline fp32: the closest is bf16, 0.95 × (within noise)")
    assert said(comparison, "precision=bf16", "does not help", "(within noise)")


# -- the verdict


def test_the_verdict_names_the_fastest_the_smallest_and_what_each_lever_does(tmp_path):
    comparison = compare([square(tmp_path)])
    assert said(comparison, "Fastest: bf16, 50.0 ms a step, 0.50 ×")
    assert said(comparison, "Smallest: bf16-x4, 240 MiB peak, 0.24 ×")
    assert said(comparison, "precision=bf16 against fp32 (2 pairs): helps in time and memory")
    assert said(comparison, "accumulation=x4 against none (2 pairs): trades time for memory")
    assert comparison.frontier == ["bf16", "bf16-x4"]


def test_the_verdict_says_no_to_a_lever_that_does_not_help_or_costs_more_than_it_gives(tmp_path):
    make_run(tmp_path / "0-fp32")
    make_run(tmp_path / "1-fp32-r8", lora="r8", step_ms=100.5, eval_accuracy=0.3)
    make_run(tmp_path / "2-fp16", precision="fp16", step_ms=1800.0)
    comparison = compare([tmp_path])
    assert said(comparison, "Nothing is faster than the baseline fp32")
    assert said(comparison, "lora=r8", "does not help and costs accuracy", "accuracy -20.0 points")
    assert said(comparison, "precision=fp16", "costs more than it gives", "18.00 × the step time")


def test_what_was_not_measured_is_not_judged(tmp_path):
    make_run(tmp_path / "0-fp32", peak_mib=None)
    make_run(tmp_path / "1-fp32-x4", accumulation="x4", step_ms=130.0, peak_mib=None)
    make_run(tmp_path / "2-bf16-block", precision="bf16", checkpointing="block", peak_mib=None)
    comparison = compare([tmp_path], budget_gib=1)
    assert said(comparison, "peak memory of the baseline was not measured")
    assert said(comparison, "What fits 1 GiB is not known")
    assert said(comparison, "accumulation=x4", "costs time", "peak memory not measured")
    assert said(comparison, "The effect of precision=bf16 is not known")


@pytest.mark.parametrize(
    ("budget", "words"),
    [(0.5, ["Within 0.5 GiB", "bf16-x4"]), (0.6, ["Within 0.6 GiB", "bf16:"]), (0.1, ["Nothing fits 0.1 GiB", "bf16-x4"])],
)
def test_a_memory_budget_has_its_own_answer(tmp_path, budget, words):
    assert said(compare([square(tmp_path)], budget_gib=budget), *words)


def test_time_to_target_is_that_of_the_first_evaluation_that_reached_it(tmp_path):
    evaluations = [{"train_s": 10.0 * epoch, "samples": 100 * epoch, "accuracy": 0.3 * epoch} for epoch in (1, 2, 3)]
    make_run(tmp_path / "0-fp32", evaluations=evaluations, target_accuracy=0.3)
    make_run(tmp_path / "1-bf16", precision="bf16", evaluations=evaluations[:1], target_accuracy=0.3)
    assert [row.time_to_target_s for row in compare([tmp_path]).rows] == [10.0, 10.0]
    comparison = compare([tmp_path], target_accuracy=0.6)
    assert [row.time_to_target_s for row in comparison.rows] == [20.0, None]
    assert said(comparison, "First to 60.00 %: fp32, after 20.0 s", "1 of 2 combinations did not get there")


def test_the_cost_of_a_job_beyond_training_is_told(tmp_path):
    spent = {"setup_s": 1.5, "train_s": 20.0, "eval_s": 0.5, "save_s": 0.25, "wall_s": 22.25}
    make_run(tmp_path / "0-fp32", startup_s=3.0, job_s=26.25, **spent)
    assert said(
        compare([tmp_path]), "a job took 6.2 s on average besides 20.0 s of training", "3.0 s starting Python", "1.0 s around"
    )


def test_rows_of_another_device_are_called_not_comparable_and_kept_out_of_the_verdict(tmp_path):
    square(tmp_path)
    make_run(tmp_path / "4-bf16", precision="bf16", step_ms=1.0, device="NVIDIA H200")
    comparison = compare([tmp_path])
    assert any("device differs" in warning and "NVIDIA H200 (1 run)" in warning for warning in comparison.warnings)
    assert said(comparison, "Fastest: bf16", "50.0 ms a step")


def test_a_precision_that_was_not_in_force_is_warned_about(tmp_path):
    folder = make_run(tmp_path / "0-tf32", precision="tf32")
    record = json.loads((folder / "summary.json").read_text())
    record["precision"]["in_force"] = "fp32"
    (folder / "summary.json").write_text(json.dumps(record))
    assert any("precision=tf32 was asked for and fp32 was in force" in line for line in compare([tmp_path]).warnings)


def test_time_is_an_image_s_where_effective_batches_differ(tmp_path):
    make_run(tmp_path / "0-fp32", step_ms=128.0)
    folder = make_run(tmp_path / "1-fp32-x4", accumulation="x4", step_ms=256.0)
    record = json.loads((folder / "summary.json").read_text())
    record["batch"]["effective"] = 512
    (folder / "summary.json").write_text(json.dumps(record))
    comparison = compare([tmp_path])
    assert comparison.time_quantity == "image_ms"
    assert said(comparison, "Fastest: fp32-x4, 0.500 ms an image, 0.50 ×")


def test_the_frontier_is_what_comparing_each_with_each_gives(tmp_path):
    draw = random.Random(0)
    for number in range(40):
        numbers = {"step_ms": float(draw.randint(1, 12)), "peak_mib": float(draw.randint(1, 12))}
        make_run(tmp_path / f"{number}-fp32", overrides=(f"optimizer.lr={number}",), **numbers)
    groups = compare([tmp_path]).groups
    points = {each.label: (each.mean("step_ms"), each.mean("peak_mib")) for each in groups}
    best = {a for a, (t, m) in points.items() if not any(u <= t and n <= m and (u < t or n < m) for u, n in points.values())}
    assert {each.label for each in frontier(groups, "step_ms")} == best


# -- the baseline


@pytest.mark.parametrize("name", ["2-bf16", "2", "bf16"])
def test_a_baseline_goes_by_its_run_the_beginning_of_it_or_its_levers(tmp_path, name):
    comparison = compare([square(tmp_path)], baseline=name)
    assert comparison.baseline == "2-bf16"
    assert comparison.rows[0].ratio["step_ms"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("fp16", "is no run here"), ("1", "fits several combinations"), ("4", "did not complete (oom)")],
)
def test_a_baseline_that_is_none_is_refused_with_those_there_are(tmp_path, name, words):
    square(tmp_path)
    make_run(tmp_path / "4-fp32-r4", lora="r4", status="oom")
    make_run(tmp_path / "10-fp32-r8", lora="r8")
    with pytest.raises(Refusal) as refusal:
        compare([tmp_path], baseline=name)
    assert words in str(refusal.value) and "use one of 0-fp32, 1-fp32-x4, 2-bf16" in str(refusal.value)


def test_without_a_completed_run_there_is_no_baseline_and_nothing_to_compare(tmp_path):
    make_run(tmp_path / "0-fp32", status="oom", step_ms=None)
    comparison = compare([tmp_path])
    assert comparison.baseline is None
    assert set(comparison.rows[0].ratio.values()) == {None}
    assert said(comparison, "nothing to compare")
    write(comparison, tmp_path)


# -- what it leaves


@pytest.fixture
def written(tmp_path):
    """A comparison with every kind of content, written; (folder, comparison)."""
    square(tmp_path)
    evaluations = [{"samples": 100.0 * n, "train_s": 1.0 * n, "accuracy": 0.2 * n} for n in (1, 2)]
    make_run(tmp_path / "4-fp32", seed=1, step_ms=101.0, evaluations=evaluations)
    make_run(tmp_path / "5-fp32-r8", lora="r8", status="failed", error="<script>alert('|')</script>", step_ms=None)
    comparison = compare([tmp_path], budget_gib=1)
    write(comparison, tmp_path)
    return tmp_path, comparison


def with_blocks(folder: Path) -> Path:
    """Two runs with their blocks: one predicted, one not."""
    blocks = {"parameters_mib": 10.0, "gradients_mib": 10.0, "optimizer_mib": 20.0, "buffers_mib": 1.0, "data_mib": 5.0}
    predicted = {**blocks, "activations_mib": 790.0, "buffers_mib": None}
    told = {"predicted_peak_mib": 950.0, "predicted": predicted}
    make_run(folder / "0-fp32", memory={**blocks, "activations_mib": 800.0, **told})
    make_run(folder / "1-fp32-x4", accumulation="x4", peak_mib=300.0, memory={**blocks, "activations_mib": 200.0})
    return folder


def test_a_prediction_is_held_against_the_measured_peak(tmp_path):
    with_blocks(tmp_path)
    make_run(tmp_path / "2-bf16", precision="bf16", memory={"predicted_peak_mib": 1010.0})
    make_run(tmp_path / "3-bf16-x4", precision="bf16", accumulation="x4", status="oom", memory={"predicted_peak_mib": 9.0})
    comparison = compare([tmp_path])
    assert [row.prediction_error for row in comparison.rows] == [pytest.approx(-0.05), None, pytest.approx(0.01), None]
    assert said(comparison, "Predicted peak memory: off by 3.0 % (median of 2 runs), at worst by -5.0 % (0-fp32).")
    assert not said(compare([tmp_path / "1-fp32-x4"]), "Predicted")


def test_the_blocks_have_a_table_and_a_figure_that_says_where_the_peak_was(tmp_path):
    comparison = compare([with_blocks(tmp_path)])
    write(comparison, tmp_path)
    markdown, page = ((tmp_path / f"comparison.{kind}").read_text() for kind in ("md", "html"))
    assert "| fp32 | measured | 10.0 | 10.0 | 20.0 | 800.0 | 1.0 | 5.0 | 1000.0 |  |" in markdown
    assert "|  | predicted | 10.0 | 10.0 | 20.0 | 790.0 | – | 5.0 | 950.0 | -5.0 % |" in markdown
    assert "| fp32-x4 | measured | 10.0 | 10.0 | 20.0 | 200.0 | 1.0 | 5.0 | 300.0 |  |" in markdown
    (figure,) = re.findall(r"<svg.*?</svg>", page[page.index("Memory block by block") :], flags=re.DOTALL)[:1]
    for words in ("activations", "predicted peak", "1000  -5.0 %", "300", "fp32-x4"):
        assert f">{words}<" in figure


def test_with_many_combinations_the_bars_are_those_with_the_fewest_levers(tmp_path):
    for number in range(30):
        blocks = {"parameters_mib": 1.0, "activations_mib": 10.0}
        make_run(tmp_path / f"{number}-fp32", overrides=(f"optimizer.lr={number}",), memory=blocks)
    figure = draw_memory(compare([tmp_path]))
    assert "the 24 of 30 combinations" in figure.caption


def test_the_json_keeps_its_contract_and_holds_finite_numbers_or_null(written):
    folder, _ = written
    content = json.loads((folder / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert content["baseline"] == "0-fp32"
    assert len(content["rows"]) == 6
    for row in content["rows"]:
        keys = "run status choices overrides wall_s train_s step_ms images_per_s peak_mib eval_accuracy error ratio"
        assert set(keys.split()) <= set(row)
        assert {"wall_s", "step_ms", "images_per_s", "peak_mib"} <= set(row["ratio"])


def test_markdown_and_csv_have_a_line_for_every_run(written):
    folder, comparison = written
    markdown, table = ((folder / f"comparison.{kind}").read_text() for kind in ("md", "csv"))
    assert len(table.splitlines()) == 1 + len(comparison.rows)
    for row in comparison.rows:
        assert f"| {row.run} |" in markdown
    assert r"\<script\>alert('\|')" in markdown


def test_the_page_needs_nothing_from_outside_escapes_what_it_is_told_and_has_unique_ids(written):
    page = (written[0] / "comparison.html").read_text()
    assert not re.search(r"https?:|<script|<link|@import|src=|<\?xml", page)
    assert "&lt;script&gt;" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)
    assert page.count("<svg") == 3 and "currentColor" in page


def test_writing_again_replaces_and_leaves_no_temporary_file(written):
    folder, comparison = written
    write(comparison, folder)
    assert len(list((folder / "comparison").iterdir())) == 1
    assert not list(folder.rglob("*.partial"))


def test_tensorboard_shows_the_words_and_the_figures_and_no_session_of_hparams(written):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(written[0] / "comparison")).Reload()
    tags = events.Tags()
    assert tags["images"] == ["comparison/frontier", "comparison/effects", "comparison/curves"]
    assert set(tags["tensors"]) == {"comparison/verdict", "comparison/table"}
    assert b"Fastest: bf16" in events.Tensors("comparison/verdict")[0].tensor_proto.string_val[0]
    assert not any("hparams" in tag for tag in tags["tensors"])


def test_the_terminal_report_is_plain_and_narrow_where_it_is_piped(written, capsys):
    show(written[1])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert all(each.label in out for each in written[1].groups)


# -- the command


def compare_py(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_the_command_writes_into_a_sweep_and_else_where_it_is_told(tmp_path):
    square(tmp_path / "sweep")
    done = compare_py("sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweep" / "comparison.json").exists()
    assert "everything about this comparison is in sweep" in done.stdout
    compare_py("sweep/0-fp32", "sweep/2-bf16", "--out", "here", cwd=tmp_path)
    assert len(json.loads((tmp_path / "here" / "comparison.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "DIR=nowhere holds no run"),
        ([], "DIR"),
        (["sweep", "--baseline", "x"], "baseline=x is no run here"),
        (["sweep", "--budget-gib", "0"], "budget_gib=0 must be"),
        (["sweep", "--target-accuracy", "90"], "target_accuracy=90 must be a fraction"),
        (["sweep", "--budget-gib", "much"], "invalid float value: 'much'"),
    ],
)
def test_the_command_refuses_bad_input_in_one_sentence(tmp_path, words, message):
    make_run(tmp_path / "sweep" / "0-fp32")
    done = compare_py(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("refused: ") and len(done.stderr.splitlines()) == 1


def test_importing_the_comparison_loads_no_heavy_library():
    heavy = "{'torch', 'matplotlib', 'rich', 'tensorboard', 'hydra', 'omegaconf'}"
    code = f"import sys, fulcrum.sweep; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
