"""The gradient norm over all ranks, the same bits at every world size.

Note: a sum that does not depend on who adds
    Floating-point sums depend on their order, and who holds which element depends on the world
    size. So elements are first added in blocks of ``ALIGNMENT``, which no cut ever divides (every
    piece starts at a multiple of it), by halving: always the same additions. The sums of blocks are
    then rounded to multiples of one power of two, chosen so large that fp64 adds them without any
    rounding, in whatever order; what the rounding left is added in the same way with a much smaller
    power. Two numbers travel each time: the largest block (from which the powers follow), the sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_fsdp_toy.sharding.layout import ALIGNMENT
from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["grad_norm"]

_CHUNK = ALIGNMENT << 14  # elements converted to fp64 at a time


@torch.no_grad()
def grad_norm(root: RootState, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of the whole gradients of sharded parameters: 0-dim fp64.

    Equal on all ranks, and bit for bit at every world size for equal gradients. A collective of 32
    bytes. NaN on one rank reaches all.

    Args:
        root: the sharded model.
        parameters: sharded parameters, the same on every rank; those without a gradient count as
            zero.
        norm_type: order of the norm, above 0; ``inf`` for the largest absolute value.

    Raises:
        ValueError: ``norm_type`` is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"`norm_type`: expected a number above 0 or inf, got {norm_type!r}.")
    params = list(parameters)
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel() > 0]
    device = root.device
    if norm_type == float("inf"):
        largest = [grad.abs().max().double().to(device) for grad in grads]
        return _max_over_ranks(root, _stack(largest, device))
    blocks = [part.to(device) for grad in grads for part in _block_sums(grad, norm_type)]
    sums = torch.cat(blocks) if blocks else torch.zeros(1, dtype=torch.float64, device=device)
    largest_sum = _max_over_ranks(root, sums)
    shapes = {id(o.sharded): o.slot.shape for o in root.originals()}
    num_blocks = sum(-(-prod(shapes.get(id(p), p.shape)) // ALIGNMENT) for p in params)
    total = _exact_sum(root, sums, largest_sum, max(num_blocks, 1))
    return total.pow(1.0 / norm_type) if norm_type != 2 else total.sqrt()


def _block_sums(grad: Tensor, norm_type: float) -> list[Tensor]:
    """Return the sums of powers of blocks of ``ALIGNMENT`` elements, fp64, 1D, in parts."""
    sums = []
    for chunk in grad.reshape(-1).split(_CHUNK):
        size = chunk.abs().double()
        size = F.pad(size, (0, -size.numel() % ALIGNMENT))
        power = size if norm_type == 1 else size * size
        if norm_type == 3:
            power = power * size
        elif norm_type not in (1, 2):
            power = size.pow(norm_type)
        rows = power.view(-1, ALIGNMENT)
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        sums.append(rows[:, 0])
    return sums


def _exact_sum(root: RootState, values: Tensor, largest: Tensor, count: int) -> Tensor:
    """Return the sum over all ranks of non-negative fp64 values (see the note)."""
    coarse = _quantum(largest, count)
    high = torch.round(values / coarse) * coarse
    fine = _quantum(coarse, count)
    low = torch.round((values - high) / fine) * fine
    sums = torch.stack([high.sum(), low.sum()])
    _all_reduce(root, sums, dist.ReduceOp.SUM)
    # Where there is an infinity or NaN, or nothing but zeros, the largest is the answer.
    is_plain = largest.isfinite() & (largest > 0)
    return torch.where(is_plain, sums.sum(), largest)


def _quantum(largest: Tensor, count: int) -> Tensor:
    """Return the power of two of which ``count`` multiples up to ``largest`` add up exactly."""
    exponent = torch.frexp(largest * count).exponent  # largest * count < 2 ** exponent
    # Made from bits: a device's `pow` need not return powers of two exactly.
    biased = (exponent.long() - 52 + 1023).clamp(1, 2046)
    return (biased << 52).view(torch.float64)


def _max_over_ranks(root: RootState, values: Tensor) -> Tensor:
    """Return the largest value of any rank, NaN if there is one."""
    # A maximum of NaN is not NaN on every backend: whether there is one travels beside it.
    is_nan = values.isnan().any().double()
    pair = torch.stack([values.nan_to_num(nan=0.0, posinf=float("inf")).max(), is_nan])
    _all_reduce(root, pair, dist.ReduceOp.MAX)
    return torch.where(pair[1] > 0, float("nan"), pair[0])


def _all_reduce(root: RootState, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    transport = root.mesh.shards
    if transport.world_size > 1:
        size = values.numel() * values.element_size()
        with root.ledger.blocking("control", "<norm>", size, size):
            dist.all_reduce(values, op=op, group=transport.group)


def _stack(values: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(values) if values else torch.zeros(1, dtype=torch.float64, device=device)
