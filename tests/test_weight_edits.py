"""Weights edited outside `unsharded` blocks: kept where every rank makes the edit, else refused."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import fully_shard, get_root, unsharded
from tests.core_helpers import Stack, assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
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


class UsedAtOnce(Shared):
    """Edits a weight of its own and uses it, twice, before it calls a module."""

    edits = True

    def __init__(self, through_data):
        super().__init__()
        self.through_data = through_data
        self.net = Stack()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def training_step(self, batch, _):
        if self.edits:
            edit_(self.weight, lambda p: p.clamp_(-0.5, 0.5).mul_(1.25), self.through_data)
        parts = self.parts(batch)
        return sum(self.loss(x, y) for x, y in parts) / len(parts)

    def loss(self, x, y):
        weight, penalty = F.normalize(self.weight, dim=1), self.weight.pow(2).mean()
        return F.mse_loss(self.net(x) @ weight, y) + penalty

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit(kind, through_data, directory, options):
    torch.manual_seed(0)
    strategy = "auto" if options is None else ToyFSDPStrategy(**options)
    return fit(kind(through_data), strategy, directory, global_batches(4))


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("kind", [Critic, Prototypes, UsedAtOnce])
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


class UnitsAtStart(Shared):
    """Clamps weights of units before they are gathered, under a module in evaluation mode."""

    def __init__(self, through_data):
        super().__init__()
        self.through_data = through_data
        self.net = Stack()
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch, _):
        self.eval()
        for param in [*self.net.blocks.parameters(), self.scale]:
            edit_(param, lambda p: p.clamp_(-0.2, 0.9), self.through_data)
        with self.trainer.strategy.unsharded() if hasattr(self, "_fsdp_root") else nullcontext():
            assert self.scale.max() <= 0.9
            assert self.scale.shape == (3,)
            with torch.no_grad():
                self.net.blocks[0](torch.ones(2, 7))
        edit_(self.scale, lambda p: p.mul_(1.125), self.through_data)  # after the block, too
        parts = self.parts(batch)
        return sum(F.mse_loss(self.scale * self.net(x), y) for x, y in parts) / len(parts)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


@pytest.mark.parametrize("num_prefetch", [0, 1])
@pytest.mark.parametrize("through_data", [True, False])
def test_units_edited_at_the_start_of_a_step_are_not_gathered_before(
    tmp_path, through_data, num_prefetch
):
    [expected] = run_ranks(_fit, 1, UnitsAtStart, through_data, tmp_path, None)
    options = {"num_prefetch": num_prefetch}
    for actual in run_ranks(_fit, 2, UnitsAtStart, through_data, tmp_path, options):
        assert_equal(actual, expected)


def _block_under_mixed_precision(directory, has_block):
    class Blocks(Prototypes):
        def training_step(self, batch, _):
            with self.trainer.strategy.unsharded() if has_block else nullcontext():
                if has_block:
                    with torch.no_grad():
                        self.net.blocks[0](torch.ones(2, 7))
            return self.mean_loss(batch, self.net)

    torch.manual_seed(0)
    module = Blocks(True)
    options = {"precision": "bf16-mixed", "use_distributed_sampler": False}
    make_trainer(ToyFSDPStrategy(), directory, **options).fit(module, global_batches(2))
    return full_parameters(module)


def test_a_block_that_edits_nothing_leaves_masters_as_they_are(tmp_path):
    [expected, _] = run_ranks(_block_under_mixed_precision, 2, tmp_path, False)
    for actual in run_ranks(_block_under_mixed_precision, 2, tmp_path, True):
        assert_equal(actual, expected)


class HoldsInForward(Stack):
    """Holds all weights inside its forward and goes on to use one of its own directly."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        with unsharded(self) if "_fsdp_root" in self.__dict__ else nullcontext():
            penalty = self.blocks[0].up.weight.pow(2).sum()
        return F.linear(x, self.head.weight) + penalty


