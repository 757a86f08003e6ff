"""Weights come back for backward whatever forward returns (cases C35 to C41)."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp_toy.sharding import (
    MixedPrecisionPolicy,
    fully_shard,
    get_root,
    register_forward_method,
    unsharded,
)
from tests.core_helpers import Block, Stack, full_gradients
from tests.ranks import run_ranks


def _compare_gradients(make_model, loss_fn, is_exact=True, **options):
    """Compare the mean over ranks of the gradients of `loss_fn(model, rank)` with a whole copy."""
    torch.manual_seed(0)
    reference = make_model()
    model = copy.deepcopy(reference)
    fully_shard(model, **{"auto_wrap_policy": ["Block"], **options})
    world_size = dist.get_world_size()
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        for rank in range(world_size):
            (loss_fn(reference, rank) / world_size).backward()
        loss_fn(model, dist.get_rank()).backward()
        expected = {name: param.grad for name, param in reference.named_parameters()}
        actual = full_gradients(model)
        assert {n for n, g in actual.items() if g is None} == {
            n for n, g in expected.items() if g is None
        }
        for name, grad in expected.items():
            if grad is not None and is_exact:
                assert torch.equal(actual[name], grad), name
            elif grad is not None:
                torch.testing.assert_close(actual[name], grad, rtol=1e-6, atol=1e-6)
        _assert_at_rest(model)


def _assert_at_rest(model):
    root = get_root(model)
    assert root.memory.held["unsharded"] == 0
    assert root.memory.held["reduce"] == 0
    assert all(unit.is_sharded for unit in root.units)


def _input(rank, size=4, width=7):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(rank))


class Storing(nn.Module):
    """Returns a detached output; the loss comes from what was set aside."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StoringBlock() for _ in range(2))

    def forward(self, x, aux):
        cache = []
        for block in self.blocks:
            x = block(x, cache, aux)
        return cache


class StoringBlock(Block):
    def forward(self, x, cache, aux):
        out = super().forward(x)
        self.stored = out
        cache.append({"key": out * 2})
        aux.append(self.up(out).pow(2).mean())
        return out.detach()


def _storing_loss(model, rank):
    aux = []
    cache = model(_input(rank), aux)
    loss = sum(aux) + sum(c["key"].sum() for c in cache)
    for block in model.blocks:
        loss = loss + block.stored.pow(2).sum()
        block.stored = None
    return loss


def test_loss_from_stored_intermediates():  # C36
    run_ranks(_compare_gradients, 2, Storing, _storing_loss)


class InPlace(nn.Module):
    """Output views of units are changed in place by the caller."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ViewBlock() for _ in range(3))

    def forward(self, x):
        h = self.blocks[0](x)
        h += 1
        residual = self.blocks[1](h)
        F.relu_(residual)
        out = self.blocks[2](residual)
        out += h
        return out


class ViewBlock(Block):
    def forward(self, x):
        return super().forward(x).view(-1, 7)


def _sum_loss(model, rank):
    return model(_input(rank)).pow(2).sum()


@pytest.mark.parametrize("policy", [["Block"], None])
def test_views_changed_in_place(policy):  # C37
    run_ranks(_compare_in_place, 2, policy)


def _compare_in_place(policy):
    _compare_gradients(InPlace, _sum_loss, auto_wrap_policy=policy)


class Unknown:
    """A container no tree utility knows."""

    def __init__(self, value):
        self.value = value


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(UnknownBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).value
        return Unknown(x)


class UnknownBlock(Block):
    def forward(self, x):
        return Unknown(super().forward(x))


def _unknown_loss(model, rank):
    return model(_input(rank)).value.sum()


def test_unknown_output_containers():
    run_ranks(_compare_gradients, 2, Wrapping, _unknown_loss)


def _two_forwards_one_backward(model, rank):
    a, b = _input(rank), _input(rank + 10)
    return (model(a) * model(b)).sum()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


class Looping(Plain):
    def forward(self, x):
        x = self.inp(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


class Checkpointed(Plain):
    use_reentrant = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class ReentrantCheckpointed(Checkpointed):
    use_reentrant = True


@pytest.mark.parametrize("model", [Plain, Looping, Checkpointed, ReentrantCheckpointed])
def test_two_forwards_before_one_backward(model):  # C40
    # A re-entrant checkpoint runs a backward of its own inside: partial sums are reduced.
    is_exact = model is not ReentrantCheckpointed
    run_ranks(_compare_gradients, 2, model, _two_forwards_one_backward, is_exact)


@pytest.mark.parametrize("model", [Looping, Checkpointed, ReentrantCheckpointed])
def test_reused_and_recomputed_blocks(model):  # C40, C31
    run_ranks(_compare_gradients, 2, model, _sum_loss)


def _two_backwards_one_graph(model):
    out = model(_input(dist.get_rank()))
    out.sum().backward(retain_graph=True)
    out.pow(2).sum().backward()


def _two_forwards_two_backwards(model):
    first, second = model(_input(dist.get_rank())), model(_input(dist.get_rank() + 10))
    first.sum().backward()
    second.pow(2).sum().backward()


def _check_sequence(sequence):
    torch.manual_seed(0)
    reference = Plain()
    model = copy.deepcopy(reference)
    fully_shard(model)
    sequence(model)
    actual = full_gradients(model)
    _assert_at_rest(model)
    sequence(reference)  # this rank's part; the mean over ranks is made by hand
    for name, param in reference.named_parameters():
        dist.all_reduce(param.grad)
        torch.testing.assert_close(actual[name], param.grad / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence", [_two_backwards_one_graph, _two_forwards_two_backwards])
def test_two_backwards_add_up(sequence):  # C40
    run_ranks(_check_sequence, 2, sequence)


class Choosing(nn.Module):
    """Two layers of different size in one unit; the rank decides which are used."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ChoosingBlock() for _ in range(2))
        self.never = nn.Linear(3, 3)

    def forward(self, x, choice):
        for block in self.blocks:
            x = block(x, choice)
        return x


