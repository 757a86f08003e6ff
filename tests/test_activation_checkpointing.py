"""Activation checkpointing inside, around and on units (cases C31, C41)."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_fsdp_toy.sharding import full_state_dict, fully_shard, get_root
from lightning_fsdp_toy.sharding.activation_checkpointing import (
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)
from tests.core_helpers import Block, Stack, full_gradients
from tests.ranks import run_ranks

WORLD_SIZE = 2
both_ways = pytest.mark.parametrize("use_reentrant", [False, True])


def _input(rank, size=4, width=5):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(rank))


def _loss(model, rank):
    torch.manual_seed(rank)  # of dropout
    return model(_input(rank)).pow(2).sum()


def _gradients(model, loss_fn):
    loss = loss_fn(model, dist.get_rank())
    random_after_forward = torch.rand(())
    loss.backward()
    random_after_backward = torch.rand(())
    return full_gradients(model), torch.stack([random_after_forward, random_after_backward])


def _check(*args):
    _compare(*args)


def _compare(make_model, policy, units, use_reentrant, loss_fn=_loss, exact=True):
    """Gradients of two steps: one process, sharded, sharded and checkpointed."""
    torch.manual_seed(0)
    reference = make_model()
    plain, model = copy.deepcopy(reference), copy.deepcopy(reference)
    fully_shard(plain, auto_wrap_policy=units)
    assert apply_activation_checkpointing(model, policy, use_reentrant)
    fully_shard(model, auto_wrap_policy=units)
    root = get_root(model)
    for _ in range(2):
        for each in (reference, plain, model):
            each.zero_grad()
        root.ledger.reset()
        root.memory.reset_peak()
        for rank in range(WORLD_SIZE):
            (loss_fn(reference, rank) / WORLD_SIZE).backward()
        uncheckpointed, random = _gradients(plain, loss_fn)
        actual, random_here = _gradients(model, loss_fn)
        assert torch.equal(random, random_here)
        for name, param in reference.named_parameters():
            for expected in (param.grad, uncheckpointed[name]):
                if expected is None:
                    assert actual[name] is None, name
                elif exact:
                    assert torch.equal(actual[name], expected), name
                else:
                    torch.testing.assert_close(actual[name], expected)
        assert all(unit.is_sharded for unit in root.units if unit.has_buffers)
        assert root.memory.held["unsharded"] == root.memory.held["reduce"] == 0
    return model


def _counts(root):
    """Gathers and reductions of each unit that has parameters."""
    units = [unit.fqn for unit in root.units if unit.flats]
    return {fqn: tuple(root.ledger.calls(o, fqn) for o in _OPERATIONS) for fqn in units}


_OPERATIONS = ("all_gather", "reduce_scatter")


class DropoutStack(Stack):
    """Masks between the blocks' layers, so that recomputation needs the same random numbers."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.5))


PLACES = {  # what is checkpointed, what is a unit
    "on_units": (["Block"], ["Block"]),
    "inside_units": (["Linear"], ["Block"]),
    "around_units": (["Block"], ["Linear"]),
    "whole_model_one_unit": (["Block"], None),
    "nested": (["Block", "Linear"], ["Block", "Linear"]),
}


def _check_place(policy, units, use_reentrant):
    model = _compare(DropoutStack, policy, units, use_reentrant)
    # The second step knows which unit comes last; it stays unsharded, as the root does.
    counts = _counts(get_root(model))
    last = [fqn for fqn in counts if fqn != "<root>"][-1:]
    expected = {f: (1, 1) if f in ("<root>", *last) else (2, 1) for f in counts}
    assert counts == expected, counts


@both_ways
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_equal_and_nothing_is_gathered_a_third_time(place, use_reentrant):  # C31, C41
    run_ranks(_check_place, WORLD_SIZE, *PLACES[place], use_reentrant)


class Opaque:
    """A container nobody knows: outputs in it get no hooks."""

    def __init__(self, value):
        self.value = value


