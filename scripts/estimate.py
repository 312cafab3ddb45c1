"""Tells the memory of a run before it starts, without allocating it: the blocks, who holds them, and what fits.

python scripts/estimate.py model=resnet50 precision=bf16                the overrides of train.py
python scripts/estimate.py model=resnet50 --budget-gib 16               the largest batch.per_device, and levers that make it fit
python scripts/estimate.py model=resnet20 --figure step.png             memory during one step
python scripts/estimate.py --parameters 7e9 --recipe mixed              the textbook's formula for Adam, for any network
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulcrum import launch, preflight, textbook
from fulcrum.budget import Way, largest_per_device, ways_to_fit
from fulcrum.estimate import Estimate, estimate, sizes_of
from fulcrum.logbook import Summary
from fulcrum.refusal import Refusal, above

METHOD = "predicted by a trace of the first steps and evaluation batches on fake tensors"
COLORS = ("blue", "cyan", "magenta", "yellow", "green", "white")  # of the blocks, in their order
BAR = 70  # characters that the peak or the sum of the blocks takes, whichever is more


class Parser(argparse.ArgumentParser):
    """Bad words end in one sentence."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; {self.prog} --help names what there is")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="as for train.py: group=option, key=value")
    parser.add_argument("--json", action="store_true", help="print the keys of summary.json's memory")
    parser.add_argument("--budget-gib", metavar="X", type=float, help="what fits into this much memory a device")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw memory over one step: .png, .svg or .pdf")
    parser.add_argument("--parameters", metavar="P", type=float, help="by formula instead: a number such as 7e9")
    parser.add_argument("--recipe", default="fp32", help=f"of --parameters: {', '.join(textbook.RECIPES)}")
    parser.add_argument("--activations-gib", metavar="X", type=float, help="of --parameters: what forward keeps, in fp32")
    parser.add_argument("--autocast", action="store_true", help="of --parameters: AMP, which halves activations only")
    parser.add_argument("--lora-rank", metavar="R", type=int, help="of --parameters: adapters of this rank …")
    parser.add_argument("--lora-matrices", metavar="OUTxIN", nargs="+", default=[], help="… on these weights, such as 4096x4096")
    typed = parser.parse_intermixed_args()
    try:
        above("--budget-gib", typed.budget_gib, 0)
        if typed.figure is not None and typed.figure.suffix not in (".png", ".svg", ".pdf"):
            raise Refusal(f"--figure={typed.figure} must end in .png, .svg or .pdf; use for example step.png")
        if typed.parameters is not None:
            by_formula(typed)
        else:
            by_trace(typed)
    except Refusal as refusal:
        refuse(str(refusal))
    except (HydraException, OmegaConfBaseException) as error:
        refuse(launch.explained(error, typed.overrides))
    except OSError as error:
        refuse(f"--figure={typed.figure} cannot be written ({error.strerror}); name another file")


def by_trace(typed: argparse.Namespace) -> None:
    launch.register()
    with initialize_config_dir(str(launch.CONF), version_base="1.3"):
        composed = compose("config", typed.overrides, return_hydra_config=True)
    experiment = preflight.preflight(*preflight.split(composed))
    num_processes = preflight.num_processes(experiment)
    sizes = sizes_of(experiment.data)
    predicted = estimate(experiment, num_processes=num_processes, sizes=sizes)
    blocks = predicted.blocks()
    record = {**Summary().memory, **blocks, "predicted": blocks, "predicted_peak_mib": predicted.peak_mib, "method": METHOD}
    largest, ways = None, []
    if typed.budget_gib is not None:
        budget_mib = typed.budget_gib * 1024
        largest = largest_per_device(experiment, budget_mib, num_processes=num_processes, sizes=sizes)
        if predicted.peak_mib > budget_mib:
            ways = ways_to_fit(experiment, budget_mib, num_processes=num_processes, sizes=sizes)
        record |= {"budget_gib": typed.budget_gib, "largest_per_device": largest}
    if typed.json:
        print(json.dumps(record, indent=2))
    else:
        show(predicted)
        if typed.budget_gib is not None:
            print("\n".join(answer(predicted, typed.budget_gib, largest, ways)))
    if typed.figure is not None:
        draw(predicted, typed.figure)


