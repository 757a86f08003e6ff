"""Counts parameters and checks the sizes that models are built with."""

from typing import NamedTuple

from torch import nn


class ParameterCount(NamedTuple):
    """Numbers of parameter elements of a model, shared (tied) parameters counted once."""

    total: int
    trainable: int


def count_parameters(module: nn.Module) -> ParameterCount:
    """Count the parameter elements of an unsharded model; works on the meta device too.

    Example:
        >>> from torch import nn
        >>> count_parameters(nn.Linear(3, 2))
        ParameterCount(total=8, trainable=8)
    """
    total = trainable = 0
    for parameter in module.parameters():  # a shared parameter is visited once
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
    return ParameterCount(total, trainable)


def check_sizes(d_model: int, nhead: int, dropout: float, **sizes: int) -> None:
    """Refuse sizes below 1, heads that do not divide the width, and impossible dropout rates."""
    for name, size in {"d_model": d_model, "nhead": nhead, **sizes}.items():
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}")
    if d_model % nhead:
        raise ValueError(
            f"`d_model` must be a multiple of `nhead`, got d_model={d_model} and nhead={nhead}"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"`dropout` must be in [0, 1), got {dropout}")