class Direct(nn.Module):
    """Uses its own weight and a child's without calling it; returns an opaque container."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.child = nn.Linear(5, 5)

    def forward(self, x):
        return Opaque(x + F.linear(torch.tanh(F.linear(x, self.weight)), self.child.weight))


class Holder(nn.Module):
    """A unit whose checkpointed part is not the unit itself."""

    def __init__(self):
        super().__init__()
        self.direct = Direct()

    def forward(self, x):
        return Opaque(torch.tanh(self.direct(x).value))


class DirectStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Holder() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).value
        return x


@pytest.mark.parametrize("units", [["Holder"], ["Direct"]])
def test_recomputation_finds_weights_that_are_used_directly(units):
    run_ranks(_check, WORLD_SIZE, DirectStack, ["Direct"], units, False)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        x = self.inp(x)[None]
        for block in self.blocks:
            x = block(x)
        return x


@both_ways
@pytest.mark.parametrize("policy", [["MultiheadAttention"], ["TransformerEncoderLayer"]])
def test_attention_which_reads_the_weights_of_its_child(policy, use_reentrant):
    units = ["TransformerEncoderLayer"]
    run_ranks(_check, WORLD_SIZE, Attending, policy, units, use_reentrant)


class Mixed(nn.Module):
    """Tensors in keywords and containers, outputs without gradient, frozen and tied weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.blocks[2].lin.weight = self.blocks[1].lin.weight

    def forward(self, x):
        for block in self.blocks:
            out = block(x, scale=2, extra={"shift": x * 3})
            x = out["x"] + out["mean"]
            assert out["nothing"] is None
        return x


class MixedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x, *, scale, extra):
        y = torch.tanh(self.lin(x)) * scale + extra["shift"]
        index = y.detach().argmax(-1) % len(y)
        return {"x": y[index], "mean": y.detach().mean(), "nothing": None}


@both_ways
def test_keywords_containers_and_outputs_without_gradient(use_reentrant):
    run_ranks(_check, WORLD_SIZE, Mixed, "auto", "auto", use_reentrant)


class Collecting(nn.Module):
    """Blocks put auxiliary losses into a list that they are given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CollectingBlock() for _ in range(3))

    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses=losses)
        assert len(losses) == 3
        return x + sum(losses)


class CollectingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x, losses):
        y = torch.tanh(self.lin(x))
        losses.append(y.square().mean() + sum(loss.detach() for loss in losses))
        return y


def test_losses_put_into_a_list_reach_the_caller():
    run_ranks(_check, WORLD_SIZE, Collecting, "auto", "auto", False)


def _collect_reentrant():
    model = Collecting()
    apply_activation_checkpointing(model, "auto", use_reentrant=True)
    with pytest.warns(UserWarning, match="No gradient flows through that one: return it"):
        fully_shard(model)(torch.ones(2, 5)).sum().backward()


def test_reentrant_checkpointing_warns_of_tensors_put_into_a_list():
    run_ranks(_collect_reentrant, 1)


def _autocast_loss(model, rank):
    torch.manual_seed(rank)
    with torch.autocast("cpu", torch.bfloat16):
        return model(_input(rank)).float().pow(2).sum()


def _check_autocast(use_reentrant):
    # Casts of a weight are cached in one process and not when it is recomputed: sums differ.
    model = _compare(Stack, "auto", "auto", use_reentrant, _autocast_loss, exact=False)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    _autocast_loss(model, 0).backward()  # outside of autocast
    assert seen == [torch.bfloat16] * 2


@both_ways
def test_recomputation_is_under_the_autocast_of_forward(use_reentrant):
    run_ranks(_check_autocast, WORLD_SIZE, use_reentrant)


def _peak_bytes(policy, units, use_reentrant):
    model = Stack(num_blocks=6)
    apply_activation_checkpointing(model, policy, use_reentrant)
    fully_shard(model, auto_wrap_policy=units)
    root = get_root(model)
    for _ in range(3):
        root.memory.reset_peak()
        _loss(model, dist.get_rank()).backward()
    sizes = [sum(4 * f.layout.padded_numel for f in unit.flats) for unit in root.units]
    return root.memory.unsharded_peak_bytes, sizes[0], max(sizes[1:])


@both_ways
@pytest.mark.parametrize("place", ["on_units", "inside_units", "around_units"])
def test_few_units_are_unsharded_at_a_time(place, use_reentrant):
    # One in use and one prefetched; all those (two) inside a module that is recomputed.
    at_most = 2 + (1 if place == "around_units" else 0)
    for peak, root, unit in run_ranks(_peak_bytes, WORLD_SIZE, *PLACES[place], use_reentrant):
        assert peak <= root + at_most * unit


@both_ways
def test_checkpointed_blocks_keep_their_inputs_only(use_reentrant):
    held = {}
    for policy in (None, ["Block"]):
        saved = {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        model = Stack(num_blocks=6)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        apply_activation_checkpointing(model, policy, use_reentrant)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(2000, 5)).sum()
        held[policy is not None] = sum(t.nbytes for ptr, t in saved.items() if ptr not in weights)
        loss.backward()
    inputs = 2000 * 4 * (5 + 7 * 7)  # of the model, six blocks and the head
    assert held[True] == pytest.approx(inputs, rel=0.01)
    assert held[False] > 3 * inputs


class Penalised(Stack):
    """Takes a gradient of a gradient in its forward."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return y + slope.pow(2).sum()


