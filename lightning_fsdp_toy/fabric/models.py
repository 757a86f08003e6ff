"""Models and optimizers under ``ToyFSDPFabricStrategy``: set up, shown whole, stepped, clipped."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.wrappers import _unwrap_objects
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_fsdp_toy.fabric.wrapping import ShardedCall, root_of
from lightning_fsdp_toy.sharding import Ledger, RootState, get_root, register_forward_method
from lightning_fsdp_toy.sharding.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp_toy.sharding.adopt import adopt_optimizers
from lightning_fsdp_toy.sharding.fully_shard import shard_with_options
from lightning_fsdp_toy.sharding.norm import grad_norm
from lightning_fsdp_toy.sharding.optim import check_optimizer, tell_of_steps
from lightning_fsdp_toy.sharding.options import ShardingOptions
from lightning_fsdp_toy.sharding.policy import WrapPolicy
from lightning_fsdp_toy.sharding.state_dict import shard_optimizer_state
from lightning_fsdp_toy.sharding.whole import hold_unsharded

__all__ = ["ShardedModels"]


class ShardedModels(ParallelStrategy):
    """The members of a Fabric strategy that take models and optimizers.

    Several models may be set up; an optimizer belongs to one of them.
    """

    activation_checkpointing_policy: WrapPolicy
    activation_checkpointing_reentrant: bool
    allow_optimizers: tuple[type[Optimizer], ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._roots: list[weakref.ref[RootState]] = []  # of every model that was set up

    @abstractmethod
    def _options(self) -> ShardingOptions:
        """What the core is told."""

    # -- what this strategy adds ----------------------------------------------------------------

    def ledger(self, module: nn.Module) -> Ledger:
        """Return the counts of this rank's collectives for ``module``."""
        return self._find_root(module)[0].ledger

    def unsharded(self, module: nn.Module, writeback: bool = True) -> AbstractContextManager[None]:
        """Show the whole weights of a model that was set up, or of a module inside one.

        See ``sharding.unsharded``.
        """
        root, inner = self._find_root(module)
        return hold_unsharded(root, inner, writeback)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let ``module.<name>()`` use weights; see ``sharding.register_forward_method``.

        For modules inside a model. A method of the model itself is marked by Fabric's
        ``model.mark_forward_method(name)``.
        """
        root, inner = self._find_root(module)
        register_forward_method(root.module, inner, name)

    # -- Fabric's members -----------------------------------------------------------------------

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard ``module``; ``optimizers`` built for it go on with its shards, groups kept."""
        with adopt_optimizers(module, optimizers):
            call = self.setup_module(module)
        return call, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard ``module`` in place and return what Fabric is to call."""
        for sub in module.modules():
            if isinstance(sub, Metric):  # its state is no buffer
                sub.to(self.root_device)
        apply_activation_checkpointing(
            module, self.activation_checkpointing_policy, self.activation_checkpointing_reentrant
        )
        shard_with_options(module, self._options(), device=self.root_device)
        self._roots = [ref for ref in self._roots if ref() is not None]
        self._roots.append(weakref.ref(get_root(module)))
        return ShardedCall(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check that ``optimizer`` updates the shards of one sharded model, and does it right.

        Afterwards its ``load_state_dict`` takes whole state too.

        Raises:
            ValueError: it does not.
        """
        root = self._root_of_optimizer(optimizer)
        if root is None:
            raise ValueError(
                f"Optimizer `{type(optimizer).__name__}` holds no parameter of a model that was "
                f"set up. Give it to `fabric.setup(model, optimizer)` together with its model, or "
                f"build it for `model.parameters()` after `model = fabric.setup_module(model)`."
            )
        check_optimizer(root, optimizer, self.allow_optimizers)
        tell_of_steps(root, optimizer)  # a LightningModule may step inside `training_step`
        optimizer.register_load_state_dict_pre_hook(_CutWholeState(root))
        return optimizer

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: ``error_if_nonfinite`` and the norm is not finite; on every rank, and the
                gradients are as they were.
        """
        root, _ = self._find_root(module)
        self.precision.unscale_gradients(optimizer)
        params = list(self.precision.main_params(optimizer))
        norm = grad_norm(root, params, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradients is {norm.item()}, so they cannot be clipped. Pass "
                f"`error_if_nonfinite=False` to scale by it anyway."
            )
        is_double = any(param.dtype == torch.float64 for param in params)
        of_gradients = norm if is_double else norm.float()
        torch.nn.utils.clip_grads_with_norm_(params, float(max_norm), of_gradients)
        return norm

    # -- which model ----------------------------------------------------------------------------

    def _live_roots(self) -> list[RootState]:
        return [root for root in (ref() for ref in self._roots) if root is not None]

    def _root_of_optimizer(self, optimizer: Optimizer) -> RootState | None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for root in self._live_roots():
            if any(id(original.sharded) in held for original in root.originals()):
                return root
        return None

    def _find_root(self, module: nn.Module) -> tuple[RootState, nn.Module]:
        """Return the sharded model that ``module`` is or belongs to, and ``module`` unwrapped."""
        module = _unwrap_objects(module)
        root = root_of(module)
        if root is not None:
            return root, root.module
        for root in self._live_roots():
            if root.unit_of(module) is not None:
                return root, module
        raise TypeError(
            f"{type(module).__name__} is no model that `fabric.setup` has sharded, nor part of one."
        )


class _CutWholeState:
    """Hook of an optimizer that cuts whole state it is to load to this rank's pieces."""

    def __init__(self, root: RootState) -> None:
        self._root = weakref.ref(root)

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        root = self._root()
        if root is None:
            return None
        if "state" not in state_dict:
            raise ValueError(
                "The optimizer state to load is empty: `optimizer.state_dict()` returns whole "
                "state on rank 0 only. Use `fabric.save` and `fabric.load`, or broadcast it."
            )
        return shard_optimizer_state(root, optimizer, state_dict)
