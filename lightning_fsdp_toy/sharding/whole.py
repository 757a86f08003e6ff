"""Weights outside forward: held unsharded for a while, shown in other forms, or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter
from lightning_fsdp_toy.sharding.fp32_vectors import take_back_fp32_vectors
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.transports.shared_memory import stop_sharing
from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["hold_unsharded", "restore", "show_faces"]


@contextmanager
def hold_unsharded(root: RootState, module: nn.Module, writeback: bool) -> Iterator[None]:
    """See ``fully_shard.unsharded``."""
    units = root.units_of(module)
    units += [root.root_unit] if root.root_unit not in units else []  # may hold tied weights
    held: list[Unit] = []
    kept: dict[FlatParameter, Tensor] = {}
    root.edits.keep(stays_open=True)
    root.num_scopes += 1
    try:
        root.enter_forward(root.root_unit)
    except BaseException:
        root.num_scopes -= 1
        raise
    try:
        for unit in units:
            _hold(root, unit, writeback, kept)
            held.append(unit)
        root.kept.append(kept)
        try:
            yield
        finally:
            root.kept.pop()
            flats = [flat for unit in units for flat in unit.flats]
            _take_edits(root, flats, kept, writeback)
    finally:
        for unit in held:
            unit.num_pins -= 1
            if unit.num_pins == 0:
                _let_go(root, unit)
        root.exit_forward()
        root.num_scopes -= 1


def _hold(root: RootState, unit: Unit, writeback: bool, kept: dict[FlatParameter, Tensor]) -> None:
    """Pin a unit and show its weights in their own dtype; note values to be put back."""
    had_master = {flat: flat.master.has_memory for flat in unit.flats}
    unit.num_pins += 1
    for flat in unit.flats if unit.num_pins == 1 else ():
        flat.note_held()
    try:
        if any(not flat.is_mixed for flat in unit.flats):
            unit.unshard()
            unit.keep_apart()
        for flat in unit.flats:
            if flat.is_mixed:
                flat.gather_master()
                root.saved.add(unit, flat, flat.master)
            if not writeback and had_master[flat]:  # others are gathered from the shards again
                kept[flat] = flat.master.tensor.clone()
    except BaseException:
        unit.num_pins -= 1
        raise


def _let_go(root: RootState, unit: Unit) -> None:
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        # Recomputation saves views as they are, without handles: they stay until post-backward.
        unit.unshard()
        root.backward.note_recomputed(unit, is_called=False)
    for flat in unit.flats:
        if flat.is_master_shown:
            root.saved.remove(flat.master)
            flat.release_master(keeps_memory=unit.is_recomputed)
    if unit.num_active == 0 and not unit.is_sharded and not unit.is_recomputed:
        unit.reshard()


@torch.no_grad()
def _take_edits(
    root: RootState,
    flats: list[FlatParameter],
    kept: dict[FlatParameter, Tensor],
    writeback: bool,
) -> None:
    """Keep the edits of a block that ends, or undo them.

    Raises:
        ValueError: a parameter was given data of another shape.
        RuntimeError: shards were changed meanwhile; that change is kept, the block's are not.
    """
    errors: list[Exception] = []
    for flat in flats:
        try:
            flat.take_in()
        except ValueError as error:  # raised when all ranks have agreed on the rest
            errors.append(error)
    for flat, values in kept.items():
        if not torch.equal(values.view(torch.uint8), flat.master.tensor.view(torch.uint8)):
            flat.master.tensor.copy_(values)
    # Agreed, because an edit that only some ranks noticed would make their versions differ.
    flags = [writeback and flat.is_edited for flat in flats]
    flags += [flat.is_stepped for flat in flats]
    agreed = root.mesh.world.any_rank(flags, "<unsharded>")
    stepped = agreed[len(flats) :]
    if any(stepped):
        name = flats[stepped.index(True)].name
        errors.append(
            RuntimeError(
                f"Shards of `{name}` were changed while an `unsharded` block held the weights (an "
                f"optimizer step, or a state dict was loaded). They keep the new values; edits of "
                f"the block are lost. Step and load outside the block."
            )
        )
    for flat, is_edited, is_stepped in zip(flats, agreed, stepped, strict=False):
        flat.write_back(is_edited and not is_stepped)
        flat.refresh_compute()
        for outer in root.kept:  # an enclosing block puts back what is kept now
            if writeback and flat in outer:
                outer[flat] = flat.master.tensor.clone()
    if errors:
        raise errors[0]


@contextmanager
def show_faces(
    root: RootState, face: Callable[[OriginalParameter], nn.Parameter]
) -> Iterator[None]:
    """Put other parameters into the modules for a while, between steps."""
    homes = [
        (module, name, original, module._parameters[name])
        for original in root.originals()
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
    with hold_unsharded(root, root.module, writeback=False):
        values = {o: o.unsharded.detach().clone() for o in root.originals()}
    for original, value in values.items():
        param = nn.Parameter(value, original.sharded.requires_grad)
        param.__dict__.update(original.sharded.__dict__)
        if param.requires_grad:
            for hook in original.hooks:
                param.register_hook(hook)
            for hook in original.reduced_hooks:
                param.register_post_accumulate_grad_hook(hook)
        for module, name in original.homes:
            module._parameters[name] = param
    take_back_fp32_vectors(root.module)
    for handle in root.added_hooks.values():
        handle.remove()
    for unit in root.units:
        unit.remove_hooks()
    for (module, name), dtype in root.buffer_dtypes.items():
        buffer = module._buffers[name]
        if buffer is not None:
            module._buffers[name] = buffer.to(dtype)
    for (_, name), (module, before) in root.replaced_methods.items():
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before
    stop_sharing(root)
    del root.module.__dict__["_fsdp_root"]
