"""Small models and the reference that sharded training is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fsdp_toy.sharding import fully_shard, unsharded


class Block(nn.Module):
    """Residual block of odd sizes."""

    def __init__(self, width: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding-like input, repeated blocks, head: 3 blocks that `auto` makes units."""

    def __init__(self, width: int = 7, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=5e-2, momentum=0.9),
}


def mse_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make_batches(num: int, size: int = 4, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches in global order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 5, generator=generator),
            torch.randn(size, 3, generator=generator),
        )
        for _ in range(num)
    ]


def train_reference(
    model: nn.Module,
    batches: list[Any],
    per_step: int,
    optimizer: str = "sgd",
    loss_fn: Callable[[nn.Module, Any], Tensor] = mse_loss,
) -> dict[str, Tensor]:
    """One process: `per_step` micro-batches per optimizer step, gradients averaged."""
    opt = OPTIMIZERS[optimizer](model.parameters())
    for start in range(0, len(batches), per_step):
        for batch in batches[start : start + per_step]:
            (loss_fn(model, batch) / per_step).backward()
        opt.step()
        opt.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_sharded(
    model: nn.Module,
    batches: list[Any],
    per_step: int,
    optimizer: str = "sgd",
    loss_fn: Callable[[nn.Module, Any], Tensor] = mse_loss,
    **options: Any,
) -> dict[str, Tensor]:
    """The same on the ranks of the default group; micro-batch m belongs to rank m % world size."""
    fully_shard(model, **options)
    opt = OPTIMIZERS[optimizer](model.parameters())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulation = per_step // world_size
    mine = batches[rank::world_size]
    for start in range(0, len(mine), accumulation):
        for batch in mine[start : start + accumulation]:
            (loss_fn(model, batch) / accumulation).backward()
        opt.step()
        opt.zero_grad()
    return full_parameters(model)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    with unsharded(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients from every rank's pieces, by parameter name, on all ranks."""
    from lightning_fsdp_toy.sharding import get_root

    gathered: list[Any] = [None] * dist.get_world_size()
    pieces = {
        o.slot.fqn: (o.piece, o.slot, None if o.sharded.grad is None else o.sharded.grad.clone())
        for o in get_root(model).originals()
    }
    dist.all_gather_object(gathered, pieces)
    grads: dict[str, Tensor | None] = {}
    for fqn, (_, slot, grad) in pieces.items():
        if grad is None:
            assert all(other[fqn][2] is None for other in gathered)
            grads[fqn] = None
            continue
        flat = torch.full((slot.numel,), float("nan"), dtype=grad.dtype)
        for other in gathered:
            piece, _, part = other[fqn]
            flat[piece.start : piece.stop] = part
        grads[fqn] = flat.as_strided(slot.shape, slot.stride)
    return grads


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), (
            f"{name} differs by {(actual[name] - value).abs().max():.3e}"
        )