class ChoosingBlock(Block):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Sequential(nn.Linear(7, 30), nn.Linear(30, 7))

    def forward(self, x, choice):
        if "first" in choice:
            x = x + self.first(x)
        if "second" in choice:
            x = x + self.second(x)
        return x


def _one_each(model, rank):
    return model(_input(rank), ["first"] if rank == 0 else ["second"]).sum()


def _both_or_one(model, rank):
    return model(_input(rank), ["first", "second"] if rank == 0 else ["second"]).sum()


@pytest.mark.parametrize("loss_fn", [_one_each, _both_or_one])
def test_ranks_that_use_different_parameters(loss_fn):  # C35 (a)
    run_ranks(_compare_gradients, 2, Choosing, loss_fn)


def _choose_anew_in_every_step(transport):
    torch.manual_seed(0)
    reference = Choosing()
    model = copy.deepcopy(reference)
    fully_shard(model, transport=transport)
    rank = dist.get_rank()
    for step in range(4):  # buffers have been used for other gradients before
        choice = ["first"] if (rank + step) % 2 else ["second"]
        for each in (model, reference):
            each.zero_grad()
            each(_input(rank), choice).sum().backward()
        actual = full_gradients(model)
        for name, param in reference.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            dist.all_reduce(expected)
            if name.split(".")[2:3] in (["first"], ["second"]):
                torch.testing.assert_close(actual[name], expected / 2, rtol=1e-6, atol=1e-6)
            else:
                assert actual[name] is None  # nobody uses it


@pytest.mark.parametrize("transport", ["pairwise", "shared_memory"])
def test_what_a_rank_does_not_use_counts_as_zero_in_every_step(transport):  # C35 (a)
    run_ranks(_choose_anew_in_every_step, 2, transport)


def _unit_skipped_on_rank_1():
    model = fully_shard(Plain())
    out = model.inp(_input(0))
    if dist.get_rank() == 0:
        out = model.blocks[0](out)
    model.blocks[1](out).sum().backward()


def test_ranks_that_call_different_units_end_with_a_named_error():  # C35 (b)
    with pytest.raises(Exception, match=r"rank \d of 2: .* of unit `blocks\.|<root>"):
        run_ranks(_unit_skipped_on_rank_1, 2, timeout=12)


