"""Activation checkpointing by policy: keep a module's inputs, compute the rest again in backward.

Note: checkpointing and sharding
    A checkpointed module keeps its name, its parameters and its hooks; only the instance's
    ``forward`` is another one. So a unit's own hooks stay *outside* of what is computed again::

        unit's pre-forward | forward, nothing saved | anchor | post-forward      in forward
        output hook: unit's pre-backward | anchor | forward again | gradients     in backward

    Recomputation needs the weights, and may come before the output hook (or without one: forward
    may return a container nobody knows). The *anchor* makes sure of them: it saves one weight of
    every buffer that the module sees, as any operation saves what it needs in backward. So
    unpacking it unshards whatever must be unsharded, by the same way as the note on getting
    weights back describes (``saved.py``), and this file knows nothing of units. It is made after
    the forward, so that all that runs later counts as finished when it is unpacked, and nothing
    inside the module does.

    Units inside a checkpointed module are all unsharded by its recomputation and stay so until
    their own backward is done: checkpoint units or what is inside them to hold few at a time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_fsdp_toy.sharding.policy import WrapPolicy, select_units

__all__ = ["apply_activation_checkpointing", "remove_activation_checkpointing"]


def apply_activation_checkpointing(
    module: nn.Module, policy: WrapPolicy, use_reentrant: bool = False
) -> list[str]:
    """Checkpoint the submodules of ``module`` that ``policy`` chooses, in place.

    Call it before ``fully_shard``. Their activations are not kept for backward but computed again,
    with the random numbers and autocast state of the first time: one more forward for less memory.
    Names of parameters and modules do not change. What an earlier call has set is replaced, so a
    second call with the same arguments changes nothing.

    Args:
        module: the root, which is never checkpointed itself.
        policy: as for units, see ``policy.select_units``; None checkpoints nothing.
        use_reentrant: run a backward of its own inside backward, as older PyTorch did.

    Returns:
        Names of the checkpointed modules.

    Raises:
        ValueError: a class of the policy has no instance in the model.
        TypeError: the policy is no policy.
    """
    chosen = select_units(module, policy, name="activation_checkpointing_policy")
    if any(isinstance(sub, CheckpointWrapper) for sub in module.modules()):
        if chosen:
            warnings.warn(
                "`activation_checkpointing_policy` is ignored: the model contains checkpointed "
                "modules (`CheckpointWrapper`) already. Remove one of the two.",
                stacklevel=2,
            )
        return []
    if policy is not None and not chosen:
        warnings.warn(
            f"`activation_checkpointing_policy={policy!r}` chooses no module of this model, so "
            f"nothing is checkpointed. Name classes of it.",
            stacklevel=2,
        )
    remove_activation_checkpointing(module)
    for _, sub in chosen:
        sub.__dict__["forward"] = CheckpointedForward(sub, use_reentrant)
    return [name for name, _ in chosen]


def remove_activation_checkpointing(module: nn.Module) -> None:
    """Undo ``apply_activation_checkpointing``; nothing happens where it was not called."""
    for sub in module.modules():
        forward = sub.__dict__.get("forward")
        if isinstance(forward, CheckpointedForward):
            forward.remove()


class CheckpointedForward:
    """The ``forward`` of a checkpointed module.

    Args:
        module: the module.
        use_reentrant: which of PyTorch's two ways.
    """

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        self.module = module
        self.use_reentrant = use_reentrant
        self.before = module.__dict__.get("forward")  # an instance's own, or None
        functools.update_wrapper(self, module.forward)

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, keeping its inputs only."""
        forward: Callable[..., Any] = self.before or functools.partial(
            type(self.module).forward, self.module
        )
        if not torch.is_grad_enabled() or not self._needs_gradient(args, kwargs):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiled graph saves weights as its own inputs
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        anchor = _Anchor()

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            anchor.recall()
            return forward(*args, **kwargs)

        output = _checkpoint(first_or_again, args, kwargs, self.use_reentrant)
        anchor.save(self.module)
        return output

    def _needs_gradient(self, args: Any, kwargs: Any) -> bool:
        leaves = [*tree_leaves((args, kwargs)), *self.module.parameters()]
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


class _Anchor:
    """Makes weights come back for a recomputation (see the note at the top)."""

    _node: Any = None

    def save(self, module: nn.Module) -> None:
        """Save one weight of each buffer, the way an operation would."""
        weights = {p.untyped_storage().data_ptr(): p.detach() for p in module.parameters()}
        start = torch.empty(0, requires_grad=True)  # or there would be no node for frozen weights
        self._node = _SaveWeights.apply(start, *weights.values()).grad_fn

    def recall(self) -> None:
        """Unpack them; nothing in the first forward, which comes before ``save``."""
        if self._node is not None:
            with torch.no_grad():  # recomputation records a graph, this must not
                _ = self._node.saved_tensors


class _SaveWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return start.clone()


def _checkpoint(function: Callable[..., Any], args: Any, kwargs: Any, use_reentrant: bool) -> Any:
    """Call PyTorch's checkpoint with any arguments and outputs.

    It knows positional tensors, and re-entrant only a tuple of output tensors: elsewhere gradients
    would be lost without a word. And a tensor given twice (attention asks whether query is key)
    would come back as two. So each tensor of the arguments is passed once.

    The first call gets the containers it was given: what it puts into a list (an auxiliary loss) is
    there for the caller. A call in backward gets new ones, which hold what these held before.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given_first = [(args, kwargs)]
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    keys = [id(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
    order = list(tensors)  # the tensors themselves must not live as long as `call`
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call(*values: Tensor) -> Any:
        if given_first:
            args, kwargs = given_first.pop()
            output = function(*args, **kwargs)
            if use_reentrant:
                _warn_of_additions(args, kwargs, order)
            return output
        given = dict(zip(order, values, strict=True))
        pairs = zip(keys, constants, strict=True)
        args, kwargs = tree_unflatten(
            [constant if key is None else given[key] for key, constant in pairs], spec
        )
        return function(*args, **kwargs)

    if not use_reentrant:
        return checkpoint(call, *tensors.values(), use_reentrant=False)
    output_specs = []

    def flat_call(start: Tensor, *values: Tensor) -> tuple[Any, ...]:
        output = call(*values)
        outputs, output_spec = tree_flatten(output)
        if not any(isinstance(leaf, Tensor) for leaf in outputs):
            raise TypeError(
                f"Re-entrant activation checkpointing finds no tensor in an output of type "
                f"`{type(output).__name__}`: its gradients would be lost. Return tensors in "
                f"tuples, lists or dicts, or use use_reentrant=False."
            )
        output_specs.append(output_spec)
        return start.clone(), *outputs

    # Weights get gradients only if some input requires one: this does, and has no elements.
    start = torch.empty(0, requires_grad=True)
    _, *outputs = checkpoint(flat_call, start, *tensors.values(), use_reentrant=True)
    return tree_unflatten(outputs, output_specs[0])


def _warn_of_additions(args: Any, kwargs: Any, before: list[int]) -> None:
    leaves = tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) and id(leaf) not in before for leaf in leaves):
        warnings.warn(
            "A module under re-entrant activation checkpointing put a tensor into a list or dict "
            "of its arguments. No gradient flows through that one: return it, or use "
            "use_reentrant=False.",
            stacklevel=2,
        )
