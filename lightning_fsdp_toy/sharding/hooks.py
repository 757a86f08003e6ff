"""The hooks by which modules and autograd call a unit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.trees import Copied, cast_floating, return_additions

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["eager", "register_hooks"]


def register_hooks(unit: Unit) -> list[RemovableHandle]:
    """Put a unit's hooks on its module, on modules inside that hold its parameters, on gradients.

    Returns:
        A handle of each.
    """
    handles: list[RemovableHandle] = []
    module, add = unit.module, handles.append
    add(module.register_forward_pre_hook(partial(eager, unit.pre_forward), prepend=True))
    add(module.register_forward_hook(partial(eager, unit.post_forward), always_call=True))
    policy = unit.root.precision
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        calls: list[list[Copied]] = []  # that have not ended
        cast = partial(_cast_inputs, policy.param_dtype, calls)
        add(module.register_forward_pre_hook(cast, with_kwargs=True))
        add(module.register_forward_hook(partial(_end_call, calls), always_call=True))
    if policy.output_dtype is not None and unit.fqn == "<root>":
        add(module.register_forward_hook(partial(_cast_outputs, policy.output_dtype)))
    inner: dict[nn.Module, list[OriginalParameter]] = {}
    for number, flat in enumerate(unit.flats):
        for index, original in enumerate(flat.originals):
            for home, _ in original.homes:
                inner.setdefault(home, []).append(original)
            if original.can_train:
                add(_hook_gradient(unit, original, number, index))
    for home in inner:
        hook = partial(_copy_into_state_dict, unit)  # torch sets an attribute on it
        add(home.register_state_dict_post_hook(hook))
    inner.pop(module, None)
    for home, originals in inner.items():
        add(home.register_forward_pre_hook(partial(unit.pre_inner, originals), prepend=True))
        add(home.register_forward_hook(unit.post_inner, always_call=True))
    return handles


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``."""
    return function(*args)


# The same where compiled code ends before the call and begins anew behind it.
eager: Callable[..., Any] = torch.compiler.disable(_call)


def _cast_inputs(
    dtype: torch.dtype, calls: list[list[Copied]], _: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    if torch.compiler.is_compiling():
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)
    copied: list[Copied] = []
    cast = cast_floating(args, dtype, copied), cast_floating(kwargs, dtype, copied)
    calls.append(copied)
    return cast


def _end_call(calls: list[list[Copied]], _: nn.Module, _args: Any, _output: Any) -> None:
    if calls:  # not where another pre-hook raised before ours ran
        return_additions(calls.pop())


def _cast_outputs(dtype: torch.dtype, _: nn.Module, _args: Any, outputs: Any) -> Any:
    return cast_floating(outputs, dtype)


def _hook_gradient(
    unit: Unit, original: OriginalParameter, number: int, index: int
) -> RemovableHandle:
    is_trainable = original.unsharded.requires_grad
    original.unsharded.requires_grad_(True)  # a frozen one may be unfrozen later
    # A strong reference would be a cycle that the garbage collector cannot see.
    collect = partial(_collect, weakref.ref(unit), number, index)
    handle: RemovableHandle = original.unsharded.register_post_accumulate_grad_hook(collect)
    original.unsharded.requires_grad_(is_trainable)
    return handle


def _collect(unit_ref: weakref.ref[Unit], number: int, index: int, _param: Tensor) -> None:
    unit = unit_ref()
    if unit is not None:
        flat = unit.flats[number]
        unit.collect(flat, flat.originals[index])


def _copy_into_state_dict(
    unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """Keep views of the buffer, which will lose its memory, out of state dicts."""
    for name, param in module._parameters.items():
        value = state.get(prefix + name)
        if value is None or param is None or value is param:  # the last: `keep_vars=True`
            continue
        flat = unit.flat_of(param)
        original = None if flat is None else flat.original_of(param)
        if original is None:
            continue
        if original.is_whole:
            state[prefix + name] = value.as_strided(original.slot.shape, original.slot.stride)
        elif param is original.unsharded:
            state[prefix + name] = value.clone()
        elif not unit.root.has_warned:
            unit.root.has_warned = True
            warnings.warn(
                "state_dict() of a sharded module holds only this rank's 1D pieces. Call it "
                "inside `unsharded(module)`, or use `full_state_dict(module)`.",
                stacklevel=2,
            )
