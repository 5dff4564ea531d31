"""Plots of what the benchmarks wrote, as PNG and SVG.

tripwire and torch.compile have one colour each, everywhere; what neither of them made is grey.
A bar is the median of the rounds, and the thin line on it goes from the lowest to the highest; in
steady state, where there are many rounds, over their middle half. Of hits the lowest figures are
drawn, which their aims are held against.
The same figures give the same files: no dates of drawing, no names that vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import NoFigure, Place, SideFailed, describe_run, read_document

OURS, THEIRS, OTHERS, RANGE = "#1f6fb4", "#e0802b", "#9aa0a6", "#333333"
COLOURS = {
    "tripwire": OURS,
    "tripwire.trace": OURS,
    "trace": OURS,
    "torch.compile": THEIRS,
    "Dynamo capture": THEIRS,
}
NAMES = {
    "trace": "tripwire.trace",
    "Dynamo capture": "torch.compile\n(Dynamo capture)",
    "make_fx, real": "make_fx",
    "eager": "plain run",
}
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "tripwire",
    "savefig.dpi": 160,
}
WIDE = 9.0  # inches


def draw_all(folder: Path) -> Iterator[Path]:
    """Draw each plot whose figures are there, and yield its files."""
    drawn: dict[str, Callable[[], Figure]] = {
        "capture": draw_capture,
        "hit": draw_hits,
        "start": draw_start,
        "steady": draw_steady,
        "memory": draw_memory,
    }
    with mpl.rc_context(STYLE):
        for name, draw in drawn.items():
            try:
                figure = draw()
            except NoFigure as reason:
                print(f"no plot of {name}: {reason}")
                continue
            for ending, nothing in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"bench-{name}.{ending}"
                figure.savefig(path, metadata=nothing)
                yield path


# --- the plots -------------------------------------------------------------------------------


def draw_capture() -> Figure:
    """Time to capture, by side."""
    figure, panels = _build_panels("trace", 2, height=3.6)
    settings = read_document("trace")["settings"]
    titles = {
        "qwen3": f"Qwen3, {settings['layers']} layers",
        "blocks": f"{settings['blocks']} plain blocks",
    }
    for axes, (model, title) in zip(panels, titles.items(), strict=True):
        labels = [row["label"] for row in read_document("trace")["figures"][model]]
        labels.remove("trace + codegen")
        _draw_rows(axes, [(label, Place.of("trace", model, label)) for label in labels], _seconds)
        axes.set_title(title)
        axes.set_xlabel("time to capture, seconds")
    panels[1].tick_params(labelleft=False)
    return figure


def draw_hits() -> Figure:
    """The cost of a hit against the model's depth."""
    figure, (axes,) = _build_panels("dispatch", 1, height=3.6)
    depths = (9, 36, 72)
    for side in ("tripwire", "torch.compile"):
        places = [Place.of("dispatch", "hits", f"Qwen3, {n} layers", side) for n in depths]
        rounds = [[1e6 * value for value in place.read()] for place in places]
        lowest = [*map(min, rounds)]
        colour = COLOURS[side]
        axes.fill_between(depths, lowest, [*map(max, rounds)], color=colour, alpha=0.15, lw=0)
        axes.plot(depths, lowest, marker="o", color=colour)
        for depth, low in zip(depths, lowest, strict=True):
            _annotate(axes, _short(low), (depth, low), (0, -16), ha="center")
        end = (depths[-1], lowest[-1])
        _annotate(axes, side, end, (14, 0), va="center", color=colour, weight="bold")
    axes.set_yscale("log")
    axes.set_ylim(1, 5000)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, 92)
    axes.set_xticks(depths)
    axes.set_title("A compiled call without its compiled code")
    axes.set_xlabel("layers of Qwen3")
    axes.set_ylabel("µs per call, lowest\n(band: all rounds)")
    return figure


