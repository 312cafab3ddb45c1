"""What went wrong while composing, in one sentence: the key as typed = the value; the rule; what to do instead.

Hydra and OmegaConf say what they could not do; a person wants to know what to type. Reached only when composing failed.
"""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .config import GROUPS, Experiment
from .refusal import did_you_mean, parse_overrides


def explain(error: Exception, overrides: list[str], conf: Path) -> str:
    """Hydra's and OmegaConf's errors as: the key as typed = the value; the rule; what to do instead."""
    text = _whole_text(error)
    typed = parse_overrides(overrides)
    options = {
        group.name: sorted(_option(file, group) for file in group.rglob("*.yaml")) for group in conf.iterdir() if group.is_dir()
    }

    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        if word.startswith("~"):
            return f"{word}: keys and groups cannot be taken out; choose an option such as none, or set another value"
        if "=" not in word:
            return f"{word}: a value is missing; type {key}=<value>"
    for key, value in typed.items():
        if key in options and value not in options[key]:
            if "," in value:
                return f"{key}={value}: one option is needed; several are a sweep: python train.py -m {key}={value}"
            hint = f"x{value}" if f"x{value}" in options[key] else value
            return f"{key}={value} is no option of {key}; " + did_you_mean(hint, options[key])
    known = _known_keys()
    for key, value in typed.items():
        if key not in known and key not in options and not key.startswith("hydra"):
            return f"{key}={value}: there is no key '{key}'; " + _nearest(key, known | set(options))
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if word.startswith("+") and f"'{key.rsplit('.', 1)[-1]}'" in text:
            return f"{word}: there is no key '{key}'; " + _nearest(key, known)
        if key.startswith("hydra") and f"'{key.rsplit('.', 1)[-1]}'" in text:
            return f"{key}={value}: Hydra has no key '{key}'; `python train.py --hydra-help` names those it has"
    for key, value in typed.items():
        if re.search(rf"full_key: {re.escape(key)}\b|override \+*{re.escape(key)}=", text):
            return f"{key}={value}: {_rule(key, value, text)}"
    first_lines = " ".join(line.strip() for line in text.splitlines()[:2] if line.strip())
    return f"{' '.join(overrides) or 'the configuration'}: {first_lines}"


def _option(file: Path, group: Path) -> str:
    """The word that chooses a file of a group: classic/fp32."""
    return file.relative_to(group).with_suffix("").as_posix()


def _whole_text(error: BaseException | None) -> str:
    """The words of an error and of those it came from."""
    words = []
    while error is not None:
        words.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(words)


def _rule(key: str, value: str, text: str) -> str:
    """What the key takes, from OmegaConf's words for what it does not."""
    if match := re.search(r"could not be converted to (\w+)", text):
        return {
            "Integer": "a whole number is needed; type one, such as 4",
            "Float": "a number is needed; type one, such as 0.1",
            "Boolean": "true or false is needed; type one of them",
        }.get(match[1], f"a {match[1].lower()} is needed")
    if match := re.search(r"expected one of \[(.*?)\]", text):
        return f"it must be one of {match[1].replace(chr(39), '')}; type one of them"
    if "not a valid bool" in text:
        return "true or false is needed; type one of them"
    if "ListConfig" in text or "list" in text:
        return f"a list is needed; type {key}=[{value.strip('[]')}]"
    if "Interpolation key" in text:
        return "it refers to a key that does not exist; give a value"
    if "not Optional" in text or "not optional" in text:
        return "null is not possible here; give a value"
    return f"{text.splitlines()[0].rstrip('.')}; see the comment in its file under conf/"


def _known_keys() -> set[str]:
    """Every dotted key that can be set."""
    schemas = {group: classes[0] for group, classes in GROUPS.items()}
    keys: set[str] = set()
    tree: dict[str, Any] = {"": OmegaConf.structured(Experiment)}
    tree |= {f"{group}.": OmegaConf.structured(schema) for group, schema in schemas.items()}
    for prefix, node in tree.items():
        for key in map(str, node):
            inner = None if OmegaConf.is_missing(node, key) else node[key]
            keys |= {f"{prefix}{key}.{sub}" for sub in map(str, inner)} if isinstance(inner, DictConfig) else {f"{prefix}{key}"}
    return keys


def _nearest(key: str, known: set[str]) -> str:
    """The key of another group with the same last word, or a close one by its whole name."""
    last = key.rsplit(".", 1)[-1]
    same = sorted(name for name in known if name.rsplit(".", 1)[-1] == last)
    if same:
        return f"did you mean '{same[0]}'?"
    hint = did_you_mean(key, known)
    if hint.startswith("did"):
        return hint
    group = key.split(".")[0]
    siblings = [name for name in known if name.startswith(f"{group}.")]
    return did_you_mean(key, siblings) if siblings else "`python train.py --help` lists all keys"
