"""The noise floor: how far apart two combinations must be before their difference is more than chance.

Repeats of one combination show how much a quantity moves by itself. Their relative standard deviations are pooled over
all combinations with at least two completed runs,

    s = sqrt( sum (n - 1) (s_group / mean_group)^2 / sum (n - 1) ),

and two combinations of n1 and n2 runs differ where the ratio r of their means fulfils

    |ln r| > t(0.975, sum (n - 1)) * s * sqrt(1/n1 + 1/n2),

the two-sided 95 % test of Student for two means with pooled variance (to first order the relative standard deviation
is that of the logarithm). The mean over pairs of combinations (the effect of a lever) has the floor
t * s * sqrt(sum (1/n1 + 1/n2)) / pairs. One comparison in twenty of equals still comes out as different.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

NOTABLE = 0.01  # less than this is never called a difference, however quiet the machine


@dataclass(kw_only=True, slots=True)
class Measured:
    """A quantity over the completed runs of one combination. spread: sample standard deviation; None for one run."""

    mean: float | None
    spread: float | None
    count: int


@dataclass(kw_only=True, slots=True)
class Noise:
    """Of one quantity. `deviation` is relative, for an accuracy absolute; `floor` is the smallest difference that
    counts between two combinations of `runs` runs each (the fewest repeats there are)."""

    deviation: float
    degrees: int
    runs: int
    floor: float


def measured(values: Iterable[float | None]) -> Measured:
    known = [value for value in values if value is not None]
    spread = stdev(known) if len(known) > 1 else None
    return Measured(mean=mean(known) if known else None, spread=spread, count=len(known))


def noise_of(repeats: Iterable[Measured], *, relative: bool = True) -> Noise | None:
    """The pooled noise of one quantity; None where nothing was repeated."""
    repeated = [each for each in repeats if each.spread is not None and (each.mean or not relative)]
    degrees = sum(each.count - 1 for each in repeated)
    if not degrees:
        return None
    squares = sum((each.count - 1) * ((each.spread or 0) / ((each.mean or 1) if relative else 1)) ** 2 for each in repeated)
    runs = min(each.count for each in repeated)
    noise = Noise(deviation=math.sqrt(squares / degrees), degrees=degrees, runs=runs, floor=0.0)
    log_floor = floor_of(noise, [(runs, runs)])
    noise.floor = math.expm1(log_floor) if relative else log_floor
    return noise


def floor_of(noise: Noise, pairs: Sequence[tuple[int, int]]) -> float:
    """The smallest difference that counts, |ln ratio| (of an accuracy: the difference itself), for the mean over pairs
    of combinations of (n1, n2) runs."""
    terms = sum(1 / ours + 1 / theirs for ours, theirs in pairs)
    return student_t(noise.degrees) * noise.deviation * math.sqrt(terms) / len(pairs)


def counts(ratio: float, noise: Noise | None, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether a ratio is a difference: beyond the noise where that was measured, and never under 1 %."""
    floor = floor_of(noise, pairs) if noise else 0.0
    return abs(math.log(ratio)) > max(floor, math.log1p(NOTABLE))


def student_t(degrees: int) -> float:
    """The 0.975 quantile of Student's t: a table, and from 11 degrees on the expansion about the normal quantile
    (Abramowitz and Stegun 26.7.5), which is right to four digits there."""
    if degrees <= len(T_TABLE):
        return T_TABLE[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


T_TABLE = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
