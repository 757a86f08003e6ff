"""A small LightningModule and trainers for tests that run inside given ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.core_helpers import Stack


class LitStack(L.LightningModule):
    """Regression with `Stack`; remembers the losses and the items it saw."""

    def __init__(self, net: torch.nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = Stack() if net is None else net
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("val/loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("test/loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def regression_data(num: int = 32, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, 5, generator=generator)
    targets = torch.randn(num, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def make_trainer(strategy: Any, directory: Path | str, **options: Any) -> L.Trainer:
    """A quiet Trainer on the ranks of the default group."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
    }
    return L.Trainer(strategy=strategy, **{**defaults, **options})
