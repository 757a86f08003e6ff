"""Weights outside forward: held unsharded for a while, shown in other forms, or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["hold_unsharded", "restore", "show_faces"]


@contextmanager
def hold_unsharded(root: RootState, module: nn.Module, writeback: bool) -> Iterator[None]:
    """See ``fully_shard.unsharded``."""
    units = root.units_of(module)
    units += [root.root_unit] if root.root_unit not in units else []  # may hold tied weights
    root.num_scopes += 1
    root.enter_forward(root.root_unit)
    held: list[Unit] = []
    kept: dict[Unit, Tensor] = {}
    try:
        for unit in units:
            if not unit.flat.is_unsharded:
                unit.unshard()
            elif not writeback:
                kept[unit] = unit.flat.buffer.clone()
            if not writeback and unit.flat.is_whole:
                kept[unit] = unit.flat.buffer.clone()
            unit.num_pins += 1
            held.append(unit)
        root.kept.append(kept)
        try:
            yield
        finally:
            root.kept.pop()
            _take_edits(root, units, kept, writeback)
    finally:
        for unit in held:
            unit.num_pins -= 1
            if unit.num_pins == 0 and unit.num_active == 0 and unit.flat.is_unsharded:
                unit.reshard()
        root.exit_forward()
        root.num_scopes -= 1


@torch.no_grad()
def _take_edits(
    root: RootState, units: list[Unit], kept: dict[Unit, Tensor], writeback: bool
) -> None:
    """Keep the edits of a block that ends, or undo them."""
    errors: list[ValueError] = []
    for unit in units:
        try:
            unit.flat.take_in()
        except ValueError as error:  # raised when all ranks have agreed on the rest
            errors.append(error)
    for unit, values in kept.items():
        if not torch.equal(values.view(torch.uint8), unit.flat.buffer.view(torch.uint8)):
            unit.flat.buffer.copy_(values)
    # Agreed, because an edit that only some ranks noticed would make their versions differ.
    flags = [writeback and unit.flat.is_edited for unit in units]
    for unit, is_edited in zip(units, root.transport.any_rank(flags, "<unsharded>"), strict=True):
        unit.flat.write_back(is_edited)
        for outer in root.kept:  # an enclosing block puts back what is kept now
            if writeback and unit in outer:
                outer[unit] = unit.flat.buffer.clone()
    if errors:
        raise errors[0]


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
            if param.requires_grad:
                for hook in (original.unsharded._backward_hooks or {}).values():
                    param.register_hook(hook)
            original.sharded = param  # what the reshard puts into the modules
        unit.reshard()
        unit.remove_hooks()
    for (_, name), (module, before) in root.forward_methods.items():
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before
    del root.module.__dict__["_fsdp_root"]
