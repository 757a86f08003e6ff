"""How the pictures are drawn: figures from recordings, plans and layouts. No files, no logger.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; what a
colour means is also written, hatched or in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_fsdp_toy.monitors.recording import Recording, Span
from lightning_fsdp_toy.monitors.timeline import compute_spans, unit_spans
from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.memory import KINDS

__all__ = ["COLORS", "bytes_figure", "memory_figure", "ownership_figure", "units_figure"]

MIB = 2**20
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_STATES = {
    "sharded": ("#E5E5E5", None),
    "all-gather": (COLORS[1], "///"),
    "unsharded": (COLORS[4], None),
    "computing": (COLORS[0], None),
    "reducing": (COLORS[5], "..."),
}
_MAX_ROWS = 24  # units that a picture shows; the others are said to be there
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


def units_figure(recording: Recording, world_size: int) -> Figure:
    """Draw what every unit did in the recorded steps, over time."""
    units = recording.units[:_MAX_ROWS]
    start_s, end_s = recording.steps[0].start_s, recording.steps[-1].end_s
    figure, axes = _figure(11, 1.6 + 0.42 * (len(units) + 1))
    for row, unit in enumerate(units):
        for span in unit_spans(recording, unit):
            is_inner = span.name in ("computing", "reducing")
            _bar(axes, row, span, start_s, 0.42 if is_inner else 0.8)
    phases = [s for s in compute_spans(recording) if s.name.endswith(f" {recording.units[0]}")]
    for span in [*phases, *recording.optimizer]:
        name = span.name.split(" ")[0]
        at = 1e3 * (span.start_s - start_s)
        width = 1e3 * (span.end_s - span.start_s)
        axes.barh(len(units), width, left=at, height=0.7, color="white", edgecolor="black")
        is_narrow = width < 50 * (end_s - start_s)  # less than a twentieth
        if is_narrow:  # below its bar
            axes.text(at + width, len(units) + 0.4, name, ha="right", va="top", fontsize=9)
        else:
            axes.text(at + width / 2, len(units), name, ha="center", va="center", fontsize=9)
    axes.set_yticks(range(len(units) + 1), [*units, "phase"])
    axes.set_ylim(len(units) + 0.85, -0.6)
    axes.set_xlim(0, 1e3 * (end_s - start_s))
    axes.set_xlabel("time in the step (ms)")
    more = len(recording.units) - len(units)
    note = f", {more} more units not shown" if more else ""
    axes.set_title(
        f"Units over one step: rank {recording.rank} of {world_size}, {_batches(recording)}{note}"
    )
    legend = [
        Patch(facecolor=color, hatch=hatch, edgecolor="black", label=name)
        for name, (color, hatch) in _STATES.items()
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return figure


def memory_figure(recording: Recording, planned: Mapping[str, float]) -> Figure:
    """Draw the bytes held over the recorded steps, stacked by kind, with the formula's maximum.

    Args:
        recording: of one rank.
        planned: bytes by kind, as ``monitors.planned.plan`` returns them.
    """
    start_s, end_s = recording.steps[0].start_s, recording.steps[-1].end_s
    order = ("shards", "optimizer", "gradients", "unsharded", "reduce", "pool", "activations")
    times = [1e3 * (max(sample.time_s, start_s) - start_s) for sample in recording.samples]
    times.append(1e3 * (end_s - start_s))
    held = [dict(zip(KINDS, sample.held, strict=True)) for sample in recording.samples]
    held.append(held[-1])
    series = [[each[kind] / MIB for each in held] for kind in order]
    figure, axes = _figure(11, 5.2)
    axes.stackplot(
        times,
        series,
        labels=order,
        colors=[COLORS[index] for index in (0, 2, 3, 4, 5, 6, 7)],
        step="post",
    )
    if "peak" in planned:
        bound = planned["peak"] / MIB
        axes.axhline(bound, color="black", linestyle="--", linewidth=1.5)
        text = f"formula: at most {bound:.2f} MiB without activations"
        axes.annotate(
            *(text, (0.01, bound)),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            va="bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    counted = max(sum(v for k, v in each.items() if k != "activations") for each in held)
    axes.set_title(
        f"Tensor memory over one step: rank {recording.rank}, {_batches(recording)}; "
        f"without activations at most {counted / MIB:.2f} MiB"
    )
    axes.set_xlim(0, times[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in the step (ms)")
    axes.set_ylabel("tensor bytes held (MiB)")
    figure.legend(loc="outside lower center", ncols=len(order), frameon=False)
    return figure


def bytes_figure(recording: Recording, planned: Mapping[str, float]) -> Figure:
    """Draw what others got of a rank in one step by operation, beside the formula's."""
    counted = dict.fromkeys(_OPERATIONS, 0)
    for record in recording.collectives:
        # A validation may come between the micro-batches of a step.
        is_inside = any(s.start_s <= record.start_s <= s.end_s for s in recording.steps)
        if is_inside and record.operation in counted:
            counted[record.operation] += record.sent_bytes
    figure, axes = _figure(8, 4.4)
    pairs: list[tuple[str, list[float], int, str | None]] = [
        ("counted", [counted[name] / MIB for name in _OPERATIONS], 0, None),
    ]
    if planned:
        formula = [planned.get(name, 0) / MIB for name in _OPERATIONS]
        pairs.append(("formula", formula, 1, "///"))
    for label, values, number, hatch in pairs:
        places = [index + 0.4 * number - 0.2 for index in range(len(values))]
        bars = axes.bar(places, values, 0.38, color=COLORS[number], hatch=hatch, label=label)
        axes.bar_label(bars, fmt="%.3f", padding=2)
    axes.set_xticks(range(len(_OPERATIONS)), [name.replace("_", "-") for name in _OPERATIONS])
    axes.set_ylabel("others get of a rank in an optimizer step (MiB)")
    most = max(value for _, values, _, _ in pairs for value in values)
    axes.set_ylim(0, 1.15 * most or 1)  # nobody gets anything of a single rank
    axes.set_title(f"Communication of one step: rank {recording.rank}, {_batches(recording)}")
    axes.legend(frameon=False)
    return figure


