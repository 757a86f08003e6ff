"""Refuses a config that cannot run, before a rank starts and before anything is written.

Every refusal is a `ValueError` of one line that names the key and what to do instead.
"""

import difflib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.data import MicroBatchDataModule
from lightning_fsdp_toy.messages import naming
from lightning_fsdp_toy.monitors import Timeline
from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks import Build, Job, StagedTask
from lightning_fsdp_toy.tasks.arguments import check_arguments, check_targets, find_target
from lightning_fsdp_toy.tasks.check_checkpoint import check_checkpoint
from lightning_fsdp_toy.tasks.check_sharding import check_policies, check_sharding

__all__ = ["PRECISIONS", "absolute_paths", "check_job", "choose_accelerator"]

logger = logging.getLogger(__name__)

PRECISIONS = (
    *("32-true", "16-true", "bf16-true", "64-true", "16-mixed", "bf16-mixed"),
    *("32", "16", "bf16", "64"),  # Lightning's short forms
)
KEYS = {  # of conf/train.yaml
    *("task", "model", "data", "strategy", "optimizer", "trainer", "logger", "callbacks"),
    *("devices", "num_nodes", "accelerator", "precision", "seed", "ckpt_path"),
    *("lit_module", "launch", "run_dir", "world_size", "trace"),
}
_OPTIONAL = {"logger", "callbacks", "ckpt_path", "trace"}
_NOT_OF_TRAINER = {"strategy", "devices", "num_nodes", "accelerator", "precision"}
_NOT_OF_TRAINER |= {"logger", "callbacks"}
_ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


def choose_accelerator(accelerator: str, devices: int) -> str:
    """Return `cpu`, `cuda` or `mps` for the key `accelerator`.

    `auto` means the GPUs where there are enough for `devices`, else the CPU.

    Raises:
        ValueError: There is no such accelerator, or not enough of it.
    """
    if accelerator not in _ACCELERATORS:
        names = ", ".join(_ACCELERATORS)
        raise ValueError(f"`accelerator={accelerator}` is unknown: choose one of {names}")
    num_gpus = torch.cuda.device_count()
    if accelerator == "auto":
        if 0 < num_gpus < devices:
            logger.warning(
                "`devices=%d`, but this machine has %d GPU(s): running on the CPU; "
                "use `devices=%d` to run on the GPU(s)",
                *(devices, num_gpus, num_gpus),
            )
        return "cuda" if num_gpus >= devices else "cpu"
    if accelerator == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("`accelerator=mps`: not available here; use `accelerator=cpu`")
        if devices > 1:
            raise ValueError(
                f"`accelerator=mps` has one device and no collectives, got `devices={devices}`: "
                "use `accelerator=cpu`, or `devices=1 strategy=single`"
            )
        return "mps"
    if accelerator == "cpu":
        return "cpu"
    if devices > num_gpus:
        raise ValueError(
            f"`devices={devices}` is more than the {num_gpus} GPU(s) of this machine: use "
            + (f"`devices={num_gpus}` or `accelerator=cpu`" if num_gpus else "`accelerator=cpu`")
        )
    return "cuda"


def absolute_paths(config: dict[str, Any], directory: str) -> None:
    """Make the user's relative paths absolute, in place: they are relative to `directory`."""

    def absolute(path: Any) -> Any:
        path = os.path.expanduser(path) if isinstance(path, str) else path
        return os.path.join(directory, path) if isinstance(path, str) else path

    data = config.get("data") or {}
    if data.get("files") is not None:
        files = data["files"]
        data["files"] = [absolute(f) for f in files] if isinstance(files, list) else absolute(files)
    config["ckpt_path"] = absolute(config.get("ckpt_path"))


def check_devices(config: dict[str, Any]) -> None:
    """Refuse what is not a number of ranks."""
    for key in ("devices", "num_nodes"):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"`{key}={value}`: expected a whole number of at least 1, such as `{key}=2`"
            )


