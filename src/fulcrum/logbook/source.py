"""Which state of the source code made a run."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def source(root: Path = ROOT) -> dict[str, str | bool]:
    """{"commit", "dirty": whether a file that git knows had changed since}; empty outside a checkout, or without git."""
    if not (root / ".git").exists():  # else git would answer for a checkout that this one lies in
        return {}
    describe = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        told = subprocess.run(describe, cwd=root, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    commit = told.stdout.strip()
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")} if commit else {}
