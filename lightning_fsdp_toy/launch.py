"""From a composed config to a finished job: starts its ranks, runs its task.

Note: who starts the ranks.
`python train.py` starts them itself, also for `devices=1`: each job of a sweep gets fresh
processes, which receive this process's resolved config and compose nothing. Under torchrun or
SLURM the ranks exist; then rank 0 alone composes, and hands the job to the others through the
rendezvous store: time stamps are equal and one run dir is made.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning.fabric.plugins.environments import ClusterEnvironment
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_fsdp_toy.handover import given_ranks, hand_over, receive
from lightning_fsdp_toy.jobs import (
    BAD_INPUT,
    JobError,
    check_grid,
    check_single,
    make_build,
    make_job,
)
from lightning_fsdp_toy.logs import log_files, log_to_files, set_up_logging
from lightning_fsdp_toy.messages import (
    describe_config_error,
    describe_group_error,
    describe_idle_group,
    one_line,
)
from lightning_fsdp_toy.processes import RankError, redirect_output, run_ranks
from lightning_fsdp_toy.stages import run_given_stages, run_stages
from lightning_fsdp_toy.tasks import Job, Stage, StagedTask, TaskFailedError

__all__ = ["CheckBeforeRun", "cli", "launch"]

logger = logging.getLogger(__name__)

_WANTS_TRACES = os.environ.get("HYDRA_FULL_ERROR") == "1"


@dataclass(frozen=True)
class _Start:
    """All that a rank needs to run a job."""

    job: Job
    work_dir: str
    logging: dict[str, Any] | None  # Hydra's `job_logging`, for rank 0
    stage: Stage | None = None  # of a task with stages: the one to run


def launch(cfg: DictConfig) -> float | None:
    """Run one job on its ranks and return its metric, which is equal on all of them.

    Raises:
        JobError: The config was refused, or a rank failed; all ranks have ended.
        SystemExit: 128 + the signal's number, if this process was told to stop.
    """
    job = make_job(cfg)
    start = _Start(job, os.getcwd(), _job_logging())
    given, task = given_ranks(), _find_task(job)
    try:
        if isinstance(task, StagedTask):
            task.clean_up(job)  # what a run that was killed left in the same run dir
        if given is not None:
            hand_over(given, (start, _log_dir(job)))
            metric: float | None = run_job(start)
            return metric
        if isinstance(task, StagedTask):
            build = make_build(job.config)
            return run_stages(
                task, job, build, lambda stage: _start_ranks(replace(start, stage=stage))
            )
        metric = _start_ranks(start)[0]
        return metric
    except (ValueError, TaskFailedError) as error:
        raise JobError(one_line(error)) from error


def _log_dir(job: Job) -> str:
    """Where ranks other than 0 write their output."""
    return os.path.join(job.run_dir, "ranks")


def _find_task(job: Job) -> Any:
    """Return the function, or the `StagedTask`, that the job runs."""
    task: Any = hydra.utils.get_method(job.config["task"]["_target_"])
    return task() if isinstance(task, type) and issubclass(task, StagedTask) else task


def _start_ranks(start: _Start) -> list[Any]:
    """Run a job, or one stage of it, in new ranks and return what they returned."""
    job, stage = start.job, start.stage
    options, log_dir = job.config["launch"], _log_dir(job)
    try:
        return run_ranks(
            run_job,
            start,
            num_ranks=job.config["devices"] if stage is None else stage.num_ranks,
            log_dir=log_dir,
            num_threads=options["num_threads"],
            max_restarts=options["max_restarts"],
            shutdown_timeout_s=options["shutdown_timeout"],
        )
    except RankError as error:
        log = (
            os.path.join(log_dir, f"rank_{error.rank}.log")
            if error.rank
            else (log_files() or [job.run_dir])[0]
        )
        trace = error.trace if _WANTS_TRACES or not error.is_expected else ""
        log_to_files(error.trace or error.message)
        message = f"{error.message} (rank {error.rank}, log: {log})"
        raise JobError(message, error.exit_code, trace) from None


def run_job(start: _Start) -> Any:
    """Run a job's task, or one stage of it, on this rank."""
    job = start.job
    given = given_ranks()  # the elastic launcher's ranks count as given, too
    set_up_logging(given.global_rank() if given is not None else 0, start.logging)
    os.chdir(start.work_dir)
    last = os.path.join(job.run_dir, "checkpoints", "last.ckpt")
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and os.path.exists(last):
        job.config["ckpt_path"] = last
        logger.warning("started again after a failure: resuming from %s", last)
    task, build = _find_task(job), make_build(job.config)
    if not isinstance(task, StagedTask):
        result = task(job, build)
    elif start.stage is not None:
        result = task.run_stage(job, build, start.stage)
    else:
        rank, size = (given.global_rank(), given.world_size()) if given is not None else (0, 1)
        result = run_given_stages(task, job, build, rank, size)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _follow(given: ClusterEnvironment) -> int:
    """Run what rank 0 hands over; return the exit code."""
    start, log_dir = receive(given)
    if start is None:
        return BAD_INPUT  # rank 0 has said why
    terminal = os.fdopen(os.dup(2), "w")
    redirect_output(log_dir, given.global_rank())
    try:
        run_job(start)
    except (ValueError, RuntimeError) as error:
        traceback.print_exc()
        log = os.path.join(log_dir, f"rank_{given.global_rank()}.log")
        message = f"{one_line(error)} (rank {given.global_rank()}, log: {log})"
        print(f"error: {message}", file=terminal, flush=True)
        return 1
    return 0


