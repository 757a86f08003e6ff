"""One unit's life in a step: which hooks run when, and what they do to its flat parameter.

Note: one step of a unit
    ::

        pre-forward     unshard (all-gather), start to gather the next    FSDP::unshard
        post-forward    reshard, unless backward follows at once          FSDP::reshard
        pre-backward    unshard again, when backward first needs it       FSDP::unshard
        (gradients arrive one by one, each is put into the reduce buffer)
        post-backward   start to reduce into the gradient shard, reshard  FSDP::reduce

    Pre-backward does not depend on what forward returned: see the note on getting weights back in
    ``saved.py``. Post-backward runs when backward has moved past everything the unit did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from lightning_fsdp_toy.sharding.edits import look_for_edits, refuse_edits
from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter, ParamState, are_all
from lightning_fsdp_toy.sharding.hooks import eager, register_hooks
from lightning_fsdp_toy.sharding.trees import map_tensors

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.collectives import Work
    from lightning_fsdp_toy.sharding.passes import ForwardPass
    from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["Unit", "is_grad_recording"]

logger = logging.getLogger(__name__)


class Unit:
    """A module whose parameters (minus those of nested units) travel together.

    Args:
        module: the unit's module.
        fqn: its name.
        flats: its flat parameters, already sharded; none if it has no parameters.
        root: the whole model's state.
    """

    def __init__(
        self, module: nn.Module, fqn: str, flats: list[FlatParameter], root: RootState
    ) -> None:
        self.module = module
        self.fqn = fqn
        self.flats = flats
        self.root = root
        self.num_active = 0  # forward calls of this unit that have not ended
        self.num_pins = 0  # `unsharded` blocks that hold it unsharded
        self.was_gathered = False  # in the current backward
        self.is_recomputed = False  # forward ran again in the current backward, which needs it
        self.is_behind = False  # micro-batches under `no_sync` have not been reduced
        self.reader: int | None = None  # the autograd node that read a weight last
        # For each forward call that has not ended: what showed weights in their own dtype.
        self._masters: list[list[FlatParameter]] = []
        # For each call of an inner module that has not ended.
        self._inner_calls: list[tuple[nn.Module, bool]] = []
        self._handles = register_hooks(self)

    @property
    def originals(self) -> Iterator[OriginalParameter]:
        """Its original parameters."""
        return (original for flat in self.flats for original in flat.originals)

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(flat.is_trainable for flat in self.flats)

    @property
    def is_unsharded(self) -> bool:
        """Whether forward and backward may use its weights now."""
        return are_all(self.flats, ParamState.UNSHARDED)

    @property
    def is_shown(self) -> bool:
        """Whether the modules show its whole weights now."""
        return self.is_unsharded and not any(flat.is_hidden for flat in self.flats)

    @property
    def is_sharded(self) -> bool:
        """Whether it holds nothing but its shards."""
        return are_all(self.flats, ParamState.SHARDED)

    @property
    def has_buffers(self) -> bool:
        """Whether unsharding it takes memory (not where the shard is the whole)."""
        return any(not flat.compute.is_permanent for flat in self.flats)

    def flat_of(self, param: Any) -> FlatParameter | None:
        """Return the flat parameter that holds a face."""
        return next((f for f in self.flats if f.original_of(param) is not None), None)

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled with the module its hooks are on."""
        raise TypeError(
            "A sharded module cannot be copied or pickled. Copy it before sharding, or save its "
            "full state dict."
        )

    # -- forward --------------------------------------------------------------------------------

    def pre_forward(self, *_: Any) -> None:
        """Unshard before a forward call (or a call that stands in for it)."""
        self.root.edits.begin_calls()
        self.root.enter_forward(self)
        self.num_active += 1
        self._masters.append([flat for flat in self.flats if flat.shows_master])
        residency = self.root.residency
        try:
            residency.note_start(self)
            self.unshard()
            for flat in self._masters[-1]:  # forward computes in the compute dtype
                flat.refresh_compute()
                flat.show_compute()
            for flat in self.flats:
                flat.sync_requires_grad()
            if not self.root.edits.is_opening:  # weights may still be edited
                residency.prefetch_forward(self)
        except BaseException:
            self.num_active -= 1
            self._show_masters()
            residency.note_end(self)
            self.root.exit_forward()
            raise
        self._note("forward")
        self.root.record_start(self)

    def post_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Reshard after a forward call, unless backward wants the weights next.

        Returns:
            The output, with copies where it has views of weights, which are about to go.
        """
        if self.num_active == 0:  # another pre-hook raised before ours ran
            return output
        self._note("end_forward")
        output = self._without_views(output)
        refusals = look_for_edits(self) if self.num_pins == 0 else []
        self.num_active -= 1
        self.root.residency.note_end(self)
        end = self.root.record_end(self)
        if end is not None:
            self._hook_outputs(output, *end)
        if self.num_active == 0 and not self.is_sharded and not self.root.keeps_unsharded(self):
            self.reshard()
        self._show_masters()
        self.root.exit_forward()
        if self.num_pins == 0:
            refuse_edits(self.originals)
        for refuse in refusals:
            refuse()
        return output

    def _without_views(self, output: Any) -> Any:
        return map_tensors(lambda leaf: leaf.clone() if self._is_view(leaf) else leaf, output)

    def _is_view(self, leaf: Tensor) -> bool:
        return leaf.layout is torch.strided and self.root.saved.is_view(leaf)

    def _show_masters(self) -> None:
        """Show what an ``unsharded`` block showed before a forward call inside it."""
        for flat in self._masters.pop():
            if flat.is_master_shown:  # the block may have ended with the call
                flat.show_master()

    def _hook_outputs(self, output: Any, end: int, forward_pass: ForwardPass) -> None:
        """Unshard as soon as backward reaches an output: the early trigger, not the only one."""
        trigger = partial(self._output_trigger, end, forward_pass)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                forward_pass.awaited.add(self)
                leaf.register_hook(trigger)

    def _output_trigger(self, end: int, forward_pass: ForwardPass, _grad: Tensor) -> None:
        self.root.backward.reach(self, end, forward_pass, is_output=True)

    def pre_inner(self, originals: list[OriginalParameter], module: nn.Module, _args: Any) -> None:
        """A module that holds parameters of this unit is called.

        Inside the unit's forward there is nothing to do. Outside it (a method other than
        ``forward``, a submodule called on its own, a second forward after a backward inside one
        ``training_step``) the call stands in for the unit's forward.
        """
        if not torch.compiler.is_compiling():
            self._begin_inner(originals, module)
        elif self.num_active == 0:  # in compiled code of the unit's forward nothing is to be done
            eager(self._begin_inner, originals, module)

    def _begin_inner(self, originals: list[OriginalParameter], module: nn.Module) -> None:
        self.root.edits.begin_calls()
        is_held = self.num_pins > 0 and any(flat.shows_master for flat in self.flats)
        stands_in = not self.is_unsharded or self.num_active == 0 or is_held
        if stands_in:
            self.pre_forward()
            self.root.note_stand_in()
        else:
            for original in originals:
                original.sync_requires_grad()
        self._inner_calls.append((module, stands_in))

    def post_inner(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A module that holds parameters of this unit has been called."""
        if self._inner_calls and self._inner_calls[-1][0] is module:
            return eager(self._end_inner, module, args, output)
        return output

    def _end_inner(self, module: nn.Module, args: Any, output: Any) -> Any:
        _, stands_in = self._inner_calls.pop()
        return self.post_forward(module, args, output) if stands_in else output

    # -- backward -------------------------------------------------------------------------------

    def pre_backward(self) -> None:
        """Unshard for backward."""
        self.was_gathered = True
        self.unshard()
        self._note("backward")

    def collect(self, flat: FlatParameter, original: OriginalParameter) -> None:
        """A gradient has arrived."""
        if original.unsharded.grad is None:  # frozen since the forward: autograd drops it
            return
        self.root.backward.note_gradient(self)
        is_first = flat.gradient.buffer is None
        flat.gradient.collect(original, self.root.gradient_scale, is_kept=not self.root.is_syncing)
        if is_first:
            self._note("collect")

    def post_backward(self) -> None:
        """Reshard: backward is past this unit."""
        self._note("end_backward")
        self.was_gathered = self.is_recomputed = False
        self.reader = None
        if not self.is_sharded and self.num_pins == 0:
            self.reshard()

    def keep_gradients(self) -> None:
        """End a micro-batch under ``no_sync``: its gradients stay on this rank."""
        self.is_behind = True
        for flat in self.flats:
            if flat.is_trainable:
                flat.gradient.keep()

    def drop_kept(self) -> None:
        """Drop gradients that ``keep_gradients`` left: the run ends, nobody will reduce them."""
        self.is_behind = False
        for flat in self.flats:
            flat.gradient.drop()

    def start_reduce(self) -> list[tuple[FlatParameter, list[bool], Work]]:
        """Begin to reduce what was collected; on every rank.

        Returns:
            For each flat parameter that is reduced: which original parameters had a gradient on
            this rank, and the work.
        """
        self.is_behind = False
        started = []
        for flat in self.flats:
            if flat.is_trainable or flat.gradient.is_kept:
                with self._range("reduce"):
                    started.append((flat, *flat.gradient.start_reduce()))
        return started

    # -- shared ---------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather the weights."""
        self._note("gather")
        with self._range("all_gather"):
            self.root.residency.add(self)
            for flat in self.flats:
                if flat.state is ParamState.SHARDED:
                    flat.start_unshard()

    def unshard(self) -> None:
        """Gather the weights and let saved tensors find this unit; nothing if they are there."""
        if self.is_unsharded:
            self.root.residency.touch(self)
            self.show()
            return
        if any(flat.state is ParamState.SHARDED for flat in self.flats):
            self.start_unshard()
        with self._range("unshard"):
            for flat in self.flats:
                if flat.state is ParamState.GATHERING:
                    flat.finish_unshard()
                    self.root.saved.add(self, flat, flat.compute)
        self._note("unsharded")

    def keep_apart(self) -> None:
        """Move the unsharded weights to memory of their own: arrays may be taken of them."""
        for flat in [flat for flat in self.flats if not flat.is_mixed]:
            self.root.saved.remove(flat.compute)
            flat.compute.keep_apart()
            self.root.saved.add(self, flat, flat.compute)

    def reshard(self) -> None:
        """Free the unsharded weights."""
        with self._range("reshard"):
            for flat in self.flats:
                self.root.saved.remove(flat.compute)
                if flat.state is not ParamState.SHARDED:
                    flat.reshard()
                if flat.is_mixed and not flat.is_master_shown:  # read by a backward
                    self.root.saved.remove(flat.master)
                    flat.master.release()
            self.root.residency.remove(self)
        self._note("sharded")

    def hide(self) -> None:
        """Let the modules show pieces while its weights wait for backward."""
        for flat in self.flats:
            if self.num_pins == 0 and flat.is_unsharded and not flat.is_hidden:
                flat.hide()

    def show(self) -> None:
        """Undo ``hide``."""
        for flat in self.flats:
            if flat.is_hidden:
                flat.show_compute()

    def reset(self) -> None:
        """Return to rest after an error, whatever was going on."""
        pending = any(flat.gradient.is_pending for flat in self.flats)
        if self.num_active == 0 and self.is_sharded and not pending:
            return
        self.num_active = 0
        self.was_gathered = self.is_recomputed = False
        self.reader = None
        self._inner_calls.clear()
        self._masters.clear()
        for flat in self.flats:
            flat.gradient.abandon()
        if not self.is_sharded and self.num_pins == 0:
            self.reshard()

    def remove_hooks(self) -> None:
        """Take every hook off the modules and parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, what: str) -> None:
        for observer in self.root.observers:
            observer.note(self.fqn, what)

    def _range(self, phase: str) -> record_function:
        label = f"FSDP::{phase} ({self.fqn})"
        logger.debug(label)
        return record_function(label)


def is_grad_recording() -> bool:
    """Whether operations are recorded for a backward that has not begun."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