def draw_start() -> Figure:
    """The first call in a new process: cold, and warm with the share of imports."""
    figure, panels = _build_panels("start", 2, height=3.0)
    layers = read_document("start")["settings"]["layers"]
    labels = ("eager", "tripwire", "torch.compile")
    for axes, caches in zip(panels, ("cold", "warm"), strict=True):
        _draw_rows(
            axes, [(s, Place.of("start", caches, "first call", s)) for s in labels], _seconds
        )
        for row, label in enumerate(labels):
            bare = median(Place.of("start", caches, "without imports", label).read())
            whole = median(Place.of("start", caches, "first call", label).read())
            axes.barh(row, whole - bare, left=bare, height=0.62, color="white", alpha=0.5)
        axes.set_title(f"{caches} caches, {layers} layers")
        axes.set_xlabel("first call, seconds (pale: imports)")
    panels[1].tick_params(labelleft=False)
    return figure


def draw_steady() -> Figure:
    """A call with Inductor's code, by depth."""
    figure, panels = _build_panels("steady", 2, height=3.4)
    depths = [f"{layers} layers" for layers in read_document("steady")["settings"]["layers"]]
    labels = ("eager", "tripwire", "torch.compile")
    for axes, mode in zip(panels, ("inference", "training"), strict=True):
        for number, label in enumerate(labels):
            places = [Place.of("steady", mode, depth, label) for depth in depths]
            rounds = [[1e3 * value for value in place.read()] for place in places]
            spots = [at + (number - 1) * 0.28 for at in range(len(depths))]
            middles = [*map(median, rounds)]
            name, colour = NAMES.get(label, label), COLOURS.get(label, OTHERS)
            axes.bar(spots, middles, width=0.26, color=colour, label=name)
            for spot, middle, values in zip(spots, middles, rounds, strict=True):
                low, _, high = quantiles(values, n=4)
                axes.plot([spot, spot], [low, high], color=RANGE, lw=1)
                _annotate(axes, _short(middle), (spot, high), (0, 3), ha="center")
        axes.set_xticks(range(len(depths)), depths)
        axes.set_title("inference" if mode == "inference" else "training step")
        axes.set_ylabel("ms per call, median\n(line: middle half)")
        axes.margins(y=0.12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return figure


def draw_memory() -> Figure:
    """Peak memory: while tracing, and of a process at its first call."""
    figure, panels = _build_panels("memory", 3, height=2.6)
    for axes, mode in zip(panels, ("inference", "training"), strict=False):
        rows = [
            (side, Place.of("memory", mode, "resident set", side)) for side in ("eager", "trace")
        ]
        _draw_rows(axes, rows, _mebibytes)
        axes.set_title(f"traced run, {mode}")
        axes.set_xlabel("peak growth, MiB")
    labels = ("eager", "tripwire", "torch.compile")
    rows = [(side, Place.of("start", "cold", "peak memory", side)) for side in labels]
    _draw_rows(panels[2], rows, _mebibytes)
    panels[2].set_title("process, cold first call")
    panels[2].set_xlabel("peak of the process, MiB")
    panels[1].tick_params(labelleft=False)
    return figure


# --- parts -----------------------------------------------------------------------------------


def _build_panels(file: str, count: int, *, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Axes side by side, and below them when and with what the figures were made."""
    figure = Figure(figsize=(WIDE, height), layout="constrained")
    figure.supxlabel(describe_run(file), x=0.995, ha="right", size=8, color="#666666")
    return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def _draw_rows(
    axes: Axes, rows: Sequence[tuple[str, Place]], show: Callable[[float], tuple[float, str]]
) -> None:
    """A horizontal bar for each side, the first on top; `show` gives its length and its words."""
    for row, (label, place) in enumerate(rows):
        try:
            values = place.read()
        except SideFailed as reason:
            _annotate(axes, str(reason), (0, row), (5, 0), va="center_baseline")
            continue
        length, words = show(median(values))
        low, high = (show(value)[0] for value in (min(values), max(values)))
        axes.barh(row, length, height=0.62, color=COLOURS.get(label, OTHERS))
        axes.plot([low, high], [row, row], color=RANGE, lw=1)
        _annotate(axes, words, (high, row), (5, 0), va="center_baseline")
    axes.set_yticks(range(len(rows)), [NAMES.get(label, label) for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.22)


def _annotate(
    axes: Axes, text: str, spot: tuple[float, float], shift: tuple[int, int], **style: Any
) -> None:
    """Put a text at some points from a spot."""
    axes.annotate(text, spot, shift, textcoords="offset points", **style)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> tuple[float, str]:
    return value, f"{_short(value)} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def _mebibytes(value: float) -> tuple[float, str]:
    return value / 2**20, _short(value / 2**20)
