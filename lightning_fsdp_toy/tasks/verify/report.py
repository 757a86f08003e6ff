"""The verdict: a table, `verify.json`, a picture, TensorBoard, and one line if bits differ."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.fit import build_all
from lightning_fsdp_toy.tasks.verify.outcomes import Outcome, Verdict
from lightning_fsdp_toy.tasks.verify.picture import draw

__all__ = ["Report", "describe_failure"]

_MB = 1e6
_MIB = 2**20


class Report:
    """All that was found, in the forms in which it is published.

    Args:
        job: The job.
        verdicts: One for each claim, in the order of the table.
        outcomes: What the ranks found, by claim.
        not_run: Claims that were left out, and why.
    """

    def __init__(
        self,
        job: Job,
        verdicts: Sequence[Verdict],
        outcomes: Sequence[Sequence[Outcome]],
        not_run: Sequence[str],
    ) -> None:
        self.job = job
        self.verdicts = verdicts
        self.not_run = not_run
        every = [outcome for of_claim in outcomes for outcome in of_claim]
        self.planted = next((o.facts["planted"] for o in every if o.facts.get("planted")), None)
        self.world_size: int = job.config["world_size"]
        # The first run of this size is the configured strategy with the first optimizer.
        base = next((of_claim for of_claim in outcomes if self._is_measured(of_claim)), [])
        measured = [outcome.sizes for outcome in base if outcome.sizes is not None]
        facts = base[0].facts if base else {}
        self.sizes: dict[str, Any] = {
            "parameters": every[0].numel if every else 0,
            "sharded_bytes": max((each.shards_bytes for each in measured), default=None),
            "replicated_bytes": facts.get("parameter_bytes"),
            "optimizer_bytes": max((each.optimizer_bytes for each in measured), default=None),
            "replicated_optimizer_bytes": facts.get("optimizer_bytes"),
            "pool_bytes": max((each.pool_bytes for each in measured), default=None),
        }

    def _is_measured(self, of_claim: Sequence[Outcome]) -> bool:
        first = of_claim[0]
        return first.sizes is not None and first.claim.world_size == self.world_size

    def publish(self, build: Build) -> None:
        """Write the files and TensorBoard, print the table."""
        self._write_json()
        picture = Path(self.job.run_dir, "verify.png")
        pixels = draw(self.sizes, self.verdicts, self.world_size, picture)
        self._log(build, pixels)
        self._print_table()
        print(f"{picture}\ntensorboard --logdir {self.job.run_dir}", flush=True)

    def _write_json(self) -> None:
        rows = [
            {
                "row": verdict.claim.row,
                "name": verdict.claim.name,
                "claim": verdict.claim.text,
                "world_size": verdict.claim.world_size,
                "optimizer": verdict.claim.optimizer,
                "steps": verdict.claim.steps[1],
                "max_divergence": verdict.max_divergence,
                "equal": verdict.is_equal,
                "first_difference": asdict(verdict.first) if verdict.first else None,
            }
            for verdict in self.verdicts
        ]
        content = {"rows": rows, **self.sizes, "not_run": self.not_run, "planted": self.planted}
        path = Path(self.job.run_dir, "verify.json")
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    def _log(self, build: Build, pixels: Any) -> None:
        """Log divergence by step, sizes and the picture."""
        scalars = {
            f"verify/{name.removesuffix('_bytes')}_mib": size / _MIB
            for name, size in self.sizes.items()
            if name.endswith("_bytes") and size is not None
        }
        for logger in build_all(build, self.job.config, "logger"):
            for verdict in self.verdicts:
                for step, size in verdict.largest.items():
                    logger.log_metrics({verdict.claim.tag: size}, step=step)
            logger.log_metrics(scalars, step=0)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("verify/picture", pixels, dataformats="HWC")
            logger.finalize("success")

    def _print_table(self) -> None:
        sizes, console = self.sizes, Console()
        if not console.is_terminal:
            console.width = 110  # files are not 80 columns wide
        table = Table(
            title=f"verify: {self.world_size} rank(s); MB are 10^6 bytes", title_justify="left"
        )
        for name in ("row", "toy_fsdp equals", "ranks", "optimizer", "steps"):
            table.add_column(name)
        table.add_column("largest divergence", justify="right")
        for verdict in self.verdicts:
            claim = verdict.claim
            cells = (claim.row, claim.text, str(claim.world_size), claim.optimizer)
            steps = str(claim.steps[1]) if claim.steps[0] < 2 else f"{claim.steps[1]} (resumed)"
            sign = "" if verdict.is_equal else "  DIFFERS"
            table.add_row(*cells, steps, f"{verdict.max_divergence:.2e}{sign}")
        console.print(table)
        console.print(f"{sizes['parameters'] / 1e6:.3f}M parameters")
        for label, own, whole in (
            ("master weights", "sharded_bytes", "replicated_bytes"),
            ("optimizer state", "optimizer_bytes", "replicated_optimizer_bytes"),
        ):
            if sizes[own] is not None:
                console.print(
                    f"{label} per rank: {sizes[own] / _MB:.2f} MB sharded, "
                    f"{sizes[whole] / _MB:.2f} MB replicated"
                )
        if sizes["pool_bytes"]:
            pool = sizes["pool_bytes"] / _MB
            console.print(f"kept to gather and reduce in per rank: {pool:.2f} MB, partly shared")
        largest = max((verdict.max_divergence for verdict in self.verdicts), default=0.0)
        console.print(f"divergence {largest:.2e}")
        for line in self.not_run:
            console.print(f"not run: {line}")


def describe_failure(verdicts: Sequence[Verdict], plant: str | None) -> str:
    """Return the line for a run in which bits differ; empty if none does."""
    unequal = [verdict for verdict in verdicts if not verdict.is_equal]
    if not verdicts:
        return "nothing was compared: no row could be run"
    if not unequal:
        return f"`verify.plant={plant}`: the fault was not noticed by any row" if plant else ""
    seen = [verdict for verdict in unequal if verdict.first is not None]
    worst = min(seen or unequal, key=lambda each: each.first.step if each.first else 0)
    rows = ", ".join(dict.fromkeys(each.claim.row for each in unequal))
    claim, first = worst.claim, worst.first
    if first is None:
        return f"row {claim.row} ({claim.text}): {worst.gap}"
    return (
        f"bits differ in row(s) {rows}: first in row {claim.row} ({claim.text}), {first.where} of "
        f"`{first.parameter}`, element {first.element}, step {first.step}, rank {first.rank} of "
        f"{claim.world_size}, by {first.size:.2e}"
    )
