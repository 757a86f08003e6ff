"""What a precision does to the modules of a model before it is sharded.

Note: small parameters under autocast
    Weights are gathered in the low dtype. Autocast expects to find those of norms and scales in
    fp32: given low ones, batch norm refuses its fp32 statistics, and on CPU layer and group norm
    refuse an fp32 input. So modules that hold nothing but vectors and scalars are called with fp32
    copies of them. A module that keeps such a weight beside a matrix and norms in its own
    ``forward`` is not covered.

    A policy without autocast has this trouble with batch norm alone, whose running statistics stay
    in the buffers' dtype; everything else computes in the low dtype throughout.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, get_root
from lightning_fsdp_toy.sharding.state_dict import full_shapes
from lightning_fsdp_toy.sharding.whole import restore

__all__ = [
    "convert",
    "give_batch_norms_fp32_vectors",
    "give_fp32_vectors",
    "sync_batch_norms",
    "take_back_fp32_vectors",
]


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


def give_fp32_vectors(module: nn.Module, kind: type[nn.Module] = nn.Module) -> None:
    """Let submodules of a kind that hold only vectors see them in fp32 (see the note)."""
    root = get_root(module) if "_fsdp_root" in module.__dict__ else None
    if root is not None:
        root.settle()
    with full_shapes(root) if root is not None else nullcontext():
        for sub in module.modules():
            is_one = sub is not module and isinstance(sub, kind) and _holds_only_vectors(sub)
            if is_one and "forward" not in sub.__dict__:
                sub.__dict__["forward"] = functools.partial(_forward_with_fp32_vectors, sub)


def give_batch_norms_fp32_vectors(module: nn.Module, policy: MixedPrecisionPolicy | None) -> None:
    """Let batch norms see fp32 parameters beside their fp32 statistics (see the note)."""
    if policy is not None and policy.param_dtype is not None:
        give_fp32_vectors(module, _BatchNorm)


def take_back_fp32_vectors(module: nn.Module) -> None:
    """Undo ``give_fp32_vectors``."""
    for sub in module.modules():
        forward = sub.__dict__.get("forward")
        if getattr(forward, "func", None) is _forward_with_fp32_vectors:
            del sub.__dict__["forward"]


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


def _holds_only_vectors(module: nn.Module) -> bool:
    params = list(module.parameters(recurse=False))
    is_leaf = next(module.children(), None) is None
    return is_leaf and bool(params) and all(param.ndim <= 1 for param in params)


def _forward_with_fp32_vectors(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of ``module``, which sees its low-precision parameters in fp32."""
    params: Any = module._parameters
    statistics = getattr(module, "running_mean", None)
    if statistics is not None and statistics.dtype != torch.float32:  # a policy's buffer_dtype
        return type(module).forward(module, *args, **kwargs)
    low = {
        name: param
        for name, param in params.items()
        if param is not None and param.dtype in (torch.bfloat16, torch.float16)
    }
    try:
        for name, param in low.items():
            params[name] = param.float()
        return type(module).forward(module, *args, **kwargs)
    finally:
        params.update(low)