def by_formula(typed: argparse.Namespace) -> None:
    adapters = None
    if typed.lora_rank is not None:
        matrices = [matrix(word) for word in typed.lora_matrices]
        adapters = textbook.lora_parameters(matrices, rank=typed.lora_rank)
        of = sum(num_out * num_in for num_out, num_in in matrices)
        print(f"rank {typed.lora_rank} trains {adapters:,} parameters for {of:,} of these weights ({100 * adapters / of:.2f} %)")
    blocks = textbook.textbook(
        typed.parameters,
        recipe=typed.recipe,
        activations_gib=typed.activations_gib,
        autocast=typed.autocast,
        adapter_parameters=adapters,
    )
    table = Table("block", "GiB", box=None, pad_edge=False)
    for row in textbook.rows(blocks):
        table.add_row(*row)
    console().print(table)
    print(f"{typed.parameters:g} parameters: {blocks.recipe.assumption}")


def matrix(word: str) -> tuple[int, int]:
    num_out, _, num_in = word.partition("x")
    if not (num_out.isdigit() and num_in.isdigit()):
        raise Refusal(f"--lora-matrices={word} must be OUTxIN; use for example 4096x4096")
    return int(num_out), int(num_in)


def show(predicted: Estimate) -> None:
    """The blocks, a bar of them, and who holds the activations."""
    blocks = predicted.blocks()
    screen = console()
    table = Table("", "MiB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for (name, mib), color in zip(blocks.items(), COLORS, strict=True):
        table.add_row(Text.assemble(("█ ", color), name.removesuffix("_mib")), f"{mib:,.2f}")
    table.add_row("peak", f"{predicted.peak_mib:,.2f}", style="bold")
    screen.print(table)
    mib_a_character = max(predicted.peak_mib, sum(blocks.values())) / BAR
    bar, filled, edge = Text(), 0, 0.0
    for mib, color in zip(blocks.values(), COLORS, strict=True):
        edge += mib
        width = round(edge / mib_a_character) - filled
        bar.append("█" * width, style=color)
        filled += width
    screen.print(bar)
    screen.print(" " * (round(predicted.peak_mib / mib_a_character) - 1) + "▲ peak\n")
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in predicted.held:
        held[part.layer.partition(".")[0]][part.operation] += part.mib
    activations = Table("activations of", "MiB", "made by", box=None, pad_edge=False)
    activations.columns[1].justify = "right"
    for place, operations in held.items():
        largest = sorted(operations.items(), key=lambda item: -item[1])[:3]
        activations.add_row(place, f"{sum(operations.values()):,.2f}", ", ".join(f"{name} {mib:,.2f}" for name, mib in largest))
    screen.print(activations)


def answer(predicted: Estimate, budget_gib: float, largest: int | None, ways: list[Way]) -> list[str]:
    """What --budget-gib asks, in sentences."""
    lines = ["", f"{budget_gib:g} GiB: the largest batch.per_device that fits is {largest}."]
    if largest is None:
        lines = ["", f"{budget_gib:g} GiB: not even batch.per_device=1 fits."]
    if predicted.peak_mib <= budget_gib * 1024:
        return [*lines, f"This configuration fits: {predicted.peak_mib / 1024:.2f} GiB."]
    lines.append(f"This configuration needs {predicted.peak_mib / 1024:.2f} GiB. ")
    if not ways:
        return [*lines, "No lever makes it fit; use a smaller batch or network."]
    lines[-1] += "It fits with one of these; × is the floating-point operations of a step to those of now, which say nothing of"
    lines.append("what a number format or smaller kernels do to the time:")
    return lines + [f"  {' '.join(way.overrides)}: {way.peak_mib / 1024:.2f} GiB, × {way.flops_ratio:.2f}" for way in ways[:5]]


def draw(predicted: Estimate, path: Path) -> None:
    """Memory over the operations of one step and the evaluation after it."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(8, 3.5), layout="constrained")
    axes = canvas.subplots()
    mib = [moment.mib for moment in predicted.timeline]
    start = 0
    for index, moment in enumerate(predicted.timeline):
        if index + 1 < len(mib) and predicted.timeline[index + 1].phase == moment.phase:
            continue
        places = range(start, index + 1)
        axes.fill_between(places, mib[start : index + 1], step="post", label=moment.phase, alpha=0.6)
        start = index + 1
    axes.set(xlabel="operations", ylabel="memory, MiB", xlim=(0, len(mib)), ylim=(0, None))
    axes.axhline(predicted.peak_mib, color="black", linewidth=0.8, linestyle="--")
    axes.legend(frameon=False, ncols=5, loc="upper left", bbox_to_anchor=(0, 1.12))
    canvas.savefig(path, dpi=150)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def refuse(sentence: str) -> NoReturn:
    print(f"refused: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
