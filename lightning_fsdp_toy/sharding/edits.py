"""Edits of unsharded weights outside ``unsharded`` blocks: kept if all ranks make them, or found.

Note: edits inside ``training_step``
    People normalise or clamp weights there: at its start, or after an optimizer step under manual
    optimization (``p.data.clamp_(-c, c)``). Modules of other units show this rank's pieces then,
    and edits of pieces stay. The root unit is shown whole, for parameters of the LightningModule
    itself: before the next module runs, edits of it are brought to the shards. Anywhere else inside
    forward an edit is refused: there it would depend on the rank's own batch, and be lost.
"""

from __future__ import annotations

import torch

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter

__all__ = ["find_data_edits", "keep_edits"]


@torch.no_grad()
def keep_edits(flat: FlatParameter) -> None:
    """Bring edits of the unsharded weights, which every rank has made, to this rank's shard."""
    if flat.is_hidden:  # the modules show pieces
        return
    for original in flat.originals:
        original.take_in(original.view_of(flat.compute.tensor))
        original.remember_version()
    if flat.is_whole and not flat.is_mixed:
        return  # one memory
    own = flat.compute.own
    before = flat.shard.to(own.device, own.dtype)
    if own.device.type == "cpu" and torch.equal(own, before):  # elsewhere the host would wait
        return
    is_edited = (own != before).to(flat.shard.device)
    edited = own.to(flat.shard.device, flat.shard.dtype)  # of a low dtype only what was edited
    flat.shard.copy_(torch.where(is_edited, edited, flat.shard))
    flat.note_edited()


def find_data_edits(flat: FlatParameter) -> list[OriginalParameter]:
    """Return those whose unsharded face was given other data (``param.data = x``).

    And takes the data away again. In debug mode also those that were edited through ``.data``,
    which leaves no other trace.
    """
    if not flat.is_unsharded:
        return []
    start, size = flat.compute.tensor.data_ptr(), flat.compute.tensor.element_size()
    found = [
        original
        for original in flat.originals
        if original.slot.numel
        and original.unsharded.data_ptr() != start + original.slot.offset * size
    ]
    for original in found:
        original.unsharded.data = original.view_of(flat.compute.tensor)
    is_one_memory = flat.is_whole and not flat.is_mixed
    if flat.mesh.world.is_debug and not found and not is_one_memory:
        own = flat.compute.own
        is_edited = own != flat.shard.to(own.device, own.dtype)
        found = [original for original in flat.originals if original.piece_of(is_edited).any()]
    return found
