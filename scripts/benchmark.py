"""Measures what a feature costs: pairs of runs that differ in it alone, side by side, as ratios of wall time.

python scripts/benchmark.py saving [--pairs 3] [--steps 40] [override ...]     a checkpoint every 10 steps against none, ResNet-18
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from fulcrum.logbook import Summary
from fulcrum.processes import TRAIN

BASE = ["model=resnet18", "data=synthetic", "data.test_size=8", "eval_every_epochs=1000"]
FEATURES = {"saving": (["saving=last", "saving.every_steps=10"], ["saving=none"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("feature", choices=FEATURES)
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without, taken in turns")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    asked, overrides = parser.parse_known_args()
    pairs = []
    for number in range(asked.pairs):
        sides = FEATURES[asked.feature]
        in_turn = sides if number % 2 == 0 else sides[::-1]
        seconds = {tuple(side): wall_s([*BASE, f"max_steps={asked.steps}", *side, *overrides]) for side in in_turn}
        pairs.append([seconds[tuple(side)] for side in sides])
        print(f"with {pairs[-1][0]:.2f} s, without {pairs[-1][1]:.2f} s, ratio {pairs[-1][0] / pairs[-1][1]:.3f}", flush=True)
    ratios = [with_it / without for with_it, without in pairs]
    print(f"{asked.feature}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over {asked.steps} steps")


def wall_s(words: list[str]) -> float:
    """Seconds of training and saving of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), *words, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        time = Summary.read(Path(folder) / "run")["time"]
    return time["train_s"] + time["save_s"]


if __name__ == "__main__":
    main()
