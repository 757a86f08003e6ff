"""What was measured: by one rank, and put together over all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_fsdp_toy.planner import ShardingSizes
from lightning_fsdp_toy.tasks.benchmark.intervals import (
    Interval,
    median_interval,
    paired_ratios,
    widest,
)
from lightning_fsdp_toy.tasks.benchmark.peak import Activations
from lightning_fsdp_toy.tasks.benchmark.variants import BASE, OURS, formula_wire_bytes

__all__ = ["Measured", "Ratios", "RankResult", "Variant", "compare", "describe_noise", "merge"]


@dataclass
class Measured:
    """What one rank measured of one variant."""

    step_s: list[float] = field(default_factory=list)  # of each round, by the slowest rank
    peak_bytes: int | None = None  # tensors
    rss_bytes: int | None = None  # of the worker's process, at most
    pss_bytes: dict[str, int] = field(default_factory=dict)  # of the same, at points of a step
    wire_bytes: int | None = None  # that this machine sent in a step, all its ranks
    sizes: ShardingSizes | None = None  # of variants of this package
    optimizer_bytes: int = 0  # of the same


@dataclass
class RankResult:
    """What one rank measured."""

    host: str
    num_parameters: int
    num_steps: int = 0  # of a turn
    variants: dict[str, Measured] = field(default_factory=dict)
    activations: dict[str, Activations] = field(default_factory=dict)  # by strategy; on rank 0
    skipped: str = ""  # why nothing was measured


@dataclass(frozen=True)
class Variant:
    """What all ranks measured of one variant.

    Attributes:
        step_s: Seconds of a step in each round.
        peak_bytes: Tensors of the rank that holds most, in a step.
        planned_peak_bytes: The same by the closed form.
        rss_bytes: Peaks of all processes of a machine, added: shared pages count several times.
        pss_bytes: All processes of a machine at the point of a step where they hold most: shared
            pages count once.
        wire_bytes: Sent by a rank in a step, as the kernel counts, headers included.
        planned_wire_bytes: The same by the formulas.
    """

    step_s: list[float]
    peak_bytes: int | None
    planned_peak_bytes: int | None
    rss_bytes: int | None
    pss_bytes: int | None
    wire_bytes: int | None
    planned_wire_bytes: int | None

    @property
    def best_step_s(self) -> float:
        """Of all rounds."""
        return min(self.step_s)


def merge(ranks: Sequence[RankResult]) -> dict[str, Variant]:
    """Put together what the ranks measured, in rank order."""
    return {name: _merge_variant(name, ranks) for name in ranks[0].variants}


def _merge_variant(name: str, ranks: Sequence[RankResult]) -> Variant:
    of_ranks = [each.variants[name] for each in ranks]
    first, world_size = of_ranks[0], len(ranks)
    hosts: dict[str, list[Measured]] = {}
    for rank, measured in zip(ranks, of_ranks, strict=True):
        hosts.setdefault(rank.host, []).append(measured)
    points = first.pss_bytes
    at_points = [_largest(hosts, partial(_at_point, point)) for point in points]
    on_wire = [
        min(_known(each.wire_bytes for each in host), default=None) for host in hosts.values()
    ]
    sent = None if None in on_wire else sum(each or 0 for each in on_wire) // world_size
    return Variant(
        step_s=first.step_s,
        peak_bytes=max(_known(each.peak_bytes for each in of_ranks), default=None),
        planned_peak_bytes=_planned_peak(name, ranks),
        rss_bytes=_largest(hosts, lambda each: each.rss_bytes),
        pss_bytes=max(_known(at_points), default=None),
        wire_bytes=sent,
        planned_wire_bytes=formula_wire_bytes(
            name, first.sizes, ranks[0].num_parameters, world_size
        ),
    )


def _at_point(point: str, measured: Measured) -> int | None:
    return measured.pss_bytes.get(point)


def _known(values: Any) -> list[int]:
    return [value for value in values if value is not None]


def _largest(
    hosts: Mapping[str, Sequence[Measured]], what: Callable[[Measured], int | None]
) -> int | None:
    """Return the sum over a machine's ranks, of the machine that has most."""
    sums = []
    for host in hosts.values():
        values = _known(what(each) for each in host)
        sums += [sum(values)] if len(values) == len(host) else []
    return max(sums, default=None)


def _planned_peak(name: str, ranks: Sequence[RankResult]) -> int | None:
    form = OURS.get(name)
    activations = None if form is None else ranks[0].activations.get(form.sharding_strategy)
    if activations is None:
        return None
    planned = [
        each.sizes.peak_bytes(each.optimizer_bytes, activations)
        for each in (rank.variants[name] for rank in ranks)
        if each.sizes is not None
    ]
    return max(planned, default=None)


Ratios = dict[str, dict[str, Interval]]
"""By base, then by the variant that is compared with it: how many times as fast the base is."""


def compare(step_s: Mapping[str, Sequence[float]]) -> Ratios:
    """Compare each variant of this package with those of others, and all with `toy_fsdp`."""
    ratios: Ratios = {}
    for base in OURS:
        if base in step_s:
            ratios[base] = {
                name: median_interval(values)
                for name, values in paired_ratios(step_s, base).items()
                if base == BASE or name not in OURS
            }
    return ratios


def describe_noise(ratios: Ratios, num_rounds: int, max_spread: float) -> str:
    """Return the line for a machine on which times vary too much; empty if they do not."""
    found = [(base, *widest(of_base)) for base, of_base in ratios.items()]
    base, name, spread = max(found, key=lambda each: each[2], default=("", "", 0.0))
    if spread <= max_spread:
        return ""
    _, low, high = ratios[base][name]
    return (
        f"too noisy: after {num_rounds} rounds the time of `{name}` is still {low:.2f} to "
        f"{high:.2f} times that of `{base}` (95 % interval, {spread:.0%} wide, at most "
        f"{max_spread:.0%} wanted): stop what else runs on this machine, leave out "
        "`benchmark.quick`, or raise `benchmark.max_rounds`, `benchmark.steps` or "
        "`benchmark.max_spread`"
    )
