"""How bad input is refused: one sentence that names the key as typed, its value, the rule and what to do instead."""

import math
from collections.abc import Iterable
from difflib import get_close_matches


class Refusal(ValueError):
    """Something a person typed, or a file they pointed at, cannot be used. Ends a run with exit code 2, no traceback."""


def at_least(key: str, value: float | None, minimum: float) -> None:
    """Refuses what is below `minimum`, not a number or infinite; None means "not set" and passes."""
    if value is not None and not (math.isfinite(value) and value >= minimum):
        raise Refusal(f"{key}={value:g} must be a number of at least {minimum:g}; use {key}={minimum:g} or more")


def above(key: str, value: float | None, limit: float) -> None:
    """Refuses what is not a finite number above `limit`; None passes."""
    if value is not None and not (math.isfinite(value) and value > limit):
        raise Refusal(f"{key}={value:g} must be a finite number above {limit:g}; use a larger value")


def fraction(key: str, value: float) -> None:
    """Refuses what lies outside [0, 1)."""
    if not 0 <= value < 1:
        raise Refusal(f"{key}={value:g} must lie in [0, 1); use 0 to switch it off, or a value such as 0.1")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'precision'?`, or the list of what there is where nothing comes close."""
    known = sorted(set(known))
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(known)}"


def parse_overrides(overrides: list[str]) -> dict[str, str]:
    """{key: value} of key=value words, without the marks +, ++ and ~."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}
