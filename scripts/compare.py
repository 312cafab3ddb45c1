"""Compares runs and sweeps: what each lever costs and brings, in the terminal, in files and in TensorBoard.

python scripts/compare.py outputs/sweeps/<date>/<time>            writes comparison.* into the sweep itself
python scripts/compare.py outputs --budget-gib 16 --baseline fp32
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NoReturn

from fulcrum.refusal import Refusal
from fulcrum.sweep import compare, show, write
from fulcrum.sweep.rows import is_run


class Parser(argparse.ArgumentParser):
    """Bad words end in one sentence."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; {self.prog} --help names what there is")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a run, a sweep, or a directory that holds some")
    parser.add_argument("--baseline", metavar="NAME", help="a run, the beginning of its name, or its levers such as fp32-x4")
    parser.add_argument("--budget-gib", metavar="X", type=float, help="name the fastest combination that fits")
    parser.add_argument("--target-accuracy", metavar="A", type=float, help="a fraction: who gets there first")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write")
    typed = parser.parse_args()
    try:
        comparison = compare(
            typed.folders, baseline=typed.baseline, budget_gib=typed.budget_gib, target_accuracy=typed.target_accuracy
        )
        out = typed.out or place(typed.folders)
        write(comparison, out)
    except Refusal as refusal:
        refuse(str(refusal))
    except OSError as error:
        refuse(f"--out={typed.out or place(typed.folders)} cannot be written ({error.strerror}); name another directory")
    show(comparison)
    print(f"\neverything about this comparison is in {out}")


def place(folders: list[Path]) -> Path:
    """The sweep itself where that is what was given, else a directory of this moment."""
    if len(folders) == 1 and sum(map(is_run, folders[0].iterdir())) > 1:
        return folders[0]
    return Path("outputs/comparisons") / time.strftime("%Y-%m-%d/%H-%M-%S")


def refuse(sentence: str) -> NoReturn:
    print(f"refused: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
