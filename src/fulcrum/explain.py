"""What went wrong while composing, in one sentence: the key as typed = the value; the rule; what to do instead.

Hydra and OmegaConf say what they could not do; a person wants to know what to type. Reached only when composing failed.
"""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .config import GROUPS, Experiment
from .refusal import did_you_mean


def explain(error: Exception, overrides: list[str], conf: Path) -> str:
    """Hydra's and OmegaConf's errors as: the key as typed = the value; the rule; what to do instead."""
    text = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    typed = parse_overrides(overrides)
    options = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in conf.iterdir() if group.is_dir()}

    for key, value in typed.items():
        if key in options and f"'{key}/{value}'" in text:
            return f"{key}={value} is no option of {key}; " + did_you_mean(value, options[key])
        if key in options and ("must be a string or a list" in text or "Ambiguous" in text) and value not in options[key]:
            hint = f"x{value}" if f"x{value}" in options[key] else value
            return f"{key}={value} is no option of {key}; " + did_you_mean(hint, options[key])
    if match := re.search(r"full_key: (\S+)", text):
        full_key = match[1]
        for key, value in typed.items():
            if full_key in (key, key.split("=")[0]) and "not in" not in text:
                return f"{key}={value}: {_rule(text)}"
    known = _known_keys(conf)
    for key, value in typed.items():
        if key not in known and key not in options and not key.startswith("hydra"):
            return f"{key}={value}: there is no key '{key}'; " + _nearest(key, known | set(options))
    for key in typed:
        if key.startswith("hydra") and f"'{key.rsplit('.', 1)[-1]}'" in text:
            return f"{key}={typed[key]}: Hydra has no key '{key}'; `python train.py --hydra-help` names those it has"
    first_lines = " ".join(line.strip() for line in text.splitlines()[:2] if line.strip())
    return f"{' '.join(overrides) or 'the configuration'}: {first_lines}"


def parse_overrides(overrides: list[str]) -> dict[str, str]:
    """{key: value} of key=value words, without the marks +, ++ and ~."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def _rule(text: str) -> str:
    """What the key takes, from OmegaConf's words for what it does not."""
    if match := re.search(r"could not be converted to (\w+)", text):
        return {
            "Integer": "a whole number is needed; type one, such as 4",
            "Float": "a number is needed; type one, such as 0.1",
            "Boolean": "true or false is needed; type one of them",
        }.get(match[1], f"a {match[1].lower()} is needed")
    if match := re.search(r"expected one of \[(.*?)\]", text):
        return f"it must be one of {match[1].replace(chr(39), '')}; type one of them"
    if "not Optional" in text or "not optional" in text:
        return "null is not possible here; give a value"
    return f"{text.splitlines()[0].rstrip('.')}; see the comment in its file under conf/"


def _known_keys(conf: Path) -> set[str]:
    """Every dotted key that can be set."""
    schemas = {group: classes[0] for group, classes in GROUPS.items()}
    keys: set[str] = set()
    tree: dict[str, Any] = {"": OmegaConf.structured(Experiment)}
    tree |= {f"{group}.": OmegaConf.structured(schema) for group, schema in schemas.items()}
    for prefix, node in tree.items():
        for key in node:
            inner = None if OmegaConf.is_missing(node, key) else node[key]
            keys |= {f"{prefix}{key}.{sub}" for sub in inner} if OmegaConf.is_dict(inner) else {f"{prefix}{key}"}
    return keys


def _nearest(key: str, known: set[str]) -> str:
    """A close key by its whole name, or the one of another group with the same last word."""
    hint = did_you_mean(key, known)
    if hint.startswith("did"):
        return hint
    last = key.rsplit(".", 1)[-1]
    same = sorted(name for name in known if name.rsplit(".", 1)[-1] == last)
    if same:
        return f"did you mean '{same[0]}'?"
    group = key.split(".")[0]
    siblings = [name for name in known if name.startswith(f"{group}.")]
    return did_you_mean(key, siblings) if siblings else "`python train.py --help` lists all keys"
