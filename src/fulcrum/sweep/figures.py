"""The figures of a comparison, drawn by matplotlib without its global state: as PNG, and as SVG that a page can dress.

An option has one colour in all figures (Okabe and Ito's palette, told apart by colour-blind readers too). Text, axes
and neutral marks are drawn in one ink. In the SVG the ink is `currentColor` and the colours are --c0, --c1 …, which the
page may set.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .groups import Effect, Group
from .rows import OFF, Row
from .verdict import WORDS, error, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from .comparison import Comparison

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
INK = "#010203"  # a colour nobody picks: in SVG it becomes currentColor
FAINT = 0.25
SIZE = 10  # of text, in points
MOST_LABELS = 24  # with more points the frontier alone is labelled
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

# The options of each lever in a fixed order, so that an option keeps its colour from one comparison to the next.
ORDER = {
    "precision": ("fp32", "bf16", "fp16", "tf32"),
    "parallelism": ("single", "ddp"),
    "accumulation": ("none", "x2", "x4", "x8"),
    "checkpointing": ("none", "block", "stage"),
    "lora": ("none", "r4", "r8", "r16"),
}


class Figure:
    """A drawn figure. caption: what it shows, in words."""

    def __init__(self, name: str, caption: str, canvas: "Canvas") -> None:
        self.name, self.caption, self.canvas = name, caption, canvas

    def png(self) -> bytes:
        out = io.BytesIO()
        self.canvas.savefig(out, format="png", dpi=150)
        return out.getvalue()

    def svg(self) -> str:
        """One <svg> element: text as text, ids of its own, the ink left to the page, no reference to the outside."""
        from matplotlib import rc_context

        out = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.canvas.savefig(out, format="svg", transparent=True)
        svg = out.getvalue()[out.getvalue().index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
        svg = re.sub(r'\bid="', f'id="{self.name}-', svg)
        svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        for number, color in enumerate(PALETTE):
            svg = svg.replace(color, f"var(--c{number}, {color})")
        return svg.replace(INK, "currentColor")


def draw(comparison: "Comparison") -> list[Figure]:
    """The figures there are data for."""
    made = (frontier(comparison), memory(comparison), effects(comparison), curves(comparison))
    return [figure for figure in made if figure is not None]


class Style:
    """Colours by the first lever that varies, markers and dashes by the second; both by combination where none does."""

    def __init__(self, groups: list[Group], *, prefer: Sequence[str] = ()) -> None:
        """prefer: levers to have marks and dashes, if they vary."""
        varying = [lever for lever, off in OFF.items() if len({each.choices.get(lever, off) for each in groups}) > 1]
        self.lever = varying[0] if varying else None
        self.second = next((lever for lever in [*prefer, *varying] if lever in varying[1:]), None)
        self.labels = [each.label for each in groups]

    def color(self, group: Group) -> str:
        if self.lever is None:
            return PALETTE[self.labels.index(group.label) % len(PALETTE)]
        return option_color(self.lever, group.choices.get(self.lever, OFF[self.lever]))

    def number(self, group: Group) -> int:
        """Of the marker and of the dashes."""
        if self.second is None:
            return 0 if self.lever else self.labels.index(group.label) // len(PALETTE)
        return option_number(self.second, group.choices.get(self.second, OFF[self.second]))

    def legend(self, canvas: "Canvas", groups: list[Group], *, lines: bool) -> None:
        """What colours and marks stand for, above the axes."""
        from matplotlib.lines import Line2D

        handles = []
        for lever in filter(None, (self.lever, self.second)):
            for group in {each.choices.get(lever, OFF[lever]): each for each in groups}.values():
                number = self.number(group) if lever == self.second else 0
                look: dict[str, Any] = {"linestyle": DASHES[number % len(DASHES)]}
                if not lines:
                    look = {"linestyle": "none", "marker": MARKERS[number % len(MARKERS)]}
                color = self.color(group) if lever == self.lever else INK
                handles.append(Line2D([], [], color=color, label=f"{lever} {group.choices.get(lever, OFF[lever])}", **look))
        if handles:
            legend_above(canvas, handles)


def legend_above(canvas: "Canvas", handles: list[Any]) -> None:
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": SIZE, "ncols": min(4, len(handles))}
    look |= {"columnspacing": 1.1, "handletextpad": 0.4, "handlelength": 1.5}
    canvas.legend(handles=handles, loc="outside upper left", **look)


def option_number(lever: str, option: str) -> int:
    known = ORDER.get(lever, (OFF[lever],))  # of a lever that is not listed the off option alone has its place
    return known.index(option) if option in known else len(known)


def option_color(lever: str, option: str) -> str:
    return PALETTE[option_number(lever, option) % len(PALETTE)]


# -- time against memory


def frontier(comparison: "Comparison") -> Figure | None:
    quantity = comparison.time_quantity
    groups = [each for each in comparison.comparable() if None not in (each.mean(quantity), each.mean("peak_mib"))]
    if len(groups) < 2:
        return None
    style = Style(groups)
    canvas, (axes,) = blank(6.2, 4.6)
    best = [each for label in comparison.frontier for each in groups if each.label == label]
    axes.plot([xy(each, quantity)[0] for each in best], [xy(each, quantity)[1] for each in best], color=INK, alpha=0.45, lw=1.2)
    for each in groups:
        x, y = xy(each, quantity)
        axes.errorbar(
            x,
            y,
            xerr=each.measured[quantity].spread,
            yerr=each.measured["peak_mib"].spread,
            fmt=MARKERS[style.number(each) % len(MARKERS)],
            color=style.color(each),
            alpha=1 if each in best else 0.7,
            ms=9 if each in best else 7,
            elinewidth=1,
        )
    if comparison.budget_gib is not None:
        axes.axhline(1024 * comparison.budget_gib, color=INK, alpha=0.5, lw=1, ls=(0, (4, 3)))
    axes.set_xlabel("step time, ms" if quantity == "step_ms" else "time an image, ms")
    axes.set_ylabel("peak memory, MiB")
    axes.margins(0.14)
    axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    style.legend(canvas, groups, lines=False)
    points = [(*xy(each, quantity), each.label, each in best) for each in groups]
    place_labels(axes, points if len(points) <= MOST_LABELS else [point for point in points if point[3]])
    caption = "Time against memory: down and to the left is better. The line joins the frontier, named in bold."
    caption += "" if comparison.budget_gib is None else f" Dashed: the budget of {comparison.budget_gib:g} GiB."
    return Figure("frontier", caption, canvas)


def xy(group: Group, quantity: str) -> tuple[float, float]:
    x, y = group.mean(quantity), group.mean("peak_mib")
    assert x is not None and y is not None
    return x, y


def place_labels(axes: "Axes", points: list[tuple[float, float, str, bool]]) -> None:
    """Writes each label where it covers nothing, near its point; one that fits nowhere is left out, frontier first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    sheet = FigureCanvasAgg(axes.figure)  # type: ignore[arg-type]
    sheet.draw()
    renderer = sheet.get_renderer()
    taken: list[Bbox] = []
    for x, y, _, _ in points:
        px, py = axes.transData.transform((x, y))
        taken.append(Bbox.from_extents(px - 8, py - 8, px + 8, py + 8))
    for x, y, label, matters in sorted(points, key=lambda point: not point[3]):
        for dx, dy, ha, va in OFFSETS:
            text = axes.annotate(
                label,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=SIZE,
                color=INK,
                fontweight="bold" if matters else "normal",
                arrowprops={"arrowstyle": "-", "color": INK, "alpha": 0.35, "lw": 0.7} if abs(dy) > 12 or abs(dx) > 12 else None,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line to the point
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


# Where a label may stand, in points from its point: beside it, above, below, then further and further away.
OFFSETS = [
    (dx * reach, dy * reach, ha, va)
    for reach in (1, 2, 3.2, 4.6)
    for dx, dy, ha, va in (
        (9, 0, "left", "center"),
        (-9, 0, "right", "center"),
        (0, 9, "center", "bottom"),
        (0, -9, "center", "top"),
        (7, 7, "left", "bottom"),
        (7, -7, "left", "top"),
        (-7, 7, "right", "bottom"),
        (-7, -7, "right", "top"),
    )
]


# -- the blocks of memory


# In the order in which they lie on each other: what is there between steps, then what a step brings.
BLOCK_COLORS = {
    "data_mib": INK,  # no lever reaches it
    "parameters_mib": PALETTE[0],
    "buffers_mib": PALETTE[4],
    "optimizer_mib": PALETTE[2],
    "gradients_mib": PALETTE[1],
    "activations_mib": PALETTE[3],
}
MOST_BARS = 24


def memory(comparison: "Comparison") -> Figure | None:
    """A bar of blocks for each combination, with marks where the peak was and where it was predicted."""
    known = [each for each in comparison.groups if any(each.mean(block) for block in BLOCK_COLORS)]
    if not known:
        return None
    shown = sorted(sorted(known, key=Group.num_pulled)[:MOST_BARS], key=known.index)
    blocks = [block for block in BLOCK_COLORS if any(each.mean(block) for each in shown)]
    canvas, (axes,) = blank(6.2, 1.3 + 0.3 * len(shown))
    ends = [0.0] * len(shown)
    for block in blocks:
        sizes = [each.mean(block) or 0.0 for each in shown]
        look: dict[str, Any] = {"color": BLOCK_COLORS[block], "alpha": 0.3 if block == "data_mib" else 0.85}
        axes.barh(range(len(shown)), sizes, left=ends, height=0.56, lw=0, label=block.removesuffix("_mib"), **look)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    marks: dict[str, dict[str, Any]] = {
        "peak_mib": {"marker": "|", "ms": 16, "mew": 2, "label": "peak"},
        "predicted_peak_mib": {"marker": "o", "ms": 8, "mew": 1.2, "mfc": "none", "label": "predicted peak"},
    }
    for quantity, look in marks.items():
        peaks = [(value, row) for row, each in enumerate(shown) if (value := each.mean(quantity)) is not None]
        if peaks:
            axes.plot(*zip(*peaks, strict=True), color=INK, ls="none", **look)
    for row, each in enumerate(shown):
        text = "" if (peak := each.mean("peak_mib")) is None else short(peak)
        text += "" if (off_by := each.mean("prediction_error")) is None else f"  {error(off_by)}"
        ends[row] = max(ends[row], *(each.mean(quantity) or 0.0 for quantity in marks))
        axes.annotate(text, (ends[row], row), (9, 0), textcoords="offset points", va="center", fontsize=SIZE, color=INK)
    axes.set_xlim(0, 1.32 * max(ends))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(range(len(shown)), [each.label for each in shown])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("memory, MiB")
    legend_above(canvas, axes.get_legend_handles_labels()[0])
    caption = "Memory block by block, with the measured peak in MiB. The blocks are not all there at the same moment, while "
    caption += "kernels, and recomputation under checkpointing, take more: the peak may lie on either side of where they end."
    if any(each.mean("prediction_error") is not None for each in shown):
        caption += " In percent: the error of the predicted peak."
    if len(shown) < len(known):
        caption += f" Shown: the {len(shown)} of {len(known)} combinations with the fewest levers pulled."
    return Figure("memory", caption, canvas)


# -- what each lever does


def effects(comparison: "Comparison") -> Figure | None:
    """Bars from 1, on a logarithmic axis: half and double are equally long."""
    known = [each for each in comparison.effects if any(each.ratio[key] for key in (comparison.time_quantity, "peak_mib"))]
    quantities = [key for key in (comparison.time_quantity, "peak_mib") if any(each.ratio[key] for each in known)]
    if not known:
        return None
    style = Style(comparison.groups)
    canvas, panels = blank(6.2, 1.0 + 0.34 * len(known), columns=len(quantities))
    pairs = [pair for each in known for key in quantities if (pair := each.extremes[key])]
    # Half the axis in powers of two, with room for the numbers beside the bars.
    reach = 0.25 + 1.25 * max(0.3, *(abs(math.log2(value)) for pair in pairs for value in pair))
    step = math.ceil(reach / 2.5) if reach > 1 else 0.5  # between ticks: five have room
    for axes, quantity in zip(panels, quantities, strict=True):
        for row, effect in enumerate(known):
            bar(axes, row, effect, quantity, option_color(effect.lever, effect.option) if effect.lever == style.lever else INK)
        axes.set_xscale("log", base=2)
        axes.set_xlim(2**-reach, 2**reach)
        axes.set_xticks([2 ** (power * step) for power in range(-2, 3) if abs(power * step) <= reach])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}×")
        axes.minorticks_off()
        axes.axvline(1, color=INK, lw=1)
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_yticks(
            range(len(known)), [f"{each.lever} {each.option}" for each in known] if axes is panels[0] else [""] * len(known)
        )
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_title(WORDS[quantity], fontsize=SIZE, color=INK, loc="left")
    caption = "What each option does to time and memory against the lever off, all else equal: left of 1 is better. "
    caption += "Whiskers: the smallest and the largest pair. Pale: within noise, or under 1 %."
    return Figure("effects", caption, canvas)


