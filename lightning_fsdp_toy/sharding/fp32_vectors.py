"""Modules that compute with fp32 copies of their weights, though these are gathered in a low dtype.

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
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy
from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["give_batch_norms_fp32_vectors", "give_fp32_vectors", "take_back_fp32_vectors"]


def give_fp32_vectors(module: nn.Module, kind: type[nn.Module] = nn.Module) -> None:
    """Let submodules of a kind that hold only vectors see them in fp32 (see the note)."""
    root: RootState | None = module.__dict__.get("_fsdp_root")
    originals = root.originals() if root is not None else ()
    num_dims = {id(p): len(o.slot.shape) for o in originals for p in (o.sharded, o.unsharded)}
    for sub in module.modules():
        params = list(sub.parameters(recurse=False))
        is_leaf = next(sub.children(), None) is None
        holds_vectors = params and all(num_dims.get(id(p), p.ndim) <= 1 for p in params)
        if sub is not module and isinstance(sub, kind) and is_leaf and holds_vectors:
            sub.__dict__.setdefault("forward", functools.partial(_forward_with_fp32_vectors, sub))


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
