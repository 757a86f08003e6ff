"""Cases of the core under the Trainer that cross several of its parts: shared weights (C21)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import full_state_dict, fully_shard, get_root
from lightning_fsdp_toy.sharding.norm import grad_norm
from lightning_fsdp_toy.sharding.state_dict import full_optimizer_state
from tests.core_helpers import (
    OPTIMIZERS,
    assert_equal,
    full_parameters,
    train_reference,
    train_sharded,
)
from tests.lit_helpers import make_trainer
from tests.ranks import run_ranks

VOCABULARY, WIDTH = 13, 7


class Mixer(nn.Module):
    """Submodule that a model uses in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Holder(nn.Module):
    """Unit that holds a (shared) submodule beside a layer of its own."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.own(x))


class Tied(nn.Module):
    """Embedding and head with one weight, and one mixer in two holders."""

    def __init__(self) -> None:
        super().__init__()
        mixer = Mixer()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = Holder(mixer)
        self.second = Holder(mixer)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))))


POLICIES: dict[str, Any] = {
    "each its own unit": {nn.Embedding, Holder, "Linear"},
    "shared module is a unit": {nn.Embedding, Holder, Mixer, "Linear"},
    "one unit": None,
}
NUM_PARAMETERS = VOCABULARY * WIDTH + VOCABULARY + 3 * (WIDTH * WIDTH + WIDTH)


def _tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def _tokens(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(VOCABULARY, (num, 2, 6), generator=generator))


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _train_tied(optimizer: str, policy: str) -> Any:
    model = _tied()
    weights = train_sharded(
        model, _tokens(20), 4, optimizer, _next_token, auto_wrap_policy=POLICIES[policy]
    )
    is_tied = model.head.weight is model.embedding.weight
    is_shared = model.first.mixer.inner.weight is model.second.mixer.inner.weight
    names = [original.slot.fqn for original in get_root(model).originals()]
    return weights, is_tied and is_shared, names


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_tied_weights_and_shared_modules_train_as_on_one_process(optimizer, policy):  # C21
    expected = train_reference(_tied(), _tokens(20), 4, optimizer, _next_token)
    assert sum(value.numel() for value in expected.values()) == NUM_PARAMETERS
    for world_size in (2, 4):
        for weights, is_one, names in run_ranks(_train_tied, world_size, optimizer, policy):
            assert is_one
            assert sorted(names) == sorted(expected)  # each once
            assert_equal(weights, expected)


def _counted_once(policy: str) -> Any:
    model = fully_shard(_tied(), auto_wrap_policy=POLICIES[policy])
    _next_token(model, _tokens(1)[0]).backward()
    params = list(model.parameters())
    norm = grad_norm(get_root(model), params, 2.0).item()
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    optimizer.zero_grad()
    entries = full_optimizer_state(get_root(model), optimizer)
    state = full_state_dict(model)
    if state:
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    return norm, sum(param.numel() for param in params), list(state), entries


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tied_weight_counts_once_in_norm_optimizer_and_state(policy):  # C21
    reference = _tied()
    _next_token(reference, _tokens(1)[0]).backward()
    grads = torch.cat([p.grad.flatten().double() for p in reference.parameters()])
    first, second = run_ranks(_counted_once, 2, policy)
    assert first[0] == second[0] == pytest.approx(grads.norm().item(), rel=1e-6)
    assert first[1] + second[1] == NUM_PARAMETERS
    keys, entries = first[2:]
    assert keys == list(reference.state_dict())
    assert len(entries["state"]) == len(list(reference.parameters()))


class LitTied(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net = Tied()
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return _next_token(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def _resume_tied(
    strategy: Any, optimizer: str, directory: Path, max_epochs: int, ckpt_path: Any = None
) -> Any:
    torch.manual_seed(0)
    module = LitTied(optimizer)
    world_size = torch.distributed.get_world_size()
    mine = torch.stack(_tokens(12)[torch.distributed.get_rank() :: world_size]).flatten(0, 1)
    trainer = make_trainer(
        strategy,
        directory,
        max_epochs=max_epochs,
        use_distributed_sampler=False,
        accumulate_grad_batches=4 // world_size,
    )
    trainer.fit(module, DataLoader(TensorDataset(mine), batch_size=2), ckpt_path=ckpt_path)
    path = directory / f"{optimizer}-{max_epochs}"
    trainer.save_checkpoint(path)
    if strategy == "auto":
        return {name: p.detach().clone() for name, p in module.named_parameters()}, path
    assert module.net.head.weight is module.net.embedding.weight
    return full_parameters(module), path


@pytest.mark.parametrize("saved_as", ["full", "sharded"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_tied_weights_stay_one_through_checkpoints_at_another_world_size(
    tmp_path, optimizer, saved_as
):  # C21
    expected = run_ranks(_resume_tied, 1, "auto", optimizer, tmp_path, 3)[0][0]
    strategy = ToyFSDPStrategy(
        auto_wrap_policy=POLICIES["each its own unit"], state_dict_type=saved_as
    )
    path = run_ranks(_resume_tied, 2, strategy, optimizer, tmp_path, 1)[0][1]
    for actual, _ in run_ranks(_resume_tied, 4, strategy, optimizer, tmp_path, 3, path):
        assert_equal(actual, expected)
    if saved_as == "full":  # and in a plain module, strictly
        saved = torch.load(path, weights_only=False)
        LitTied(optimizer).load_state_dict(saved["state_dict"], strict=True)
