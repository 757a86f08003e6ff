"""From a composed config to a checked job; here, and where jobs start, Hydra is known."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra

# Hydra has no public way to list the jobs of a grid.
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_fsdp_toy.handover import given_ranks, layout
from lightning_fsdp_toy.messages import describe_config_error, naming, one_line
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.checks import (
    absolute_paths,
    check_devices,
    check_job,
    choose_accelerator,
)

__all__ = ["BAD_INPUT", "JobError", "check_grid", "check_single", "make_build", "make_job"]

BAD_INPUT = 2  # exit code


class JobError(RuntimeError):
    """A job failed; the message is the line for the user.

    Args:
        message: What happened and what to do.
        exit_code: What the program should end with.
        trace: Traceback of the rank that failed, if it is of use to the reader.
    """

    def __init__(self, message: str, exit_code: int = 1, trace: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.trace = trace


def make_job(cfg: DictConfig, run_dir: str | None = None) -> Job:
    """Resolve and check a composed config.

    Raises:
        JobError: A line that names the key and the remedy.
    """
    given = given_ranks()
    try:
        cfg = cfg.copy()
        _check_computed(cfg)
        with open_dict(cfg):
            if run_dir is not None:
                cfg.run_dir = run_dir
            if given is not None:
                cfg.devices, cfg.num_nodes = layout(given)
            check_devices({"devices": cfg.devices, "num_nodes": cfg.num_nodes})
            if cfg.num_nodes > 1 and given is None:
                raise ValueError(
                    f"`num_nodes={cfg.num_nodes}`: start one process per rank on every machine "
                    "with torchrun or SLURM, such as `torchrun --nnodes=2 --nproc-per-node=8 "
                    "train.py`; alone, `train.py` starts ranks on its own machine only"
                )
            cfg.accelerator = choose_accelerator(str(cfg.accelerator), cfg.devices)
            cfg.world_size = cfg.devices * cfg.num_nodes
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        is_hydra = HydraConfig.initialized()
        absolute_paths(config, HydraConfig.get().runtime.cwd if is_hydra else os.getcwd())
        choices = dict(HydraConfig.get().runtime.choices) if is_hydra else {}
        for group in ("task", "strategy"):
            node = config.get(group)
            name = node["_target_"] if isinstance(node, dict) and "_target_" in node else node
            choices.setdefault(group, str(name).rpartition(".")[2])
        job = Job(config, choices, config["run_dir"])
        check_job(job, make_build(config))
    except (ValueError, OmegaConfBaseException) as error:
        text = describe_config_error(error, ()) if isinstance(error, OmegaConfBaseException) else ""
        raise JobError(text or one_line(error), BAD_INPUT) from error
    return job


def _check_computed(cfg: DictConfig) -> None:
    """Refuse keys of the command line that are computed when a job starts."""
    given: Any = OmegaConf.to_container(cfg, resolve=False)
    size, run_dir = given.get("world_size"), str(given.get("run_dir"))
    if size is not None:
        raise ValueError(
            f"`world_size={size}` is computed: leave it out and set `devices`, `num_nodes`"
        )
    if HydraConfig.initialized() and not run_dir.startswith("${"):
        raise ValueError(
            f"`run_dir={run_dir}` is computed: leave it out and set `hydra.run.dir`, or "
            "`hydra.sweep.dir` in a sweep"
        )


def make_build(config: dict[str, Any]) -> Build:
    """Return the function that makes the object that `config` describes under a dotted key."""
    return _Builder(config)


@dataclass(frozen=True)
class _Builder:
    """Makes what a config describes; picklable, for processes that a task starts."""

    config: dict[str, Any]

    def __call__(self, key: str, **extra: Any) -> Any:
        node: Any = self.config
        for name in key.split("."):
            node = node[name]
        with naming(key):
            if not extra:
                return hydra.utils.instantiate(node, _convert_="all")
            # Not as arguments of `instantiate`: it would copy the model.
            return hydra.utils.instantiate(node, _convert_="all", _partial_=True)(**extra)


def check_single(config: DictConfig) -> None:
    """Check a single run of which Hydra gives the whole config.

    Raises:
        JobError: A line that names the key and the remedy.
    """
    _check_folder(config.hydra.run.dir, "hydra.run.dir")
    _check_composed(config)


def check_grid(config: DictConfig) -> None:
    """Check all jobs of a sweep over a grid.

    Other sweepers choose their jobs as they go; those are checked when they start.

    Raises:
        JobError: A line that names the job, the key and the remedy.
    """
    _check_folder(config.hydra.sweep.dir, "hydra.sweep.dir")
    if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
        return
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    # As they were written: an interpolation in one is for the job it is in.
    written: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    given = [*params, *written["task"]]
    [jobs] = BasicSweeper.split_arguments(
        OverridesParser.create().parse_overrides(given), max_batch_size=None
    )
    for number, overrides in enumerate(jobs):
        try:
            composed = hydra.compose(
                config.hydra.job.config_name,
                [*written["hydra"], *overrides],
                return_hydra_config=True,
            )
            _check_composed(composed)
        except (JobError, HydraException, OmegaConfBaseException) as error:
            text = str(error) if isinstance(error, JobError) else describe_config_error(error, ())
            raise JobError(f"job {number} of the sweep: {text}", BAD_INPUT) from None


def _check_folder(path: str, key: str) -> None:
    """Refuse a folder that cannot be made."""
    for folder in (Path(path).absolute(), *Path(path).absolute().parents):
        if folder.exists():
            if not folder.is_dir():
                raise JobError(f"`{key}={path}`: {folder} is a file; name a folder", BAD_INPUT)
            return


def _check_composed(config: DictConfig) -> None:
    """Check a config that Hydra composed, its own part included."""
    hydra_config = HydraConfig.instance()
    before = hydra_config.cfg
    hydra_config.set_config(config)
    try:
        cfg = config.copy()
        with open_dict(cfg):
            del cfg["hydra"]
        make_job(cfg, run_dir="")
    finally:
        hydra_config.cfg = before
