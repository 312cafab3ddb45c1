"""Compares predicted and measured memory over a grid of short runs, and writes the table into docs/memory.md.

python scripts/predictions.py                 about four minutes on 2 CPU cores
python scripts/predictions.py --every 16      every sixteenth configuration, and no file is written
python scripts/predictions.py --device cuda   on a GPU; no file is written
"""

import argparse
import contextlib
import io
import itertools
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from fulcrum import launch, preflight
from fulcrum.estimate import Estimate, estimate
from fulcrum.logbook.summary import BLOCKS
from fulcrum.run import Invocation, run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
GRID = {
    "model": ("resnet8", "resnet20"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": ("none", "x2"),
    "checkpointing": ("none", "block"),
    "lora": ("none", "r4"),
    "optimizer": ("sgd", "adamw"),
    "batch.effective": ("32", "64"),
}
COMMON = ["data=synthetic", "data.train_size=128", "data.test_size=128", "epochs=1", "max_steps=2", "saving=none", "threads=2"]
COMMON += ["precision.init_scale=4"]
SIZES = {"fp32": "data.image_size=32", "bf16": "data.image_size=32", "fp16": "data.image_size=8"}  # fp16 is emulated, and slow


@dataclass
class Point:
    overrides: list[str]
    predicted: Estimate
    measured: dict[str, Any]

    def error(self, block: str) -> float | None:
        """Predicted to measured - 1; None where there is nothing to predict."""
        measured = self.measured.get(block)
        return getattr(self.predicted, block) / measured - 1 if measured else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", metavar="N", type=int, default=1, help="take every Nth configuration only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    typed = parser.parse_args()
    launch.register()
    points = []
    for options in itertools.islice(itertools.product(*GRID.values()), 0, None, typed.every):
        overrides = [f"{group}={option}" for group, option in zip(GRID, options, strict=True)]
        points.append(compared([*overrides, *COMMON, SIZES[options[1]], f"device={typed.device}"], overrides))
        print(line(points[-1]), flush=True)
    report = "\n".join(markdown(points, typed.device))
    print(report)
    if typed.every == 1 and typed.device == "cpu":
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{report}\n{END}{rest.partition(END)[2]}")


def compared(words: list[str], shown: list[str]) -> Point:
    """One run in this process: its peak does not depend on what ran before."""
    with initialize_config_dir(str(launch.CONF), version_base="1.3"):
        composed = compose("config", words, return_hydra_config=True)
    experiment = preflight.preflight(*preflight.split(composed))
    predicted = estimate(experiment)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = run(experiment, Path(folder), Invocation(preflight.choices(composed.hydra), words, "predictions", 0, []))
    assert summary.status == "completed", summary.error
    return Point(shown, predicted, summary.memory)


def line(point: Point) -> str:
    error = point.error("peak_mib")
    assert error is not None
    return (
        f"{100 * error:+6.2f} %  {point.predicted.peak_mib:8.2f} predicted  {point.measured['peak_mib']:8.2f} MiB  "
        + " ".join(point.overrides)
    )


def markdown(points: list[Point], device: str) -> Iterator[str]:
    yield f"{len(points)} configurations, on {device} ({platform.machine()}, torch {torch.__version__.partition('+')[0]}):"
    yield ""
    yield from (f"- `{group}`: {', '.join(options)}" for group, options in GRID.items())
    yield ""
    yield "| | median error | worst error | worst in |"
    yield "|---|--:|--:|---|"
    for block in ("peak_mib", *BLOCKS):
        known = [(abs(error), point) for point in points if (error := point.error(block)) is not None]
        if known:
            worst, where = max(known, key=lambda item: item[0])
            middle = median(error for error, _ in known)
            words = "–" if worst < 5e-5 else " ".join(where.overrides)
            yield f"| {block.removesuffix('_mib')} | {100 * middle:.2f} % | {100 * worst:.2f} % | {words} |"
    yield ""
    yield "The peak by lever, median and worst error:"
    yield ""
    yield "| | median | worst |"
    yield "|---|--:|--:|"
    for number, (group, options) in enumerate(GRID.items()):
        for option in options:
            errors = [abs(point.error("peak_mib") or 0) for point in points if point.overrides[number] == f"{group}={option}"]
            if errors:
                yield f"| `{group}={option}` | {100 * median(errors):.2f} % | {100 * max(errors):.2f} % |"


if __name__ == "__main__":
    main()
