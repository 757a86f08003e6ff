"""Refuses a config that cannot run, before a rank starts and before anything is written.

Every refusal is a `ValueError` of one line that names the key and what to do instead.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fsdp_toy.data import MicroBatchDataModule
from lightning_fsdp_toy.sharding.policy import select_units
from lightning_fsdp_toy.tasks import Build, Job

__all__ = ["PRECISIONS", "absolute_paths", "check_job", "choose_accelerator"]

logger = logging.getLogger(__name__)

PRECISIONS = (
    *("32-true", "16-true", "bf16-true", "64-true", "16-mixed", "bf16-mixed"),
    *("32", "16", "bf16", "64"),  # Lightning's short forms
)
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
    if isinstance(config["strategy"], dict):
        _check_wrap_policies(config["strategy"], model)
        build("strategy")
    make_optimizer = build("optimizer")
    try:
        make_optimizer([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"`optimizer`: {error}") from error
    build("lit_module", model=model, optimizer=make_optimizer)
    with _quiet():
        _check_trainer(config)
    _check_amount_of_data(config, data)


def _check_scalars(config: dict[str, Any]) -> None:
    """Refuse values that no part of the run would accept."""
    precision = str(config["precision"])
    if precision not in PRECISIONS:
        names = ", ".join(PRECISIONS)
        raise ValueError(f"`precision={precision}` is unknown: choose one of {names}")
    seed = config["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed}`: expected a whole number from 0 to 2**32 - 1")
    path = config["ckpt_path"]
    if path is not None and not Path(path).exists():
        raise ValueError(f"`ckpt_path={path}` does not exist: check the path, or leave it out")
    max_steps = config["trainer"].get("max_steps", -1)
    if not isinstance(max_steps, int) or max_steps < -1 or max_steps == 0:
        raise ValueError(
            f"`trainer.max_steps={max_steps}`: expected a whole number of at least 1, "
            "or -1 to train for `trainer.max_epochs` epochs"
        )
    for key, minimum in (("num_threads", 1), ("max_restarts", 0), ("shutdown_timeout", 1)):
        value = config["launch"][key]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(
                f"`launch.{key}={value}`: expected a whole number of at least {minimum}"
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


def _check_wrap_policies(strategy: dict[str, Any], model: nn.Module) -> None:
    """Refuse classes that the model does not contain; of this project's strategy only."""
    if not strategy.get("_target_", "").endswith("ToyFSDPStrategy"):
        return
    for key in ("auto_wrap_policy", "activation_checkpointing_policy"):
        try:
            select_units(model, strategy.get(key))
        except (ValueError, TypeError) as error:
            message = str(error).removeprefix("`auto_wrap_policy`").strip(" :")
            raise ValueError(f"`strategy.{key}`: {message}") from error


def _check_trainer(config: dict[str, Any]) -> None:
    """Refuse what the Trainer's constructor refuses; devices and strategy are not its matter."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    try:
        L.Trainer(**(config["trainer"] | quiet), accelerator="cpu", devices=1)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ValueError(f"`trainer`: {' '.join(str(error).split())}") from error


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
