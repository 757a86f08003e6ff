"""The picture: bytes per rank, sharded and replicated; divergence over steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_fsdp_toy.tasks.verify.outcomes import Verdict

__all__ = ["draw"]

# From the palette of Okabe and Ito, told apart with every kind of colour vision.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"
_PURPLE, _SKY, _RED = "#CC79A7", "#56B4E9", "#D55E00"
_COLOURS = {"a": _BLUE, "b": _ORANGE, "c": _GREEN, "d": _PURPLE, "e": _SKY, "f": _RED}
_LABELS = {
    "a": "a  replica fed the same gradient",
    "b": "b  every sharding strategy",
    "c": "c  one process",
    "d": "d  DDP",
    "e": "e  1, 2 and 4 ranks",
    "f": "f  no overlap; resumed",
}
_MARKERS = {"a": "o", "b": "s", "c": "^", "d": "D", "e": "v", "f": "P"}
_MB = 1e6


def draw(
    sizes: Mapping[str, Any], verdicts: Sequence[Verdict], world_size: int, path: Path
) -> np.ndarray[Any, Any]:
    """Draw both panels to `path` (PNG); return the pixels, (height, width, 3) of uint8."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    _draw_bytes(left, sizes, world_size)
    _draw_divergence(right, verdicts)
    figure.savefig(path)
    canvas.draw()
    pixels: np.ndarray[Any, Any] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels


def _draw_bytes(axes: Axes, sizes: Mapping[str, Any], world_size: int) -> None:
    """Left: what one rank holds between steps."""
    columns = {
        "replicated": ("replicated_bytes", "replicated_optimizer_bytes", ""),
        f"sharded\n(ranks: {world_size})": ("sharded_bytes", "optimizer_bytes", "pool_bytes"),
    }
    bottoms = [0.0] * len(columns)
    kinds = [("master weights", _BLUE, ""), ("optimizer state", _ORANGE, "//")]
    if sizes.get("pool_bytes"):
        kinds.append(("pool to gather and reduce in", _SKY, ".."))
    for index, (label, colour, hatch) in enumerate(kinds):
        heights = [(sizes.get(keys[index]) or 0) / _MB for keys in columns.values()]
        axes.bar(
            list(columns), heights, 0.6, bottoms, color=colour, hatch=hatch, edgecolor="white",
            label=label,
        )  # fmt: skip
        for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
            if height:
                middle = bottom + height / 2
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                axes.text(place, middle, f"{height:.2f}", ha="center", va="center", bbox=box)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, max(bottoms) * 1.25 or 1)
    axes.set_ylabel("bytes per rank between steps (MB = 10^6)")
    axes.set_title(f"{sizes['parameters'] / 1e6:.3f}M parameters")
    axes.legend(loc="upper right")


def _draw_divergence(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    """Right: the largest absolute difference of any weight after every step, by row."""
    rows: dict[str, dict[int, float]] = {}
    for verdict in verdicts:
        by_step = rows.setdefault(verdict.claim.row, {})
        for step, size in verdict.largest.items():
            by_step[step] = max(size, by_step.get(step, 0.0))
    names = sorted(rows)
    for index, row in enumerate(names):
        steps = sorted(rows[row])
        axes.plot(
            steps, [rows[row][step] for step in steps], color=_COLOURS[row], label=_LABELS[row],
            marker=_MARKERS[row], markevery=max(1, len(steps) // 12), markerfacecolor="none",
            markersize=14 - 2 * index, linewidth=1.5,
        )  # fmt: skip  # lines that coincide show as markers inside each other
    largest = max((max(by_step.values()) for by_step in rows.values() if by_step), default=0.0)
    is_finite = 0.0 < largest < float("inf")
    axes.set_ylim(*((-0.05 * largest, 1.4 * largest) if is_finite else (-1e-8, 1e-7)))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("largest |difference| of a weight")
    equal = all(verdict.is_equal for verdict in verdicts)
    axes.set_title("not one bit differs" if equal else "bits differ")
    if rows:
        axes.legend(ncols=2, loc="upper center")
