"""Growth: seconds of a step against the size of the model, or the number of ranks.

Note: what the formulas explain
    With the same micro-batch a rank computes the same on any number of ranks, so what grows with
    ranks are the bytes it sends, (N - 1) / N of 3 (FULL_SHARD) or 2 (DDP) model sizes, and the
    share of a core that it gets. With the model's size everything grows in proportion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_fsdp_toy.tasks import Job
from lightning_fsdp_toy.tasks.benchmark.fitting import SIZES_OF_SCALING
from lightning_fsdp_toy.tasks.benchmark.options import RANKS, SIZES, BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import RankResult, Variant, merge
from lightning_fsdp_toy.tasks.benchmark.picture import COLOURS, save
from lightning_fsdp_toy.tasks.benchmark.report import write_json
from lightning_fsdp_toy.tasks.benchmark.stage import BenchmarkStage
from lightning_fsdp_toy.tasks.benchmark.variants import BASE

__all__ = ["ScalingReport", "scaling_stages"]

_RANKS = (1, 2, 4, 8)
_MIB = 2**20
_MARKERS = ("o", "s", "D", "^")


def scaling_stages(job: Job, options: BenchmarkOptions) -> list[BenchmarkStage]:
    """Return one stage for each point of the curve."""
    config = job.config
    if options.scaling == RANKS:
        most = torch.cuda.device_count() if config["accelerator"] == "cuda" else max(_RANKS)
        return [BenchmarkStage(size, is_scaling=True) for size in _RANKS if size <= most]
    stages = []
    for width, layers in SIZES_OF_SCALING:
        sizes = {"d_model": width, "num_layers": layers}
        if "dim_feedforward" in config["model"]:
            sizes["dim_feedforward"] = 4 * width
        stages.append(BenchmarkStage(config["world_size"], tuple(sizes.items()), is_scaling=True))
    return stages


@dataclass(frozen=True)
class _Point:
    """What was measured at one size."""

    num_parameters: int
    num_ranks: int
    variants: dict[str, Variant]


class ScalingReport:
    """The curves, in the forms in which they are published.

    Args:
        job: The job.
        results: For each stage, what its ranks measured; None if it was not run.
    """

    def __init__(
        self, job: Job, results: Sequence[tuple[BenchmarkStage, list[RankResult] | None]]
    ) -> None:
        self.job = job
        self.options = BenchmarkOptions.of(job.config)
        self.points: list[_Point] = []
        self.skipped: list[str] = []
        for stage, ranks in results:
            if ranks is None:
                size = job.config["world_size"]
                self.skipped.append(f"{stage.num_ranks} rank(s): started with {size}")
            elif ranks[0].skipped:
                self.skipped.append(ranks[0].skipped)
            else:
                number = ranks[0].num_parameters
                self.points.append(_Point(number, stage.num_ranks, merge(ranks)))

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step of `toy_fsdp` at the last point."""
        return median(self.points[-1].variants[BASE].step_s) if self.points else None

    def publish(self) -> None:
        """Write the files, print the table."""
        write_json(Path(self.job.run_dir, "scaling.json"), self._content())
        if self.points:
            picture = Path(self.job.run_dir, "scaling.png")
            self.draw(picture)
            console = Console()
            if not console.is_terminal:
                console.width = 120
            console.print(self._table())
            print(picture)
        for line in self.skipped:
            print(f"not run: {line}", flush=True)

    def _content(self) -> dict[str, Any]:
        return {
            "by": self.options.scaling,
            "workload": self.options.workload,
            "points": [
                {
                    "parameters": point.num_parameters,
                    "world_size": point.num_ranks,
                    "variants": {
                        name: {
                            "step_s": each.step_s,
                            "wire_bytes": each.wire_bytes,
                            "planned_wire_bytes": each.planned_wire_bytes,
                        }
                        for name, each in point.variants.items()
                    },
                }
                for point in self.points
            ],
            "skipped": self.skipped,
        }

    def _table(self) -> Table:
        table = Table(title=f"{self.options.workload}: milliseconds of a step (MiB sent by a rank)")
        table.title_justify = "left"
        for name in ("parameters", "ranks", *self.points[0].variants):
            table.add_column(name, justify="right")
        for point in self.points:
            cells = []
            for each in point.variants.values():
                sent = "" if each.wire_bytes is None else f" ({each.wire_bytes / _MIB:,.1f})"
                cells.append(f"{1e3 * median(each.step_s):,.1f}{sent}")
            table.add_row(f"{point.num_parameters / 1e6:.1f}M", str(point.num_ranks), *cells)
        return table

    def draw(self, path: Path) -> Any:
        """Draw seconds, and beside them bytes, to `path` (PNG); return the pixels."""
        figure = Figure(figsize=(12, 4.8), dpi=110, layout="constrained")
        left, right = figure.subplots(1, 2)
        is_by_size = self.options.scaling == SIZES
        places = [
            point.num_parameters / 1e6 if is_by_size else point.num_ranks for point in self.points
        ]
        for index, name in enumerate(self.points[0].variants):
            of_points = [point.variants[name] for point in self.points]
            marker, colour = _MARKERS[index % len(_MARKERS)], COLOURS[name]
            middle = [median(each.step_s) for each in of_points]
            low = [mid - min(each.step_s) for mid, each in zip(middle, of_points, strict=True)]
            high = [max(each.step_s) - mid for mid, each in zip(middle, of_points, strict=True)]
            left.errorbar(
                places, middle, (low, high), color=colour, marker=marker, capsize=3, label=name
            )
            _draw_bytes(right, places, of_points, name, marker, colour)
        for axes in (left, right):
            axes.set_xscale("log", base=10 if is_by_size else 2)
            axes.set_xlabel("million parameters" if is_by_size else "ranks")
            axes.legend()
        left.set_yscale("log")
        left.set_ylabel("seconds of a step: median, least, most")
        left.set_title(f"{self.options.workload}, float32")
        right.set_yscale("symlog", linthresh=1)
        right.set_ylim(bottom=-0.2)
        right.set_ylabel("MiB sent by a rank in a step")
        right.set_title("filled: counted by the kernel; line: formula")
        return save(figure, path)


def _draw_bytes(
    axes: Any, places: Sequence[float], of_points: Sequence[Variant], name: str, marker: str,
    colour: str,
) -> None:  # fmt: skip
    """Bytes sent: those counted as markers, those of the formula as a line."""
    counted = [
        (at, each.wire_bytes / _MIB)
        for at, each in zip(places, of_points, strict=True)
        if each.wire_bytes is not None
    ]
    planned = [
        (at, each.planned_wire_bytes / _MIB)
        for at, each in zip(places, of_points, strict=True)
        if each.planned_wire_bytes is not None
    ]
    if counted:
        axes.plot(*zip(*counted, strict=True), marker, color=colour, label=name)
    if planned:
        axes.plot(*zip(*planned, strict=True), "-", color=colour, linewidth=1)
