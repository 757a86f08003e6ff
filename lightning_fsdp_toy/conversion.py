"""What a precision does to the modules of a model before it is sharded."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_fsdp_toy.sharding import get_root
from lightning_fsdp_toy.sharding.whole import restore

__all__ = ["convert", "sync_batch_norms"]


def convert(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert floating-point parameters and buffers in place, on any device, also the meta device.

    Not by ``module.to(dtype)``, which would cut complex tensors down to their real part and let
    metrics count in low precision. A model that an earlier run sharded in another dtype is made
    whole first, which is a collective.
    """
    is_sharded = "_fsdp_root" in module.__dict__
    if is_sharded and any(p.dtype != dtype for p in module.parameters() if p.is_floating_point()):
        restore(get_root(module))
    _convert(module, dtype)
    return module


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    if isinstance(module, Metric):
        return
    for child in module.children():
        _convert(child, dtype)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors):
        module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)
    if isinstance(module, _DeviceDtypeModuleMixin):
        module._dtype = dtype  # what `self.dtype` says


def sync_batch_norms(module: nn.Module, layer_sync: LayerSync, device: torch.device) -> nn.Module:
    """Let batch norms take their statistics over all ranks (``Trainer(sync_batchnorm=True)``).

    Raises:
        ValueError: on the CPU, where torch has no such layer.
    """
    names = [
        name
        for name, sub in module.named_modules()
        if isinstance(sub, _BatchNorm) and not isinstance(sub, nn.SyncBatchNorm)
    ]
    if not names:  # converted again, modules would be others than those that were sharded
        return module
    if device.type == "cpu":
        raise ValueError(
            f"`sync_batchnorm=True`: torch's SyncBatchNorm runs on CUDA only, but `{names[0]}` "
            f"would run on the CPU. Leave the flag out: every rank then normalises by its own "
            f"batch, and running statistics are rank 0's on all ranks, as under DDP."
        )
    if "_fsdp_root" in module.__dict__:
        restore(get_root(module))
    return layer_sync.apply(module)
