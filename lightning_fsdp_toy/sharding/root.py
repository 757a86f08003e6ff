"""The root: one sharded model, its units and its forward calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.backward import Backward
from lightning_fsdp_toy.sharding.build import (
    broadcast_buffers,
    build_units,
    cast_buffers,
    nesting_of,
    shared_buffers,
)
from lightning_fsdp_toy.sharding.edits import EditWindow, refuse_edits
from lightning_fsdp_toy.sharding.flat_param import FlatParameter
from lightning_fsdp_toy.sharding.heap import give_back_freed_memory
from lightning_fsdp_toy.sharding.memory import MemoryCounter
from lightning_fsdp_toy.sharding.observer import Observer
from lightning_fsdp_toy.sharding.passes import ForwardPass
from lightning_fsdp_toy.sharding.residency import Residency
from lightning_fsdp_toy.sharding.saved import SavedTensors
from lightning_fsdp_toy.sharding.transports.shared_memory import share_memory
from lightning_fsdp_toy.sharding.unit import Unit, is_grad_recording

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_fsdp_toy.sharding.faces import OriginalParameter
    from lightning_fsdp_toy.sharding.ledger import Ledger
    from lightning_fsdp_toy.sharding.mesh import RankMesh
    from lightning_fsdp_toy.sharding.options import ShardingOptions

__all__ = ["RootState"]


class RootState:
    """Everything that concerns the whole sharded model on this rank.

    Built by ``fully_shard``. Attributes that callers use:

    Attributes:
        module: the sharded module.
        units: the root unit first, then the others in module order.
        mesh: the ranks, and the transports that collectives go through.
        ledger: counts this rank's collectives.
        memory: counts this rank's tensor bytes.
        options: how it was sharded.
        gradient_scale: every gradient is multiplied by it; 1 / world size makes the sum a mean.
        is_syncing: backward reduces gradients (not so under ``no_sync``).
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: RankMesh,
        ledger: Ledger,
        device: torch.device,
        options: ShardingOptions,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.ledger = ledger
        self.device = device
        self.options = options
        self.precision = options.precision
        self.is_debug = options.debug
        for transport in mesh.transports:
            transport.is_debug = options.debug
        self.memory = MemoryCounter()
        self.observers: list[Observer] = []  # for timelines of a few steps
        self.gradient_scale = 1.0 / mesh.world.world_size
        self.is_syncing = True
        self.num_forwards = 0
        self.num_backwards = 0
        self.tick = 0
        self.current_pass: ForwardPass | None = None
        self._depth = 0  # nested forward calls of any unit
        self.num_scopes = 0  # those that are `with` blocks, which end whatever happens
        self.saved = SavedTensors(self)
        self.backward = Backward(self)
        self._hooks: list[AbstractContextManager[None]] = []  # of nested forward calls
        self._stands_in = False  # the outermost call is of a module inside a unit
        self.edits = EditWindow(self)
        self._last: Unit | None = None  # ended last in the forward before
        self._last_ended: Unit | None = None
        self.units: list[Unit] = []
        unit_index = self._make_units()
        is_bounded = options.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
        nesting = nesting_of(module, [unit.module for unit in self.units[1:]])
        self.residency = Residency(self.units[0], options.num_prefetch, is_bounded, nesting)
        # By identity: the hash of a torchmetrics metric changes with its state.
        self._unit_of = {id(sub): self.units[index] for sub, index in unit_index.items()}
        broadcast_buffers(list(module.buffers()), mesh.world)
        self._buffers_drift = False
        self.replaced_methods: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self.kept: list[dict[FlatParameter, Tensor]] = []  # `writeback=False` blocks put it back
        self.has_warned = False  # about a state dict of pieces
        self._known = {id(p) for o in self.originals() for p in (o.sharded, o.unsharded)}
        self.added_hooks: dict[int, RemovableHandle] = {}  # on parameters that came later
        module.__dict__["_fsdp_root"] = self

    def _make_units(self) -> dict[nn.Module, int]:
        options, mesh = self.options, self.mesh
        plans, unit_index = build_units(
            self.module, options.auto_wrap_policy, self.device, mesh.world
        )
        self.buffer_dtypes = cast_buffers(self.module, self.precision.buffer_dtype)
        for plan in plans:
            flats = [
                FlatParameter(
                    [(m.fqn, m.param, m.homes) for m in members],
                    name,
                    mesh,
                    self.device,
                    self.memory,
                    self.precision,
                    options.cpu_offload,
                )
                for name, members in plan.take_members(self.device, mesh.world)
            ]
            self.units.append(Unit(plan.module, plan.fqn or "<root>", flats, self))
            give_back_freed_memory()  # of the whole unit that was here
        share_memory(self)
        return unit_index

    @property
    def flats(self) -> Iterator[FlatParameter]:
        """Every flat parameter, unit by unit."""
        return (flat for unit in self.units for flat in unit.flats)

    def originals(self) -> Iterator[OriginalParameter]:
        """Every original parameter, unit by unit."""
        return (original for flat in self.flats for original in flat.originals)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter of the model was there when it was sharded."""
        return all(id(param) in self._known for param in self.module.parameters())

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
            self.num_forwards += 1
            self.note_place(f"forward number {self.num_forwards}")
            self._stands_in = False
            self.residency.begin_forward()
            is_training = self.module.training and torch.is_grad_enabled()
            if torch.is_grad_enabled():
                self._watch_added()
            self.sync_buffers(may_have_changed=is_training)
            self.current_pass = None
        if torch._C._current_graph_task_id() == -1:
            self._hooks.append(self.saved.hooks())
            self._hooks[-1].__enter__()

    def _watch_added(self) -> None:
        """Refuse gradients of parameters that were put into the model after sharding.

        Nobody reduces them: every rank would go its own way.
        """
        for name, param in self.module.named_parameters():
            handle = self.added_hooks.get(id(param))
            is_watched = handle is not None and handle.id in (param._backward_hooks or ())
            if id(param) not in self._known and param.requires_grad and not is_watched:
                self.added_hooks[id(param)] = param.register_hook(partial(_refuse_added, name))

    def note_stand_in(self) -> None:
        """The call that began is of a module inside a unit, maybe in a method of the unit's."""
        if self._depth == 1:
            self._stands_in = True

    def _is_abandoned(self, unit: Unit) -> bool:
        """Whether the forward that seems to run ended without a word (a KeyboardInterrupt)."""
        is_forward = torch._C._current_graph_task_id() == -1
        is_begun = is_forward and unit is self.root_unit and unit.num_active > 0
        return is_begun and not _is_recursive(self.module)

    @property
    def is_in_forward(self) -> bool:
        """Whether some unit's forward call runs, so that saved tensors are packed."""
        return bool(self._hooks)

    @contextmanager
    def forward_scope(self, unit: Unit, is_step: bool = False) -> Iterator[list[Any]]:
        """A ``with`` block that counts as a forward call of ``unit``; yields a list for outputs.

        One that is a step of the user's begins with code that may edit weights (``edits.py``).
        """
        outputs: list[Any] = []
        self.num_scopes += 1
        try:
            if is_step and self._depth == 0:
                self.edits.open_scope()
            else:
                unit.pre_forward()
            try:
                yield outputs
                if is_step and self._depth == 1:
                    self.edits.end_scope()
            finally:
                outputs[:] = unit.post_forward(unit.module, (), outputs)
        finally:
            self.num_scopes -= 1

    def note_step(self) -> None:
        """An optimizer has stepped: inside an open forward scope, gathered weights are old now.

        Under manual optimization backward and optimizer steps happen inside ``training_step``.
        Between the two, modules show the pieces that hold the gradients, also for the root unit;
        after the step it is shown whole again, for parameters of the LightningModule itself.
        """
        if self.root_unit.num_active == 0:
            return
        refuse_edits(self.root_unit.originals)
        self.residency.boundary()
        is_backward = torch._C._current_graph_task_id() != -1
        for unit in self.units:
            is_idle = unit.num_active == 0 or (unit is self.root_unit and not is_backward)
            if is_idle and unit.num_pins == 0 and not unit.is_sharded:
                unit.reshard()
        if not is_backward:
            self.root_unit.unshard()
            self.edits.reopen()

    def sync_buffers(self, may_have_changed: bool = False) -> None:
        """Make buffers equal to rank 0's, if a training forward may have let them drift apart.

        Happens at every training forward, as under DDP, and also before the first evaluation after
        one and before saving, so that all ranks evaluate (and save) the same model.
        """
        if may_have_changed or self._buffers_drift:
            broadcast_buffers(shared_buffers(self.module), self.mesh.world)
        self._buffers_drift = may_have_changed

    def exit_forward(self) -> None:
        """A forward call of some unit has ended, in whatever way."""
        self._depth -= 1
        was_in_forward = self.is_in_forward
        while len(self._hooks) > self._depth:
            self._hooks.pop().__exit__(None, None, None)
        if self._depth == 0 and was_in_forward:
            self.residency.end_forward()
            for unit in self.units if not self._stands_in else ():
                unit.hide()

    def show_gathered(self) -> None:
        """Let the modules show whole weights where they are gathered: a backward begins."""
        for unit in self.units:
            unit.show()

    def settle(self) -> None:
        """Return to rest: what an aborted step or a forward without backward left is freed.

        Weights are gathered anew in every forward of the root, so a stale copy is never used.
        """
        self.edits.close()
        if self.backward.is_running:  # the last backward raised
            self.backward.abandon()
        for unit in self.units:
            unit.reset()
        self.residency.reset()

    def rest(self) -> None:
        """``settle``, unless a step is running that still needs its weights."""
        if self.num_scopes == 0:
            self.settle()

    def sync_frozen(self) -> None:
        """Let parameters that are shown unsharded follow what was frozen on their other face."""
        for original in self.originals():
            original.sync_requires_grad()

    def record_start(self, unit: Unit) -> None:
        """Note the tick at which a unit's call begins."""
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            self.backward.note_recomputed(unit)
        if not is_grad_recording():
            if self.current_pass is not None and not torch.is_grad_enabled():
                self.tick += 1
                self.current_pass.gaps.append(self.tick)
            return
        self.tick += 1
        if self.current_pass is None or self.current_pass.is_consumed:
            self.current_pass = ForwardPass()
            self.backward.passes.note(self.current_pass)
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
        if not self.residency.is_bounded:
            return True
        return unit is self.root_unit or unit is self._last

    def note_place(self, place: str) -> None:
        """Tell the transports where in training this rank is."""
        for transport in self.mesh.transports if self.is_debug else ():
            transport.place = place

    def note_backward(self) -> None:
        """A backward begins."""
        self.num_backwards += 1
        self.note_place(f"backward number {self.num_backwards}")
        self._last = self._last_ended

    # -- modules --------------------------------------------------------------------------------

    def unit_of(self, module: nn.Module) -> Unit | None:
        """Return the unit a module belongs to, None if it is not part of the model."""
        return self._unit_of.get(id(module))

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Return the units of a module and all modules inside it."""
        # A module compiled after sharding has a wrapper that nobody knows around it.
        units = (self._unit_of.get(id(sub)) for sub in module.modules())
        return list(dict.fromkeys(unit for unit in units if unit is not None))


def _refuse_added(name: str, _grad: Tensor) -> NoReturn:
    raise RuntimeError(
        f"A gradient flows into parameter `{name}`, which was added to the model after sharding: "
        f"it is in no unit, and nobody reduces its gradient. Add modules and parameters before "
        f"sharding (under Lightning, in `__init__` or `configure_model`)."
    )


def _is_recursive(module: nn.Module) -> bool:
    """Whether a call of ``module`` that begins is made by another call of it."""
    num_calls, frame = 0, inspect.currentframe()
    while frame is not None and num_calls < 2:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls == 2
