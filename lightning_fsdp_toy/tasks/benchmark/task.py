"""The task: its stages, and the report in the end."""

import shutil
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from lightning_fsdp_toy.tasks import Build, Job, StagedTask, TaskFailedError
from lightning_fsdp_toy.tasks.benchmark.lightning_job import scratch_dir
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions, check_config
from lightning_fsdp_toy.tasks.benchmark.outcomes import RankResult
from lightning_fsdp_toy.tasks.benchmark.report import Report
from lightning_fsdp_toy.tasks.benchmark.scaling import ScalingReport, scaling_stages
from lightning_fsdp_toy.tasks.benchmark.stage import BenchmarkStage, StageRun

__all__ = ["Benchmark"]


class Benchmark(StagedTask):
    """Times one training step of every variant, in turns."""

    config_key = "benchmark"

    @override
    def check_options(self, config: dict[str, Any]) -> None:
        BenchmarkOptions.of(config)

    @override
    def check(self, job: Job, build: Build) -> None:
        check_config(job, build)

    @override
    def stages(self, job: Job, build: Build) -> list[BenchmarkStage]:
        options = BenchmarkOptions.of(job.config)
        if options.scaling is not None:
            return scaling_stages(job, options)
        return [BenchmarkStage(job.config["world_size"])]

    @override
    def run_stage(self, job: Job, build: Build, stage: BenchmarkStage) -> RankResult:
        return StageRun(job, build, stage).run()

    @override
    def report(
        self, job: Job, build: Build, results: Sequence[tuple[BenchmarkStage, list[Any] | None]]
    ) -> float | None:
        if BenchmarkOptions.of(job.config).scaling is not None:
            curves = ScalingReport(job, results)
            curves.publish()
            if not curves.points:
                raise TaskFailedError(f"nothing was measured: {'; '.join(curves.skipped)}")
            return curves.step_s
        [(_, ranks)] = results
        assert ranks is not None, "the one stage is that of the job's own ranks"
        report = Report(job, ranks)
        report.publish(build)
        if report.noise:
            raise TaskFailedError(report.noise)
        return report.step_s

    @override
    def clean_up(self, job: Job) -> None:
        shutil.rmtree(scratch_dir(job), ignore_errors=True)