class Coding(nn.Module):
    """Methods other than forward, one of which reads weights directly."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fc = nn.Linear(7, 7)

    def encode(self, x):
        return self.blocks[0](x)

    def decode(self, x):
        return self.fc(self.blocks[1](x))

    def direct(self, x):
        return F.linear(x, self.fc.weight)

    def forward(self, x):
        return self.decode(self.encode(x))


def _methods_loss(model, rank):
    return model.decode(model.encode(_input(rank))).sum()


def test_methods_other_than_forward_that_call_submodules():  # C39
    run_ranks(_compare_gradients, 2, Coding, _methods_loss)


def _registered_method():
    torch.manual_seed(0)
    reference = Coding()
    model = copy.deepcopy(reference)
    fully_shard(model)
    with pytest.raises(RuntimeError):
        model.direct(_input(0))
    register_forward_method(model, model, "direct")
    out = model.direct(_input(0))
    assert torch.equal(out, reference.direct(_input(0)))
    out.sum().backward()
    reference.direct(_input(0)).sum().backward()
    assert torch.equal(full_gradients(model)["fc.weight"], reference.fc.weight.grad)
    _assert_at_rest(model)


def test_registered_method_reads_weights_directly():  # C39
    run_ranks(_registered_method, 2)


def _count_collectives(strategy):
    model = fully_shard(Stack(), sharding_strategy=strategy, auto_wrap_policy=["Block"])
    root = get_root(model)
    for _ in range(2):  # the first forward learns the order
        root.ledger.reset()
        model(torch.randn(4, 5)).sum().backward()
    counts = {}
    for unit in root.units:
        counts[unit.fqn] = (
            root.ledger.calls("all_gather", unit.fqn),
            root.ledger.calls("reduce_scatter", unit.fqn),
        )
    model.zero_grad()
    assert root.memory.held["gradients"] == 0
    return counts


def test_two_gathers_and_one_reduce_per_unit():  # C41
    counts = run_ranks(_count_collectives, 2, "FULL_SHARD")[0]
    assert counts == {"<root>": (1, 1), "blocks.0": (2, 1), "blocks.1": (2, 1), "blocks.2": (1, 1)}


def test_one_gather_per_unit_that_is_kept():  # C41
    counts = run_ranks(_count_collectives, 2, "SHARD_GRAD_OP")[0]
    assert set(counts.values()) == {(1, 1)}


def _step_between():
    model = fully_shard(Plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_input(0)).sum().backward()
    loss = model(_input(1)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated between this forward and its backward"):
        loss.backward()
    optimizer.zero_grad()
    model(_input(0)).sum().backward()  # usable again
    _assert_at_rest(model)


def test_a_step_between_forward_and_backward_is_refused():
    run_ranks(_step_between, 2)


def _reading_between(edit):
    model = fully_shard(Plain())
    loss = model(_input(0)).sum()
    with unsharded(model), torch.no_grad():
        norm = sum(p.norm() for p in model.parameters())
        if edit:
            model.blocks[1].up.weight.mul_(2)
    assert norm > 0
    if edit:
        with pytest.raises(RuntimeError, match="updated between this forward and its backward"):
            loss.backward()
    else:
        loss.backward()
        _assert_at_rest(model)


@pytest.mark.parametrize("edit", [False, True])
def test_weights_may_be_read_but_not_edited_between_forward_and_backward(edit):
    run_ranks(_reading_between, 2, edit)


def _in_place_change_of_an_activation():
    model = fully_shard(Plain())
    x = _input(0).requires_grad_()
    hidden = model.inp(x)
    with torch.enable_grad():
        out = model(x)
    squared = out.pow(2)
    del hidden
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.add_(1)
        squared.sum().backward()


def test_in_place_changes_of_activations_are_still_noticed():
    run_ranks(_in_place_change_of_an_activation, 2)


def _two_forwards_with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    reference = copy.deepcopy(model)
    fully_shard(model)
    rank = dist.get_rank()
    x = torch.randn(2, 2, 4, 5, generator=torch.Generator().manual_seed(3))
    (model(x[rank, 0]).sum() + model(x[rank, 1]).square().sum()).backward()
    for each in x:
        ((reference(each[0]).sum() + reference(each[1]).square().sum()) / 2).backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad)
    model(x[rank, 0])
    model.eval()
    model(x[0, 0])
    means = [torch.empty(7) for _ in range(2)]
    dist.all_gather(means, model[1].running_mean)
    assert torch.equal(*means)


def test_two_forwards_of_batch_norms_before_one_backward():  # C40, C52
    run_ranks(_two_forwards_with_batch_norm, 2)


class _Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        hidden = x
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        (force,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return hidden * self.scale, force * self.scale


def _forces():
    torch.manual_seed(0)
    model = _Forces()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.randn(2, 5)
    for each in (model, reference):
        energy, force = each(x.clone().requires_grad_())
        (energy.sum() + (force**2).sum()).backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad)


def test_forward_goes_on_after_a_gradient_inside_it():
    run_ranks(_forces, 2)


class _Penalised(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inp = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.whole = nullcontext

    def _part(self, x):
        x = torch.tanh(self.blocks[0](x))
        with self.whole():
            penalty = (self.blocks[2].weight ** 2).sum()
        return torch.tanh(self.blocks[1](x)) * penalty

    def forward(self, x):
        x = checkpoint(self._part, self.inp(x), use_reentrant=self.use_reentrant)
        return self.blocks[3](torch.tanh(self.blocks[2](x)))


def _unsharded_in_recomputation(use_reentrant, precision):
    torch.manual_seed(0)
    model = _Penalised(use_reentrant)
    reference = copy.deepcopy(model)
    fully_shard(model, mixed_precision=precision)
    model.whole = lambda: unsharded(model)
    for each in (model, reference):
        each(torch.ones(2, 5)).float().pow(2).sum().backward()
    tolerance = {} if precision is None else {"rtol": 0.1, "atol": 0.5}
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad, **tolerance)
    root = get_root(model)
    assert all(unit.is_sharded for unit in root.units)
    assert root.memory.held["unsharded"] == 0


@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy(param_dtype="bfloat16")])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_weights_read_in_a_recomputation_stay_until_its_backward(use_reentrant, precision):
    run_ranks(_unsharded_in_recomputation, 2, use_reentrant, precision)
