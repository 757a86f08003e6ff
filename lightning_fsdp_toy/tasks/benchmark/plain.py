"""Training steps in a plain loop: what every variant but `lightning` does."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fsdp_toy.data import MicroBatchDataModule
from lightning_fsdp_toy.lit_module import Batch, token_loss
from lightning_fsdp_toy.tasks import Build

__all__ = ["AFTER_BACKWARD", "AFTER_FORWARD", "AFTER_STEP", "IN_BACKWARD", "POINTS"]
__all__ += ["PlainSteps", "make_batches", "make_model"]

AFTER_FORWARD, IN_BACKWARD = "after forward", "in the middle of backward"
AFTER_BACKWARD, AFTER_STEP = "after backward", "after the optimizer step"
POINTS = (AFTER_FORWARD, IN_BACKWARD, AFTER_BACKWARD, AFTER_STEP)
_NUM_BATCHES = 8  # made once, then used again and again


def _ignore(point: str) -> None:
    """Note nothing."""


class PlainSteps:
    """A model, its optimizer and its data.

    Args:
        model: Maps tokens to logits; sharded, replicated or neither.
        optimizer: Of its parameters.
        batches: Micro-batches on the model's device.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, batches: list[Batch]) -> None:
        self.model = model
        self.optimizer = optimizer
        self._batches = itertools.cycle(batches)

    def step(self, note: Callable[[str], None] = _ignore) -> None:
        """Train on one micro-batch; calls `note` at the points of a step."""
        tokens, targets = next(self._batches)
        loss = token_loss(self.model(tokens), targets)
        note(AFTER_FORWARD)
        loss.backward()
        del loss
        note(AFTER_BACKWARD)
        self.optimizer.step()
        note(AFTER_STEP)
        self.optimizer.zero_grad()


def make_model(build: Build, seed: int, sizes: dict[str, int]) -> nn.Module:
    """Make the model, with the same initial weights in every process.

    Args:
        build: Makes what the job's config describes.
        seed: Of the weights.
        sizes: Arguments of the model that replace configured ones.
    """
    L.seed_everything(seed, workers=True, verbose=False)
    model: nn.Module = build("model", **sizes)
    return model.train()


def make_batches(build: Build, rank: int, world_size: int, device: torch.device) -> list[Batch]:
    """Return the first micro-batches that the data module deals to a rank."""
    data: MicroBatchDataModule = build("data")
    data.trainer = SimpleNamespace(  # type: ignore[assignment]  # what the loaders ask it for
        world_size=world_size, global_rank=rank, accumulate_grad_batches=1, training=False
    )
    data.prepare_data()
    data.setup("fit")
    first = itertools.islice(data.train_dataloader(), _NUM_BATCHES)
    return [(tokens.to(device), targets.to(device)) for tokens, targets in first]
