"""Refuses what sharding the job's model would only refuse in its ranks."""

from typing import Any

import torch
from torch import nn

from lightning_fsdp_toy.messages import naming
from lightning_fsdp_toy.sharding.optim import ELEMENTWISE_OPTIMIZERS
from lightning_fsdp_toy.sharding.options import check_device_mesh
from lightning_fsdp_toy.sharding.policy import select_units
from lightning_fsdp_toy.strategy import ToyFSDPStrategy

__all__ = ["check_policies", "check_sharding"]


def check_policies(strategy: dict[str, Any], model: nn.Module) -> None:
    """Refuse what is no policy, or chooses classes that the model does not contain.

    Of this package's strategies only.
    """
    if not str(strategy.get("_target_")).startswith("lightning_fsdp_toy."):
        return
    for name in ("auto_wrap_policy", "activation_checkpointing_policy"):
        policy = strategy.get(name)
        if not isinstance(policy, dict):  # those are objects that do not exist yet
            with naming("strategy"):
                select_units(model, policy, name)
    allowed = strategy.get("allow_optimizers") or ()
    for each in allowed if isinstance(allowed, list | tuple) else (allowed,):
        if not (isinstance(each, dict) and "_target_" in each):
            raise ValueError(
                f"`strategy.allow_optimizers`: {each!r} is no optimizer class; write each as "
                "{_target_: hydra.utils.get_class, path: a.b.C}"
            )
    precision = strategy.get("mixed_precision")
    if precision is not None and not (isinstance(precision, dict) and "_target_" in precision):
        raise ValueError(
            f"`strategy.mixed_precision={precision}`: expected null or {{_target_: "
            f"lightning_fsdp_toy.sharding.MixedPrecisionPolicy, param_dtype: bfloat16}}"
        )


def check_sharding(
    config: dict[str, Any],
    strategy: ToyFSDPStrategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse what sharding this model would only refuse in its ranks."""
    with naming("strategy"):
        select_units(model, strategy.auto_wrap_policy)
        name = "activation_checkpointing_policy"
        select_units(model, strategy.activation_checkpointing_policy, name)
        if strategy.device_mesh is not None:
            name, world_size = strategy.sharding_strategy, config["world_size"]
            check_device_mesh(name, strategy.device_mesh, world_size)
    cls = type(optimizer)
    if cls not in (*ELEMENTWISE_OPTIMIZERS, *strategy.allow_optimizers):
        path = config["optimizer"]["_target_"]
        raise ValueError(
            f"`optimizer._target_={path}`: {cls.__name__} is not known to update elements "
            f"independently, so on shards it could be silently wrong; if it does, use "
            f"`strategy.allow_optimizers=[{{_target_: hydra.utils.get_class, path: {path}}}]`"
        )
