"""Lightning's precision plugins, made to clip gradients over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from typing_extensions import override

from lightning_fsdp_toy.sharding.optim import clip_grad_norm_

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding import RootState

__all__ = ["ToyFSDPMixedPrecision", "ToyFSDPPrecision", "to_toy_precision"]


class _GlobalClipping:
    """Clips by the norm over all ranks; Lightning's default would take each rank's own."""

    root: RootState | None = None  # set by the strategy when the model is sharded

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: int | float) -> None:
        """Clip the gradients of ``optimizer`` by their norm over all ranks."""
        assert self.root is not None, "clipping before the strategy was set up"
        params = [param for group in optimizer.param_groups for param in group["params"]]
        clip_grad_norm_(self.root, params, float(clip_val))


class ToyFSDPPrecision(_GlobalClipping, Precision):
    """32-true."""


class ToyFSDPMixedPrecision(_GlobalClipping, MixedPrecision):
    """bf16-mixed: fp32 shards, gradients, optimizer state and collectives; autocast forward."""

    @override
    def clip_gradients(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        Precision.clip_gradients(self, *args, **kwargs)


def to_toy_precision(plugin: Precision) -> Precision:
    """Return the plugin that does under this strategy what ``plugin`` does elsewhere.

    Raises:
        ValueError: the strategy does not support its precision.
    """
    if isinstance(plugin, _GlobalClipping):
        return plugin
    if type(plugin) is Precision:
        return ToyFSDPPrecision()
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return ToyFSDPMixedPrecision("bf16-mixed", plugin.device)
    raise ValueError(
        f"`ToyFSDPStrategy` does not support `precision={plugin.precision!r}`. "
        f"Use precision='32-true' or 'bf16-mixed'."
    )