def check_job(job: Job, build: Build) -> None:
    """Refuse a job that cannot run; builds its parts without weights to find out.

    Raises:
        ValueError: Names the key and the remedy.
    """
    config = job.config
    task = _task_of(config)
    own_key = task.config_key if task is not None else ""
    _check_groups(config, own_key)
    if task is not None:
        task.check_options(config)
    for key, node in config.items():
        if key not in ("task", own_key):
            check_targets(node, key)
    _check_named(config, "logger")
    _check_named(config, "callbacks")
    for name, node in (config.get("callbacks") or {}).items():
        if node is not None and node["_target_"].startswith("lightning_fsdp_toy.monitors."):
            build(f"callbacks.{name}")  # which checks their numbers
    _check_scalars(config)
    if config["strategy"] == "auto" and config["world_size"] > 1:
        raise ValueError(
            f"`strategy=single` runs in one process, got `devices={config['devices']}`: use "
            "`devices=1`, or another strategy such as `strategy=toy_fsdp`"
        )
    data = build("data")
    with torch.device("meta"):
        model = build("model")
    _check_sizes(config, data)
    strategy: Any = config["strategy"]
    if isinstance(strategy, dict):
        check_policies(strategy, model)
        strategy = build("strategy")
        _check_strategy(config, strategy)
    make_optimizer = build("optimizer")
    with naming("optimizer"):
        optimizer = make_optimizer([nn.Parameter(torch.zeros(1))])
    if isinstance(strategy, ToyFSDPStrategy):
        check_sharding(config, strategy, model, optimizer)
    module = build("lit_module", model=model, optimizer=make_optimizer)
    with _quiet():
        _check_trainer(config, strategy)
    with naming("data"):
        _check_amount_of_data(config, data)
    if config["ckpt_path"] is not None:
        check_checkpoint(config, module)
    if task is not None:
        task.check(job, build)


def _task_of(config: dict[str, Any]) -> StagedTask | None:
    """Return the task if it is one with stages; refuse what is no task."""
    node = config.get("task")
    if not isinstance(node, dict) or "_target_" not in node:
        return None  # refused with the other groups
    task = find_target(node["_target_"], "task")
    return task() if isinstance(task, type) and issubclass(task, StagedTask) else None


