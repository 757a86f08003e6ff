"""Row a: a replica held whole on every rank, fed the identical averaged gradient."""

from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.lit_module import LitLanguageModel
from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.flat_param import FlatParameter
from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks.verify.comparison import Divergence, pieces_of
from lightning_fsdp_toy.tasks.verify.trajectory import in_memory_order

__all__ = ["Replica", "whole_gradients"]


class Replica(Callback):
    """Trains whole weights beside the shards and compares the two.

    The replica is a plain module with a torch optimizer of its own. Before every optimizer step it
    gets the averaged gradient, put together from the shards of all ranks; after it, every rank's
    shard must be its part of the replica. And whenever a unit is gathered, the gathered weights
    must be the replica's.

    Args:
        module: With the initial weights, not sharded.
        rank: This rank.

    Attributes:
        shards: What came of comparing shards after each step.
        gathered: What came of comparing gathered weights in each step.
    """

    def __init__(self, module: LitLanguageModel, rank: int) -> None:
        self.module = module
        self.shards = Divergence(rank)
        self.gathered = Divergence(rank)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.module.to(pl_module.device)
        self.weights = dict(self.module.named_parameters())
        configured = self.module.configure_optimizers()
        self.optimizer = configured["optimizer"]
        self.scheduler = configured["lr_scheduler"]["scheduler"]  # type: ignore[index]
        for flat in _root_of(trainer).flats:
            watched = partial(self._finish_unshard, trainer, flat, flat.finish_unshard)
            flat.finish_unshard = watched  # type: ignore[method-assign]

    def _finish_unshard(
        self, trainer: L.Trainer, flat: FlatParameter, finish: Callable[[], None]
    ) -> None:
        """Compare a unit's weights at the moment at which they are complete."""
        finish()
        is_backward = torch._C._current_graph_task_id() != -1
        where = f"weight gathered for {'backward' if is_backward else 'forward'}"
        for original in flat.originals:
            gathered = in_memory_order(original.view_of(flat.compute.tensor))
            name = original.slot.fqn
            expected = in_memory_order(self.weights[name])
            self.gathered.compare(trainer.global_step + 1, name, 0, gathered, expected, where)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = whole_gradients(_root_of(trainer))
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.optimizer.step()
        self.scheduler.step()

    def compare_shards(self, trainer: L.Trainer, step: int) -> None:
        """Compare this rank's shards with its part of the replica."""
        for name, start, piece in pieces_of(trainer):
            expected = in_memory_order(self.weights[name])[start : start + piece.numel()]
            self.shards.compare(step, name, start, piece, expected, "weight")


def _root_of(trainer: L.Trainer) -> RootState:
    assert isinstance(trainer.strategy, ToyFSDPStrategy)
    return trainer.strategy.root


@torch.no_grad()
def whole_gradients(root: RootState) -> dict[str, Tensor | None]:
    """Put gradients together from the shards of all ranks; called on all of them.

    Every rank adds its pieces, as whole numbers, to zeros: a sum that changes no bit.
    """
    gradients: dict[str, Tensor | None] = {}
    for flat in root.flats:
        bits = torch.zeros(flat.layout.padded_numel, dtype=torch.int32, device=root.device)
        for original in flat.originals:
            grad, piece = original.sharded.grad, original.piece
            if grad is not None:
                start = original.slot.offset + piece.start
                bits[start : start + piece.numel].copy_(grad.view(torch.int32))
        if flat.mesh.shards.world_size > 1:
            dist.all_reduce(bits, group=flat.mesh.shards.group)
        for original in flat.originals:
            whole = original.view_of(bits.view(torch.float32))
            is_used = original.sharded.grad is not None
            gradients[original.slot.fqn] = whole.clone() if is_used else None
    return gradients
