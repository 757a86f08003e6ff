"""Edits of unsharded weights outside ``unsharded`` blocks: kept if all ranks make them, or found.

Note: edits inside ``training_step``
    People normalise or clamp weights there: at its start, or after an optimizer step under manual
    optimization (``p.data.clamp_(-c, c)``). Modules of other units show this rank's pieces then,
    and edits of pieces stay. The root unit is shown whole, for parameters of the LightningModule
    itself: before the next module runs, edits of it are brought to the shards. Anywhere else inside
    forward an edit is refused: there it would depend on the rank's own batch, and be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.root import RootState
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["EditWindow", "look_for_edits", "refuse_edits"]


class EditWindow:
    """Knows when weights may be edited inside a ``with`` block that counts as a forward call.

    Args:
        root: the sharded model.

    Attributes:
        is_open: the root unit is shown whole, and no module has been called since.
        is_opening: the block begins: nothing is gathered ahead yet, which would read shards.
    """

    def __init__(self, root: RootState) -> None:
        self.root = root
        self.is_open = False
        self.is_opening = False
        self._awaits_calls = False
        self._has_saved = False

    def open_scope(self) -> None:
        """Begin the block: the root unit's pre-forward, without prefetch."""
        # Made since the last block, where the root unit was shown whole.
        refuse_edits(self.root.root_unit.originals)
        self.is_opening = True
        try:
            self.root.root_unit.pre_forward()
        finally:
            self.is_opening = False
        self._awaits_calls = True
        self.reopen()
        self.is_open = torch.is_grad_enabled()

    def reopen(self) -> None:
        """The root unit is shown whole, and no module has been called."""
        self.is_open = True
        self._has_saved = False

    def begin_calls(self) -> None:
        """A module of the model is called: from here on weights are read, and gathered ahead."""
        if self.is_opening:
            return
        self.keep()
        if self._awaits_calls:
            self._awaits_calls = False
            if not self.root.is_debug:  # which compares the ranks' order of collectives
                self.root.residency.prefetch_forward(self.root.root_unit)

    def end_scope(self) -> None:
        """The block ends well: a rank that has called no module gathers what the others did."""
        if self._awaits_calls:
            self.begin_calls()

    def keep(self, stays_open: bool = False) -> None:
        """Bring edits of the root unit's weights to the shards, if there may be any."""
        unit = self.root.root_unit
        if self.is_open and unit.num_pins == 0:
            self.is_open = stays_open
            for flat in unit.flats if unit.is_unsharded else ():
                _keep_edits(flat)

    def keep_before_saving(self, original: OriginalParameter) -> None:
        """Autograd saves a root weight that may have been edited: keep it first.

        Keeping makes what was saved before it out of date. Edits through ``.data`` are looked for
        at the first one saved.
        """
        is_held = self.root.root_unit.num_pins > 0  # by an `unsharded` block, which keeps its own
        if self.is_open and not is_held and (not self._has_saved or original.is_edited):
            self._has_saved = True
            self.keep(stays_open=True)

    def close(self) -> None:
        """Forget a block that an error ended."""
        self.is_open = self._awaits_calls = False


@torch.no_grad()
def _keep_edits(flat: FlatParameter) -> None:
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
    if torch.equal(own, before):  # on a GPU the host waits for this
        return
    is_edited = _differ(own, before).to(flat.shard.device)
    edited = own.to(flat.shard.device, flat.shard.dtype)  # of a low dtype only what was edited
    flat.shard.copy_(torch.where(is_edited, edited, flat.shard))
    flat.note_edited([o for o in flat.originals if o.piece_of(is_edited).any()])


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Return where elements differ; NaN is equal to itself."""
    return (a != b) & ~(a.isnan() & b.isnan())


def refuse_edits(originals: Iterable[OriginalParameter]) -> None:
    """Raise for the first that was edited in place where that is lost, and forget the others."""
    edited = [each for each in originals if not each.is_whole and each.is_edited]
    for each in edited[1:]:
        each.remember_version()
    if edited:
        edited[0].refuse_edits()


def look_for_edits(unit: Unit) -> list[Callable[[], None]]:
    """Keep edits of a forward call that ends; return what raises for those that are lost."""
    refusals: list[Callable[[], None]] = []
    if unit is unit.root.root_unit and unit.num_active == 1:
        try:
            unit.root.edits.keep()
        except ValueError as error:  # raised when the call has been ended in order
            refusals.append(partial(_raise, error))
    refusals += [o.refuse_replacement for o in unit.originals if o.is_replaced]
    refusals += [o.refuse_data_edit for flat in unit.flats for o in _find_data_edits(flat)]
    return refusals


def _raise(error: Exception) -> None:
    raise error


def _find_data_edits(flat: FlatParameter) -> list[OriginalParameter]:
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
        before = flat.shard.to(own.device, own.dtype)
        is_edited = _differ(own, before)
        found = [original for original in flat.originals if original.piece_of(is_edited).any()]
    return found