def ownership_figure(root: RootState) -> Figure:
    """Draw every flat parameter with its parameters, and which rank owns which part."""
    flats = list(root.flats)
    shown = flats[:_MAX_ROWS]
    figure, axes = _figure(11, 1.8 + 0.5 * len(shown))
    num_ranks = root.mesh.shards.world_size
    for row, flat in enumerate(shown):
        layout = flat.layout
        for rank in range(num_ranks):
            low, high = layout.shard_bounds(rank)
            color = COLORS[rank % len(COLORS)]
            axes.barh(
                row, high - low, left=low, height=0.8, color=color, alpha=0.75, edgecolor="white"
            )
            axes.text(low, row - 0.22, f" rank {rank}", ha="left", va="center", fontsize=8)
        for slot in layout.slots:
            axes.plot([slot.offset] * 2, [row - 0.4, row + 0.4], color="black", linewidth=0.8)
            if slot.numel > 0.06 * max(each.layout.padded_numel for each in shown):
                name = ".".join(slot.fqn.split(".")[-2:])
                at = slot.offset + slot.numel / 2
                axes.text(at, row + 0.22, name, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [flat.name for flat in shown])
    axes.invert_yaxis()
    axes.set_xlabel("element of the flat parameter (lines: where a parameter begins)")
    more = f", {len(flats) - len(shown)} more not shown" if len(flats) > len(shown) else ""
    replicas = root.mesh.replicas
    if replicas is None:
        ranks = f"{num_ranks} rank(s)"
    else:
        ranks = (
            f"{num_ranks} rank(s) of a shard group, the same in all {replicas.world_size} groups"
        )
    axes.set_title(f"Who owns which slice: {ranks}{more}")
    return figure


def _batches(recording: Recording) -> str:
    """The batches that were recorded, in words."""
    first, last = recording.steps[0].name, recording.steps[-1].name
    return first if first == last else f"{first} to {last.rpartition(' ')[2]}"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _bar(axes: Axes, row: int, span: Span, start_s: float, height: float) -> None:
    color, hatch = _STATES[span.name]
    axes.barh(
        row,
        1e3 * (span.end_s - span.start_s),
        left=1e3 * (span.start_s - start_s),
        height=height,
        color=color,
        hatch=hatch,
        edgecolor="black" if hatch else color,
        linewidth=0.3,
    )
