"""Runs the stages of a task, see Note: stages in `tasks`."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_fsdp_toy.tasks import Build, Job, Stage, StagedTask

__all__ = ["run_given_stages", "run_stages"]


def run_stages(
    task: StagedTask, job: Job, build: Build, start_ranks: Callable[[Stage], list[Any]]
) -> float | None:
    """Run every stage in ranks of its own and report; called where no ranks are given.

    Args:
        task: The task.
        job: Its job.
        build: Makes what the job's config describes.
        start_ranks: Runs one stage on `stage.num_ranks` new ranks and returns what they returned.
    """
    try:
        stages = task.stages(job, build)
        return task.report(job, build, [(stage, start_ranks(stage)) for stage in stages])
    finally:
        task.clean_up(job)


def run_given_stages(
    task: StagedTask, job: Job, build: Build, rank: int, world_size: int
) -> float | None:
    """Run the stages for `world_size` ranks; called on all of them. Rank 0 reports."""
    results: list[tuple[Stage, list[Any] | None]] = []
    try:
        for stage in task.stages(job, build):
            is_run = stage.num_ranks == world_size
            results.append((stage, _run_here(task, job, build, stage) if is_run else None))
        return task.report(job, build, results) if rank == 0 else None
    finally:
        if rank == 0:
            task.clean_up(job)


def _run_here(task: StagedTask, job: Job, build: Build, stage: Stage) -> list[Any]:
    """Run a stage in this process, which is one of its ranks; return what all ranks returned."""
    result = task.run_stage(job, build, stage)
    if not dist.is_initialized():
        return [result]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    return gathered
