"""The task: its stages, and the verdict in the end."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from lightning_fsdp_toy.models import count_parameters
from lightning_fsdp_toy.tasks import Build, Job, StagedTask, TaskFailedError
from lightning_fsdp_toy.tasks.verify.families import (
    VerifyStage,
    planned_stages,
    scratch_dir,
)
from lightning_fsdp_toy.tasks.verify.options import VerifyOptions, check_config
from lightning_fsdp_toy.tasks.verify.outcomes import Outcome, merge
from lightning_fsdp_toy.tasks.verify.report import Report, describe_failure
from lightning_fsdp_toy.tasks.verify.runs import StageRuns
from lightning_fsdp_toy.tasks.verify.trajectory import check_disk

__all__ = ["Verify"]


class Verify(StagedTask):
    """Trains in every form and compares all weights bit for bit after every step."""

    config_key = "verify"

    @override
    def check_options(self, config: dict[str, Any]) -> None:
        VerifyOptions.of(config)

    @override
    def check(self, job: Job, build: Build) -> None:
        check_config(job, build)

    @override
    def stages(self, job: Job, build: Build) -> list[VerifyStage]:
        options = VerifyOptions.of(job.config)
        with torch.device("meta"):
            numel = count_parameters(build("model")).total
        check_disk(scratch_dir(job), options.steps, numel)
        return planned_stages(job, options)[0]

    @override
    def run_stage(self, job: Job, build: Build, stage: VerifyStage) -> list[Outcome]:
        return StageRuns(job, build, stage).run()

    @override
    def report(
        self, job: Job, build: Build, results: Sequence[tuple[VerifyStage, list[Any] | None]]
    ) -> float:
        by_claim = [
            list(of_ranks)
            for _, ranks in results
            if ranks is not None
            for of_ranks in zip(*ranks, strict=True)
        ]
        options = VerifyOptions.of(job.config)
        verdicts = sorted((merge(each) for each in by_claim), key=lambda each: each.claim.row)
        report = Report(job, verdicts, by_claim, _not_run(job, options, results))
        report.publish(build)
        failure = describe_failure(verdicts, options.plant)
        if failure:
            raise TaskFailedError(failure)
        return max((verdict.max_divergence for verdict in verdicts), default=0.0)

    @override
    def clean_up(self, job: Job) -> None:
        shutil.rmtree(scratch_dir(job), ignore_errors=True)


def _not_run(
    job: Job, options: VerifyOptions, results: Sequence[tuple[VerifyStage, list[Any] | None]]
) -> list[str]:
    """Say which claims were left out, and why."""
    world_size = job.config["world_size"]
    _, reason = planned_stages(job, options)
    lines = []
    if reason:
        rows = " and ".join(row for row in ("e", "f (resume)") if row[0] in options.rows)
        lines.append(f"rows {rows}: {reason}")
    missing = sorted({stage.num_ranks for stage, ranks in results if ranks is None})
    for num_ranks in missing:
        lines.append(f"rows e, f (resume) on {num_ranks} rank(s): started with {world_size} ranks")
    if "d" in options.rows and world_size > 2:
        lines.append(
            f"row d with Lightning's stock DDP: on {world_size} ranks it adds in another order"
        )
    return lines
