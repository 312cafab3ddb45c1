"""Combinations: runs that differ by nothing or by the seed alone are one, with means over its completed runs.

From them: the effect of each lever, over pairs equal in all else, and the time-memory frontier.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import mean

from .noise import Measured, Noise, counts, floor_of, measured
from .rows import BLOCKS, OFF, RATIOS, Row, levers, natural

BEYOND_TRAINING = ("startup_s", "setup_s", "eval_s", "save_s", "other_s")
PREDICTION = ("predicted_peak_mib", "prediction_error")
AVERAGED = (*RATIOS, *BEYOND_TRAINING, *BLOCKS, *PREDICTION, "eval_accuracy", "best_eval_accuracy", "time_to_target_s")


@dataclass(kw_only=True, slots=True)
class Group:
    """One combination of levers under one setting."""

    label: str
    choices: dict[str, str]
    setting: list[str]
    runs: list[str]
    statuses: dict[str, int]
    effective_batch: int | None
    measured: dict[str, Measured]
    comparable: bool = False  # completed under the conditions of the baseline
    ratio: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(RATIOS))  # to the baseline's
    differs: dict[str, bool | None] = field(default_factory=lambda: dict.fromkeys(RATIOS))  # from it; None: no ratio

    @property
    def num_completed(self) -> int:
        return self.statuses.get("completed", 0)

    def num_pulled(self) -> int:
        return sum(self.choices.get(lever, off) != off for lever, off in OFF.items())

    def mean(self, quantity: str) -> float | None:
        return self.measured[quantity].mean

    def identity(self, **changed: str) -> tuple[object, ...]:
        """Equal for equal combinations; with `changed` levers, that of another combination."""
        return identity(self.choices | changed, self.setting)


@dataclass(kw_only=True, slots=True)
class Effect:
    """One option of a lever against the option that pulls nothing."""

    lever: str
    option: str
    num_pairs: int
    ratio: dict[str, float | None]  # geometric mean over the pairs
    extremes: dict[str, tuple[float, float] | None]  # the smallest and the largest ratio of a pair
    differs: dict[str, bool | None]  # the mean from 1, beyond the noise
    accuracy_difference: float | None  # mean over the pairs
    accuracy_differs: bool | None  # beyond the effect of the seed; None: that was not measured


def group(rows: list[Row]) -> list[Group]:
    """The combinations, in the order of their first rows.

    A run that ended before it knew its machine belongs to those that were asked for the same.
    """
    members: dict[object, list[Row]] = defaultdict(list)
    homes: dict[object, object] = {}
    for row in sorted(rows, key=lambda row: row.device is None):
        asked = identity(row.choices, row.asked()) if row.choices else row.run
        home = homes.get(asked, asked) if row.device is None else (asked, *row.machine())
        homes.setdefault(asked, home)
        members[home].append(row)
    in_order = sorted(members.values(), key=lambda each: rows.index(each[0]))
    return [_group(name, each) for name, each in zip(label([each[0] for each in in_order]), in_order, strict=True)]


def identity(choices: dict[str, str], words: list[str]) -> tuple[object, ...]:
    return *(choices.get(lever, off) for lever, off in OFF.items()), frozenset(words)


def _group(name: str, members: list[Row]) -> Group:
    done = [row for row in members if row.completed]
    means = {quantity: measured(getattr(row, quantity) for row in done) for quantity in AVERAGED}
    means |= {f"predicted_{block}": measured(row.predicted.get(block) for row in done) for block in BLOCKS}
    return Group(
        label=name,
        choices=members[0].choices,
        setting=members[0].setting(),
        runs=sorted((row.run for row in members), key=natural),
        statuses=dict(Counter(row.status for row in members)),
        effective_batch=done[0].batch.get("effective") if done else None,
        measured=means,
    )


def label(firsts: list[Row]) -> list[str]:
    """A name for each combination: its levers, then whatever is not the same in all of them."""
    settings = [set(row.setting()) for row in firsts if row.device is not None]
    shared = set.intersection(*settings) if settings else set()
    labels = []
    for row in firsts:
        own = [word for word in row.setting() if word not in shared]
        labels.append(" ".join([levers(row.choices), *own]) if row.choices else row.run)
    return [name if labels.count(name) == 1 else f"{name} ({row.run})" for name, row in zip(labels, firsts, strict=True)]


def ratio(value: float | None, base: float | None) -> float | None:
    """None where either is missing; a time or a size of 0 was not measured."""
    return value / base if value and base and value > 0 and base > 0 else None


def effects(groups: list[Group], noise: dict[str, Noise | None]) -> list[Effect]:
    """Every option of every lever that has a partner with the lever off and all else equal."""
    done = {each.identity(): each for each in groups if each.num_completed}
    pairs: dict[tuple[str, str], list[tuple[Group, Group]]] = defaultdict(list)
    for each in done.values():
        for lever, off in OFF.items():
            option = each.choices.get(lever, off)
            partner = done.get(each.identity(**{lever: off}))
            if option != off and partner is not None:
                pairs[lever, option].append((each, partner))
    in_order = sorted(pairs, key=lambda key: (list(OFF).index(key[0]), natural(key[1])))
    return [_effect(lever, option, pairs[lever, option], noise) for lever, option in in_order]


def _effect(lever: str, option: str, pairs: list[tuple[Group, Group]], noise: dict[str, Noise | None]) -> Effect:
    effect = Effect(
        lever=lever,
        option=option,
        num_pairs=len(pairs),
        ratio={},
        extremes={},
        differs={},
        accuracy_difference=None,
        accuracy_differs=None,
    )
    for quantity in RATIOS:
        logs, sizes = [], []
        for on, off in pairs:
            between = ratio(on.mean(quantity), off.mean(quantity))
            if between is not None:
                logs.append(math.log(between))
                sizes.append((on.measured[quantity].count, off.measured[quantity].count))
        middle = math.exp(mean(logs)) if logs else None
        effect.ratio[quantity] = middle
        effect.extremes[quantity] = (math.exp(min(logs)), math.exp(max(logs))) if logs else None
        effect.differs[quantity] = None if middle is None else counts(middle, noise[quantity], sizes)
    accuracies = [(on.measured["eval_accuracy"], off.measured["eval_accuracy"]) for on, off in pairs]
    known = [(on, off) for on, off in accuracies if on.mean is not None and off.mean is not None]
    if known:
        effect.accuracy_difference = mean((on.mean or 0) - (off.mean or 0) for on, off in known)
        if (seeds := noise["eval_accuracy"]) is not None:
            floor = floor_of(seeds, [(on.count, off.count) for on, off in known])
            effect.accuracy_differs = abs(effect.accuracy_difference) > floor
    return effect


def frontier(groups: list[Group], time_quantity: str) -> list[Group]:
    """Those with no other at most as slow and as large, and better in one of the two; the fastest first."""
    points = [
        (time, peak, each)
        for each in groups
        if (time := each.mean(time_quantity)) is not None and (peak := each.mean("peak_mib")) is not None
    ]
    kept = [
        (time, peak, each)
        for time, peak, each in points
        if not any(t <= time and p <= peak and (t, p) != (time, peak) for t, p, _ in points)
    ]
    return [each for _, _, each in sorted(kept, key=lambda point: point[:2])]
