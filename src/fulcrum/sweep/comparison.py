"""Which levers to pull, from runs that are done: `compare` reads their summaries and says what came out.

report.py shows and writes a comparison, verdict.py puts it into words.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..refusal import Refusal, above
from .groups import Effect, Group, effects, frontier, group, ratio
from .noise import Noise, counts, noise_of
from .rows import RATIOS, Row, levers, read
from .verdict import counted, verdict


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What comparison.json holds. `baseline` names a run; combinations go by their labels."""

    baseline: str | None
    rows: list[Row]
    groups: list[Group]
    effects: list[Effect]
    noise: dict[str, Noise | None]  # None: nothing was repeated
    time_quantity: str  # step_ms, or image_ms where effective batches differ
    frontier: list[str]
    conditions: dict[str, str]  # under which the baseline ran; the frontier and the verdict are about those like it
    warnings: list[str]
    budget_gib: float | None
    verdict: list[str] = field(default_factory=list)

    def reference(self) -> Group | None:
        """The baseline's combination."""
        return next((each for each in self.groups if self.baseline in each.runs), None)

    def comparable(self) -> list[Group]:
        return [each for each in self.groups if each.comparable]


def compare(
    folders: Sequence[Path],
    *,
    baseline: str | None = None,
    budget_gib: float | None = None,
    target_accuracy: float | None = None,
) -> Comparison:
    """Compares all runs in and below the folders; refuses a folder without one, and a baseline that is none.

    baseline: a run, an unambiguous beginning of its name, or a combination; else the completed run with the fewest
    levers pulled. target_accuracy: instead of each run's own.
    """
    above("budget_gib", budget_gib, 0)
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise Refusal(f"target_accuracy={target_accuracy:g} must be a fraction in (0, 1]; use 0.9 for 90 %")
    rows = read(folders, target_accuracy=target_accuracy)
    groups = group(rows)
    base = find_baseline(rows, groups, baseline)
    conditions = conditions_of(base) if base else {}
    alike = {row.run for row in rows if row.completed and conditions_of(row) == conditions}
    for each in groups:
        each.comparable = not alike.isdisjoint(each.runs)
    comparable = [each for each in groups if each.comparable]
    noise = noise_floor(rows, groups)
    if base:
        relate(rows, groups, base, noise)
    time_quantity = "image_ms" if len({each.effective_batch for each in comparable}) > 1 else "step_ms"
    comparison = Comparison(
        baseline=base.run if base else None,
        rows=rows,
        groups=groups,
        effects=effects(groups, noise),
        noise=noise,
        time_quantity=time_quantity,
        frontier=[each.label for each in frontier(comparable, time_quantity)],
        conditions=conditions,
        warnings=warnings(rows),
        budget_gib=budget_gib,
    )
    comparison.verdict = verdict(comparison)
    return comparison


def find_baseline(rows: list[Row], groups: list[Group], name: str | None) -> Row | None:
    """The completed row with the fewest levers pulled, the first to run among equals; or the one that is named."""
    done = [row for row in rows if row.completed]
    combination = {run: each for each in groups for run in each.runs}
    if name is None:
        return min(done, key=lambda row: (combination[row.run].num_pulled(), row.order), default=None)
    tests: list[Callable[[Row], bool]] = [
        lambda row: row.run == name,
        lambda row: combination[row.run].label == name,
        lambda row: levers(row.choices) == name,
        lambda row: row.run.startswith(name),
    ]
    found = next((matches for test in tests if (matches := [row for row in rows if test(row)])), [])
    names = ", ".join(row.run for row in done) or "none: no run completed"
    if not found:
        raise Refusal(f"baseline={name} is no run here; use one of {names}")
    if len({combination[row.run].label for row in found}) > 1:
        raise Refusal(f"baseline={name} fits several combinations; use one of {names}")
    completed = [row for row in found if row.completed]
    if not completed:
        raise Refusal(f"baseline={name} did not complete ({found[0].status}); use one of {names}")
    return min(completed, key=lambda row: row.order)


def conditions_of(row: Row) -> dict[str, str]:
    """What must be equal for two runs to be compared: the machine, and the work but for the levers."""
    words = row.asked()

    def about(name: str) -> str:
        return " ".join(word for word in words if word.startswith((f"{name}=", f"{name}.")))

    return {
        "device": str(row.device),
        "torch": str(row.environment.get("torch")),
        "model": about("model"),
        "data": about("data"),
        "epochs": f"{row.epochs} {about('max_steps')}".strip(),
    }


def warnings(rows: list[Row]) -> list[str]:
    """What stands against comparing the completed rows, a sentence each."""
    done = [row for row in rows if row.completed]
    facts = [
        {**conditions_of(row), "platform": str(row.environment.get("platform")), "CPU threads": threads(row)} for row in done
    ]
    sentences = []
    for name in facts[0] if facts else ():
        values = Counter(fact[name] for fact in facts)
        if len(values) > 1:
            listed = ", ".join(f"{value} ({counted(count, 'run')})" for value, count in values.items())
            care = "Compare with care" if name in ("platform", "CPU threads") else "Not comparable"
            sentences.append(f"{care}: {name} differs: {listed}.")
    if len({tuple(conditions_of(row).items()) for row in done}) > 1:
        sentences.append("The verdict and the frontier are about the runs whose conditions are those of the baseline.")
    asked = {(row.option("precision"), row.precision_in_force) for row in done if row.precision_in_force}
    for requested, forced in sorted(pair for pair in asked if pair[0] != pair[1]):
        sentences.append(
            f"precision={requested} was asked for and {forced} was in force: these rows say nothing about {requested}."
        )
    return sentences


def threads(row: Row) -> str:
    each = row.environment.get("threads")
    return f"{each * row.batch.get('world_size', 1)} in all" if isinstance(each, int) else "unknown"


def noise_floor(rows: list[Row], groups: list[Group]) -> dict[str, Noise | None]:
    """The noise of each quantity. Accuracy moves with the seed: only groups with several seeds show how much."""
    noise = {quantity: noise_of(each.measured[quantity] for each in groups) for quantity in RATIOS}
    seeds = {row.run: row.seed for row in rows if row.completed}
    several = [each for each in groups if len({seeds[run] for run in each.runs if run in seeds}) > 1]
    return {**noise, "eval_accuracy": noise_of((each.measured["eval_accuracy"] for each in several), relative=False)}


def relate(rows: list[Row], groups: list[Group], base: Row, noise: dict[str, Noise | None]) -> None:
    """Fills in the ratios: of rows to the baseline, of combinations to the baseline's."""
    for row in rows:
        row.ratio = {quantity: ratio(getattr(row, quantity), getattr(base, quantity)) for quantity in RATIOS}
    reference = next(each for each in groups if base.run in each.runs)
    for each in groups:
        for quantity in RATIOS:
            ours, theirs = each.measured[quantity], reference.measured[quantity]
            each.ratio[quantity] = between = ratio(ours.mean, theirs.mean)
            sizes = [(ours.count, theirs.count)]
            each.differs[quantity] = None if between is None else counts(between, noise[quantity], sizes)
