"""Compares weights with those of another run, to the bit, and keeps where they differ first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks.verify.trajectory import Trajectory, in_memory_order

__all__ = ["AfterEveryStep", "CompareWithPlain", "Difference", "Divergence", "pieces_of"]


@dataclass(frozen=True)
class Difference:
    """The first place where bits differ."""

    step: int  # optimizer step in which, or after which, it was seen
    rank: int
    parameter: str
    element: int  # in memory order
    size: float  # absolute
    where: str  # such as "weight after the step"


@dataclass
class Divergence:
    """How far this rank's numbers of one run are from those they are compared with."""

    rank: int
    largest: dict[int, float] = field(default_factory=dict)  # absolute difference by step
    num_compared: dict[int, int] = field(default_factory=dict)  # elements by step
    first: Difference | None = None

    def compare(
        self, step: int, name: str, start: int, actual: Tensor, expected: Tensor, where: str
    ) -> None:
        """Compare float32 elements `start` and following of a parameter, bit by bit.

        As whole numbers: NaN is equal to itself, and 0.0 is not equal to -0.0.
        """
        actual, expected = actual.detach().cpu().reshape(-1), expected.detach().cpu().reshape(-1)
        bits, expected_bits = actual.view(torch.int32), expected.view(torch.int32)
        self.num_compared[step] = self.num_compared.get(step, 0) + len(bits)
        self.largest.setdefault(step, 0.0)
        if torch.equal(bits, expected_bits):
            return
        size = (actual.double() - expected.double()).abs()
        size[bits == expected_bits] = 0.0  # equal infinities
        size = size.nan_to_num(nan=float("inf"), posinf=float("inf"))
        self.largest[step] = max(self.largest[step], float(size.max()))
        if self.first is None:
            index = int((bits != expected_bits).nonzero()[0])
            element, distance = start + index, float(size[index])
            self.first = Difference(step, self.rank, name, element, distance, where)

    def joined(self, other: "Divergence") -> "Divergence":
        """Return what is known of two runs that are each compared with the same third one."""
        steps = sorted({**self.largest, **other.largest})
        firsts = [each for each in (self.first, other.first) if each is not None]
        return Divergence(
            self.rank,
            {n: max(self.largest.get(n, 0.0), other.largest.get(n, 0.0)) for n in steps},
            {n: self.num_compared.get(n, 0) + other.num_compared.get(n, 0) for n in steps},
            min(firsts, key=lambda each: each.step, default=None),
        )


def pieces_of(trainer: L.Trainer) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, first element and weights (1D) of what this rank holds of each parameter."""
    if isinstance(trainer.strategy, ToyFSDPStrategy):
        for original in trainer.strategy.root.originals():
            if original.piece.numel:
                yield original.slot.fqn, original.piece.start, original.sharded.detach()
    else:
        for name, param in trainer.lightning_module.named_parameters():
            yield name, 0, in_memory_order(param)


class AfterEveryStep(Callback):
    """Calls functions with the Trainer and the number of steps: at the start and after each step.

    Args:
        *functions: Called in this order.
    """

    def __init__(self, *functions: Callable[[L.Trainer, int], None]) -> None:
        self.functions = functions
        self._step = -1

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._call(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step != self._step:  # not between micro-batches
            self._call(trainer)

    def _call(self, trainer: L.Trainer) -> None:
        self._step = trainer.global_step
        for function in self.functions:
            function(trainer, self._step)


class CompareWithPlain:
    """Compares what this rank holds with the weights of the plain run after the same step."""

    def __init__(self, trajectory: Trajectory, rank: int) -> None:
        self.trajectory = trajectory
        self.divergence = Divergence(rank)

    def __call__(self, trainer: L.Trainer, step: int) -> None:
        """Compare after `step` optimizer steps."""
        for name, start, piece in pieces_of(trainer):
            expected = self.trajectory.piece(step, name, start, start + piece.numel())
            self.divergence.compare(step, name, start, piece, expected, "weight")