def test_a_gradient_penalty_inside_forward():
    run_ranks(_check, WORLD_SIZE, Penalised, "auto", "auto", False, _loss, False)


def _count_calls(model):
    """Make the first block's first layer count its calls."""
    calls = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    return calls


@both_ways
def test_nothing_is_computed_again_where_there_is_no_gradient(use_reentrant):
    model = Stack()
    apply_activation_checkpointing(model, "auto", use_reentrant)
    calls = _count_calls(model)
    with torch.no_grad():
        model(_input(0))
    model.blocks[0].requires_grad_(False)
    model.inp.requires_grad_(False)
    model(_input(0)).sum().backward()
    assert len(calls) == 2
    model.inp.requires_grad_(True)
    model(_input(0)).sum().backward()
    assert len(calls) == 4


def test_a_second_call_replaces_the_first_and_removal_undoes_it():
    model = Stack()
    names = list(model.state_dict())
    own_forward = model.blocks[1].forward = lambda x: Block.forward(model.blocks[1], x)
    for _ in range(2):
        assert apply_activation_checkpointing(model, "auto") == [f"blocks.{i}" for i in range(3)]
        calls = _count_calls(model)
        model(_input(0)).sum().backward()
        assert len(calls) == 2
    assert list(model.state_dict()) == names
    assert apply_activation_checkpointing(model, ["LayerNorm"]) == [
        f"blocks.{i}.norm" for i in range(3)
    ]
    calls = _count_calls(model)
    model(_input(0)).sum().backward()
    assert len(calls) == 1
    assert apply_activation_checkpointing(model, None) == []
    remove_activation_checkpointing(model)
    assert [n for n, m in model.named_modules() if "forward" in m.__dict__] == ["blocks.1"]
    assert model.blocks[1].forward is own_forward


def _second_run():
    """Train, change what is checkpointed while the model stays sharded, train again."""
    torch.manual_seed(0)
    model = Stack()
    apply_activation_checkpointing(model, "auto")
    fully_shard(model, auto_wrap_policy=["Block"])
    gradients = []
    for policy, num_calls in (("auto", 2), ("auto", 2), (["LayerNorm"], 1), (None, 1)):
        apply_activation_checkpointing(model, policy)
        calls = _count_calls(model)
        model.zero_grad()
        gradients.append(_gradients(model, _loss)[0])
        assert len(calls) == num_calls
    for other in gradients[1:]:
        assert all(torch.equal(other[name], value) for name, value in gradients[0].items())
    return list(full_state_dict(model)), list(Stack().state_dict())


def test_a_sharded_model_can_be_checkpointed_in_another_way():
    (names, expected), (others, _) = run_ranks(_second_run, WORLD_SIZE)
    assert names == expected
    assert others == []


def test_a_copy_is_checkpointed_with_its_own_weights():
    model = Stack()
    apply_activation_checkpointing(model, "auto")
    other = copy.deepcopy(model)
    calls, other_calls = _count_calls(model), _count_calls(other)
    other(_input(0)).sum().backward()
    assert (len(calls), len(other_calls)) == (0, 2)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def _update_before_backward(use_reentrant):
    model = Stack()
    apply_activation_checkpointing(model, "auto", use_reentrant)
    fully_shard(model, auto_wrap_policy=["Block"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_input(0)).sum().backward()
    loss = model(_input(0)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated between this forward and its backward"):
        loss.backward()


@both_ways
def test_weights_updated_before_the_recomputation_are_noticed(use_reentrant):
    run_ranks(_update_before_backward, WORLD_SIZE, use_reentrant)


def test_reentrant_checkpointing_refuses_outputs_it_cannot_see():
    model = DirectStack()
    apply_activation_checkpointing(model, ["Direct"], use_reentrant=True)
    with pytest.raises(TypeError, match=r"no tensor in an output of type .*Opaque.*use_reentrant"):
        model(_input(0))


def test_policies_are_checked_under_the_name_of_their_option():
    with pytest.raises(ValueError, match=r"`activation_checkpointing_policy` names 'Blok'.*Block"):
        apply_activation_checkpointing(Stack(), ["Blok"])
    with pytest.raises(TypeError, match=r"`activation_checkpointing_policy`: expected 'auto'"):
        apply_activation_checkpointing(Stack(), 3)


def test_a_policy_without_effect_warns():
    with pytest.warns(UserWarning, match="chooses no module of this model"):
        assert apply_activation_checkpointing(nn.Linear(2, 2), "auto") == []
    model = Stack()
    model.head = checkpoint_wrapper(model.head)
    with pytest.warns(UserWarning, match="ignored: the model contains checkpointed modules"):
        assert apply_activation_checkpointing(model, "auto") == []
