"""The comparison as one HTML file that stands alone: no network, no script, figures inside; light, dark and on a phone."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from . import table
from .verdict import counted

if TYPE_CHECKING:
    from .comparison import Comparison
    from .figures import Figure


def page(comparison: "Comparison", figures: list["Figure"]) -> str:
    """The verdict first, then figures, tables, what failed, and how it was measured."""
    done = sum(row.completed for row in comparison.rows)
    sub = f"{counted(len(comparison.rows), 'run')} of {counted(len(comparison.groups), 'combination')}, {done} completed"
    sub += f"; baseline {comparison.baseline}" if comparison.baseline else ""
    parts = [f"<header><h1>What the levers cost</h1><p>{escape(sub)}</p></header>"]
    if comparison.warnings:
        parts.append(section("Before you compare", items(comparison.warnings), kind="warning"))
    parts.append(section("Verdict", items(comparison.verdict)))
    parts += [drawn(figure) for figure in figures]
    parts += [f"<p class=quiet>{escape(sentence)}</p>" for sentence in absent(comparison, figures)]
    legend = f"<p class=quiet>{escape(table.legend(comparison))}</p>"
    parts.append(section("Combinations", grid(table.COMBINATIONS, table.combinations(comparison)) + legend))
    if memory := table.memory(comparison):
        parts.append(section("Memory, MiB", grid(table.MEMORY, memory)))
    if failed := table.failures(comparison):
        parts.append(section("Not completed", grid(("run", "status", "error"), failed, text_columns=3)))
    parts.append(section("Every run", grid(table.RUNS, table.runs(comparison))))
    parts.append(section("How it was measured", items(table.method(comparison)), kind="quiet"))
    return HEAD + "\n".join(parts) + "\n</main>\n</html>\n"


def section(title: str, content: str, *, kind: str = "") -> str:
    mark = f" class={kind}" if kind else ""
    return f"<section{mark}><h2>{escape(title)}</h2>{content}</section>"


def items(sentences: Iterable[str]) -> str:
    """A list; what stands before the first colon of a sentence is its subject, and stands out."""
    lines = []
    for sentence in sentences:
        subject, colon, rest = sentence.partition(": ")
        lines.append(f"<li><b>{escape(subject)}:</b> {escape(rest)}</li>" if colon else f"<li>{escape(sentence)}</li>")
    return f"<ul>{''.join(lines)}</ul>"


def grid(titles: Sequence[str], lines: Iterable[Sequence[str]], *, text_columns: int = 2) -> str:
    """A table that scrolls inside its own box."""
    marks = ["" if number < text_columns else " class=n" for number in range(len(titles))]
    head = "".join(f"<th{mark}>{escape(title)}</th>" for title, mark in zip(titles, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(line, marks, strict=True)) + "</tr>"
        for line in lines
    )
    table_html = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class=scroll tabindex=0 role=region aria-label="table">{table_html}</div>'


def drawn(figure: "Figure") -> str:
    caption = escape(figure.caption)
    image = f'<div class=scroll role=img aria-label="{caption}">{figure.svg()}</div>'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def absent(comparison: "Comparison", figures: list["Figure"]) -> list[str]:
    """A sentence for each figure that is left out."""
    names = {figure.name for figure in figures}
    reasons = {
        "frontier": "No figure of time against memory: fewer than two combinations have both measured.",
        "memory": "No figure of the blocks of memory: no completed run recorded them.",
        "effects": "No figure of the levers: no two combinations differ in one lever alone.",
        "curves": "No learning curves: these runs recorded no evaluations over time.",
    }
    return [reason for name, reason in reasons.items() if name not in names]


HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>What the levers cost</title>
<style>
:root { --ink: #1c1e21; --quiet: #5c6068; --paper: #fdfdfc; --line: #e2e2de; --accent: #0072b2; --warn: #b34a00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e1; --quiet: #a3a19b; --paper: #16181b; --line: #34373c; --accent: #56b4e9; --warn: #f0a860; --c0: #4ba3dc }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 }
h2 { font-size: 1.05rem; margin: 2.75rem 0 .6rem }
header p, .quiet, figcaption { color: var(--quiet) }
header p { margin: .4rem 0 0 }
.quiet, figcaption { font-size: .875rem }
.quiet h2 { color: var(--ink) }
.warning { border-left: 3px solid var(--warn); padding-left: 1rem; margin-top: 2rem }
.warning h2 { margin-top: 0; color: var(--warn) }
ul { padding-left: 1.1rem; margin: 0; max-width: 44rem }
li { margin: .35rem 0; overflow-wrap: anywhere }
li::marker { color: var(--accent) }
figure { margin: 2.5rem 0 0 }
figure svg { display: block; width: 100%; min-width: 22rem; max-width: 42rem; height: auto }
figure .scroll { border: 0 }
figure svg text { font-family: inherit !important }
figcaption { margin-top: .5rem; max-width: 44rem }
.scroll { overflow-x: auto; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .42rem .8rem .42rem 0; white-space: nowrap;
  border-top: 1px solid var(--line) }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper) }
th { font-weight: 600; color: var(--quiet); border-top: 0 }
.n { text-align: right }
td:last-child:not(.n) { white-space: normal; min-width: 16rem }
li b { font-weight: 600 }
@media (max-width: 40rem) { main { padding: 1.75rem 1rem 3rem } h1 { font-size: 1.55rem } }
</style>
<main>
"""
