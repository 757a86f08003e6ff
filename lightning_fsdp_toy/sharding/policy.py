"""What becomes a unit, and which dtypes its weights and gradients travel and compute in."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.fsdp.wrap import _Policy

from lightning_fsdp_toy.sharding.names import named_units, unwrapped

__all__ = ["MixedPrecisionPolicy", "WrapPolicy", "check_policy", "select_units"]

WrapPolicy = str | None | Iterable[type[nn.Module] | str] | Callable[..., bool] | _Policy


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes weights, gradients and buffers have; names follow torch's FSDP.

    Shards, the gradients the optimizer sees, its state and checkpoints keep the dtype the
    parameters were made with, whatever the policy says. Every dtype may be given by name
    (``"bfloat16"``). Floating-point parameters and buffers only; others keep theirs.

    Args:
        param_dtype: of gathered weights, so of the all-gather, forward and backward. None: the
            parameters' own.
        reduce_dtype: in which gradients are summed over ranks. None: the parameters' own (not
            ``param_dtype``: a sum in half precision loses bits).
        buffer_dtype: of floating-point buffers. None: their own.
        output_dtype: to which floating-point outputs of the root are cast. None: as they come.
        cast_forward_inputs: cast floating-point inputs of every unit to ``param_dtype``. Without
            effect if that is None; not wanted under autocast, which casts by itself.

    Raises:
        ValueError: a dtype is not a floating-point one.
        TypeError: ``cast_forward_inputs`` is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        """Turn names into dtypes and refuse what is none."""
        for name in (field.name for field in fields(self) if field.name.endswith("_dtype")):
            given = getattr(self, name)
            dtype = getattr(torch, given, None) if isinstance(given, str) else given
            if dtype is None and given is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(
                    f"`mixed_precision.{name}`: expected a floating-point dtype such as "
                    f"torch.bfloat16 or 'bfloat16', or None, got {given!r}."
                )
            object.__setattr__(self, name, dtype)
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"`mixed_precision.cast_forward_inputs`: expected true or false, "
                f"got {self.cast_forward_inputs!r}."
            )


def check_policy(policy: object, name: str = "auto_wrap_policy") -> None:
    """Refuse what is no policy for any model; see ``select_units``.

    Raises:
        ValueError: it is a string other than ``"auto"``.
        TypeError: it is of the wrong kind, or names something else than classes.
    """
    if isinstance(policy, str) and policy != "auto":
        raise ValueError(
            f"`{name}`: expected 'auto', None, classes, class names in a list or a "
            f"callable, got {policy!r}. For one class name, write [{policy!r}]."
        )
    if isinstance(policy, type):
        raise TypeError(
            f"`{name}`: expected 'auto', None, classes in a list or set or a callable, got the "
            f"class {policy.__name__}. For one class, write [{policy.__name__}]."
        )
    if isinstance(policy, list | tuple | set | frozenset):
        for wanted in policy:
            if not isinstance(wanted, str) and not (
                isinstance(wanted, type) and issubclass(wanted, nn.Module)
            ):
                raise TypeError(
                    f"`{name}`: expected module classes or class names, got {wanted!r}."
                )
    elif not (policy is None or isinstance(policy, Iterable | _Policy) or callable(policy)):
        raise TypeError(
            f"`{name}`: expected 'auto', None, classes, class names or a callable, "
            f"got {type(policy).__name__}."
        )


def select_units(
    module: nn.Module, policy: WrapPolicy = "auto", name: str = "auto_wrap_policy"
) -> list[tuple[str, nn.Module]]:
    """Return the submodules of ``module`` that become units of their own, outermost first.

    ``module`` itself is always the root unit and is not in the list. Modules without parameters are
    never units.

    Args:
        module: the root.
        policy: ``"auto"``: every block that repeats (by class) in a ``ModuleList`` or
            ``Sequential``, outermost only. ``None``: no units beside the root, the whole model is
            one. A set or list of classes or class names: every instance. A callable that
            takes a module: where it returns true. A policy of ``torch.distributed.fsdp.wrap`` (an
            object, or a function of ``module, recurse, nonwrapped_numel``): what FSDP would wrap.
        name: of the option, for messages.

    Raises:
        ValueError: a class of the policy has no instance in the model.
        TypeError: the policy is none of the above.
    """
    if isinstance(policy, Iterable) and not isinstance(policy, str):
        policy = list(policy)
    check_policy(policy, name)
    if policy is None:
        return []
    if isinstance(policy, str):
        return _repeated_blocks(module)
    if isinstance(policy, list):
        return _instances(module, policy, name)
    if isinstance(policy, _Policy):
        wrapped = policy._run_policy(module, set(), {})
        for kwargs in wrapped.values():
            if kwargs:
                raise ValueError(
                    f"`{name}`: a policy that gives units options of their own is not supported, "
                    f"got {sorted(kwargs)}. Return true or false, and set options for all units."
                )
        return [(n, m) for n, m in _with_parameters(module) if m in wrapped]
    if callable(policy) and _is_recursive(policy):
        recursive = _run_recursive(module, policy)
        return [(n, m) for n, m in _with_parameters(module) if m in recursive]
    assert callable(policy)
    accept: Callable[[nn.Module], bool] = policy
    return [(n, m) for n, m in _with_parameters(module) if accept(unwrapped(m))]


def _is_recursive(policy: Callable[..., bool]) -> bool:
    """Whether a policy is a function as torch's FSDP calls it."""
    try:
        names = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return "recurse" in names and "nonwrapped_numel" in names


