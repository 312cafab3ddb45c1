"""The tables and the small print of a comparison as plain words, the same in the terminal, in Markdown and on the page."""

from typing import TYPE_CHECKING

from .groups import Group
from .noise import Noise
from .rows import BLOCKS, Row
from .verdict import decimals, error, percent, short

if TYPE_CHECKING:
    from .comparison import Comparison

COMBINATIONS = ("levers", "status", "step ms", "×", "images/s", "peak MiB", "×", "accuracy", "wall s")
RUNS = ("run", "status", "seed", "step ms", "×", "images/s", "peak MiB", "×", "accuracy", "train s", "wall s", "×")
MEMORY = ("levers", "", *(name.removesuffix("_mib") for name in BLOCKS), "peak", "error")
MISSING = "–"


def combinations(comparison: "Comparison") -> list[list[str]]:
    """A line for each combination: means over its completed runs. ≈ marks a ratio within noise."""
    return [_combination(each, comparison) for each in comparison.groups]


def _combination(group: Group, comparison: "Comparison") -> list[str]:
    return [
        name(group, comparison),
        status(group),
        spread(group, "step_ms"),
        _ratio(group, "step_ms", comparison),
        cell(group.mean("images_per_s"), ".0f"),
        spread(group, "peak_mib"),
        _ratio(group, "peak_mib", comparison),
        MISSING if group.mean("eval_accuracy") is None else percent(group.mean("eval_accuracy")),
        cell(group.mean("wall_s"), ".1f"),
    ]


def name(group: Group, comparison: "Comparison") -> str:
    """With * where it is on the frontier."""
    return f"{group.label} *" if group.label in comparison.frontier else group.label


def status(group: Group) -> str:
    if len(group.runs) == 1:
        return next(iter(group.statuses))
    return ", ".join(f"{count} {status}" for status, count in group.statuses.items())


def spread(group: Group, quantity: str) -> str:
    """Mean ± sample standard deviation, where there are repeats."""
    each = group.measured[quantity]
    if each.mean is None:
        return MISSING
    if not each.spread:
        return short(each.mean)
    return f"{short(each.mean)} ± {each.spread:.{decimals(each.mean)}f}"


def _ratio(group: Group, quantity: str, comparison: "Comparison") -> str:
    value = group.ratio[quantity]
    if value is None:
        return MISSING
    is_noise = comparison.noise[quantity] and not group.differs[quantity] and group is not comparison.reference()
    return f"{'≈ ' if is_noise else ''}{value:.2f}"


def memory(comparison: "Comparison") -> list[list[str]]:
    """The blocks and the peak of each combination in MiB, and below them what was predicted, where it was."""
    lines = []
    for each in comparison.groups:
        if any(each.mean(block) is not None for block in BLOCKS):
            lines.append([each.label, "measured", *(cell(each.mean(key), ".1f") for key in (*BLOCKS, "peak_mib")), ""])
            if (off_by := each.mean("prediction_error")) is not None:
                predicted = [cell(each.mean(f"predicted_{key}"), ".1f") for key in (*BLOCKS, "peak_mib")]
                lines.append(["", "predicted", *predicted, error(off_by)])
    return lines


def runs(comparison: "Comparison") -> list[list[str]]:
    """A line for each run. A run that did not complete has no ratio: it did not do the same work."""
    return [_run(row) for row in comparison.rows]


def _run(row: Row) -> list[str]:
    ratio = row.ratio if row.completed else dict.fromkeys(row.ratio)
    return [
        row.run,
        row.status,
        cell(row.seed, "d"),
        MISSING if row.step_ms is None else short(row.step_ms),
        cell(ratio["step_ms"], ".2f"),
        cell(row.images_per_s, ".0f"),
        MISSING if row.peak_mib is None else short(row.peak_mib),
        cell(ratio["peak_mib"], ".2f"),
        MISSING if row.eval_accuracy is None else percent(row.eval_accuracy),
        cell(row.train_s, ".1f"),
        cell(row.wall_s, ".1f"),
        cell(ratio["wall_s"], ".2f"),
    ]


def cell(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def legend(comparison: "Comparison") -> str:
    """What the marks of the table mean."""
    marks = [f"× to the baseline {reference.label}"] if (reference := comparison.reference()) else []
    marks += ["* on the time-memory frontier"] if comparison.frontier else []
    marks += ["± sample standard deviation"] if any(len(each.runs) > 1 for each in comparison.groups) else []
    marks += ["≈ within noise, or under 1 %"] if any(comparison.noise.values()) else []
    return "; ".join(marks)


def failures(comparison: "Comparison") -> list[tuple[str, str, str]]:
    """(run, status, error) of those that did not complete."""
    return [(row.run, row.status, row.error or "no error recorded") for row in comparison.rows if not row.completed]


def method(comparison: "Comparison") -> list[str]:
    """How it was measured: the machine, the versions, the repeats, and what the numbers leave out."""
    done = [row for row in comparison.rows if row.completed]
    lines = []
    for title, values in (
        ("Device", [row.device for row in done]),
        ("torch", [row.environment.get("torch") for row in done]),
        ("CUDA", [row.environment.get("cuda") for row in done]),
        ("Python", [row.environment.get("python") for row in done]),
        ("Platform", [row.environment.get("platform") for row in done]),
        ("CPU threads a process", [row.environment.get("threads") for row in done]),
        ("Peak memory", [row.memory_method for row in done]),
    ):
        known = sorted({str(value) for value in values if value is not None})
        if known:
            lines.append(f"{title}: {', '.join(known)}")
    counts = sorted({len(each.runs) for each in comparison.groups})
    lines.append(f"Runs a combination: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}")
    lines.append("Step time: the median over the steps after the first three, evaluation and saving not counted")
    lines.append("images/s: all images of those steps over all their time")
    lines.append("Wall time: set-up, training, evaluating and saving; starting Python and importing are not in it")
    lines += [_noise(comparison.noise["step_ms"])] if comparison.noise["step_ms"] else []
    return lines


def _noise(noise: Noise) -> str:
    return (
        f"Noise of the step time: pooled relative standard deviation {100 * noise.deviation:.2f} %, {noise.degrees} degrees of "
        f"freedom; two combinations of {noise.runs} runs differ from {100 * noise.floor:.1f} % on (two-sided 95 %, Student's t)"
    )
