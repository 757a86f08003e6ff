"""The outcome: tables, `benchmark.json`, a picture, TensorBoard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import (
    RankResult,
    Ratios,
    Variant,
    compare,
    describe_noise,
    merge,
)
from lightning_fsdp_toy.tasks.benchmark.picture import draw
from lightning_fsdp_toy.tasks.benchmark.variants import BASE
from lightning_fsdp_toy.tasks.fit import build_all

__all__ = ["Report", "write_json"]

_MIB = 2**20


class Report:
    """All that was measured, in the forms in which it is published.

    Args:
        job: The job.
        ranks: What its ranks measured, in rank order.
    """

    def __init__(self, job: Job, ranks: Sequence[RankResult]) -> None:
        self.job = job
        self.options = BenchmarkOptions.of(job.config)
        self.num_parameters = ranks[0].num_parameters
        self.num_steps = ranks[0].num_steps
        self.variants: dict[str, Variant] = merge(ranks)
        step_s = {name: each.step_s for name, each in self.variants.items()}
        self.num_rounds = len(step_s[BASE])
        ratios = compare(step_s)
        self.noise = describe_noise(ratios, self.num_rounds, self.options.max_spread)
        self.ratios: Ratios = {} if self.noise else ratios

    @property
    def step_s(self) -> float:
        """Median seconds of a step of `toy_fsdp`."""
        return median(self.variants[BASE].step_s)

    def publish(self, build: Build) -> None:
        """Write the files and TensorBoard, print the tables."""
        write_json(Path(self.job.run_dir, "benchmark.json"), self._content())
        picture = Path(self.job.run_dir, "benchmark.png")
        pixels = draw(self.variants, self._title(), picture)
        self._log(build, pixels)
        console = Console()
        if not console.is_terminal:
            console.width = 120  # files are not 80 columns wide
        if not self.noise:
            console.print(self._speed_table())
        console.print(self._size_table())
        print(f"{picture}\ntensorboard --logdir {self.job.run_dir}", flush=True)

    def _content(self) -> dict[str, Any]:
        config = self.job.config
        ratios, best = self.ratios.get(BASE, {}), self.variants[BASE].best_step_s
        return {
            "workload": self.options.workload,
            "rounds": self.num_rounds,
            "variants": {
                name: asdict(variant) | {"best_step_s": variant.best_step_s}
                for name, variant in self.variants.items()
            },
            "ratios": {name: list(interval) for name, interval in ratios.items()},
            "best_ratios": {name: self.variants[name].best_step_s / best for name in ratios},
            "ratios_of_others": {
                base: {name: list(interval) for name, interval in of_base.items()}
                for base, of_base in self.ratios.items()
                if base != BASE
            },
            "too_noisy": self.noise or None,
            "parameters": self.num_parameters,
            "world_size": config["world_size"],
            "accelerator": config["accelerator"],
            "threads": config["launch"]["num_threads"],
            "steps_of_a_turn": self.num_steps,
            "batch": [config["data"]["batch_size"], config["data"]["seq_len"]],
            "quick": self.options.quick,
        }

    def _title(self) -> str:
        data = self.job.config["data"]
        return (
            f"{self.options.workload}: {self.num_parameters / 1e6:.2f}M parameters, "
            f"{data['batch_size']} x {data['seq_len']} tokens a rank, "
            f"{self.job.config['world_size']} rank(s), {self.num_rounds} rounds"
        )

    def _log(self, build: Build, pixels: Any) -> None:
        """Log seconds by round, sizes, ratios and the picture."""
        scalars = {
            f"benchmark/{name}/{key.removesuffix('_bytes')}_mib": size / _MIB
            for name, variant in self.variants.items()
            for key, size in asdict(variant).items()
            if key.endswith("_bytes") and size is not None
        }
        for name, interval in self.ratios.get(BASE, {}).items():
            scalars[f"benchmark/{name}/ratio"] = interval.median
        for logger in build_all(build, self.job.config, "logger"):
            for name, variant in self.variants.items():
                for number, seconds in enumerate(variant.step_s):
                    logger.log_metrics({f"benchmark/{name}/step_s": seconds}, step=number)
            logger.log_metrics(scalars, step=0)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("benchmark/picture", pixels, dataformats="HWC")
            logger.finalize("success")

    def _speed_table(self) -> Table:
        table = Table(title=self._title(), title_justify="left")
        table.add_column("variant")
        for name in ("step, ms", "best, ms", "best x", *(f"x {base}" for base in self.ratios)):
            table.add_column(name, justify="right")
        best = self.variants[BASE].best_step_s
        for name, variant in self.variants.items():
            intervals = [of_base.get(name) for of_base in self.ratios.values()]
            cells = [
                "" if each is None else f"{each.median:.2f} [{each.low:.2f}, {each.high:.2f}]"
                for each in intervals
            ]
            times = f"{1e3 * median(variant.step_s):.1f}", f"{1e3 * variant.best_step_s:.1f}"
            table.add_row(name, *times, f"{variant.best_step_s / best:.2f}", *cells)
        table.caption = (
            "x: its time by that of the column's, median of rounds and 95 % interval; above 1: "
            "the column's is faster"
        )
        table.caption_justify = "left"
        return table

    def _size_table(self) -> Table:
        table = Table(title="MiB (2^20 bytes)", title_justify="left")
        table.add_column("variant")
        columns = ("tensors, peak", "closed form", "RSS", "PSS", "sent in a step", "formula")
        for name in columns:
            table.add_column(name, justify="right")
        for name, variant in self.variants.items():
            values = (
                *(variant.peak_bytes, variant.planned_peak_bytes),
                *(variant.rss_bytes, variant.pss_bytes),
                *(variant.wire_bytes, variant.planned_wire_bytes),
            )
            table.add_row(name, *(_mib(value) for value in values))
        table.caption = "tensors, bytes sent: of a rank; RSS, PSS: all ranks of a machine"
        table.caption_justify = "left"
        return table


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / _MIB:,.2f}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file; complete or not at all."""
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
