"""Which modules become units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

__all__ = ["WrapPolicy", "select_units"]

WrapPolicy = str | None | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]


def select_units(module: nn.Module, policy: WrapPolicy = "auto") -> list[tuple[str, nn.Module]]:
    """Return the submodules of ``module`` that become units of their own, outermost first.

    ``module`` itself is always the root unit and is not in the list. Modules without parameters are
    never units.

    Args:
        module: the root.
        policy: ``"auto"``: every block that repeats (by class) in a ``ModuleList`` or
            ``Sequential``, outermost only. ``None``: no units beside the root, the whole model is
            one. A set or list of classes or class names: every instance. A callable that
            takes a module: where it returns true.

    Raises:
        ValueError: a class of the policy has no instance in the model.
        TypeError: the policy is none of the above.
    """
    if policy is None:
        return []
    if isinstance(policy, str):
        if policy != "auto":
            raise ValueError(
                f"`auto_wrap_policy`: expected 'auto', None, classes, class names in a list or a "
                f"callable, got {policy!r}. For one class name, write [{policy!r}]."
            )
        return _repeated_blocks(module)
    if isinstance(policy, Iterable):
        return _instances(module, list(policy))
    if callable(policy):
        accept: Callable[[nn.Module], bool] = policy
        return [(n, m) for n, m in _with_parameters(module) if accept(m)]
    raise TypeError(
        f"`auto_wrap_policy`: expected 'auto', None, classes, class names or a callable, "
        f"got {type(policy).__name__}."
    )


def _with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Submodules that hold parameters, without ``module`` itself, parents first."""
    return [
        (name, sub)
        for name, sub in module.named_modules()
        if sub is not module and next(sub.parameters(), None) is not None
    ]


def _repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    chosen: dict[int, tuple[str, nn.Module]] = {}
    inside: set[int] = set()  # modules inside a chosen unit: blocks of blocks stay whole
    candidates: set[int] = set()
    for name, sub in module.named_modules():
        if id(sub) in inside:
            continue
        if id(sub) in candidates:
            chosen[id(sub)] = (name, sub)
            inside.update(id(child) for child in sub.modules())
        elif isinstance(sub, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child) for child in sub.children())
            candidates.update(id(child) for child in sub.children() if counts[type(child)] > 1)
    return [unit for unit in chosen.values() if next(unit[1].parameters(), None) is not None]


def _instances(
    module: nn.Module, classes: list[type[nn.Module] | str]
) -> list[tuple[str, nn.Module]]:
    modules = _with_parameters(module)
    present = {type(sub) for _, sub in modules}
    for wanted in classes:
        if not isinstance(wanted, str) and not (
            isinstance(wanted, type) and issubclass(wanted, nn.Module)
        ):
            raise TypeError(
                f"`auto_wrap_policy`: expected module classes or class names, got {wanted!r}."
            )
        if not any(_matches(cls, wanted) for cls in present):
            wanted_name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(
                f"`auto_wrap_policy` names {wanted_name!r}, but the model contains no such module "
                f"with parameters. It contains: {', '.join(sorted(c.__name__ for c in present))}."
            )
    return [(n, m) for n, m in modules if any(_matches(type(m), c) for c in classes)]


def _matches(cls: type, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(base.__name__ == wanted for base in cls.__mro__)
    return issubclass(cls, wanted)