def _run_recursive(root: nn.Module, policy: Callable[..., bool]) -> set[nn.Module]:
    """Return the modules that FSDP would wrap, the root left out.

    A policy is asked first whether to look inside a module, given the parameters in it, and on the
    way back whether to wrap it, given those that no module inside took.
    """
    wrapped: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        numel = sum(param.numel() for param in module.parameters())
        taken = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            taken = sum(visit(child) for child in module.children())
            left = numel - taken
            if module is not root and policy(module=module, recurse=False, nonwrapped_numel=left):
                wrapped.add(module)
                return numel
        return taken

    visit(root)
    return wrapped


def _with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Submodules that hold parameters, without ``module`` itself, parents first."""
    return [
        (name, sub)
        for name, sub in named_units(module)
        if sub is not module and next(sub.parameters(), None) is not None
    ]


def _repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    chosen: dict[int, tuple[str, nn.Module]] = {}
    inside: set[int] = set()  # modules inside a chosen unit: blocks of blocks stay whole
    candidates: set[int] = set()
    for name, sub in named_units(module):
        if id(sub) in inside:
            continue
        if id(sub) in candidates:
            chosen[id(sub)] = (name, sub)
            inside.update(id(child) for child in sub.modules())
        elif isinstance(unwrapped(sub), nn.ModuleList | nn.Sequential):
            children = list(unwrapped(sub).children())
            counts = Counter(type(unwrapped(child)) for child in children)
            candidates.update(id(c) for c in children if counts[type(unwrapped(c))] > 1)
    return [unit for unit in chosen.values() if next(unit[1].parameters(), None) is not None]


def _instances(
    module: nn.Module, classes: list[type[nn.Module] | str], name: str
) -> list[tuple[str, nn.Module]]:
    modules = _with_parameters(module)
    present = {type(unwrapped(sub)) for _, sub in modules}
    for wanted in classes:
        if not any(_matches(cls, wanted) for cls in present):
            wanted_name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(
                f"`{name}` names {wanted_name!r}, but the model contains no such module "
                f"with parameters. It contains: {', '.join(sorted(c.__name__ for c in present))}."
            )
    return [(n, m) for n, m in modules if any(_matches(type(unwrapped(m)), c) for c in classes)]


def _matches(cls: type, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in cls.__mro__)
    return issubclass(cls, wanted)
