"""Faults to plant: one wrong bit, or one sum in another order, which some row must then name.

They are put in from outside, by wrapping what one rank's strategy holds; sharding knows nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.collectives import Work
from lightning_fsdp_toy.sharding.flat_param import FlatParameter
from lightning_fsdp_toy.sharding.transports import pairwise
from lightning_fsdp_toy.strategy import ToyFSDPStrategy

__all__ = ["Fault", "WrongBitInGather", "WrongBitInShard", "WrongOrder", "make_fault"]


class Fault(Callback):
    """Something goes wrong once, on one rank.

    Args:
        step: After (shard) or during (others) this optimizer step, counted from 1.
        rank: On this rank.

    Attributes:
        planted: What was done, once it has been done on this rank.
    """

    def __init__(self, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank
        self.planted: dict[str, Any] | None = None

    def after_step(self, trainer: L.Trainer, step: int) -> None:
        """Called after every optimizer step, before anything is compared."""

    def is_due(self, trainer: L.Trainer) -> bool:
        """Whether it is to happen now, inside a step."""
        is_here = trainer.global_rank == self.rank and self.planted is None
        return is_here and trainer.global_step + 1 == self.step

    def note(self, name: str, element: int | None = None) -> None:
        """Remember what was done."""
        self.planted = {
            "parameter": name,
            "element": element,
            "step": self.step,
            "rank": self.rank,
        }


class WrongBitInShard(Fault):
    """The lowest bit of one element of a shard, after the step."""

    @override
    def after_step(self, trainer: L.Trainer, step: int) -> None:
        if trainer.global_rank != self.rank or step != self.step:
            return
        held = [original for original in _root_of(trainer).originals() if original.piece.numel]
        original = held[len(held) // 2]
        element = original.piece.numel // 2
        flip_lowest_bit(original.sharded.detach(), element)
        self.note(original.slot.fqn, original.piece.start + element)


class WrongBitInGather(Fault):
    """The lowest bit of one weight of a unit gathered for forward, on this rank only."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        flat = list(_root_of(trainer).flats)[-1]
        finish = flat.finish_unshard

        def finish_unshard() -> None:
            finish()
            if self.is_due(trainer):
                self._flip(flat)

        flat.finish_unshard = finish_unshard  # type: ignore[method-assign]

    def _flip(self, flat: FlatParameter) -> None:
        original = flat.originals[len(flat.originals) // 2]
        element = original.slot.numel // 2
        flip_lowest_bit(flat.compute.tensor, original.slot.offset + element)
        self.note(original.slot.fqn, element)


class WrongOrder(Fault):
    """The contributions to one unit's gradient shard are added in the opposite order."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        root = _root_of(trainer)
        transport, name = root.mesh.world, list(root.flats)[-1].name
        start = transport.start_reduce_scatter

        def start_reduce_scatter(buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> Work:
            num_contributions = transport.world_size + accumulate
            if unit != name or num_contributions < 3 or not self.is_due(trainer):
                return start(buffer, out, accumulate, unit)  # two have only one order
            with _backwards():  # at once: later it would be waited for with others
                start(buffer, out, accumulate, unit).wait()
            self.note(unit)
            return Work()

        transport.start_reduce_scatter = start_reduce_scatter  # type: ignore[method-assign]


@contextmanager
def _backwards() -> Iterator[None]:
    """Reductions that are waited for inside add the last rank first."""
    forwards = pairwise.add_in_order

    def add(out: Tensor, contributions: list[Tensor], accumulate: bool) -> None:
        forwards(out, contributions[::-1], accumulate)

    pairwise.add_in_order = add
    try:
        yield
    finally:
        pairwise.add_in_order = forwards


def make_fault(kind: str, num_steps: int, world_size: int) -> Fault:
    """Return a fault in the middle of the run, on the second rank if there is one."""
    kinds = {"shard": WrongBitInShard, "weight": WrongBitInGather, "order": WrongOrder}
    return kinds[kind](max(1, num_steps // 2), min(1, world_size - 1))


@torch.no_grad()
def flip_lowest_bit(values: Tensor, index: int) -> None:
    """Change the lowest bit of the float32 number at `index` of a 1D tensor."""
    values.view(torch.int32)[index] ^= 1


def _root_of(trainer: L.Trainer) -> RootState:
    assert isinstance(trainer.strategy, ToyFSDPStrategy)
    return trainer.strategy.root
