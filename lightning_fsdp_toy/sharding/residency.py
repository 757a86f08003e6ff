"""Which units hold gathered weights: the order of forward, prefetch, and the bound.

Note: prefetch
    The order in which units run is recorded in every forward. In the next one, as long as it goes
    the same way, the gathers of the following ``num_prefetch`` units are started before a unit
    computes, so that bytes travel meanwhile. In backward the order needs no guess: it is the
    forward's, from the end::

        forward    gather 2 |  compute 1  | gather 3 |  compute 2  | ...
        backward   gather n-1 |  compute n  | reduce n, gather n-2 |  compute n-1  | ...

    A gather that is started reads shards that must not change, so none is started across the end of
    a forward, a backward or an optimizer step (a *boundary*).

Note: the bound
    Where weights are resharded after forward, at most ``1 + num_prefetch`` units beside the root
    are unsharded at any time (units nested in each other count as one). A unit that would be one
    too many takes the place of the one that was used longest ago and is not in use; should backward
    come back to that, it is gathered again. More can only be in use at once where a checkpointed
    module holds several units: its recomputation needs them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["Residency"]


class Residency:
    """Keeps track of the units that hold gathered weights, and starts gathers ahead of need.

    Args:
        root_unit: is outside all counts.
        num_prefetch: gathers started ahead.
        is_bounded: weights are resharded after forward.
        nesting: most units inside each other, the root not counted.
    """

    def __init__(self, root_unit: Unit, num_prefetch: int, is_bounded: bool, nesting: int) -> None:
        self.root_unit = root_unit
        self.num_prefetch = num_prefetch
        self.is_bounded = is_bounded
        self.nesting = max(nesting, 1)
        self._held: dict[Unit, None] = {}  # used longest ago first
        self._active: dict[Unit, int] = {}  # forward calls that have not ended
        self._order: list[Unit | None] = []  # of this forward; None: a boundary
        self._known: dict[bool, list[Unit | None]] = {}  # of the last one, with and without grad
        self._has_grad = False

    # -- order ----------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost forward call begins."""
        self._order = []
        self._has_grad = torch.is_grad_enabled()

    def end_forward(self) -> None:
        """The outermost forward call has ended."""
        self.boundary()
        self._known[self._has_grad] = self._order

    def boundary(self) -> None:
        """Weights may change now: no gather reaches across."""
        self.cancel()
        self._order.append(None)

    def cancel(self) -> None:
        """Take back gathers that were started and not used."""
        for unit in [unit for unit in self._held if not unit.is_unsharded]:
            unit.reshard()

    def note_start(self, unit: Unit) -> None:
        """A forward call of ``unit`` begins."""
        if unit is not self.root_unit:
            self._active[unit] = self._active.get(unit, 0) + 1
            if torch._C._current_graph_task_id() == -1 and self._active[unit] == 1:
                self._order.append(unit)

    def note_end(self, unit: Unit) -> None:
        """A forward call of ``unit`` has ended."""
        if unit in self._active:
            self._active[unit] -= 1
            if self._active[unit] == 0:
                del self._active[unit]

    def prefetch_forward(self, unit: Unit) -> None:
        """Start to gather the units that followed ``unit`` last time."""
        known, position = self._known.get(self._has_grad, []), len(self._order) - 1
        is_recomputing = torch._C._current_graph_task_id() != -1
        if is_recomputing or not self.num_prefetch or position >= len(known):
            return
        if position < 0 and unit is not self.root_unit:
            return
        if position >= 0 and (known[position] is not unit or self._order[-1] is not unit):
            return
        for following in known[position + 1 : position + 1 + self.num_prefetch]:
            if following is None:
                return
            self.prefetch(following)

    def prefetch(self, unit: Unit) -> bool:
        """Start to gather a unit if that needs memory and there is room; return whether it is."""
        if not unit.is_sharded or not unit.has_buffers:
            return not unit.is_sharded
        if unit is not self.root_unit and self.is_bounded and self._num_held() >= self._bound:
            return False
        unit.start_unshard()
        return True

    # -- the bound ------------------------------------------------------------------------------

    @property
    def _bound(self) -> int:
        return self.num_prefetch + max(self.nesting, len(self._active))

    def _num_held(self) -> int:
        num_held = 0
        for unit in self._held:
            num_held += unit.num_pins == 0
        return num_held

    def add(self, unit: Unit) -> None:
        """A unit is about to take memory; make room for it."""
        if unit is self.root_unit or not unit.has_buffers or unit in self._held:
            return
        if self.is_bounded and unit.num_pins == 0:
            for other in list(self._held):
                if self._num_held() < self._bound:
                    break
                if other.num_pins == 0 and not _is_in_use(other):
                    other.reshard()
        self._held[unit] = None
        in_use = sum(_is_in_use(unit) for unit in self._held)
        assert not self.is_bounded or self._num_held() <= max(self._bound, in_use + 1), (
            f"{self._num_held()} units are unsharded at `{unit.fqn}`, at most {self._bound} may be"
        )

    def touch(self, unit: Unit) -> None:
        """A unit's weights are used."""
        if unit in self._held:
            del self._held[unit]
            self._held[unit] = None

    def remove(self, unit: Unit) -> None:
        """A unit holds only its shards again."""
        self._held.pop(unit, None)

    def reset(self) -> None:
        """Forget forward calls that an error ended."""
        self._active.clear()


def _is_in_use(unit: Unit) -> bool:
    """Whether a forward call, its recomputation or the autograd node that runs now needs it."""
    is_read = unit.reader is not None and unit.reader == current_reader()
    return unit.num_active > 0 or unit.is_recomputed or is_read


def current_reader() -> int | None:
    """Return the number of the autograd node that runs now."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
