"""Manual optimization: what follows a step inside `training_step` sees the new weights (C06)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fsdp_toy import ToyFSDPStrategy
from tests.core_helpers import assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks


class TwoSteps(LitStack):
    """Steps twice in each `training_step`; between backward and the first comes a forward."""

    def __init__(self, is_raw: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(3))
        self.is_raw = is_raw

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.is_raw)
        for _ in range(2):
            loss = F.mse_loss(self.net(batch[0]) * self.scale, batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.net(batch[0])  # leaves weights gathered
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(make: type[TwoSteps], strategy: Any, is_raw: bool, directory: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = make(is_raw)
    trainer = make_trainer(strategy, directory, use_distributed_sampler=False)
    trainer.fit(module, regression_data(16))
    if strategy == "auto":
        return {name: param.detach().clone() for name, param in module.named_parameters()}
    return full_parameters(module)


@pytest.mark.parametrize("is_raw", [False, True], ids=["lightning", "raw"])
@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_step_makes_gathered_weights_old(tmp_path, sharding_strategy, is_raw):
    (expected,) = run_ranks(_fit, 1, TwoSteps, "auto", is_raw, tmp_path)
    strategy = ToyFSDPStrategy(sharding_strategy=sharding_strategy)
    for weights in run_ranks(_fit, 2, TwoSteps, strategy, is_raw, tmp_path):
        assert_equal(weights, expected)


class ScalesGradients(TwoSteps):
    """Changes every gradient between backward and step, found by way of the module."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.is_raw)
        for _ in range(2):
            loss = F.mse_loss(self.net(batch[0]) * self.scale, batch[1])
            self.manual_backward(loss)
            for param in self.parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("is_raw", [False, True], ids=["lightning", "raw"])
@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_modules_show_gradients_between_backward_and_step(tmp_path, sharding_strategy, is_raw):
    (expected,) = run_ranks(_fit, 1, ScalesGradients, "auto", is_raw, tmp_path)
    strategy = ToyFSDPStrategy(sharding_strategy=sharding_strategy)
    for weights in run_ranks(_fit, 2, ScalesGradients, strategy, is_raw, tmp_path):
        assert_equal(weights, expected)
