"""Weights edited outside `unsharded` blocks: kept where every rank makes the edit, else refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import fully_shard, get_root
from tests.core_helpers import Stack, assert_equal, full_parameters
from tests.lit_helpers import make_trainer
from tests.ranks import run_ranks
from tests.test_trainer_features import Shared, fit, global_batches

POLICIES = [{}, {"auto_wrap_policy": None}, {"sharding_strategy": "SHARD_GRAD_OP"}]


def edit_(param, change, through_data):
    if through_data:
        change(param.data)
    else:
        with torch.no_grad():
            change(param)


class Critic(Shared):
    """A WGAN: clamps the critic's weights after its step, before the generator's forward."""

    def __init__(self, through_data):
        super().__init__()
        self.automatic_optimization = False
        self.through_data = through_data
        self.generator = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.critic = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.scale = nn.Parameter(torch.ones(3))  # of the root unit, whatever the policy

    def training_step(self, batch, _):
        generator, critic = self.optimizers()
        parts = self.parts(batch)
        for x, y in parts:
            fake, real = self.critic(self.scale * self.generator(x)), self.critic(y)
            self.manual_backward((fake.mean() - real.mean()) / len(parts))
        critic.step()
        critic.zero_grad()
        generator.zero_grad()
        for param in [*self.critic.parameters(), self.scale]:
            edit_(param, lambda p: p.clamp_(-0.05, 0.05), self.through_data)
        for x, _ in parts:
            fake = self.critic(self.scale * self.generator(x))
            self.manual_backward(-fake.mean() / len(parts))
        generator.step()
        generator.zero_grad()
        critic.zero_grad()
        edit_(self.scale, lambda p: p.add_(0.125), self.through_data)

    def configure_optimizers(self):
        return (
            torch.optim.RMSprop([*self.generator.parameters(), self.scale], 0.05),
            torch.optim.RMSprop(self.critic.parameters(), 0.05),
        )


class Prototypes(Shared):
    """SwAV: normalises its prototypes at the start of every training step."""

    def __init__(self, through_data):
        super().__init__()
        self.through_data = through_data
        self.net = Stack()
        self.prototypes = nn.Linear(3, 3, bias=False)

    def training_step(self, batch, _):
        edit_(
            self.prototypes.weight,
            lambda p: p.copy_(F.normalize(p.clone(), dim=1)),
            self.through_data,
        )
        parts = self.parts(batch)
        losses = [F.mse_loss(self.prototypes(self.net(x)), y) for x, y in parts]
        return sum(losses) / len(parts)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit(kind, through_data, directory, options):
    torch.manual_seed(0)
    strategy = "auto" if options is None else ToyFSDPStrategy(**options)
    return fit(kind(through_data), strategy, directory, global_batches(4))


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("kind", [Critic, Prototypes])
def test_edits_that_every_rank_makes_in_training_step_are_kept(
    tmp_path, kind, through_data, options
):
    [expected] = run_ranks(_fit, 1, kind, through_data, tmp_path, None)
    for actual in run_ranks(_fit, 2, kind, through_data, tmp_path, options):
        assert_equal(actual, expected)


def _fit_mixed(directory):
    torch.manual_seed(0)
    module = Prototypes(True)
    trainer = make_trainer(
        ToyFSDPStrategy(), directory, precision="bf16-mixed", use_distributed_sampler=False
    )
    trainer.fit(module, global_batches(1))
    return full_parameters(module)["net.inp.weight"], full_parameters(module)["prototypes.weight"]


def test_an_edit_rounds_nothing_else_under_mixed_precision(tmp_path):
    torch.manual_seed(0)
    before = Prototypes(True).net.inp.weight
    for inp, prototypes in run_ranks(_fit_mixed, 2, tmp_path):
        assert not torch.equal(inp, inp.bfloat16().float())  # fp32 masters, not rounded
        assert torch.allclose(inp, before, atol=0.02)
        assert torch.allclose(prototypes.norm(dim=1), torch.ones(3), atol=0.1)  # one step later


class Editing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        if self.how == "assign":
            self.weight.data = 2 * self.weight.data
        elif self.how == "data":
            self.weight.data.mul_(2)
        return x @ self.weight


def _edit_in_forward(how, debug):
    model = nn.Sequential(nn.Linear(3, 16), Editing(how))
    fully_shard(model, auto_wrap_policy=["Editing"], debug=debug)
    with pytest.raises(RuntimeError, match=r"`1.weight` was given other data inside forward"):
        model(torch.ones(1, 3))
    model[1].how = None
    model(torch.ones(1, 3)).sum().backward()  # nothing of the edit is left
    assert all(unit.is_sharded for unit in get_root(model).units)
    return full_parameters(model)["1.weight"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_data_given_inside_forward_is_refused(world_size):
    for weight in run_ranks(_edit_in_forward, world_size, "assign", False):
        assert torch.equal(weight, torch.eye(16))


def test_debug_mode_finds_edits_of_data_inside_forward():
    for weight in run_ranks(_edit_in_forward, 2, "data", True):
        assert torch.equal(weight, torch.eye(16))
