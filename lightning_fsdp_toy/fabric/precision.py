"""Fabric's precision plugins, made right for shards, and the dtypes they ask of the core."""

from __future__ import annotations

import torch
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn
from typing_extensions import override

from lightning_fsdp_toy.conversion import convert
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy
from lightning_fsdp_toy.sharding.fp32_vectors import give_fp32_vectors
from lightning_fsdp_toy.sharding.grad_scaler import ShardedGradScaler

__all__ = ["ShardedMixedPrecision", "policy_of", "to_sharded_precision"]


class ShardedMixedPrecision(MixedPrecision):
    """bf16-mixed and 16-mixed: fp32 shards and optimizer state, weights gathered in low precision.

    Under 16-mixed all ranks skip a step together.
    """

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        give_fp32_vectors(module)
        return super().convert_module(module)


class ShardedHalfPrecision(HalfPrecision):
    """bf16-true and 16-true: everything is low precision, shards and optimizer state too."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return convert(module, self._desired_input_dtype)


class ShardedDoublePrecision(DoublePrecision):
    """64-true."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return convert(module, torch.float64)


def to_sharded_precision(plugin: Precision) -> Precision:
    """Return the plugin that does under sharding what ``plugin`` does elsewhere.

    Raises:
        ValueError: there is none.
    """
    kind = type(plugin)
    if kind in (Precision, ShardedMixedPrecision, ShardedHalfPrecision, ShardedDoublePrecision):
        return plugin
    if isinstance(plugin, MixedPrecision) and kind is MixedPrecision:
        scaler = None if plugin.scaler is None else ShardedGradScaler.like(plugin.scaler)
        return ShardedMixedPrecision(plugin.precision, plugin.device, scaler)  # type: ignore[arg-type]
    if isinstance(plugin, HalfPrecision) and kind is HalfPrecision:
        return ShardedHalfPrecision(plugin.precision)
    if kind is DoublePrecision:
        return ShardedDoublePrecision()
    raise ValueError(
        f"`ToyFSDPFabricStrategy` does not support the precision plugin `{kind.__name__}` "
        f"(precision={plugin.precision!r}). Use one of precision='32-true', 'bf16-mixed', "
        f"'16-mixed', 'bf16-true', '16-true' or '64-true', without a plugin."
    )


def policy_of(plugin: Precision) -> MixedPrecisionPolicy | None:
    """Return in which dtypes weights travel under ``plugin``; None: in their own.

    The plugin itself casts the inputs and outputs of the whole module and computes under autocast.
    """
    if isinstance(plugin, MixedPrecision):
        dtype = torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    return None
