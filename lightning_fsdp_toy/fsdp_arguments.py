"""Arguments as users of Lightning's ``FSDPStrategy`` write them, for both of our strategies.

Its own arguments have the same names here; torch's objects are taken where Lightning takes them
(``ShardingStrategy``, ``MixedPrecision``, ``CPUOffload``, ``DeviceMesh``). What Lightning hands on
to ``FullyShardedDataParallel`` is accepted where it says what is always so here, and refused with
the reason where not.
"""

from __future__ import annotations

import difflib
import inspect
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fsdp_toy.sharding import SHARDING_STRATEGIES
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy, WrapPolicy, check_policy

__all__ = [
    "checkpointing_policy",
    "device_mesh_shape",
    "is_offloading",
    "optimizer_classes",
    "precision_policy",
    "refuse_arguments",
    "strategy_name",
    "timeout_of",
]

DEFAULT_TIMEOUT = timedelta(minutes=30)  # what None means, as for a process group

# What `FullyShardedDataParallel` takes: the value that is always so here or asks for nothing, and
# what to do instead of another.
_FSDP_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "use_orig_params": (True, "parameters always keep their names and groups"),
    "sync_module_states": (True, "rank 0's values always win"),
    "limit_all_gathers": (True, "use `num_prefetch`, which bounds what is gathered"),
    "forward_prefetch": (False, "use `num_prefetch`"),
    "backward_prefetch": (BackwardPrefetch.BACKWARD_PRE, "use `num_prefetch`"),
    "param_init_fn": (None, "a module on the meta device is initialised by `reset_parameters()`"),
    "ignored_modules": (None, "every parameter is sharded; register constants as buffers"),
    "ignored_states": (None, "every parameter is sharded; register constants as buffers"),
    "ignored_parameters": (None, "every parameter is sharded; register constants as buffers"),
    "device_id": (None, "the Trainer's `devices` decide"),
    "process_group": (None, "use `device_mesh`; all ranks of the Trainer take part"),
}


def refuse_arguments(given: dict[str, Any], strategy: type, base: type) -> None:
    """Take what says nothing new out of ``given``, in place; refuse what ``strategy`` cannot do.

    Args:
        given: arguments that are none of the strategy's own.
        strategy: the strategy's class.
        base: Lightning's class that takes what is left.

    Raises:
        ValueError: an argument of ``FullyShardedDataParallel`` asks for something else.
        TypeError: neither class knows it; names what comes near.
    """
    for name, (always, instead) in _FSDP_ARGUMENTS.items():
        if name not in given:
            continue
        value = given.pop(name)
        is_empty = isinstance(value, list | tuple | set | frozenset) and not value
        is_unset = (value is None and name != "backward_prefetch") or is_empty
        if not is_unset and value != always:
            shown = " ".join(repr(value).split())  # on one line, also if it holds tensors
            raise ValueError(
                f"`{name}={shown}` is not supported by {strategy.__name__}: {instead}."
            )
    own = [name for name in inspect.signature(strategy).parameters if name != "kwargs"]
    names = [*inspect.signature(base).parameters, *own]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(names)}."
            raise TypeError(f"`{name}` is no argument of {strategy.__name__}: {remedy}")


def optimizer_classes(value: Any) -> tuple[type[torch.optim.Optimizer], ...]:
    """Return ``allow_optimizers`` as a tuple.

    Raises:
        TypeError: it holds something else than optimizer classes.
    """
    classes = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, torch.optim.Optimizer)):
            raise TypeError(
                f"`allow_optimizers`: expected optimizer classes such as (torch.optim.Adafactor,), "
                f"got {each!r}."
            )
    return classes


def timeout_of(value: Any) -> timedelta:
    """Return ``timeout``, 30 minutes for None; what the process group would refuse is refused here.

    Raises:
        ValueError: it is no time above 0.
    """
    if value is None:
        return DEFAULT_TIMEOUT
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ValueError(
            f"`timeout`: expected a timedelta above 0 such as timedelta(minutes=30), got {value!r}."
        )
    return value


def strategy_name(value: Any) -> Any:
    """Return the name of a ``ShardingStrategy``, in capitals if given so or not; else as it is.

    Raises:
        ValueError: it is torch's only strategy that does not exist here.
    """
    name = value.name if isinstance(value, ShardingStrategy) else value
    upper = name.upper() if isinstance(name, str) else name
    if upper == ShardingStrategy._HYBRID_SHARD_ZERO2.name:
        raise ValueError(
            f"`sharding_strategy={name!r}` is not supported: weights do not stay whole between "
            f"forward and backward in groups of ranks. Use 'HYBRID_SHARD'."
        )
    return upper if upper in SHARDING_STRATEGIES else name


def is_offloading(value: Any) -> Any:
    """Return whether ``cpu_offload`` (None or torch's object) asks for it; else it as it is."""
    if isinstance(value, CPUOffload):
        return value.offload_params
    return False if value is None else value


def precision_policy(value: Any) -> Any:
    """Return the policy that torch's ``MixedPrecision`` stands for; anything else as it is.

    Raises:
        ValueError: it asks for something that does not exist here.
    """
    if not isinstance(value, MixedPrecision):
        return value
    if value.keep_low_precision_grads:
        raise ValueError(
            "`mixed_precision.keep_low_precision_grads=True` is not supported: "
            "gradients have the dtype of the shards. Leave it out, or use precision='bf16-true'."
        )
    ignored = set(value._module_classes_to_ignore)
    if ignored not in (set(), {_BatchNorm}):
        names = ", ".join(sorted(each.__name__ for each in ignored))
        raise ValueError(
            f"`mixed_precision._module_classes_to_ignore`: expected torch's default (_BatchNorm,) "
            f"or (), got ({names}): all other modules have one policy. Leave it out, and cast in "
            f"the forward of modules that need another dtype."
        )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        # FSDP reduces in the parameters' dtype unless told otherwise.
        reduce_dtype=value.reduce_dtype or value.param_dtype,
        buffer_dtype=value.buffer_dtype,
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )


def device_mesh_shape(value: Any) -> Any:
    """Return ``(replicas, shards)`` of a ``DeviceMesh`` or a list; anything else as it is.

    Raises:
        ValueError: the mesh numbers its ranks in another order than row by row.
    """
    if isinstance(value, DeviceMesh):
        if not torch.equal(value.mesh.flatten().cpu(), torch.arange(value.mesh.numel())):
            raise ValueError(
                f"`device_mesh`: expected ranks 0, 1, 2, ... row by row, got {value.mesh.tolist()}."
            )
        return tuple(value.mesh.shape)
    return tuple(value) if isinstance(value, list) else value


def checkpointing_policy(policy: WrapPolicy, given: dict[str, Any]) -> WrapPolicy:
    """Return the activation checkpointing policy, also from Lightning's older argument.

    Raises:
        ValueError: both are given, or it is a string.
        TypeError: it is of the wrong kind.
    """
    classes = given.pop("activation_checkpointing", None)
    check_policy(policy, "activation_checkpointing_policy")
    if classes is None:
        return policy
    if policy is not None:
        raise ValueError(
            "`activation_checkpointing` and `activation_checkpointing_policy` say the same: give "
            "the second."
        )
    policy = list(classes) if isinstance(classes, list | tuple | set) else [classes]
    check_policy(policy, "activation_checkpointing")
    return policy