def _check_groups(config: dict[str, Any], own_key: str) -> None:
    """Refuse top-level keys that nothing reads, and the lack of those that everything needs."""
    unknown = sorted(set(config) - KEYS - {own_key})
    if unknown:
        key = unknown[0]
        near = difflib.get_close_matches(key, KEYS, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"keys are {', '.join(sorted(KEYS))}"
        raise ValueError(f"unknown key `{key}`: {remedy}")
    for key in sorted(KEYS - _OPTIONAL):
        if config.get(key) is None:
            raise ValueError(f"`{key}` is null or missing: choose an option, such as in conf/")
    for key in ("task", "model", "data", "optimizer", "lit_module"):
        if not isinstance(config[key], dict) or "_target_" not in config[key]:
            raise ValueError(f"`{key}={config[key]}`: expected a config with a `_target_`")
    for key in ("logger", "callbacks"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"`{key}={config[key]}`: expected named configs, or null for none")


def _check_scalars(config: dict[str, Any]) -> None:
    """Refuse values that no part of the run would accept."""
    precision = str(config["precision"])
    if precision not in PRECISIONS:
        names = ", ".join(PRECISIONS)
        raise ValueError(f"`precision={precision}` is unknown: choose one of {names}")
    if precision in ("16", "16-mixed") and config["accelerator"] == "cpu":
        raise ValueError(
            f"`precision={precision}` needs a GPU: use `precision=bf16-mixed` or "
            "`precision=32-true` on CPU"
        )
    seed = config["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed}`: expected a whole number from 0 to 2**32 - 1")
    path = config["ckpt_path"]
    if path is not None and not (isinstance(path, str) and Path(path).exists()):
        raise ValueError(f"`ckpt_path={path}` does not exist: check the path, or leave it out")
    for key, minimum in (("num_threads", 1), ("max_restarts", 0), ("shutdown_timeout", 1)):
        value = config["launch"][key]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(
                f"`launch.{key}={value}`: expected a whole number of at least {minimum}"
            )
    trace = config.get("trace")
    if not isinstance(trace, bool | dict | None):
        raise ValueError(
            f"`trace={trace}`: expected `+trace=true`, or `+trace.first_step=... "
            "+trace.num_steps=...`"
        )
    if isinstance(trace, dict):
        check_arguments(trace, "trace", Timeline)
        with naming("trace"):
            options: dict[str, Any] = {"path": ""} | trace
            Timeline(**options)
    before = config["task"].get("evaluate_before_fit", True)
    if not isinstance(before, bool):
        raise ValueError(f"`task.evaluate_before_fit={before}`: expected true or false")


def _check_named(config: dict[str, Any], group: str) -> None:
    """Refuse entries of a group of named configs that describe no object."""
    for name, node in (config.get(group) or {}).items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            raise ValueError(
                f"`{group}.{name}={node}`: expected a config with `_target_`, the class to make, "
                f"or null (or `~{group}.{name}`) to leave it out"
            )


def _check_strategy(config: dict[str, Any], strategy: Any) -> None:
    """Refuse what a strategy would only notice, or not notice, in its ranks."""
    timeout = getattr(strategy, "_timeout", None)
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(
            f"`strategy.timeout={timeout}`: expected a time above 0, such as "
            "`strategy.timeout.minutes=30`"
        )
    backend = config["strategy"].get("process_group_backend")
    names = [part.rpartition(":")[2] for part in str(backend).split(",")]
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    if backend is not None and not set(names) <= set(known):
        raise ValueError(
            f"`strategy.process_group_backend={backend}` is unknown: choose one of "
            f"{', '.join(known)}, or null to decide by device"
        )
    if names == ["nccl"] and config["accelerator"] == "cpu":
        raise ValueError(
            "`strategy.process_group_backend=nccl` moves memory of GPUs: use gloo or null on CPU"
        )


def _check_sizes(config: dict[str, Any], data: Any) -> None:
    """Refuse data that do not fit the model."""
    model, seq_len = config["model"], getattr(data, "seq_len", 0)
    longest = model.get("max_seq_len")
    if longest is not None and seq_len > longest:
        raise ValueError(
            f"`data.seq_len={seq_len}` is longer than `model.max_seq_len={longest}`: lower the "
            "first or raise the second"
        )
    num_tokens, vocab_size = getattr(data, "vocab_size", 0), model.get("vocab_size")
    if vocab_size is not None and num_tokens > vocab_size:
        raise ValueError(
            f"`model.vocab_size={vocab_size}` is too small for the {num_tokens} different tokens "
            f"of the data: use `model.vocab_size={num_tokens}`"
        )


def _check_trainer(config: dict[str, Any], strategy: Any) -> None:
    """Refuse what the Trainer's constructor refuses, also of strategy and precision together."""
    options = config["trainer"]
    for key in sorted(_NOT_OF_TRAINER & set(options)):
        raise ValueError(f"unknown key `trainer.{key}`: use `{key}`, a key of the whole config")
    check_arguments(options, "trainer", L.Trainer)
    if options.get("barebones"):
        raise ValueError(
            "`trainer.barebones=true` leaves out the metrics and checkpoints that a task reports: "
            "use `~logger ~callbacks trainer.enable_checkpointing=false` instead"
        )
    max_steps = options.get("max_steps", -1)
    if max_steps < -1 or max_steps == 0:
        raise ValueError(
            f"`trainer.max_steps={max_steps}`: expected a whole number of at least 1, "
            "or -1 to train for `trainer.max_epochs` epochs"
        )
    accumulate = options.get("accumulate_grad_batches", 1)
    if accumulate < 1:
        raise ValueError(f"`trainer.accumulate_grad_batches={accumulate}`: expected at least 1")
    for key, is_exclusive in (("gradient_clip_val", False), ("val_check_interval", True)):
        value = options.get(key)
        if isinstance(value, int | float) and (value < 0 or (is_exclusive and value == 0)):
            bound = "above 0" if is_exclusive else "of at least 0"
            raise ValueError(f"`trainer.{key}={value}`: expected a number {bound}, or null")
    without = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    whole_process = {"deterministic": None, "benchmark": None}  # settings that would stay behind
    with naming("trainer"):
        L.Trainer(**(options | without | whole_process), accelerator="cpu", devices=1)
    with naming(f"precision={config['precision']}` with `strategy={_name_of(strategy)}"):
        L.Trainer(
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            **{key: config[key] for key in ("accelerator", "devices", "num_nodes", "precision")},
        )


def _name_of(strategy: Any) -> str:
    """Return how a refusal calls a strategy."""
    return strategy if isinstance(strategy, str) else type(strategy).__name__


def _check_amount_of_data(config: dict[str, Any], data: Any) -> None:
    """Refuse data that do not fill one optimizer step on all ranks."""
    if not isinstance(data, MicroBatchDataModule):
        return
    data.trainer = SimpleNamespace(  # type: ignore[assignment]  # what the loaders ask it for
        world_size=config["world_size"],
        global_rank=0,
        accumulate_grad_batches=config["trainer"].get("accumulate_grad_batches", 1),
        training=False,
    )
    data.setup("fit")
    data.train_dataloader()
    data.val_dataloader()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep a Trainer that is only tried from talking about devices."""
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        lightning.setLevel(level)
