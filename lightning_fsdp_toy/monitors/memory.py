"""Counts the bytes that live tensors hold on this rank: no formula, no estimate."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["TensorBytes", "count_tensor_bytes", "process_peak_bytes"]


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of the memory behind a model's tensors on this rank, each memory counted once."""

    parameters: int
    gradients: int
    optimizer: int


def count_tensor_bytes(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> TensorBytes:
    """Count what this rank holds for parameters, gradients and optimizer state now.

    Counts whole storages, padding included, and each storage once however many tensors view it:
    tied parameters, or the parts of one flat parameter. Of sharded tensors, this rank's part.
    Parameters are those of `module` and those the optimizers update. Makes no copy and no
    communication; may be called on any subset of the ranks.

    >>> count_tensor_bytes(nn.Linear(3, 2, bias=False)).parameters
    24
    """
    optimizers = list(optimizers)
    parameters: list[torch.Tensor] = list(module.parameters())
    for optimizer in optimizers:
        parameters += [each for group in optimizer.param_groups for each in group["params"]]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return TensorBytes(
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(gradients),
        optimizer=_storage_bytes(state),
    )


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            continue  # nothing is allocated
        storage = local.untyped_storage()
        sizes[local.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def process_peak_bytes() -> int | None:
    """Largest resident memory of this process so far; `None` where the system cannot tell."""
    if sys.platform == "win32":
        return None
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
