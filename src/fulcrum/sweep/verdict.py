"""A comparison in plain words, a sentence each. It is worth most when it says no; what was not measured is not judged."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

from .groups import BEYOND_TRAINING, Effect, Group, ratio
from .noise import NOTABLE, Noise, counts, floor_of
from .rows import OFF, RATIOS, Row

if TYPE_CHECKING:
    from .comparison import Comparison

WORDS = {
    "wall_s": "wall time",
    "train_s": "training time",
    "step_ms": "step time",
    "image_ms": "time an image",
    "images_per_s": "images/s",
    "peak_mib": "peak memory",
}
UNSURE = 0.01  # a loss of accuracy that is named even where the effect of the seed was not measured
MOST_NAMES = 6
SPENT = {
    "startup_s": "starting Python and importing",
    "setup_s": "setting up",
    "eval_s": "evaluating",
    "save_s": "saving",
    "other_s": "around it",
}


def verdict(comparison: "Comparison") -> list[str]:
    """The sentences, the most wanted first."""
    done = [row for row in comparison.rows if row.completed]
    if not done:
        return ["No run completed, so there is nothing to compare.", *failures(comparison.rows)]
    groups = comparison.comparable()
    sentences = []
    if len(groups) == 1:
        sentences.append(f"Only one combination completed under these conditions ({groups[0].label}): nothing to compare.")
    else:
        sentences += best_time(comparison, groups)
        sentences += best_memory(comparison, groups)
        sentences += best_accuracy(comparison, groups)
    sentences += within_budget(comparison, groups)
    sentences += to_target(comparison, groups)
    sentences += on_frontier(comparison)
    sentences += [lever(comparison, effect) for effect in comparison.effects]
    sentences += without_partner(comparison)
    sentences += [*failures(comparison.rows), *beyond_training(done), *prediction(done)]
    return [*sentences, *noise(comparison)]


# -- the best combinations


def best_time(comparison: "Comparison", groups: list[Group]) -> list[str]:
    return lowest(comparison, groups, comparison.time_quantity, title="Fastest", better="faster")


def best_memory(comparison: "Comparison", groups: list[Group]) -> list[str]:
    return lowest(comparison, groups, "peak_mib", title="Smallest", better="smaller")


def lowest(comparison: "Comparison", groups: list[Group], quantity: str, *, title: str, better: str) -> list[str]:
    """The combination with the least of a quantity, of equals the one with the fewest levers; or that none beats the
    baseline."""
    known = [each for each in groups if each.mean(quantity) is not None]
    reference = comparison.reference()
    if reference not in known:
        return [f"The {WORDS[quantity]} of the baseline was not measured, so no combination is called {better}."]
    assert reference is not None
    least = min(known, key=by(quantity))
    if least.mean(quantity) == reference.mean(quantity):
        return [f"Nothing is {better} than the baseline {reference.label} ({amount(quantity, least.mean(quantity))})."]
    if not least.differs[quantity]:
        closest = f"{least.label}, {least.ratio[quantity]:.2f} ×{doubt(least.ratio[quantity])}"
        return [f"Nothing is {better} than the baseline {reference.label}: the closest is {closest}."]
    equal = [each for each in known if not apart(each, least, quantity, comparison.noise[quantity])]
    best = min(equal, key=lambda each: (each.num_pulled(), by(quantity)(each)))
    others = [each.label for each in equal if each is not best]
    also = f"; not told apart from it: {some(others)}" if others else ""
    times = f"{best.ratio[quantity]:.2f} × the {WORDS[quantity]} of the baseline {reference.label}"
    return [f"{title}: {best.label}, {amount(quantity, best.mean(quantity))}, {times}{price(comparison, best)}{also}."]


def by(quantity: str) -> Callable[[Group], float]:
    """To sort combinations that have a quantity."""
    return lambda group: group.mean(quantity) or 0.0


def price(comparison: "Comparison", group: Group) -> str:
    """What a combination loses in accuracy against the baseline, where that is more than chance."""
    reference = comparison.reference()
    assert reference is not None
    ours, theirs = group.measured["eval_accuracy"], reference.measured["eval_accuracy"]
    if ours.mean is None or theirs.mean is None:
        return ""
    seeds = comparison.noise["eval_accuracy"]
    lost = theirs.mean - ours.mean
    if lost <= (floor_of(seeds, [(ours.count, theirs.count)]) if seeds else UNSURE):
        return ""
    return f", with an accuracy {100 * lost:.1f} points lower"


def apart(one: Group, other: Group, quantity: str, noise: Noise | None) -> bool:
    between = ratio(one.mean(quantity), other.mean(quantity))
    return between is not None and counts(between, noise, [(one.measured[quantity].count, other.measured[quantity].count)])


def best_accuracy(comparison: "Comparison", groups: list[Group]) -> list[str]:
    known = [each for each in groups if each.mean("eval_accuracy") is not None]
    reference, seeds = comparison.reference(), comparison.noise["eval_accuracy"]
    if not known or reference is None or reference not in known:
        return []
    best = max(known, key=by("eval_accuracy"))
    ours, theirs = best.measured["eval_accuracy"], reference.measured["eval_accuracy"]
    if ours.mean == theirs.mean:
        return [f"Nothing is more accurate than the baseline {reference.label} ({percent(ours.mean)})."]
    against = f"{percent(ours.mean)} against {percent(theirs.mean)} for the baseline {reference.label}"
    if seeds is None:
        return [
            f"Most accurate: {best.label}, {against}; how much the seed alone moves it was not measured "
            "(add seed=0,1,2), so this may be chance."
        ]
    if (ours.mean or 0) - (theirs.mean or 0) <= floor_of(seeds, [(ours.count, theirs.count)]):
        return [f"Nothing is more accurate than the baseline beyond what the seed does: the best, {best.label}, has {against}."]
    return [f"Most accurate: {best.label}, {against}."]


def within_budget(comparison: "Comparison", groups: list[Group]) -> list[str]:
    budget, quantity = comparison.budget_gib, comparison.time_quantity
    sized = [each for each in groups if each.mean("peak_mib") is not None and each.mean(quantity) is not None]
    if budget is None:
        return []
    if not sized:
        return [f"What fits {budget:g} GiB is not known: peak memory was not measured."]
    fitting = [each for each in sized if by("peak_mib")(each) <= 1024 * budget]
    if not fitting:
        smallest = min(sized, key=by("peak_mib"))
        return [
            f"Nothing fits {budget:g} GiB: the smallest is {smallest.label}, {amount('peak_mib', smallest.mean('peak_mib'))}."
        ]
    best = min(fitting, key=by(quantity))
    return [
        f"Within {budget:g} GiB the fastest is {best.label}: {amount(quantity, best.mean(quantity))}, "
        f"{amount('peak_mib', best.mean('peak_mib'))}{price(comparison, best)}."
    ]


def to_target(comparison: "Comparison", groups: list[Group]) -> list[str]:
    """Seconds of training to the target accuracy, where all runs of a combination reached it."""
    targets = {row.target_accuracy for row in comparison.rows if row.target_accuracy is not None and row.evaluations}
    if len(targets) != 1:
        return []
    target = percent(targets.pop())
    reached = [each for each in groups if each.measured["time_to_target_s"].count == each.num_completed]
    if not reached:
        return [f"No combination reached {target} with all of its runs."]
    best = min(reached, key=by("time_to_target_s"))
    missed = len(groups) - len(reached)
    also = f"; {missed} of {len(groups)} combinations did not get there" if missed else ""
    return [f"First to {target}: {best.label}, after {best.mean('time_to_target_s'):.1f} s of training{also}."]


def on_frontier(comparison: "Comparison") -> list[str]:
    labels = comparison.frontier
    if not labels or len(comparison.comparable()) == 1:
        return []
    if len(labels) == 1:
        return [f"No trade to make: {labels[0]} is at once the fastest and the smallest."]
    return [f"Frontier, from fast to small: {', '.join(labels)}. Every other one is no faster and no smaller than one of these."]


# -- the levers


def lever(comparison: "Comparison", effect: Effect) -> str:
    """What one option does to time and memory, and whether that is worth having."""
    time, memory = change(effect, comparison.time_quantity), change(effect, "peak_mib")
    facts = [told(effect, quantity) for quantity in (comparison.time_quantity, "peak_mib")]
    name = f"{effect.lever}={effect.option} against {OFF[effect.lever]} ({counted(effect.num_pairs, 'pair')})"
    return f"{name}: {JUDGEMENT[time, memory]}{costs_accuracy(effect)}; {', '.join(facts)}{accuracy(effect)}."


# By what happens to (time, memory): less, same, more; None where it was not measured.
JUDGEMENT = {
    ("less", "less"): "helps in time and memory",
    ("less", "same"): "helps in time",
    ("less", "more"): "trades memory for time",
    ("less", None): "helps in time",
    ("same", "less"): "helps in memory",
    ("same", "same"): "does not help",
    ("same", "more"): "costs more than it gives",
    ("same", None): "does not help in time",
    ("more", "less"): "trades time for memory",
    ("more", "same"): "costs more than it gives",
    ("more", "more"): "costs more than it gives",
    ("more", None): "costs time",
    (None, "less"): "helps in memory",
    (None, "same"): "does not help in memory",
    (None, "more"): "costs memory",
    (None, None): "not judged",
}


def change(effect: Effect, quantity: str) -> str | None:
    times = effect.ratio[quantity]
    if times is None:
        return None
    if not effect.differs[quantity]:
        return "same"
    return "less" if times < 1 else "more"


def told(effect: Effect, quantity: str) -> str:
    times = effect.ratio[quantity]
    if times is None:
        return f"{WORDS[quantity]} not measured"
    return f"{times:.2f} × the {WORDS[quantity]}{'' if effect.differs[quantity] else doubt(times)}"


def doubt(times: float | None) -> str:
    """Why a ratio is no difference."""
    return " (under 1 %)" if times and abs(math.log(times)) <= math.log1p(NOTABLE) else " (within noise)"


def costs_accuracy(effect: Effect) -> str:
    points = effect.accuracy_difference
    if points is None or effect.accuracy_differs is False or points >= (0 if effect.accuracy_differs else -UNSURE):
        return ""
    return " and costs accuracy"


def accuracy(effect: Effect) -> str:
    """In percentage points, with what the seeds say about it."""
    points = effect.accuracy_difference
    if points is None or abs(points) < 0.0005:
        return "" if points is None else ", the same accuracy"
    return f", accuracy {100 * points:+.1f} points" + (" (within what the seed does)" if effect.accuracy_differs is False else "")


def without_partner(comparison: "Comparison") -> list[str]:
    """Options that were run, and whose effect is still unknown."""
    judged = {(effect.lever, effect.option) for effect in comparison.effects}
    sentences = []
    for name, off in OFF.items():
        options = {each.choices.get(name, off) for each in comparison.groups if each.num_completed}
        unknown = sorted(option for option in options if option != off and (name, option) not in judged)
        if unknown and len(comparison.comparable()) > 1:
            sentences.append(
                f"The effect of {name}={','.join(unknown)} is not known: no completed run differs from it by {name}={off} alone."
            )
    return sentences


# -- the runs


def failures(rows: Sequence[Row]) -> list[str]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if not row.completed:
            kinds[row.status].append(row.run)
    if not kinds:
        return []
    listed = "; ".join(f"{len(runs)} {status} ({some(runs)})" for status, runs in sorted(kinds.items()))
    count = sum(map(len, kinds.values()))
    return [f"{count} of {len(rows)} runs did not complete: {listed}."]


def beyond_training(done: Sequence[Row]) -> list[str]:
    """What a job took besides training, and where that went."""
    spent = {key: [value for row in done if (value := getattr(row, key)) is not None] for key in BEYOND_TRAINING}
    trained = [row.train_s for row in done if row.train_s is not None]
    parts = {key: mean(values) for key, values in spent.items() if values}
    if not parts or not trained:
        return []
    listed = ", ".join(f"{seconds:.1f} s {SPENT[key]}" for key, seconds in parts.items())
    unknown = "" if "startup_s" in parts else "; starting Python and importing came on top and was not recorded"
    total, training = sum(parts.values()), mean(trained)
    return [f"Beyond training: a job took {total:.1f} s on average besides {training:.1f} s of training, {listed}{unknown}."]


def prediction(done: Sequence[Row]) -> list[str]:
    """How far the peak told before training was from the measured one."""
    errors = {row.run: row.prediction_error for row in done if row.prediction_error is not None}
    if not errors:
        return []
    worst = max(errors, key=lambda run: abs(errors[run]))
    middle = 100 * median(map(abs, errors.values()))
    return [
        f"Predicted peak memory: off by {middle:.1f} % (median of {counted(len(errors), 'run')}), "
        f"at worst by {error(errors[worst])} ({worst})."
    ]


def noise(comparison: "Comparison") -> list[str]:
    shown = [quantity for quantity in RATIOS if quantity != "image_ms" or comparison.time_quantity == "image_ms"]
    floors = [f"{100 * each.floor:.1f} % in {WORDS[key]}" for key in shown if (each := comparison.noise[key]) is not None]
    if floors:
        return [f"Within noise: differences below {', '.join(floors)}; one below 1 % is never called a difference."]
    return [
        "Noise not measured: add seed=0,0,0 to the sweep (seed=0,1,2 to see what the seed does to accuracy); "
        "until then a small difference may be chance."
    ]


# -- numbers


def some(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def amount(quantity: str, value: float | None) -> str:
    """A mean in its unit."""
    if value is None:
        return "not measured"
    if quantity == "peak_mib":
        return f"{short(value / 1024)} GiB peak" if value >= 1024 else f"{short(value)} MiB peak"
    return f"{short(value)} ms {'a step' if quantity == 'step_ms' else 'an image'}"


def percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{100 * fraction:.2f} %"


def error(fraction: float) -> str:
    return f"{round(100 * fraction, 1) + 0.0:+.1f} %"  # adding 0.0 makes -0.0 positive


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{decimals(value)}f}"


def decimals(value: float) -> int:
    """Digits after the point that make three significant ones."""
    return 0 if value == 0 else min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
