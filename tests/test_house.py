"""The shape of the house: imports run down only, and the lists of levers are complete."""

import ast
from pathlib import Path

from fulcrum.config import GROUPS, Experiment

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fulcrum"

# From the top down; a module may import from floors below its own, and from its own package.
FLOORS = [
    {"preloaded", "finished", "record"},
    {"launch"},
    {"sweep"},
    {"explain", "preflight", "processes"},
    {"budget", "prediction"},
    {"estimate"},
    {"run"},
    {"peft_files"},
    {"adapters"},
    {"restoring"},
    {"trainer"},
    {"config", "logbook"},
    {"export"},
    {"levers"},
    {"models", "data", "optimizer", "schedule", "saving", "meters", "tensorfile"},
    {"distributed", "signals", "textbook"},
    {"refusal", "__init__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
ENVIRONMENT_READERS = {"distributed.py", "launch.py", "processes.py"}


def imported_names(path: Path) -> set[str]:
    """The top-level modules of the package that a file imports from."""
    package = path.relative_to(SOURCE).parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            parts = [*base, *(node.module.split(".") if node.module else [])]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
    return {name if name in FLOOR else "__init__" for name in names}


def test_imports_run_down_only():
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name in imported_names(path) - {own}:
            assert FLOOR[own] < FLOOR[name], f"{path} imports {name}"


def test_levers_never_import_each_other():
    names = {path.stem for path in (SOURCE / "levers").glob("*.py")} - {"__init__"}
    for path in (SOURCE / "levers").glob("*.py"):
        if path.stem != "__init__":
            tree = ast.walk(ast.parse(path.read_text()))
            siblings = {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.level == 1}
            assert not siblings & names, path


def test_only_three_files_read_the_environment():
    readers = {path.name for path in SOURCE.rglob("*.py") if "os.environ" in path.read_text()}
    assert readers <= ENVIRONMENT_READERS


def test_group_field_and_folder_have_one_name_and_every_option_says_what_it_does():
    folders = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"experiment", "sweep"}
    assert folders == set(GROUPS)
    assert set(GROUPS) <= set(Experiment.__dataclass_fields__)
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert path.read_text().startswith("# "), path
