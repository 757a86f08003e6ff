"""What stands between Fabric's wrapper and a sharded module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from typing_extensions import override

from lightning_fsdp_toy.sharding import RootState, get_root, no_sync
from lightning_fsdp_toy.sharding.hints import explain_sharded_use

__all__ = ["BackwardSync", "ShardedCall", "root_of"]


class ShardedCall(nn.Module):
    """Calls a sharded module; stands before it because Fabric asks for another object.

    Fabric sends methods marked by ``mark_forward_method`` (and the steps of a LightningModule)
    through this ``forward``, so that they see the root's whole weights and the chosen precision,
    and refuses those that are not marked. It does so only where a strategy returned another module
    than it was given.

    Args:
        module: a module that ``fully_shard`` has sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; an error that comes from using sharded weights says so."""
        root = get_root(self.module)
        # The scope keeps the root unsharded until a failed call has been looked at.
        with root.forward_scope(root.root_unit, is_step=True):
            try:
                return self.module(*args, **kwargs)
            except Exception as error:
                explain_sharded_use(root, error)
                raise


class BackwardSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: gradients stay on the rank until a backward outside it."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context; see ``sharding.no_sync``."""
        if not enabled:
            return nullcontext()
        root = root_of(module)
        if root is None:
            raise TypeError(
                f"`no_backward_sync`: expected a model that `fabric.setup` has sharded, got "
                f"{type(module).__name__}."
            )
        return no_sync(root.module)


def root_of(module: object) -> RootState | None:
    """Return the root of a sharded module, given as it is or wrapped; None for anything else."""
    if isinstance(module, ShardedCall):
        module = module.module
    return module.__dict__.get("_fsdp_root") if isinstance(module, nn.Module) else None
