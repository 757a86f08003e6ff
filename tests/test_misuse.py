"""What would go wrong without a word after sharding is right, or refused by name."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from lightning_fsdp_toy.sharding import full_state_dict, fully_shard, get_root, unsharded
from lightning_fsdp_toy.sharding.state_dict import (
    full_optimizer_state,
    load_model_state,
    load_optimizer_state,
)
from tests.core_helpers import Block, Stack, assert_equal, full_gradients, full_parameters
from tests.ranks import run_ranks


def _x():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def _other_expert():
    model = nn.Module()
    model.inp = nn.Linear(5, 7)
    model.experts = nn.ModuleList(Block() for _ in range(2))
    fully_shard(model)
    model.experts[dist.get_rank()](model.inp(_x()))


def test_ranks_that_run_equal_units_in_another_order_do_not_swap_weights():
    match = r"rank 0 waits in all-gather number 1 of unit `experts\.0`; rank 1 .* `experts\.1`"
    with pytest.raises(Exception, match=match):
        run_ranks(_other_expert, 2)


def _gradient_outside_forward():
    model = fully_shard(Stack())
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    with pytest.raises(
        RuntimeError, match=r"gradient flows into a piece of parameter `.*unsharded"
    ):
        penalty.backward()
    with unsharded(model):
        penalty = sum(p.pow(2).sum() for p in model.parameters())
    penalty.backward()
    grads, weights = full_gradients(model), full_parameters(model)
    for name, value in weights.items():
        torch.testing.assert_close(grads[name], 2 * value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_penalties_on_weights_need_whole_weights(world_size):
    run_ranks(_gradient_outside_forward, world_size)


class Renormalised(nn.Embedding):
    """Hides its `max_norm` from setup, where an embedding that has one is refused."""

    def forward(self, index):
        return F.embedding(index, self.weight, max_norm=0.1)


def _edits_inside_forward():
    model = nn.Sequential(Renormalised(9, 5), nn.Linear(5, 3))
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"`0\.weight` was changed in place inside forward"):
        model(torch.arange(9))


def test_edits_that_would_reach_one_rank_only_are_refused():
    run_ranks(_edits_inside_forward, 2)


def _edits_in_every_way():
    model = fully_shard(Stack())
    with unsharded(model), torch.no_grad():
        model.inp.weight.fill_(1.0)
        model.head.weight.data = torch.full((3, 7), 2.0)
        model.blocks[0].up.bias = nn.Parameter(torch.full((13,), 3.0))
        nn.utils.vector_to_parameters(torch.full((7,), 4.0), [model.blocks[1].norm.bias])
    with unsharded(model, writeback=False), torch.no_grad():
        model.head.bias.fill_(5.0)
    weights = full_parameters(model)
    assert (weights["inp.weight"] == 1).all()
    assert (weights["head.weight"] == 2).all()
    assert (weights["blocks.0.up.bias"] == 3).all()
    assert (weights["blocks.1.norm.bias"] == 4).all()
    assert not (weights["head.bias"] == 5).any()
    model(_x()).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_inside_unsharded_are_kept_on_all_ranks(world_size):
    run_ranks(_edits_in_every_way, world_size)


def _replaced_and_cached():
    model = Stack()
    cached = model.inp.weight
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"the object that was parameter `inp\.weight`"):
        cached.sum().backward()
    with pytest.raises(RuntimeError, match=r"was replaced by another object"):
        functional_call(model, {"inp.bias": torch.zeros(7)}, (_x(),))


def test_replaced_and_cached_parameters_are_refused():
    run_ranks(_replaced_and_cached, 2)


def _module_added_later():
    model = fully_shard(Stack())
    model.add_module("teacher", nn.Linear(5, 3))
    model(torch.ones(2, 5)).sum().backward()  # it gets no gradient
    model.head = nn.Linear(7, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"`head\..*`, which was added to the model"):
            model(torch.ones(2, 5)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 5))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_parameters_added_after_sharding_are_refused(world_size):
    run_ranks(_module_added_later, world_size)


def _frozen_inside_forward():
    class Toggling(Stack):
        def forward(self, x):
            self.head.requires_grad_(False)
            return super().forward(x)

    model = fully_shard(Toggling())
    model(_x()).sum().backward()
    grads = full_gradients(model)
    assert grads["head.weight"] is None
    assert grads["inp.weight"] is not None
    assert not any(p.requires_grad for p in model.head.parameters())


def test_freezing_inside_forward_holds():
    run_ranks(_frozen_inside_forward, 2)


def _backward_after_a_failed_one():
    model = fully_shard(Stack())
    out = model(_x())
    out.register_hook(_fail_once)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert all(grad is not None for grad in full_gradients(model).values())


_calls = []


def _fail_once(_):
    _calls.append(1)
    if len(_calls) == 1:
        raise KeyError("inside backward")


def test_a_backward_after_one_that_raised_gives_gradients():
    run_ranks(_backward_after_a_failed_one, 2)


def _interrupted():
    model = fully_shard(Stack())

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(_x())
    handle.remove()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    expected = full_parameters(model)
    reference = Stack()
    reference.load_state_dict(expected)
    with torch.no_grad():
        assert torch.equal(model(_x()), reference(_x()))
    assert get_root(model).memory.held["unsharded"] == 0


def test_weights_are_current_after_an_interrupted_forward():
    run_ranks(_interrupted, 2)


def _state_dicts():
    torch.manual_seed(0)
    model = Stack()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    fully_shard(model)
    with unsharded(model):
        inside = model.state_dict()
        part = model.blocks.state_dict()
    assert_equal(inside, expected)
    assert torch.equal(part["0.up.weight"], expected["blocks.0.up.weight"])
    with pytest.warns(UserWarning, match="only this rank's 1D pieces"):
        model.state_dict()
    full = full_state_dict(model)
    assert_equal(full, expected if dist.get_rank() == 0 else {})


def test_state_dicts_hold_whole_weights_or_warn():
    run_ranks(_state_dicts, 2)


def _dropped():
    model = fully_shard(Stack())
    model(_x()).sum().backward()
    ref = weakref.ref(get_root(model))
    del model
    gc.collect()
    return ref() is None


def test_a_dropped_model_is_collected():
    assert run_ranks(_dropped, 2) == [True, True]


def _shared_by_two_units():
    torch.manual_seed(0)
    shared = nn.Linear(7, 7)

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Block(), shared) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Sharing()
    reference = copy.deepcopy(model)
    fully_shard(model, auto_wrap_policy=["Sequential"])
    x = torch.randn(4, 7)
    reference(x).sum().backward()
    model(x).sum().backward()
    grads = full_gradients(model)
    for name, param in reference.named_parameters():
        assert torch.equal(grads[name], param.grad), name


def test_a_module_shared_by_two_units_has_one_gradient():
    run_ranks(_shared_by_two_units, 2)


def _create_graph_outside_forward():
    model = fully_shard(Stack())
    x = _x().requires_grad_()
    out = model(x)
    with pytest.raises(RuntimeError, match="create_graph=True outside forward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_create_graph_outside_forward_names_the_remedy():
    run_ranks(_create_graph_outside_forward, 2)


def _nested_blocks():
    model = fully_shard(Stack())
    with unsharded(model), torch.no_grad():
        model.head.bias.fill_(0.0)
        with unsharded(model, writeback=False):
            model.head.bias.fill_(1.0)
        assert (model.head.bias == 0).all()
    assert (full_parameters(model)["head.bias"] == 0).all()
    with unsharded(model, writeback=False), torch.no_grad():
        with unsharded(model):
            model.head.bias.fill_(2.0)
        model.head.bias.fill_(3.0)
    assert (full_parameters(model)["head.bias"] == 2).all()
    with pytest.raises(ValueError, match=r"`head\.bias` was given data of shape \(4,\)"):
        with unsharded(model):
            model.head.bias.data = torch.zeros(4)
    model(_x()).sum().backward()
    assert get_root(model).memory.held["unsharded"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_nested_unsharded_blocks_keep_and_undo_the_same_at_any_world_size(world_size):
    run_ranks(_nested_blocks, world_size)


def _raising_pre_hook():
    model = fully_shard(Stack())

    def fail(*_):
        raise KeyError("early")

    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(KeyError):
        model(_x())
    handle.remove()
    model(_x()).sum().backward()
    assert [unit.num_active for unit in get_root(model).units] == [0, 0, 0, 0]
    assert get_root(model).memory.held["unsharded"] == 0


def test_a_pre_hook_that_raises_first_leaves_counts_right():
    run_ranks(_raising_pre_hook, 2)


class WithScalar(Stack):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.scale


def _optimizer_state_round_trip(name):
    model = fully_shard(WithScalar())
    optimizer = getattr(torch.optim, name)(model.parameters())
    for _ in range(2):
        model(_x()).sum().backward()
        optimizer.step()
        box = [full_optimizer_state(get_root(model), optimizer)]
        dist.broadcast_object_list(box)
        load_optimizer_state(get_root(model), optimizer, box[0])


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "AdamW", "Adagrad"])
def test_optimizer_state_of_0_dim_parameters_survives(name):
    run_ranks(_optimizer_state_round_trip, 2, name)


def _changed_in_block(change):
    model = fully_shard(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_parameters(model)
    state = {name: value + 1 for name, value in before.items()}
    with pytest.raises(RuntimeError, match=r"changed while an `unsharded` block held"):
        with unsharded(model):
            if change == "step":
                model(_x()).sum().backward()
                optimizer.step()
            else:
                load_model_state(get_root(model), state)
    after = full_parameters(model)
    assert not any(torch.equal(after[name], before[name]) for name in before if "norm" not in name)


@pytest.mark.parametrize("change", ["step", "load"])
def test_steps_and_loads_inside_unsharded_are_refused_not_undone(change):
    run_ranks(_changed_in_block, 2, change)


class _Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x, depth=2):
        x = torch.tanh(x @ self.weight)
        if depth > 0:
            x = self(x, depth - 1)
        for block in self.blocks:
            x = block(x)
        return x @ self.weight


def _recursion():
    torch.manual_seed(0)
    model = _Recursive()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.ones(2, 5)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    for name, grad in full_gradients(model).items():
        assert torch.equal(grad, reference.get_parameter(name).grad), name


def test_a_root_that_calls_itself_is_not_taken_for_an_interrupted_one():
    run_ranks(_recursion, 2)


class _Reassigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.lin(x - self.mean)


def _reassigned_buffers():
    model = fully_shard(_Reassigns())
    for _ in range(3):
        model(torch.randn(2, 5) + dist.get_rank()).sum().backward()
    model.eval()
    with torch.no_grad():
        model(_x())
    return model.mean


def test_buffers_that_modules_replace_stay_equal_on_all_ranks():
    first, second = run_ranks(_reassigned_buffers, 2)
    assert torch.equal(first, second)


class _Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.codes = nn.Embedding(4, 5)

    def forward(self, x):
        self.codes.weight = nn.Parameter(self.codes.weight.detach() * 2, requires_grad=False)
        return self.lin(x) + self.codes.weight.sum(0)


def _replaced_in_forward():
    model = fully_shard(_Replaces())
    with pytest.raises(RuntimeError, match=r"`codes.weight` was replaced .* inside forward"):
        model(torch.ones(2, 5))


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_replaced_inside_forward_are_refused(world_size):
    run_ranks(_replaced_in_forward, world_size)


def _inner_first():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    fully_shard(model[0])
    with pytest.raises(RuntimeError, match=r"`0` is sharded already.*auto_wrap_policy"):
        fully_shard(model)


def test_a_model_around_a_sharded_module_is_refused():
    run_ranks(_inner_first, 2)
