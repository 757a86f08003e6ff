"""The two faces of an original parameter: what the optimizer and what forward sees.

Note: which face is shown
    Modules show the unsharded face only inside a forward call, a backward or an ``unsharded``
    block. Weights that stay gathered from forward to backward are hidden in between, so that
    whoever lists ``module.parameters()`` there (``module.zero_grad()``, a new optimizer, a loop
    over ``.grad``) gets what the optimizer updates::

        loss = model(x)      # unsharded face
        model.zero_grad()    #           sharded face: their gradients are the accumulated ones
        loss.backward()      # unsharded face
        optimizer.step()     #           sharded face

    A call of a submodule outside forward hides nothing: a method that made it may go on to read
    weights beside it.

Note: hooks of the user
    A hook on a parameter is asked for this rank's whole gradient, before it is reduced, as under
    DDP; one registered after sharding (on the sharded face) too. Post-accumulate-grad hooks belong
    on the sharded face: they run at the end of backward, when its ``.grad`` is reduced.

Note: misuse is refused
    Sharding replaces parameters behind the user's back, so everything that would then go wrong
    without a word is noticed and refused by name: gradients that flow into a face that nobody
    reduces, data or parameters put in from outside, edits that would reach one rank only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_fsdp_toy.sharding.layout import ParamSlot, Piece

__all__ = ["OriginalParameter"]


@dataclass(eq=False)
class OriginalParameter:
    """One original parameter: its slot, its homes and its two faces.

    Attributes:
        slot: place in the flat parameter.
        piece: the part of it in this rank's shard.
        homes: every ``(module, name)`` under which the model holds it; several when it is tied.
        sharded: 1D piece in the shard, what the optimizer updates.
        unsharded: view into the buffer, what forward and backward use.
        has_gradient: a gradient has arrived since the last reduction.
    """

    slot: ParamSlot
    piece: Piece
    homes: list[tuple[nn.Module, str]]
    sharded: nn.Parameter = field(init=False)
    unsharded: nn.Parameter = field(init=False)
    is_whole: bool = False  # the piece is the parameter: both faces are the same memory
    has_gradient: bool = False
    _is_trainable: bool = field(init=False, default=True)  # as both faces last agreed
    _version: int = field(init=False, default=0)  # of the unsharded face, edits accepted
    _address: int = field(init=False, default=0)  # of the sharded face's data
    _own_hooks: list[int] = field(init=False, default_factory=list)  # keys of those that are ours

    def view_of(self, flat: Tensor) -> Tensor:
        """Return this parameter's place in a tensor laid out like the flat parameter."""
        return flat.as_strided(self.slot.shape, self.slot.stride, self.slot.offset)

    def piece_of(self, shard: Tensor) -> Tensor:
        """Return this parameter's piece of a shard, 1D."""
        return shard[self.piece.shard_offset : self.piece.shard_offset + self.piece.numel]

    def take_over(self, param: nn.Parameter) -> None:
        """Give the faces what the user put on the original: attributes, hooks, frozenness.

        Raises:
            ValueError: the original has hooks that cannot move.
        """
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"Parameter `{self.slot.fqn}` has post-accumulate-grad hooks, which would see no "
                f"reduced gradient. Register them on sharded parameters, after sharding."
            )
        hooks = list((param._backward_hooks or {}).values())
        self._is_trainable = param.requires_grad
        for face in (self.sharded, self.unsharded):
            face.__dict__.update(param.__dict__)
        self._address = self.sharded.data_ptr()
        self.remember_version()
        if not self.can_train:
            return
        for face in (self.sharded, self.unsharded):
            face.requires_grad_(True)  # a frozen one may be unfrozen later
        for hook in hooks:
            self.unsharded.register_hook(hook)
        fqn = self.slot.fqn
        refusal = self.sharded.register_hook(lambda _: _refuse_gradient(fqn, "a piece of"))
        asking = self.unsharded.register_hook(partial(_ask_hooks_of, self.sharded, refusal.id))
        self._own_hooks = [refusal.id, asking.id]
        if param.requires_grad:
            param.register_hook(lambda _: _refuse_gradient(fqn, "the object that was"))
        for face in (self.sharded, self.unsharded):
            face.requires_grad_(self._is_trainable)

    def take_hooks(self, param: nn.Parameter) -> None:
        """Take over the hooks of a parameter that stood in for this one for a while."""
        for hook in _hooks_of(param).values():
            self.sharded.register_hook(hook)
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            self.sharded.register_post_accumulate_grad_hook(hook)

    @property
    def can_train(self) -> bool:
        """Whether its dtype has gradients."""
        return self.sharded.dtype.is_floating_point or self.sharded.dtype.is_complex

    @property
    def hooks(self) -> list[Callable[[Tensor], Tensor | None]]:
        """The user's hooks on either face."""
        both = [*_hooks_of(self.unsharded).items(), *_hooks_of(self.sharded).items()]
        return [hook for key, hook in both if key not in self._own_hooks]

    @property
    def reduced_hooks(self) -> list[Callable[[Tensor], None]]:
        """The user's hooks for the reduced gradient (see the note on hooks)."""
        hooks: dict[int, Any] | None = getattr(self.sharded, "_post_accumulate_grad_hooks", None)
        return list((hooks or {}).values())

    def sync_requires_grad(self) -> None:
        """Freeze or unfreeze both faces when the user did so with one."""
        sharded, unsharded = self.sharded.requires_grad, self.unsharded.requires_grad
        if sharded == unsharded == self._is_trainable:
            return
        self._is_trainable = not self._is_trainable  # at least one face was changed
        self.sharded.requires_grad_(self._is_trainable)
        self.unsharded.requires_grad_(self._is_trainable)

    def show_unsharded(self) -> None:
        """Put the unsharded face into the modules."""
        self.sync_requires_grad()
        for module, name in self.homes:
            module._parameters[name] = self.unsharded

    def show_sharded(self) -> None:
        """Put the sharded face into the modules."""
        self.sync_requires_grad()
        for module, name in self.homes:
            module._parameters[name] = self.sharded

    @property
    def is_replaced(self) -> bool:
        """Whether a module holds neither face."""
        faces = self.sharded, self.unsharded
        for module, name in self.homes:
            param = module._parameters.get(name)
            if param is not faces[0] and param is not faces[1]:
                return True
        return False

    def refuse_replacement(self) -> None:
        """Raise because forward put another parameter in the place of this one."""
        raise RuntimeError(
            f"Parameter `{self.slot.fqn}` was replaced by another object inside forward, which "
            f"would be lost. Edit it in place between steps inside `unsharded(module)`, or hold "
            f"what forward computes in a buffer."
        )

    def refuse_data_edit(self) -> None:
        """Raise because forward changed the data of this one behind autograd's back."""
        raise RuntimeError(
            f"Parameter `{self.slot.fqn}` was given other data inside forward (`param.data = x` or "
            f"an edit of `param.data`), where this rank's copy alone changes and is lost. Do it "
            f"between steps inside `unsharded(module)`, or hold what forward computes in a buffer."
        )

    def refuse_edits(self) -> None:
        """Raise if the unsharded face was edited where the edit would be lost."""
        if not self.is_whole and self.is_edited:
            self.remember_version()
            raise RuntimeError(
                f"Parameter `{self.slot.fqn}` was changed in place inside forward, where this "
                f"rank's copy alone changes. Do it between steps inside `unsharded(module)`."
            )

    @property
    def is_edited(self) -> bool:
        """Whether the unsharded face was changed in place since edits were last accepted."""
        return self.unsharded._version != self._version

    def remember_version(self) -> None:
        """Accept in-place edits of the unsharded face up to now."""
        self._version = self.unsharded._version

    def check_sharded(self, shard: Tensor, is_shown: bool = True) -> None:
        """Refuse to go on with a sharded face that is no longer part of the shard."""
        face = self.sharded if is_shown else self.unsharded
        for module, name in self.homes:
            if module._parameters.get(name) is not face:
                raise RuntimeError(
                    f"Parameter `{self.slot.fqn}` was replaced by another object after sharding "
                    f"(an assignment, or torch.func.functional_call). Replace it before, or edit "
                    f"weights in place inside `unsharded(module)`."
                )
        if self.piece.numel == 0 and self.sharded.dtype == shard.dtype:
            return
        if self.sharded.data_ptr() != self._address or self.sharded.dtype != shard.dtype:
            raise RuntimeError(
                f"Parameter `{self.slot.fqn}` was moved, converted or given other data "
                f"after sharding (`module.to()`, `.half()`, `param.data = ...`); training "
                f"would not reach it. Do it before sharding, or edit weights in place inside "
                f"`unsharded(module)`."
            )

    def take_in(self, place: Tensor) -> None:
        """Copy values put in from outside (``p.data = x``, ``module.p = p2``) to ``place``."""
        given: list[Tensor] = []
        for module, name in self.homes:
            shown = module._parameters.get(name)
            if shown is not None and shown is not self.unsharded:
                given.append(shown.detach())
            module._parameters[name] = self.unsharded
        if self.unsharded.data_ptr() != place.data_ptr():
            given.append(self.unsharded.detach())
            self.unsharded.data = place
        for value in given:
            if value.shape != place.shape:
                raise ValueError(
                    f"Parameter `{self.slot.fqn}` was given data of shape {tuple(value.shape)}; "
                    f"its shape is {tuple(place.shape)} and cannot change after sharding."
                )
            place.copy_(value)


def _hooks_of(param: Tensor) -> dict[int, Any]:
    return dict(param._backward_hooks or {})


def _ask_hooks_of(sharded: Tensor, refusal: int, grad: Tensor) -> Tensor:
    """Hand a gradient of the unsharded face through the hooks on the sharded one."""
    for key, hook in _hooks_of(sharded).items():
        changed = hook(grad) if key != refusal else None
        grad = grad if changed is None else changed
    return grad


def _refuse_gradient(fqn: str, what: str) -> NoReturn:
    raise RuntimeError(
        f"A gradient flows into {what} parameter `{fqn}`, where nobody reduces it: the parameter "
        f"was used outside its unit's forward. Use it inside `with unsharded(module):` (under "
        f"Lightning `self.trainer.strategy.unsharded(module)`)."
    )