def _hold_in_forward():
    torch.manual_seed(0)
    model, x = HoldsInForward(), torch.ones(2, 5)
    expected = model(x)
    fully_shard(model)
    return torch.equal(model(x), expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_inside_forward_leaves_the_running_forward_alone(world_size):
    assert all(run_ranks(_hold_in_forward, world_size))


class WrongShape(Prototypes):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.prototypes.weight.data = torch.ones(2, 2)
            return None
        return super().training_step(batch, batch_idx)


def _wrong_shape(directory):
    torch.manual_seed(0)
    module = WrongShape(True)
    with pytest.raises(ValueError, match=r"`prototypes.weight` was given data of shape \(2, 2\)"):
        fit(module, ToyFSDPStrategy(), directory, global_batches(4))
    root = get_root(module)
    assert not root.is_in_forward and root.root_unit.num_active == 0
    assert full_parameters(module)["prototypes.weight"].shape == (3, 3)


def test_data_of_another_shape_ends_the_step_in_order(tmp_path):
    run_ranks(_wrong_shape, 2, tmp_path)


class CallsApart(Prototypes):
    """In every other batch rank 0 calls a module of the root unit, and the other rank none."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        x = torch.ones(1, 3)
        if self.global_rank == 0:
            return self.prototypes(x).sum()
        return F.linear(x, self.prototypes.weight).sum()


def _calls_apart(directory, options):
    torch.manual_seed(0)
    return fit(CallsApart(True), ToyFSDPStrategy(**options), directory, global_batches(4))


@pytest.mark.parametrize("options", [{}, {"debug": True}, {"num_prefetch": 2}], ids=str)
def test_a_rank_that_calls_no_module_does_not_hang_the_others(tmp_path, options):
    first, second = run_ranks(_calls_apart, 2, tmp_path, options)
    assert_equal(first, second)


def _debug_with_nan():
    model = Stack()
    fully_shard(model, debug=True)
    with unsharded(model):
        torch.nn.init.constant_(model.blocks[0].up.weight, float("nan"))
    return model(torch.ones(1, 5)).isnan().all().item()


def test_debug_mode_does_not_take_nan_for_an_edit():
    assert all(run_ranks(_debug_with_nan, 2))


class SavesInside(Prototypes):
    """Saves in the middle of its second training step, after an edit."""

    def training_step(self, batch, index):
        if index == 1:
            edit_(self.prototypes.weight, lambda p: p.clamp_(-0.125, 0.125), self.through_data)
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/saved")
            with self.trainer.strategy.unsharded(self):
                self.expected = {name: p.detach().clone() for name, p in self.named_parameters()}
        return F.mse_loss(self.prototypes(self.net(batch[0])), batch[1])

    def validation_step(self, *_):
        self.found = full_parameters(self)


def _save_inside(through_data, directory, form):
    torch.manual_seed(0)
    options = {"precision": "bf16-mixed", "use_distributed_sampler": False}
    data = global_batches(3)
    saver, reader = SavesInside(through_data), SavesInside(through_data)
    make_trainer(ToyFSDPStrategy(state_dict_type=form), directory, **options).fit(saver, data)
    trainer = make_trainer(ToyFSDPStrategy(), directory, **options)
    trainer.validate(reader, data, ckpt_path=f"{directory}/saved", verbose=False)
    return saver.expected, reader.found


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_checkpoint_saved_inside_training_step_has_the_edit_in_full_precision(
    tmp_path, through_data, form
):
    for expected, found in run_ranks(_save_inside, 2, through_data, str(tmp_path), form):
        assert expected["prototypes.weight"].abs().max() == 0.125
        assert not torch.equal(found["net.inp.weight"], found["net.inp.weight"].bfloat16().float())
        assert_equal(found, expected)


def _train_with_nan(directory):
    module = UsedAtOnce(False)
    module.edits = False
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    make_trainer(ToyFSDPStrategy(), directory).fit(module, regression_data())
    return full_parameters(module)["weight"].isnan().any()


def test_a_weight_that_is_nan_is_not_taken_for_an_edit(tmp_path):
    assert all(run_ranks(_train_with_nan, 2, str(tmp_path)))


class Teacher(LitStack):
    """A moving average that is taken where the root unit is shown whole for backward."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(7, 7).requires_grad_(False)

    def on_before_backward(self, _):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)


def _average_before_backward(directory):
    module = Teacher()
    with pytest.raises(RuntimeError, match=r"Parameter `teacher.weight` was changed in place"):
        make_trainer(ToyFSDPStrategy(), directory).fit(module, regression_data())
    assert not get_root(module).is_in_forward
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_edits_before_backward_are_refused_by_name(tmp_path):
    run_ranks(_average_before_backward, 2, str(tmp_path))


def _save_inside_a_block(directory, form, precision):
    options = {"precision": precision, "max_steps": 2}
    saver, reader = SavesInside(False), SavesInside(False)
    data = global_batches(1)
    trainer = make_trainer(ToyFSDPStrategy(state_dict_type=form), directory, **options)
    trainer.fit(saver, data)
    with trainer.strategy.unsharded(saver), torch.no_grad():
        for param in saver.parameters():
            param.fill_(0.1)
        trainer.save_checkpoint(f"{directory}/saved")
    trainer = make_trainer(ToyFSDPStrategy(), directory, precision=precision)
    trainer.validate(reader, data, ckpt_path=f"{directory}/saved", verbose=False)
    return reader.found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_checkpoint_saved_inside_an_unsharded_block_has_its_edits(tmp_path, form, precision):
    for found in run_ranks(_save_inside_a_block, 2, str(tmp_path), form, precision):
        assert all(torch.equal(w, torch.full_like(w, 0.1)) for w in found.values())
