"""Writes what a sweep measured into the pages on levers, docs/levers/*.md, between their markers.

python scripts/measured.py outputs/sweeps/<date>/<time>
"""

import argparse
import shlex
from pathlib import Path

from omegaconf import OmegaConf

from fulcrum.sweep import Comparison, compare
from fulcrum.sweep.comparison import threads
from fulcrum.sweep.groups import Effect
from fulcrum.sweep.rows import OFF

PAGES = Path(__file__).resolve().parents[1] / "docs" / "levers"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SHOWN = {"step_ms": "step time", "images_per_s": "images/s", "peak_mib": "peak memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="the directory of a sweep")
    sweep = parser.parse_args().sweep
    comparison = compare([sweep])
    for lever in OFF:
        page = PAGES / f"{lever}.md"
        text = page.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text("\n".join([before + BEGIN, *measured(comparison, lever, command(sweep)), END + after]))
        print(page)


def measured(comparison: Comparison, lever: str, typed: str) -> list[str]:
    """The lines about one lever: every option against none, then under what circumstances."""
    done = [row for row in comparison.rows if row.completed]
    effects = [effect for effect in comparison.effects if effect.lever == lever]
    if not effects:
        return ["Not part of the last sweep."]
    lines = [
        f"Against `{OFF[lever]}`, all else equal: the mean over pairs of runs, in brackets from the least to the most.",
        "",
        f"| {lever} | pairs | {' | '.join(SHOWN.values())} | accuracy, points |",
        "|---|--:|" + "--:|" * (len(SHOWN) + 1),
    ]
    for effect in effects:
        points = "" if effect.accuracy_difference is None else f"{100 * effect.accuracy_difference:+.1f}"
        lines.append(
            f"| `{effect.option}` | {effect.num_pairs} | {' | '.join(cell(effect, quantity) for quantity in SHOWN)} | {points} |"
        )
    row = next(row for row in done if row.run == comparison.baseline)
    lines += ["", f"    {typed}", ""]
    machine = row.environment.get("cpu") or f"{row.environment['platform'].partition('-')[0]}, {row.environment['machine']}"
    lines.append(
        f"{len(done)} jobs of {row.optimizer_steps} optimizer steps, on {row.device} ({machine}), CPU threads: {threads(row)}, "
        f"torch {row.environment['torch']}, {(row.started or '')[:10]}. {noise(comparison)}"
    )
    return lines


def cell(effect: Effect, quantity: str) -> str:
    times, extremes = effect.ratio[quantity], effect.extremes[quantity]
    if times is None or extremes is None:
        return "not measured"
    within = "" if effect.differs[quantity] else ", no difference"
    return f"× {times:.2f} ({extremes[0]:.2f} … {extremes[1]:.2f}{within})"


def noise(comparison: Comparison) -> str:
    if (floor := comparison.noise["step_ms"]) is None:
        return "Noise was not measured: take times within 10 % of each other as equal."
    return f"Noise: step times within {100 * floor.floor:.0f} % of each other are not told apart."


def command(sweep: Path) -> str:
    """The command that started the sweep."""
    words = OmegaConf.load(sweep / "multirun.yaml").hydra.overrides.task
    return f"python train.py -m {shlex.join(words)}"


if __name__ == "__main__":
    main()