class CheckBeforeRun(Callback):
    """Hydra callback: refuses a config that cannot run before a folder is made for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the config of a single run."""
        self._check(check_single, config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check all jobs of a grid before the first one starts."""
        self._check(check_grid, config)

    @staticmethod
    def _check(check: Callable[[DictConfig], None], config: DictConfig) -> None:
        try:
            check(config)
        except JobError as error:
            # Not an `Exception`: Hydra would turn that into a warning.
            raise SystemExit(_report(error)) from None


def run(cfg: DictConfig) -> float | None:
    """What `train.py` runs as Hydra's task function: `launch`, with errors said in a line."""
    try:
        return launch(cfg)
    except JobError as error:
        exit_code = _report(error)
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN:
            raise SystemExit(exit_code) from None
        raise  # the sweep decides whether other jobs run


def cli(main: Callable[[], Any], config_dir: Path) -> None:
    """Run Hydra's `main`; whatever is wrong with the config is said in one line.

    Args:
        main: Function decorated with `hydra.main`.
        config_dir: Where its config is, to suggest keys.
    """
    given = given_ranks()
    if given is not None and given.global_rank() != 0:
        sys.exit(_follow(given))
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing
    exit_code = 0
    try:
        if given is not None and {"-m", "--multirun"} & set(sys.argv[1:]):
            raise HydraException("a sweep starts its own ranks: run it without torchrun and SLURM")
        main()
    except KeyboardInterrupt:
        exit_code = 130  # 128 + SIGINT
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except JobError as error:
        exit_code = error.exit_code  # said when it happened
    except (HydraException, OmegaConfBaseException) as error:
        message = describe_idle_group(error, config_dir)
        message = message or describe_config_error(error, _known_keys(config_dir))
        trace = traceback.format_exc() if _WANTS_TRACES else ""
        exit_code = _report(JobError(message, BAD_INPUT, trace))
    except (ValueError, OSError) as error:
        # Hydra lets these through: a group set to no option, a folder that cannot be made.
        message = describe_group_error(sys.argv[1:], config_dir) or one_line(error)
        if isinstance(error, OSError) and error.filename:
            message = (
                f"cannot use {error.filename!r}: {error.strerror}; check `hydra.run.dir` (of a "
                "sweep `hydra.sweep.dir`)"
            )
        trace = traceback.format_exc() if _WANTS_TRACES else ""
        exit_code = _report(JobError(message, BAD_INPUT, trace))
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
    if exit_code == BAD_INPUT and given is not None:
        hand_over(given, (None, ""))
    sys.exit(exit_code)


def _report(error: JobError) -> int:
    """Say what went wrong on the terminal; return the exit code."""
    trace = error.trace or (traceback.format_exc() if _WANTS_TRACES else "")
    if trace:
        print(trace, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _known_keys(config_dir: Path) -> list[str]:
    """All dotted keys of the config with the groups that the command line chooses."""
    chosen = [
        override
        for override in sys.argv[1:]
        for group, _, option in [override.partition("=")]
        if (config_dir / group / f"{option}.yaml").is_file()
    ]
    with hydra.initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
        cfg = hydra.compose("train", overrides=chosen)

    def walk(node: Any, prefix: str) -> list[str]:
        if not isinstance(node, dict):
            return [prefix]
        found = [prefix] if prefix else []
        for name, value in node.items():
            found += walk(value, f"{prefix}.{name}" if prefix else str(name))
        return found

    return walk(OmegaConf.to_container(cfg, resolve=False), "")


def _job_logging() -> dict[str, Any] | None:
    """Hydra's logging set-up of this job."""
    if not HydraConfig.initialized():
        return None
    config: Any = OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True)
    return config if config and config.get("root") is not None else None
