"""Shows a comparison in the terminal and writes it: comparison.json, .csv, .md, .html and a TensorBoard run.

Every file is written under a temporary name and renamed; matplotlib, rich and tensorboard are imported when needed.
"""

import csv
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import table
from .comparison import Comparison
from .rows import BLOCKS, OFF, RATIOS, Row

NAME = "comparison"
PLAIN_WIDTH = 100


def show(comparison: Comparison) -> None:
    """The table and the verdict, to the terminal; without colours where stdout is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    is_narrow = console.width < PLAIN_WIDTH
    grid = Table(box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    shown = [n for n, title in enumerate(table.COMBINATIONS) if title != "images/s" or not is_narrow]
    for number in shown:
        look: dict[str, Any] = {"min_width": 18} if number == 0 else {"no_wrap": True}
        grid.add_column(table.COMBINATIONS[number], justify="left" if number < 2 else "right", overflow="fold", **look)
    for line in table.combinations(comparison):
        grid.add_row(*(Text(line[number]) for number in shown))
    console.print(grid)
    console.print(Text(table.legend(comparison) + "\n"))
    for run, status, error in table.failures(comparison):
        console.print(Text(f"{run}: {status}: {error}", style="red"))
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for sentence in comparison.verdict:
        console.print(Text(f"- {sentence}"))


def write(comparison: Comparison, folder: Path) -> None:
    """The five outputs, in place of older ones."""
    from .figures import draw
    from .page import page

    folder.mkdir(parents=True, exist_ok=True)
    figures = draw(comparison)
    replace(folder / f"{NAME}.json", json.dumps(asdict(comparison), indent=2, allow_nan=False) + "\n")
    replace(folder / f"{NAME}.csv", to_csv(comparison))
    replace(folder / f"{NAME}.md", to_markdown(comparison))
    replace(folder / f"{NAME}.html", page(comparison, figures))
    texts = {"verdict": verdict_in_markdown(comparison), "table": combinations_in_markdown(comparison)}
    write_events(folder / NAME, texts, {figure.name: figure.png() for figure in figures})


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def to_csv(comparison: Comparison) -> str:
    """A line for each run; ratios as ratio_<quantity>, an option a column, what was not measured empty."""
    groups = list(dict.fromkeys([*OFF, *(group for row in comparison.rows for group in row.choices)]))
    nested = ("choices", "batch", "environment", "predicted", "evaluations", "ratio")
    plain = [key for key in Row.__dataclass_fields__ if key not in nested]
    batch = list(dict.fromkeys(key for row in comparison.rows for key in row.batch))
    predicted = [f"predicted_{block}" for block in BLOCKS]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ratios = [f"ratio_{quantity}" for quantity in RATIOS]
    writer.writerow([*plain, *groups, *(f"batch_{key}" for key in batch), *predicted, *ratios])
    for row in comparison.rows:
        values = {**{key: getattr(row, key) for key in plain}, "overrides": " ".join(row.overrides)}
        chosen = [row.choices.get(group) for group in groups]
        sizes = [row.batch.get(key) for key in batch]
        told = [row.predicted.get(block) for block in BLOCKS]
        writer.writerow([*values.values(), *chosen, *sizes, *told, *(row.ratio[quantity] for quantity in RATIOS)])
    return out.getvalue()


def to_markdown(comparison: Comparison) -> str:
    """The verdict, the combinations, their memory, every run, what failed, how it was measured."""
    parts = ["# What the levers cost", verdict_in_markdown(comparison)]
    parts += ["## Combinations", combinations_in_markdown(comparison)]
    if memory := table.memory(comparison):
        parts += ["## Memory, MiB", grid(table.MEMORY, memory, text_columns=2)]
    parts += ["## Every run", grid(table.RUNS, table.runs(comparison), text_columns=2)]
    if failed := table.failures(comparison):
        parts += ["## Not completed", grid(("run", "status", "error"), failed, text_columns=3)]
    return "\n\n".join([*parts, "## How it was measured", bullets(table.method(comparison))]) + "\n"


def verdict_in_markdown(comparison: Comparison) -> str:
    return bullets([*comparison.warnings, *comparison.verdict])


def combinations_in_markdown(comparison: Comparison) -> str:
    lines = grid(table.COMBINATIONS, table.combinations(comparison), text_columns=2)
    return f"{lines}\n\n{escaped(table.legend(comparison))}"


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(sentence)}" for sentence in sentences)


def grid(titles: Sequence[str], lines: Iterable[Sequence[str]], *, text_columns: int) -> str:
    rules = [":--" if number < text_columns else "--:" for number in range(len(titles))]
    rows = [titles, rules, *([escaped(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def escaped(text: str) -> str:
    """As Markdown shows it literally, on one line."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def write_events(folder: Path, texts: dict[str, str], images: dict[str, bytes]) -> None:
    """A TensorBoard run of its own: Markdown texts, and figures as images. It is no session of HParams."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    values = []
    for name, markdown in texts.items():
        text = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        values.append(Summary.Value(tag=f"{NAME}/{name}", metadata=plugin, tensor=text))
    for name, png in images.items():
        values.append(Summary.Value(tag=f"{NAME}/{name}", image=Summary.Image(encoded_image_string=png)))
    temporary = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    writer = EventFileWriter(str(temporary))
    writer.add_event(Event(wall_time=time.time(), summary=Summary(value=values)))
    writer.close()
    folder.mkdir(exist_ok=True)
    older = list(folder.glob("events.out.tfevents.*"))
    for path in temporary.iterdir():
        os.replace(path, folder / path.name)
    for path in older:
        path.unlink()
    temporary.rmdir()
