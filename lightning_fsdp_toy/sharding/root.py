"""The root: the order in which units run, and the end of backward.

Note: time and the order of post-backward
    ``RootState`` counts ticks: the start and end of every unit call in forward. Autograd runs the
    nodes of a graph from the latest created to the earliest, so when backward touches something of
    tick t, everything later than t is finished, and so are all units whose first call began after
    t. They are finalised (reduced, resharded) in the order of falling start. That order follows
    from the forward alone: it is the same on every rank even when ranks use different parameters.

Note: passes
    The starts of one forward belong to its ``ForwardPass``. The graph keeps its pass alive (through
    the handles and output hooks), the root knows older ones only weakly: a forward that never sees
    a backward is forgotten with its graph. Two forwards before one backward are two live passes,
    and a unit's start is the earlier one, so that it is reduced once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_fsdp_toy.sharding.build import broadcast_buffers, build_units
from lightning_fsdp_toy.sharding.collectives import Ledger, make_transport
from lightning_fsdp_toy.sharding.flat_param import FlatParameter, MemoryCounter
from lightning_fsdp_toy.sharding.policy import WrapPolicy
from lightning_fsdp_toy.sharding.saved import SavedTensors
from lightning_fsdp_toy.sharding.unit import Unit, is_grad_recording

__all__ = ["ForwardPass", "RootState"]


class ForwardPass:
    """The unit calls of one forward (see the note on passes).

    Attributes:
        starts: tick at which each unit was first called.
        awaited: units some output of which required a gradient.
        is_consumed: a backward through it has ended.
    """

    def __init__(self) -> None:
        self.starts: dict[Unit, int] = {}
        self.awaited: set[Unit] = set()
        self.is_consumed = False


class _EndOfBackward:
    """The call that autograd makes when a backward has ended; gone with a backward that raised."""

    def __init__(self, root: RootState) -> None:
        self.root = root

    def __call__(self) -> None:
        self.root.end_backward()


class RootState:
    """Everything that concerns the whole sharded model on this rank.

    Built by ``fully_shard``. Attributes that callers use:

    Attributes:
        module: the sharded module.
        units: the root unit first, then the others in module order.
        ledger: counts this rank's collectives.
        memory: counts this rank's tensor bytes.
        transport: what the collectives go through.
        sharding_strategy: one of ``SHARDING_STRATEGIES``.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        policy: WrapPolicy,
        sharding_strategy: str,
        transport: str,
    ) -> None:
        self.module = module
        self.device = device
        self.policy = policy
        self.sharding_strategy = sharding_strategy
        self.requested_transport = transport
        self.ledger = Ledger()
        self.memory = MemoryCounter()
        self.transport = make_transport(transport, group, device, self.ledger)
        self.gradient_scale = 1.0 / self.transport.world_size
        self.tick = 0
        self.current_pass: ForwardPass | None = None
        self._passes: list[weakref.ref[ForwardPass]] = []
        self._touched: set[ForwardPass] = set()  # passes the current backward has reached
        self._depth = 0  # nested forward calls of any unit
        self.num_scopes = 0  # those that are `with` blocks, which end whatever happens
        self._saved = SavedTensors(self)
        self._hooks: saved_tensors_hooks | None = None  # while depth > 0
        self._last: Unit | None = None  # ended last in the forward before
        self._last_ended: Unit | None = None
        self._in_backward = False
        self._end_ref: weakref.ref[_EndOfBackward] | None = None
        self._pending: list[tuple[int, Unit]] = []  # (start, unit) by rising start
        self._pending_units: set[Unit] = set()
        self._finished: set[Unit] = set()  # in the current backward
        self._awaited: set[Unit] = set()  # in the live passes
        self._used: dict[Unit, list[bool]] = {}
        plans, unit_index = build_units(module, policy, device, self.transport)
        self.units: list[Unit] = []
        for plan in plans:
            flat = FlatParameter(
                [(m.fqn, m.param, m.homes) for m in plan.take_members(device, self.transport)],
                plan.fqn or "<root>",
                self.transport,
                device,
                self.memory,
                replicate=sharding_strategy == "NO_SHARD",
            )
            self.units.append(Unit(plan.module, flat, self))
        # By identity: the hash of a torchmetrics metric changes with its state.
        self._unit_of = {id(sub): self.units[index] for sub, index in unit_index.items()}
        self._buffers: list[Tensor] = list(module.buffers())
        broadcast_buffers(self._buffers, self.transport)
        self._buffers_drift = False
        self.forward_methods: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self.kept: list[dict[Unit, Tensor]] = []  # what open `writeback=False` blocks put back
        self.has_warned = False  # about a state dict of pieces
        module.__dict__["_fsdp_root"] = self

    @property
    def root_unit(self) -> Unit:
        """The unit that holds what no other unit does."""
        return self.units[0]

    # -- forward --------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """A forward call of some unit begins."""
        if self._depth > 0 and self.num_scopes == 0 and self._is_abandoned(unit):
            self._depth = 1
            self.exit_forward()
        self._depth += 1
        if self._depth == 1 and torch._C._current_graph_task_id() == -1:
            self.settle()
            is_training = self.module.training and torch.is_grad_enabled()
            self.sync_buffers(may_have_changed=is_training)
            self.current_pass = None
            self._hooks = saved_tensors_hooks(self._saved.pack, self._saved.unpack)
            self._hooks.__enter__()

    def _is_abandoned(self, unit: Unit) -> bool:
        """Whether the forward that seems to run ended without a word (a KeyboardInterrupt)."""
        is_forward = torch._C._current_graph_task_id() == -1
        return is_forward and unit is self.root_unit and unit.num_active > 0

    @property
    def is_in_forward(self) -> bool:
        """Whether some unit's forward call runs, so that saved tensors are packed."""
        return self._hooks is not None

    @contextmanager
    def forward_scope(self, unit: Unit) -> Iterator[list[Any]]:
        """A ``with`` block that counts as a forward call of ``unit``; yields a list for outputs."""
        outputs: list[Any] = []
        self.num_scopes += 1
        try:
            unit.pre_forward()
            try:
                yield outputs
            finally:
                unit.post_forward(unit.module, (), outputs)
        finally:
            self.num_scopes -= 1

    def refresh_open_root(self) -> None:
        """Show the root unit's current weights where its forward scope is still open.

        Under manual optimization backward and optimizer steps happen inside ``training_step``,
        which may then use the LightningModule's own parameters again.
        """
        unit = self.root_unit
        if unit.num_active > 0 and torch._C._current_graph_task_id() == -1:
            if unit.flat.is_unsharded and unit.num_pins == 0:
                unit.reshard()
            if not unit.flat.is_unsharded:
                unit.unshard()

    def sync_buffers(self, may_have_changed: bool = False) -> None:
        """Make buffers equal to rank 0's, if a training forward may have let them drift apart.

        Happens at every training forward, as under DDP, and also before the first evaluation after
        one and before saving, so that all ranks evaluate (and save) the same model.
        """
        if may_have_changed or self._buffers_drift:
            broadcast_buffers(self._buffers, self.transport)
        self._buffers_drift = may_have_changed

    def exit_forward(self) -> None:
        """A forward call of some unit has ended, in whatever way."""
        self._depth -= 1
        if self._depth == 0 and self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)

    def settle(self) -> None:
        """Return to rest: what an aborted step or a forward without backward left is freed.

        Weights are gathered anew in every forward of the root, so a stale copy is never used.
        """
        if self._in_backward:  # the last backward raised
            self._clear_backward()
        for unit in self.units:
            unit.reset()

    def rest(self) -> None:
        """``settle``, unless a step is running that still needs its weights."""
        if self.num_scopes == 0:
            self.settle()

    def sync_frozen(self) -> None:
        """Let parameters that are shown unsharded follow what was frozen on their other face."""
        for unit in self.units:
            for original in unit.flat.originals:
                original.sync_requires_grad()

    def record_start(self, unit: Unit) -> None:
        """Note the tick at which a unit's call begins."""
        if not is_grad_recording():
            return
        self.tick += 1
        if self.current_pass is None or self.current_pass.is_consumed:
            self.current_pass = ForwardPass()
            self._passes = [ref for ref in self._passes if ref() is not None]
            self._passes.append(weakref.ref(self.current_pass))
        self.current_pass.starts.setdefault(unit, self.tick)

    def record_end(self, unit: Unit) -> tuple[int, ForwardPass] | None:
        """Return the tick at which a unit's call ends, and its pass; None if not recorded."""
        if not is_grad_recording() or self.current_pass is None:
            return None
        self.tick += 1
        if unit is not self.root_unit:
            self._last_ended = unit
        return self.tick, self.current_pass

    def keeps_unsharded(self, unit: Unit) -> bool:
        """Whether a unit's weights stay after a forward call: backward needs them next."""
        if unit.num_pins > 0:
            return True
        if torch._C._current_graph_task_id() != -1:  # recomputation: post-backward reshards
            return True
        if not torch.is_grad_enabled():
            return False
        if self.sharding_strategy == "SHARD_GRAD_OP":
            return True
        return unit is self.root_unit or unit is self._last

    # -- weights --------------------------------------------------------------------------------

    def on_unshard(self, unit: Unit) -> None:
        """A unit's buffer has memory now."""
        self._saved.add(unit)

    def on_reshard(self, unit: Unit) -> None:
        """A unit's buffer is about to lose its memory."""
        self._saved.remove(unit)

    def unit_of(self, module: nn.Module) -> Unit | None:
        """Return the unit a module belongs to, None if it is not part of the model."""
        return self._unit_of.get(id(module))

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Return the units of a module and all modules inside it."""
        return list(dict.fromkeys(self._unit_of[id(sub)] for sub in module.modules()))

    # -- backward -------------------------------------------------------------------------------

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
        self._begin_backward()
        if forward_pass is not None:
            self._touched.add(forward_pass)
        while self._pending and self._pending[-1][0] > tick:
            self._finalize(self._pending.pop()[1])
        if is_output and unit in self._finished:
            return
        self._expect(unit)
        unit.pre_backward()

    def note_gradient(self, unit: Unit) -> None:
        """A gradient of ``unit`` arrives."""
        self._begin_backward()
        self._expect(unit)

    def _expect(self, unit: Unit) -> None:
        """Make sure that post-backward comes for a unit no live pass knows (at the end, then)."""
        if unit not in self._pending_units:
            self._pending.insert(0, (0, unit))
            self._pending_units.add(unit)

    def _begin_backward(self) -> None:
        if self._in_backward:
            if self._end_ref is not None and self._end_ref() is not None:
                return
            self._clear_backward()  # the last backward raised, its end will not come
            for unit in self.units:
                unit.flat.abandon_gradients()
        self._in_backward = True
        self._awaited = set()
        self._last = self._last_ended
        starts: dict[Unit, int] = {}
        for forward_pass in self._live_passes():
            self._awaited |= forward_pass.awaited
            for unit, start in forward_pass.starts.items():
                starts[unit] = min(start, starts.get(unit, start))
        self._pending = sorted(((s, u) for u, s in starts.items()), key=lambda pair: pair[0])
        self._pending_units = set(starts)
        end = _EndOfBackward(self)
        self._end_ref = weakref.ref(end)  # the engine holds it as long as this backward runs
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finalize(self, unit: Unit) -> None:
        self._pending_units.discard(unit)
        self._finished.add(unit)
        used = unit.post_backward(unit in self._awaited)
        if used is not None:
            before = self._used.get(unit, [False] * len(used))
            self._used[unit] = [a or b for a, b in zip(before, used, strict=True)]

    def end_backward(self) -> None:
        """Finalise what is left, agree on unused parameters, hand gradients to the optimizer."""
        while self._pending:
            self._finalize(self._pending.pop()[1])
        flags = [flag for used in self._used.values() for flag in used]
        agreed = iter(self.transport.any_rank(flags, "<root>"))
        for unit, used in self._used.items():
            unit.flat.publish_gradients([next(agreed) for _ in used])
        live = self._live_passes()
        for forward_pass in live if len(live) == 1 else self._touched:
            forward_pass.is_consumed = True
        self._clear_backward()

    def _clear_backward(self) -> None:
        self._in_backward = False
        self._pending = []
        self._pending_units = set()
        self._finished = set()
        self._touched = set()
        self._used = {}

    def _live_passes(self) -> list[ForwardPass]:
        passes = (ref() for ref in self._passes)
        return [p for p in passes if p is not None and not p.is_consumed]
