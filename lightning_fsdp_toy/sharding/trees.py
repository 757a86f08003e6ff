"""Tensors in the arguments and outputs of a call, inside containers of any kind.

Note: containers of the caller
    A module may put something into a list or dict that it is given: an auxiliary loss, a cache. So
    a container in which no tensor changes is handed on as it is. Where a list or dict had to be
    copied to cast its tensors, what the call puts into the copy is put into the caller's, too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Copied", "cast_floating", "map_tensors", "return_additions"]


class Copied(NamedTuple):
    """A list or dict and the copy a call gets in its place."""

    given: Any
    copy: Any
    before: Any  # what the copy held when the call began


def map_tensors(
    function: Callable[[Tensor], Any],
    value: Any,
    copied: list[Copied] | None = None,
    inside: frozenset[int] = frozenset(),
) -> Any:
    """Return ``value`` (a tree, dataclasses in it too) with ``function`` applied to its tensors.

    A container in which nothing changes stays the same object.

    Args:
        function: returns its argument where nothing is to change.
        value: a tensor, a container, or anything else, which stays as it is.
        copied: lists and dicts that had to be copied are added to it.
        inside: the dataclasses that ``value`` is in, which it may hold again (a node its parent).
    """

    def mapped(items: Any) -> list[Any]:
        return [map_tensors(function, item, copied, inside) for item in items]

    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        items = mapped(value)
        if _are_same(items, value):
            return value
        return tuple(items) if type(value) is tuple else _noted(value, items, copied)
    if type(value) is dict:
        items = mapped(value.values())
        if _are_same(items, value.values()):
            return value
        return _noted(value, dict(zip(value, items, strict=True)), copied)
    if dataclasses.is_dataclass(value) and id(value) in inside:
        return value
    leaves, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    if not spec.is_leaf():
        items = mapped(leaves)
        return value if _are_same(items, leaves) else tree_unflatten(items, spec)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    inside |= {id(value)}
    fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    before = [getattr(value, name) for name in fields]
    items = mapped(before)
    if _are_same(items, before):
        return value
    value = copy.copy(value)
    for name, item in zip(fields, items, strict=True):
        object.__setattr__(value, name, item)  # a frozen one, too
    return value


def cast_floating(value: Any, dtype: torch.dtype, copied: list[Copied] | None = None) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``; see ``map_tensors``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value, copied)


def return_additions(copied: list[Copied]) -> None:
    """A call has ended: do to the caller's lists and dicts what it did to their copies."""
    for given, now, before in copied:
        if isinstance(given, list) and not _are_same(now, before):
            old = {id(new): item for new, item in zip(before, given, strict=False)}
            given[:] = [old.get(id(item), item) for item in now]
        elif isinstance(given, dict):
            changed = {k: v for k, v in now.items() if k not in before or v is not before[k]}
            for key in [key for key in before if key not in now]:
                given.pop(key, None)
            given.update(changed)


def _are_same(items: Any, others: Any) -> bool:
    return len(items) == len(others) and all(a is b for a, b in zip(items, others, strict=True))


def _noted(given: Any, made: Any, copied: list[Copied] | None) -> Any:
    if copied is not None:
        copied.append(Copied(given, made, copy.copy(made)))
    return made
