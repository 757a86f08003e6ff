"""One unit's life in a step: which hooks run when, and what they do to its flat parameter.

Note: one step of a unit
    ::

        pre-forward     unshard (all-gather)                              FSDP::unshard
        post-forward    reshard, unless backward follows at once          FSDP::reshard
        pre-backward    unshard again, when backward first needs it       FSDP::unshard
        (gradients arrive one by one, each is put into the reduce buffer)
        post-backward   reduce-scatter into the gradient shard, reshard   FSDP::reduce

    Pre-backward does not depend on what forward returned: see the note on getting weights back in
    ``saved.py``. Post-backward runs when backward has moved past everything the unit did.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.root import ForwardPass, RootState

__all__ = ["Unit"]

logger = logging.getLogger(__name__)


class Unit:
    """A module whose parameters (minus those of nested units) travel together.

    Args:
        module: the unit's module.
        flat: its flat parameter, already sharded.
        root: the whole model's state.
    """

    def __init__(self, module: nn.Module, flat: FlatParameter, root: RootState) -> None:
        self.module = module
        self.flat = flat
        self.root = root
        self.fqn = flat.fqn
        self.num_active = 0  # forward calls of this unit that have not ended
        self.num_pins = 0  # `unsharded` blocks that hold it unsharded
        self.was_gathered = False  # in the current backward
        self._stands_in: list[bool] = []  # for each call of an inner module that has not ended
        self._handles: list[RemovableHandle] = []
        self._register_hooks()

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(original.sharded.requires_grad for original in self.flat.originals)

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled with the module its hooks are on."""
        raise TypeError(
            "A sharded module cannot be copied or pickled. Copy it before sharding, or save its "
            "full state dict."
        )

    # -- forward --------------------------------------------------------------------------------

    def pre_forward(self, *_: Any) -> None:
        """Unshard before a forward call (or a call that stands in for it)."""
        self.root.enter_forward(self)
        self.num_active += 1
        try:
            if not self.flat.is_unsharded:
                self.unshard()
            self.flat.sync_requires_grad()
        except BaseException:
            self.num_active -= 1
            self.root.exit_forward()
            raise
        self.root.record_start(self)

    def post_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Reshard after a forward call, unless backward wants the weights next."""
        if self.num_active == 0:  # another pre-hook raised before ours ran
            return
        self.num_active -= 1
        end = self.root.record_end(self)
        if end is not None:
            self._hook_outputs(output, *end)
        if self.num_active == 0 and self.flat.is_unsharded and not self.root.keeps_unsharded(self):
            self.reshard()
        self.root.exit_forward()
        if self.num_pins == 0:
            for original in self.flat.originals:
                original.refuse_edits()

    def _hook_outputs(self, output: Any, end: int, forward_pass: ForwardPass) -> None:
        """Unshard as soon as backward reaches an output: the early trigger, not the only one."""
        trigger = partial(self._output_trigger, end, forward_pass)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                forward_pass.awaited.add(self)
                leaf.register_hook(trigger)

    def _output_trigger(self, end: int, forward_pass: ForwardPass, _grad: Tensor) -> None:
        self.root.reach(self, end, forward_pass, is_output=True)

    def _pre_inner(self, originals: list[OriginalParameter], module: nn.Module, _args: Any) -> None:
        """A module that holds parameters of this unit is called.

        Inside the unit's forward there is nothing to do. Outside it (a method other than
        ``forward``, a submodule called on its own, a second forward after a backward inside one
        ``training_step``) the call stands in for the unit's forward.
        """
        stands_in = not self.flat.is_unsharded or self.num_active == 0
        if stands_in:
            self.pre_forward()
        else:
            for original in originals:
                original.sync_requires_grad()
        self._stands_in.append(stands_in)

    def _post_inner(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stands_in and self._stands_in.pop():
            self.post_forward(module, args, output)

    # -- backward -------------------------------------------------------------------------------

    def pre_backward(self) -> None:
        """Unshard for backward."""
        self.was_gathered = True
        if not self.flat.is_unsharded:
            self.unshard()

    def collect(self, original: OriginalParameter) -> None:
        """A gradient has arrived."""
        self.root.note_gradient(self)
        self.flat.collect_gradient(original, self.root.gradient_scale)

    def post_backward(self, is_awaited: bool) -> list[bool] | None:
        """Reduce gradients and reshard, once backward has moved past this unit.

        Every rank that called a trainable unit in forward comes here in the same order and does
        the same collectives, even if its own backward never reached the unit: other ranks may
        have gradients for it.

        Args:
            is_awaited: some output required a gradient, so backward may reach it on other ranks.

        Returns:
            Which original parameters had a gradient on this rank; None if nothing was reduced.
        """
        used = None
        if not self.was_gathered and (self.is_trainable or is_awaited):
            self.pre_backward()
        if self.is_trainable:
            with self._range("reduce"):
                used = self.flat.reduce_gradients()
        self.was_gathered = False
        if self.flat.is_unsharded and self.num_pins == 0:
            self.reshard()
        return used

    def _copy_into_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Keep views of the buffer, which will lose its memory, out of state dicts."""
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if value is None or param is None or value is param:  # the last: `keep_vars=True`
                continue
            original = self.flat.original_of(param)
            if original is None:
                continue
            if self.flat.is_whole:
                state[prefix + name] = value.as_strided(original.slot.shape, original.slot.stride)
            elif self.flat.is_unsharded:
                state[prefix + name] = value.clone()
            elif not self.root.has_warned:
                self.root.has_warned = True
                warnings.warn(
                    "state_dict() of a sharded module holds only this rank's 1D pieces. Call it "
                    "inside `unsharded(module)`, or use `full_state_dict(module)`.",
                    stacklevel=2,
                )

    # -- shared ---------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the weights and let saved tensors find this unit."""
        with self._range("unshard"):
            self.flat.unshard()
        self.root.on_unshard(self)

    def reshard(self) -> None:
        """Free the unsharded weights."""
        with self._range("reshard"):
            self.root.on_reshard(self)
            self.flat.reshard()

    def reset(self) -> None:
        """Return to rest after an error, whatever was going on."""
        if self.num_active == 0 and not self.flat.is_unsharded and not self.flat.is_reducing:
            return
        self.num_active = 0
        self.was_gathered = False
        self._stands_in.clear()
        self.flat.abandon_gradients()
        if self.flat.is_unsharded and self.num_pins == 0:
            self.reshard()

    def remove_hooks(self) -> None:
        """Take every hook off the modules and parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _range(self, phase: str) -> record_function:
        label = f"FSDP::{phase} ({self.fqn})"
        logger.debug(label)
        return record_function(label)

    def _register_hooks(self) -> None:
        module, add = self.module, self._handles.append
        add(module.register_forward_pre_hook(self.pre_forward, prepend=True))
        add(module.register_forward_hook(self.post_forward, always_call=True))
        inner: dict[nn.Module, list[OriginalParameter]] = {}
        for index, original in enumerate(self.flat.originals):
            for home, _ in original.homes:
                inner.setdefault(home, []).append(original)
            is_trainable = original.unsharded.requires_grad
            original.unsharded.requires_grad_(True)  # a frozen one may be unfrozen later
            # A strong reference would be a cycle that the garbage collector cannot see.
            collect = partial(_collect, weakref.ref(self), index)
            add(original.unsharded.register_post_accumulate_grad_hook(collect))
            original.unsharded.requires_grad_(is_trainable)
        for home in inner:
            hook = partial(self._copy_into_state_dict)  # torch sets an attribute on it
            add(home.register_state_dict_post_hook(hook))
        inner.pop(module, None)
        for home, originals in inner.items():
            hook = partial(self._pre_inner, originals)
            add(home.register_forward_pre_hook(hook, prepend=True))
            add(home.register_forward_hook(self._post_inner, always_call=True))


def _collect(unit_ref: weakref.ref[Unit], index: int, _param: Tensor) -> None:
    unit = unit_ref()
    if unit is not None:
        unit.collect(unit.flat.originals[index])


def is_grad_recording() -> bool:
    """Whether operations are recorded for a backward that has not begun."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
