"""Names without what ``torch.compile`` puts into them.

Note: two ways to compile
    ``block.compile()`` changes how ``block`` is called and no name. ``torch.compile(block)``
    returns a wrapper that holds ``block`` as its child ``_orig_mod``; where it takes the place of
    ``block`` in a model, every name below it has one part more. That part is left out of the names
    of parameters and units and of the keys of state dicts, so that a checkpoint does not tell
    whether the model that saved it was compiled, and loads in any other.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

__all__ = [
    "clean_keys",
    "clean_name",
    "is_compiled_wrapper",
    "keys_for",
    "named_units",
    "unwrapped",
]

_WRAPPED = "_orig_mod"
_State = TypeVar("_State", bound=Mapping[str, Any])


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned for another module."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that was compiled; ``module`` itself if it is no wrapper."""
    inner = module._modules[_WRAPPED] if is_compiled_wrapper(module) else module
    assert inner is not None, "a compiled wrapper without a module"
    return inner


def clean_name(name: str) -> str:
    """Return a dotted name without the parts that ``torch.compile`` added."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def named_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what can be a unit: ``module.named_modules()`` under clean names.

    A compiled module comes once, as its wrapper: hooks on that run outside of compiled code.
    """
    compiled = {id(m._modules[_WRAPPED]) for m in module.modules() if is_compiled_wrapper(m)}
    for name, sub in module.named_modules():
        if id(sub) not in compiled:
            yield clean_name(name), sub


def clean_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict under clean names."""
    return _renamed(state, clean_name)


def keys_for(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict, saved compiled or not, under the names that ``module`` has now."""
    named = module.named_modules(remove_duplicate=False)
    wrappers = [name for name, sub in named if is_compiled_wrapper(sub)]  # outer ones first

    def rename(key: str) -> str:
        key = clean_name(key)
        for wrapper in wrappers:
            prefix = f"{wrapper}." if wrapper else ""
            if key.startswith(prefix) or key == wrapper:  # the latter in the metadata
                key = f"{prefix}{_WRAPPED}.{key[len(prefix) :]}".rstrip(".")
        return key

    return _renamed(state, rename)


def _renamed(state: _State, rename: Callable[[str], str]) -> _State | OrderedDict[str, Any]:
    """Return ``state`` with other keys, the versions of modules that torch keeps beside it too."""
    if all(rename(key) == key for key in state):
        return state
    renamed = OrderedDict((rename(key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        renamed._metadata = {rename(key): value for key, value in metadata.items()}  # type: ignore[attr-defined]
    return renamed
