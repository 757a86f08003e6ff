"""Weights outside forward: held unsharded for a while, shown in other forms, or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["hold_unsharded", "restore", "show_faces"]


@contextmanager
def hold_unsharded(root: RootState, module: nn.Module, writeback: bool) -> Iterator[None]:
    """See ``fully_shard.unsharded``."""
    units = root.units_of(module)
    units += [root.root_unit] if root.root_unit not in units else []  # may hold tied weights
    root.num_scopes += 1
    root.enter_forward(root.root_unit)
    for unit in units:
        unit.num_pins += 1
        if not unit.flat.is_unsharded:
            unit.unshard()
    kept = [] if writeback else [unit.flat.keep_whole() for unit in units]
    try:
        yield
    finally:
        for unit in units:
            unit.flat.take_in()
        # Agreed, because an edit that only some ranks noticed would make their versions differ.
        flags = [writeback and unit.flat.is_edited for unit in units]
        for unit, flag in zip(units, root.transport.any_rank(flags, "<unsharded>"), strict=True):
            unit.flat.write_back(flag)
            unit.num_pins -= 1
            if unit.num_pins == 0 and unit.num_active == 0:
                unit.reshard()
        for unit, values in zip(units, kept, strict=False):
            unit.flat.put_back_whole(values)
        root.exit_forward()
        root.num_scopes -= 1


@contextmanager
def show_faces(
    root: RootState, face: Callable[[OriginalParameter], nn.Parameter]
) -> Iterator[None]:
    """Put other parameters into the modules for a while, between steps."""
    homes = [
        (module, name, original, module._parameters[name])
        for unit in root.units
        for original in unit.flat.originals
        for module, name in original.homes
    ]
    faces = {original: face(original) for _, _, original, _ in homes}
    for module, name, original, _ in homes:
        module._parameters[name] = faces[original]
    try:
        yield
    finally:
        for module, name, _, before in homes:
            module._parameters[name] = before


def restore(root: RootState) -> None:
    """Undo ``fully_shard``: whole parameters in the modules, no hooks. A collective."""
    root.settle()
    for unit in root.units:
        unit.unshard()
        for original in unit.flat.originals:
            value = original.unsharded.detach().clone()
            param = nn.Parameter(value, original.sharded.requires_grad)
            param.__dict__.update(original.sharded.__dict__)
            original.sharded = param  # what the reshard puts into the modules
        unit.reshard()
        unit.remove_hooks()
    for module, name in root.forward_methods:
        del module.__dict__[name]
    del root.module.__dict__["_fsdp_root"]
