"""What the Trainer's and Fabric's strategy do alike with their arguments."""

from __future__ import annotations

from typing import Any

# Lightning keeps this to itself, but every strategy of its own is registered there.
from lightning.fabric.strategies import _StrategyRegistry

from lightning_fsdp_toy.fsdp_arguments import (
    device_mesh_shape,
    is_offloading,
    optimizer_classes,
    precision_policy,
    strategy_name,
)
from lightning_fsdp_toy.sharding.options import SHARDING_STRATEGIES, TRANSPORTS, ShardingOptions
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy

__all__ = ["check_choice", "convert_arguments", "register", "sharding_options"]

_NAMES: dict[str, dict[str, Any]] = {  # what `strategy="..."` may say, with the arguments it means
    "toy_fsdp": {"start_method": "popen"},
    "toy_fsdp_spawn": {"start_method": "spawn"},
    "toy_fsdp_notebook": {"start_method": "fork"},
    "toy_fsdp_cpu_offload": {"cpu_offload": True},
}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse an argument that is none of its choices.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"`{name}`: expected one of {', '.join(choices)}, got {value!r}.")


def convert_arguments(strategy: Any, start_method: str) -> None:
    """Turn the arguments that ``strategy`` keeps as they were given into those of the core.

    Raises:
        ValueError: an argument is none of its choices.
        TypeError: it is of the wrong kind.
    """
    strategy.sharding_strategy = strategy_name(strategy.sharding_strategy)
    strategy.mixed_precision = precision_policy(strategy.mixed_precision)
    strategy.cpu_offload = is_offloading(strategy.cpu_offload)
    strategy.device_mesh = device_mesh_shape(strategy.device_mesh)
    strategy.allow_optimizers = optimizer_classes(strategy.allow_optimizers)
    check_choice("sharding_strategy", strategy.sharding_strategy, SHARDING_STRATEGIES)
    check_choice("state_dict_type", strategy.state_dict_type, ("full", "sharded"))
    check_choice("transport", strategy.transport, TRANSPORTS)
    check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
    reentrant = strategy.activation_checkpointing_reentrant
    if not isinstance(reentrant, bool):
        raise TypeError(
            f"`activation_checkpointing_reentrant`: expected true or false, got {reentrant!r}."
        )


def sharding_options(
    strategy: Any, policy: MixedPrecisionPolicy | None, device_mesh: tuple[int, ...] | None
) -> ShardingOptions:
    """Return what the core is told.

    Args:
        strategy: keeps the arguments under their own names.
        policy: its ``mixed_precision``, or what the precision flag asks for.
        device_mesh: its ``device_mesh``, or what follows from the number of machines.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: it is of the wrong kind.
    """
    return ShardingOptions(
        auto_wrap_policy=strategy.auto_wrap_policy,
        sharding_strategy=strategy.sharding_strategy,
        transport=strategy.transport,
        precision=MixedPrecisionPolicy() if policy is None else policy,
        device_mesh=device_mesh,  # type: ignore[arg-type]  # its length is checked there
        num_prefetch=strategy.num_prefetch,
        cpu_offload=strategy.cpu_offload,
        debug=strategy.debug,
    )


def register(cls: type, registry: _StrategyRegistry) -> None:
    """Register a strategy class under all its names, once."""
    for name, arguments in _NAMES.items():
        if name not in registry:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            text = f"Fully sharded data parallel by hand, {given}"
            registry.register(name, cls, description=text, **arguments)
