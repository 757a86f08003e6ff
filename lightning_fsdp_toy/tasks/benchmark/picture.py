"""The picture: seconds of a step in every round, memory, bytes sent."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_fsdp_toy.tasks.benchmark.outcomes import Variant
from lightning_fsdp_toy.tasks.benchmark.variants import VARIANTS

__all__ = ["COLOURS", "draw", "save"]

# From the palette of Okabe and Ito, told apart with every kind of colour vision.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"
_PURPLE, _SKY, _RED = "#CC79A7", "#56B4E9", "#D55E00"
_YELLOW, _GREY = "#F0E442", "#777777"
COLOURS = dict(
    zip(VARIANTS, (_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PURPLE, _GREY, _YELLOW), strict=True)
)
_MIB = 2**20

Values = Sequence[int | None]


def draw(variants: Mapping[str, Variant], title: str, path: Path) -> np.ndarray[Any, Any]:
    """Draw three panels to `path` (PNG); return the pixels, (height, width, 3) of uint8."""
    figure = Figure(figsize=(14, 4.8), dpi=110, layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    _draw_times(left, variants)
    _draw_memory(middle, variants)
    _draw_wire(right, variants)
    return save(figure, path)


def save(figure: Figure, path: Path) -> np.ndarray[Any, Any]:
    """Write a figure to `path` (PNG); return the pixels, (height, width, 3) of uint8."""
    canvas = FigureCanvasAgg(figure)
    figure.savefig(path)
    canvas.draw()
    pixels: np.ndarray[Any, Any] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels


def _draw_times(axes: Axes, variants: Mapping[str, Variant]) -> None:
    """Left: a dot for every round, a bar for the median."""
    for place, (name, variant) in enumerate(variants.items()):
        milliseconds = [1e3 * each for each in variant.step_s]
        axes.bar(place, median(milliseconds), 0.7, color=COLOURS[name], alpha=0.45)
        offsets = np.linspace(-0.25, 0.25, len(milliseconds))  # in the order of rounds
        axes.plot(place + offsets, milliseconds, ".", color="black", markersize=4)
    axes.set_ylabel("milliseconds of a step")
    axes.set_title("every round (dots), their median (bar)")
    _name_places(axes, variants)


def _draw_memory(axes: Axes, variants: Mapping[str, Variant]) -> None:
    """Middle: three measures of memory, side by side."""
    kinds: tuple[tuple[str, Callable[[Variant], int | None], str, str], ...] = (
        ("tensors of a rank, peak", lambda each: each.peak_bytes, _BLUE, ""),
        ("PSS of all ranks", lambda each: each.pss_bytes, _ORANGE, "//"),
        ("RSS of all ranks, peaks added", lambda each: each.rss_bytes, _SKY, ".."),
    )
    for index, (label, value, colour, hatch) in enumerate(kinds):
        places = [place + 0.27 * (index - 1) for place in range(len(variants))]
        heights = [(value(each) or 0) / _MIB for each in variants.values()]
        axes.bar(places, heights, 0.25, color=colour, hatch=hatch, edgecolor="white", label=label)
    planned = [each.planned_peak_bytes for each in variants.values()]
    _mark(axes, planned, -0.27, "closed form of the peak")
    axes.set_ylabel("MiB")
    axes.set_title("memory in a step")
    _leave_room(axes)
    _name_places(axes, variants)


def _draw_wire(axes: Axes, variants: Mapping[str, Variant]) -> None:
    """Right: bytes that the kernel counted, and what the formulas say."""
    for place, (name, variant) in enumerate(variants.items()):
        axes.bar(place, (variant.wire_bytes or 0) / _MIB, 0.7, color=COLOURS[name], alpha=0.7)
    planned = [each.planned_wire_bytes for each in variants.values()]
    _mark(axes, planned, 0, "formula")
    axes.set_ylabel("MiB sent by a rank in a step")
    axes.set_title("on the wire")
    _leave_room(axes)
    _name_places(axes, variants)


def _mark(axes: Axes, values: Values, offset: float, label: str) -> None:
    """Mark the values that there are."""
    known = [(place + offset, each / _MIB) for place, each in enumerate(values) if each is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "D", color="black", markersize=6, label=label)


def _leave_room(axes: Axes) -> None:
    """Room for the legend above what is drawn."""
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1] or 1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right")


def _name_places(axes: Axes, variants: Mapping[str, Variant]) -> None:
    axes.set_xticks(range(len(variants)), list(variants), rotation=35, ha="right")
