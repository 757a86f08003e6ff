"""Backward: which unit is finished when, and what then happens to its gradients.

Note: time and the order of post-backward
    ``RootState`` counts ticks: the start and end of every unit call in forward. Autograd runs the
    nodes of a graph from the latest created to the earliest, so when backward touches something of
    tick t, everything later than t is finished, and so are all units whose first call began after
    t. They are finalised (reduced, resharded) in the order of falling start. That order follows
    from the forward alone: it is the same on every rank even when ranks use different parameters.

Note: a backward inside a backward
    Re-entrant checkpointing runs a forward and a backward of its own inside a node of the outer
    backward. Units that only such a forward called are finalised when its backward ends.

Note: overlap
    A reduction is only started here; it is waited for when the next unit's turn comes, or at the
    end of backward. So there are at most two reduce buffers: one whose bytes travel, one that
    fills. With ``num_prefetch=0`` nothing overlaps: every collective is waited for
    at once.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from lightning_fsdp_toy.sharding.passes import ForwardPass, KnownPass, LivePasses

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.collectives import Work
    from lightning_fsdp_toy.sharding.faces import OriginalParameter
    from lightning_fsdp_toy.sharding.flat_param import FlatParameter
    from lightning_fsdp_toy.sharding.root import RootState
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["Backward"]


class _EndOfBackward:
    """The call that autograd makes when a backward has ended; gone with a backward that raised."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.end()


