"""The options `benchmark.*`, checked."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_fsdp_toy.data import MicroBatchDataModule
from lightning_fsdp_toy.lit_module import LitLanguageModel
from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.benchmark.device import KINDS
from lightning_fsdp_toy.tasks.benchmark.variants import BASE, SCALED, VARIANTS

__all__ = ["RANKS", "SIZES", "BenchmarkOptions", "check_config"]

SIZES, RANKS = "sizes", "ranks"
_QUICK_ROUNDS = 5
_QUICK_S = 40.0  # of rounds
_QUICK_SPREAD = 2.0  # times as wide as otherwise
_SHARDING = (  # arguments of the strategy that variants decide
    *("auto_wrap_policy", "sharding_strategy", "mixed_precision", "cpu_offload"),
    *("activation_checkpointing_policy", "device_mesh", "num_prefetch", "gradient_sync"),
    *("transport", "debug"),
)


@dataclass(frozen=True)
class BenchmarkOptions:
    """The options of `conf/task/benchmark.yaml`.

    Raises:
        ValueError: An option is out of its range.
    """

    workload: str
    variants: tuple[str, ...]
    rounds: int
    steps: int | None
    warm_up: int
    max_spread: float
    max_rounds: int
    quick: bool
    scaling: str | None
    timeout: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> "BenchmarkOptions":
        """Read them from a resolved config."""
        given = config.get("benchmark")
        known = tuple(cls.__dataclass_fields__)
        if not isinstance(given, dict) or set(given) != set(known):
            raise ValueError(f"`benchmark`: expected the keys {', '.join(known)}, got {given}")
        for key, least in (("rounds", 2), ("warm_up", 1)):
            _check_count(key, given[key], least)
        fewest = min(given["rounds"], _QUICK_ROUNDS) if given["quick"] else given["rounds"]
        _check_count("max_rounds", given["max_rounds"], fewest)
        if given["steps"] is not None:
            _check_count("steps", given["steps"], 1)
        for key in ("max_spread", "timeout"):
            value = given[key]
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"`benchmark.{key}={value}`: expected a number above 0")
        if not isinstance(given["quick"], bool):
            raise ValueError(f"`benchmark.quick={given['quick']}`: expected true or false")
        if given["scaling"] not in (None, SIZES, RANKS):
            raise ValueError(
                f"`benchmark.scaling={given['scaling']}`: expected null, {SIZES} or {RANKS}"
            )
        if not isinstance(given["workload"], str):
            raise ValueError(f"`benchmark.workload={given['workload']}`: expected a name")
        options = cls(**(given | {"variants": _names(given["variants"])}))
        return options._adapted()

    def _adapted(self) -> "BenchmarkOptions":
        """What the quick mode and scaling choose."""
        options = self
        if self.scaling is not None:
            chosen = tuple(name for name in SCALED if name in self.variants)
            options = replace(options, variants=chosen, max_rounds=self.rounds)
        if self.quick:
            options = replace(
                options,
                rounds=min(self.rounds, _QUICK_ROUNDS),
                steps=self.steps or 1,
                warm_up=1,
                max_spread=_QUICK_SPREAD * self.max_spread,
            )
        return options

    @property
    def max_s(self) -> float:
        """Seconds after which no round begins."""
        return _QUICK_S if self.quick else float("inf")


def _check_count(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`benchmark.{key}={value}`: expected a whole number of at least {least}")


def _names(given: Any) -> tuple[str, ...]:
    """Check the list of variants; all if null; what others are compared with is always there."""
    given = [given] if isinstance(given, str) else given
    if given is None:
        return VARIANTS
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"`benchmark.variants={given}`: expected null or a list of {', '.join(VARIANTS)}"
        )
    for name in given:
        if name not in VARIANTS:
            raise ValueError(f"`benchmark.variants`: {name!r} is none of {', '.join(VARIANTS)}")
    return tuple(name for name in VARIANTS if name in given or name == BASE)


def check_config(job: Job, build: Build) -> None:
    """Refuse a config that cannot be measured, or has options that measuring would not heed.

    Raises:
        ValueError: Names the key and the remedy.
    """
    config = job.config
    options = BenchmarkOptions.of(config)
    _check_strategy(job, build)
    if config["accelerator"] not in KINDS:
        raise ValueError(
            f"`accelerator={config['accelerator']}`: `task=benchmark` runs on {' and '.join(KINDS)}"
        )
    if str(config["precision"]) not in ("32", "32-true"):
        raise ValueError(
            f"`precision={config['precision']}`: `task=benchmark` compares in float32; use "
            "`precision=32-true`"
        )
    for key in ("ckpt_path", "trace"):
        if config.get(key):
            raise ValueError(f"`{key}` has no effect with `task=benchmark`; leave it out")
    decided = {"max_steps": (-1,), "accumulate_grad_batches": (1, None)}
    decided["gradient_clip_val"] = (None, 0)
    for key, plain in decided.items():
        value = config["trainer"].get(key)
        if value not in plain:
            raise ValueError(
                f"`trainer.{key}={value}` has no effect with `task=benchmark`; leave it out"
            )
    if not isinstance(build("data"), MicroBatchDataModule):
        raise ValueError("`data`: `task=benchmark` needs a data module that deals micro-batches")
    with torch.device("meta"):
        model = build("model")
    if not isinstance(build("lit_module", model=model), LitLanguageModel):
        raise ValueError("`lit_module`: `task=benchmark` needs `LitLanguageModel`")
    if any(param.dtype != torch.float32 for param in model.parameters()):
        raise ValueError("`model`: `task=benchmark` compares float32 weights; this one has others")
    if options.scaling == SIZES and not {"d_model", "num_layers"} <= set(config["model"]):
        raise ValueError(
            "`benchmark.scaling=sizes` changes `model.d_model` and `model.num_layers`, which this "
            "model does not have; use `model=transformer` or `model=gpt`"
        )


def _check_strategy(job: Job, build: Build) -> None:
    """Refuse another strategy than `toy_fsdp`, and arguments that the variants decide."""
    strategy = build("strategy") if isinstance(job.config["strategy"], dict) else None
    if not isinstance(strategy, ToyFSDPStrategy):
        raise ValueError(
            f"`strategy={job.choices['strategy']}`: `task=benchmark` compares `toy_fsdp` with the "
            "others; use `strategy=toy_fsdp`, and choose others by `benchmark.variants`"
        )
    plain = ToyFSDPStrategy()
    for name in _SHARDING:
        value = getattr(strategy, name)
        if value != getattr(plain, name):
            raise ValueError(
                f"`strategy.{name}={value}` has no effect with `task=benchmark`, whose variants "
                "decide it; leave it out"
            )