def bar(axes: "Axes", row: int, effect: Effect, quantity: str, color: str) -> None:
    value, extremes = effect.ratio[quantity], effect.extremes[quantity]
    if value is None or extremes is None:
        axes.text(1, row, " not measured", va="center", fontsize=SIZE, color=INK, alpha=0.6)
        return
    alpha = (0.85 if color != INK else 0.55) if effect.differs[quantity] else FAINT
    axes.barh(row, value - 1, left=1, height=0.56, color=color, alpha=alpha, lw=0)
    if effect.num_pairs > 1:
        axes.plot(extremes, (row, row), color=INK, alpha=0.6, lw=1)
    end = max(value, *extremes) if value >= 1 else min(value, *extremes)
    side, shift = ("left", 4) if value >= 1 else ("right", -4)
    axes.annotate(
        f"{value:.2f}", (end, row), (shift, 0), textcoords="offset points", ha=side, va="center", fontsize=SIZE, color=INK
    )


# -- accuracy on the way


def curves(comparison: "Comparison") -> Figure | None:
    groups = [each for each in comparison.groups if any(points(row, "samples") for row in members(each, comparison))]
    axis = [(key, title) for key, title in AXES if any(points(row, key) for each in groups for row in members(each, comparison))]
    if not axis:
        return None
    moved = sorted(comparison.effects, key=lambda each: abs(each.accuracy_difference or 0), reverse=True)
    style = Style(groups, prefer=[each.lever for each in moved])  # marks for the lever that moves accuracy most
    canvas, panels = blank(6.2, 3.3, columns=len(axis))
    for axes, (key, title) in zip(panels, axis, strict=True):
        for each in groups:
            for row in members(each, comparison):
                dashes = DASHES[style.number(each) % len(DASHES)]
                look: dict[str, Any] = {"color": style.color(each), "ls": dashes, "lw": 1.1, "alpha": 0.8, "marker": "o", "ms": 2}
                if known := points(row, key):
                    axes.plot(*zip(*known, strict=True), **look)
        for target in {row.target_accuracy for row in comparison.rows if row.target_accuracy is not None}:
            axes.axhline(target, color=INK, alpha=0.5, lw=1, ls=(0, (4, 3)))
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        if axes is not panels[0]:
            axes.tick_params(labelleft=False)
            axes.set_ylim(panels[0].get_ylim())
    style.legend(canvas, groups, lines=True)
    caption = "Accuracy at each evaluation, a line for each run, over the work done and over the time spent on training."
    return Figure("curves", caption, canvas)


MOST_POINTS = 300
AXES = (("samples", "images trained on"), ("train_s", "seconds of training"))


def members(group: Group, comparison: "Comparison") -> list[Row]:
    return [row for row in comparison.rows if row.run in group.runs]


def points(row: Row, key: str) -> list[tuple[float, float]]:
    """As many as a figure can show, the last one among them."""
    known = [(each.get(key), each.get("accuracy")) for each in row.evaluations]
    whole = [(x, y) for x, y in known if x is not None and y is not None]
    every = -(-len(whole) // MOST_POINTS) or 1
    return whole[::-every][::-1]


# -- the sheet


def blank(width: float, height: float, *, columns: int = 1) -> "tuple[Canvas, list[Axes]]":
    """An empty figure and its axes side by side, drawn in ink on nothing."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), layout="constrained", facecolor="white")
    panels = list(canvas.subplots(1, columns, squeeze=False)[0])
    for axes in panels:
        axes.set_facecolor("none")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(INK)
            axes.spines[side].set_alpha(0.4)
        axes.tick_params(colors=INK, labelsize=SIZE)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(color=INK, alpha=0.08, lw=0.8)
        axes.set_axisbelow(True)
    return canvas, panels