class Backward:
    """The backward that is under way, if one is.

    Args:
        root: the whole model's state.
    """

    def __init__(self, root: RootState) -> None:
        self.root = root
        self.passes = LivePasses()
        self.is_running = False
        self._end_ref: weakref.ref[_EndOfBackward] | None = None
        self._tasks: list[int] = []  # autograd's numbers of the backwards inside each other
        self._touched: set[ForwardPass] = set()  # passes it has reached
        self._awaited: set[Unit] = set()  # in the live passes, as the next two
        self._starts: dict[Unit, int] = {}
        self._gaps: list[int] = []
        self._pending: list[tuple[int, Unit]] = []  # (start, unit) by rising start
        self._pending_units: set[Unit] = set()
        self._finished: set[Unit] = set()
        # Called again by re-entrant checkpointing and not finalised, by the backward it was in.
        self._recomputed: dict[int, list[Unit]] = {}
        self._current: Unit | None = None  # whose followers have been prefetched
        self._used: dict[FlatParameter, list[bool]] = {}
        self._reducing: list[Work] = []

    def reach(
        self, unit: Unit, tick: int, forward_pass: ForwardPass | None, is_output: bool = False
    ) -> None:
        """Backward touches something of ``unit`` that was made at ``tick``.

        Args:
            unit: whose weights are needed now.
            tick: what is later than this is finished.
            forward_pass: the pass it was made in.
            is_output: it is an output of the unit. One that a unit hands through from before is
                reached again when the unit is finished.
        """
        self._begin()
        if forward_pass is not None and forward_pass not in self._touched:
            self._touched.add(forward_pass)
            if forward_pass.is_consumed:  # its graph was retained
                self._add(forward_pass)
        while self._pending and self._pending[-1][0] > tick:
            self._finalize(self._pending.pop()[1])
        if is_output and unit in self._finished:
            return
        self._expect(unit)
        self._gather(unit, tick)

    def note_gradient(self, unit: Unit) -> None:
        """A gradient of ``unit`` arrives."""
        self._begin()
        self._expect(unit)

    def note_recomputed(self, unit: Unit, is_called: bool = True) -> None:
        """A forward inside this backward calls ``unit``, or reads its weights in another way."""
        self._begin()
        unit.is_recomputed = True
        noted = self._recomputed.setdefault(self._tasks[-1], [])
        if unit not in self._pending_units and unit not in noted:
            noted.append(unit)
        if not is_called:  # earlier than its first call, if it has one: finished last
            self._pending = [(0, unit), *(pair for pair in self._pending if pair[1] is not unit)]
            self._pending_units.add(unit)

    def _gather(self, unit: Unit, now: int) -> None:
        """Unshard ``unit`` and start to gather those that backward comes to next, after ``now``."""
        unit.pre_backward()
        if unit is self._current:
            return
        self._current = unit
        if unit not in self._starts:  # of a re-entrant checkpoint: what comes next is not known
            return
        num_ahead = 0
        for start, following in reversed(self._pending):
            is_full = num_ahead == self.root.residency.num_prefetch
            if is_full or any(start < gap <= now for gap in self._gaps):
                return
            if following is unit or following.is_unsharded:
                continue
            if following.is_trainable or following in self._awaited:
                if self.root.residency.prefetch(following):
                    following.was_gathered = True
                num_ahead += 1

    def _expect(self, unit: Unit) -> None:
        """Make sure that post-backward comes for a unit no live pass knows (at the end, then)."""
        if unit not in self._pending_units:
            self._pending.insert(0, (0, unit))
            self._pending_units.add(unit)

    def _begin(self) -> None:
        if self.is_running:
            if self._end_ref is not None and self._end_ref() is not None:
                self._notice_nested()
                return
            self.abandon()  # the last backward raised, its end will not come
        self.is_running = True
        self.root.edits.keep()  # the root unit may be resharded now
        self.root.residency.boundary()
        self.root.show_gathered()
        self._tasks = [torch._C._current_graph_task_id()]
        self._awaited, self._starts, self._gaps = set(), {}, []
        self.root.note_backward()
        self.passes.forget_dead(self._any_rank)
        for known in self.passes:
            self._add(known)
        end = _EndOfBackward(self)
        # The engine holds it as long as this backward runs.
        self._end_ref = weakref.ref(end, self._note_gone)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _note_gone(self, ref: weakref.ref[_EndOfBackward]) -> None:
        """Let the modules show pieces again, with their gradients, after a backward that raised."""
        if self.is_running and ref is self._end_ref and not self.root.is_in_forward:
            for unit in self.root.units:
                unit.hide()

    def _add(self, calls: ForwardPass | KnownPass) -> None:
        """Expect the units of a pass."""
        self._awaited |= calls.awaited
        self._gaps += calls.gaps
        pending = {unit: start for start, unit in self._pending}
        for unit, start in calls.starts.items():
            if unit not in self._finished:
                pending[unit] = self._starts[unit] = min(start, self._starts.get(unit, start))
        self._pending = sorted(((s, u) for u, s in pending.items()), key=lambda pair: pair[0])
        self._pending_units = set(pending)

    def _notice_nested(self) -> None:
        """Ask for a call at the end of a backward inside this one."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._tasks:
            self._tasks.append(task)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_nested)

    def _end_nested(self) -> None:
        self._tasks.pop()
        recomputed = self._recomputed.pop(self._tasks[-1], [])
        for unit in [unit for unit in reversed(recomputed) if unit in self._pending_units]:
            recomputed.remove(unit)
            self._pending = [pair for pair in self._pending if pair[1] is not unit]
            self._finalize(unit)
        if recomputed:  # a backward further inside has ended, theirs has not
            self._recomputed[self._tasks[-1]] = recomputed

    def _finalize(self, unit: Unit) -> None:
        """Backward is past ``unit``: reshard it and reduce its gradients.

        Every rank that called a trainable unit in forward comes here in the same order and does
        the same collectives, even if its own backward never reached the unit: other ranks may
        have gradients for it, or need this rank's shard.
        """
        self._pending_units.discard(unit)
        self._finished.add(unit)
        if not unit.was_gathered and (unit.is_trainable or unit in self._awaited):
            self._gather(unit, self._starts.get(unit, 0))
        unit.post_backward()
        if self.root.is_syncing:
            self._reduce(unit)
        else:
            unit.keep_gradients()

    def _reduce(self, unit: Unit) -> None:
        self._wait_for_reductions()
        for flat, used, work in unit.start_reduce():
            before = self._used.get(flat, [False] * len(used))
            self._used[flat] = [a or b for a, b in zip(before, used, strict=True)]
            self._reducing.append(work)
        if not self.root.residency.num_prefetch:
            self._wait_for_reductions()

    def _wait_for_reductions(self) -> None:
        while self._reducing:
            self._reducing.pop(0).wait()

    def end(self) -> None:
        """Finalise what is left, agree on unused parameters, hand gradients to the optimizer."""
        while self._pending:
            self._finalize(self._pending.pop()[1])
        if self.root.is_syncing:
            for unit in self.root.units:
                if unit.is_behind:  # an earlier micro-batch used it, this one did not
                    self._reduce(unit)
        self._wait_for_reductions()
        flags = [flag for used in self._used.values() for flag in used]
        touched = self.passes.touched_by(self._touched)
        agreed = self._any_rank([*flags, *touched])
        self.passes.consume(agreed[len(flags) :])
        self.root.mesh.shards.trim()
        has_gradients, each = any(agreed[: len(flags)]), iter(agreed)
        reduced: list[OriginalParameter] = []
        for flat, used in self._used.items():
            flags = [next(each) for _ in used]
            flat.gradient.publish(flags)
            reduced += [o for o, is_used in zip(flat.originals, flags, strict=True) if is_used]
            if self.root.is_debug:
                self._warn_of_missing(flat, flags)
        if self.root.is_debug and self.root.is_syncing:
            self._warn_of_idle()
        self._clear()
        if not has_gradients:
            self._reopen()
        with torch.no_grad():
            for original in reduced:
                for hook in original.reduced_hooks:
                    hook(original.sharded)

    def _any_rank(self, flags: list[bool]) -> list[bool]:
        return self.root.mesh.world.any_rank(flags, "<root>")

    def _reopen(self) -> None:
        """Give weights back to forward calls that the backward was in.

        A force is the gradient of an energy with respect to positions, and forward goes on. Not
        where parameters got gradients: an optimizer step may follow, whose weights the next call
        of a module must gather.
        """
        for unit in self.root.units:
            if unit.num_active > 0:
                unit.unshard()

    def _warn_of_missing(self, flat: FlatParameter, used: list[bool]) -> None:
        pairs = zip(flat.originals, used, strict=True)
        missing = [o.slot.fqn for o, is_used in pairs if not is_used and o.sharded.requires_grad]
        if missing and self.root.mesh.world.rank == 0:
            what = "no gradients at all" if len(missing) == len(used) else "gradients missing"
            warnings.warn(
                f"`{flat.name}` ran in forward, but in backward number "
                f"{self.root.num_backwards} there were {what}, on any rank: {', '.join(missing)}.",
                stacklevel=2,
            )

    def _warn_of_idle(self) -> None:
        """Debug mode: name trainable units that no forward called."""
        flats = [flat for flat in self.root.flats if flat.is_trainable and flat not in self._used]
        if flats and self.root.mesh.world.rank == 0:
            names = ", ".join(f"`{flat.name}`" for flat in flats)
            warnings.warn(
                f"{names} did not run in forward: backward number {self.root.num_backwards} "
                f"brought no gradients for any of its parameters.",
                stacklevel=2,
            )

    def abandon(self) -> None:
        """Forget a backward that raised."""
        self._wait_for_reductions()
        self._clear()
        for unit in self.root.units:
            for flat in unit.flats:
                flat.gradient.abandon()

    def _clear(self) -> None:
        self.is_running = False
        self._current = None
        self._tasks, self._recomputed = [], {}
        self._pending, self._pending_units = [], set()
        self._finished, self._touched = set(), set()
        self._used = {}
