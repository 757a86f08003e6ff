"""The options `verify.*`, checked, and the optimizers that can be chosen by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_fsdp_toy.data import MicroBatchDataModule
from lightning_fsdp_toy.lit_module import LitLanguageModel
from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks import Build, Job

__all__ = ["OPTIMIZERS", "VerifyOptions", "check_config", "make_optimizer"]

ROWS = ("a", "b", "c", "d", "e", "f")
FAULTS = ("shard", "order", "weight")
NUM_MICRO_BATCHES = 4  # of a step of rows e and f, on 1, 2 or 4 ranks

_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
_ONE_BY_ONE = {"foreach": False, "fused": False}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, _ADAMW, _ONE_BY_ONE),
    "adamw_foreach": (torch.optim.AdamW, _ADAMW, {"foreach": True, "fused": False}),
    "adamw_fused": (torch.optim.AdamW, _ADAMW, {"foreach": False, "fused": True}),
    "sgd": (torch.optim.SGD, _SGD, _ONE_BY_ONE),
}
CONFIGURED = "configured"  # stands for `optimizer` of the config


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `conf/task/verify.yaml`.

    Raises:
        ValueError: An option is out of its range.
    """

    steps: int
    rows: tuple[str, ...]
    optimizers: tuple[str, ...]
    plant: str | None

    @classmethod
    def of(cls, config: dict[str, Any]) -> "VerifyOptions":
        """Read them from a resolved config."""
        given = config.get("verify")
        known = ("steps", "rows", "optimizers", "plant")
        if not isinstance(given, dict) or set(given) != set(known):
            raise ValueError(f"`verify`: expected the keys {', '.join(known)}, got {given}")
        steps, plant = given["steps"], given["plant"]
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 2:
            raise ValueError(
                f"`verify.steps={steps}`: expected a whole number of at least 2 (row f saves in "
                "the middle)"
            )
        rows = _names("rows", given["rows"], ROWS)
        if {"d", "f"} & set(rows):  # what they compare with has to be run, and to be right
            rows = _names("rows", [*rows, "c"], ROWS)
        named = given["optimizers"]
        optimizers = (CONFIGURED,) if named is None else _names("optimizers", named, OPTIMIZERS)
        if plant is not None and plant not in FAULTS:
            raise ValueError(f"`verify.plant={plant}`: expected null or {' or '.join(FAULTS)}")
        return cls(steps, rows, optimizers, plant)


def _names(key: str, given: Any, known: Any) -> tuple[str, ...]:
    """Check a list of names; keep the order in which they are known."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise ValueError(f"`verify.{key}={given}`: expected a list of {', '.join(known)}")
    for name in given:
        if name not in known:
            raise ValueError(f"`verify.{key}`: {name!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in given)


def make_optimizer(name: str, job: Job, build: Build) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes an optimizer from parameters.

    A named one takes the learning rate and the like from `optimizer` if that is of its class.
    """
    configured: Callable[..., torch.optim.Optimizer] = build("optimizer")
    if name == CONFIGURED:
        return configured
    cls, arguments, kernel = OPTIMIZERS[name]
    if getattr(configured, "func", None) is cls:
        return partial(configured, **kernel)
    return partial(cls, **arguments, **kernel)


def check_config(job: Job, build: Build) -> VerifyOptions:
    """Refuse a config that cannot be verified, or has options that verifying would not heed.

    Raises:
        ValueError: Names the key and the remedy.
    """
    config = job.config
    options = VerifyOptions.of(config)
    strategy = build("strategy") if isinstance(config["strategy"], dict) else None
    if not isinstance(strategy, ToyFSDPStrategy):
        raise ValueError(
            f"`strategy={job.choices['strategy']}`: `task=verify` compares `toy_fsdp` with the "
            "others; use `strategy=toy_fsdp`"
        )
    if str(config["precision"]) not in ("32", "32-true"):
        raise ValueError(
            f"`precision={config['precision']}`: `task=verify` compares with a plain loop in "
            "float32; use `precision=32-true`"
        )
    if strategy.mixed_precision is not None or strategy.cpu_offload:
        raise ValueError(
            "`strategy`: `task=verify` compares float32 on one device; leave `mixed_precision` "
            "null and `cpu_offload` false"
        )
    if strategy.sharding_strategy == "HYBRID_SHARD":
        raise ValueError(
            "`strategy.sharding_strategy=HYBRID_SHARD` adds inside a group first, so it equals the "
            "others within rounding only: `task=verify` takes FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
        )
    if strategy.gradient_sync != "every_micro_batch":
        raise ValueError(
            f"`strategy.gradient_sync={strategy.gradient_sync}` adds a rank's micro-batches first, "
            "so it equals the others within rounding only: `task=verify` takes every_micro_batch"
        )
    if config["ckpt_path"] is not None:
        raise ValueError("`ckpt_path`: `task=verify` starts from new weights; leave it out")
    _check_trainer(config["trainer"], options)
    if not isinstance(build("data"), MicroBatchDataModule):
        raise ValueError("`data`: `task=verify` needs a data module that deals out micro-batches")
    with torch.device("meta"):
        model = build("model")
    module = build("lit_module", model=model, optimizer=build("optimizer"))
    if not isinstance(module, LitLanguageModel):
        raise ValueError("`lit_module`: `task=verify` needs `LitLanguageModel`")
    if any(param.dtype != torch.float32 for param in module.parameters()):
        raise ValueError("`model`: `task=verify` compares float32 weights; this one has others")
    _check_plant(config, options, strategy)
    return options


def _check_trainer(trainer: dict[str, Any], options: VerifyOptions) -> None:
    """Refuse options of the Trainer that a user set and verifying replaces."""
    if trainer.get("max_steps") != options.steps:
        raise ValueError(
            f"`trainer.max_steps={trainer.get('max_steps')}` has no effect with `task=verify`: "
            "use `verify.steps`"
        )
    decided = {"accumulate_grad_batches": (1, None), "gradient_clip_val": (None, 0, 0.0)}
    for key, plain in decided.items():
        if trainer.get(key) not in plain:
            raise ValueError(
                f"`trainer.{key}={trainer[key]}` has no effect with `task=verify`, which "
                "accumulates and clips in row e; leave it out"
            )


def _check_plant(config: dict[str, Any], options: VerifyOptions, strategy: Any) -> None:
    """Refuse a fault that no chosen row could see."""
    if options.plant is None:
        return
    world_size = config["world_size"]
    if options.plant == "order":
        needed = {"c"} if world_size >= 3 else {"e"}  # 2 contributions have one order
        if strategy.transport == "native" or config["accelerator"] != "cpu":
            raise ValueError(
                "`verify.plant=order` needs a transport that adds in rank order, on CPU"
            )
    else:
        needed = {"a", "c"} if options.plant == "shard" else {"a"}
    if not needed & set(options.rows):
        names = " or ".join(sorted(needed))
        raise ValueError(f"`verify.plant={options.plant}` needs row {names} in `verify.rows`")
