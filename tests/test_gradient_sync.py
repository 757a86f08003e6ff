"""When gradients are reduced (every micro-batch, or once: `no_sync`) and how they are divided."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import (
    fully_shard,
    get_root,
    no_sync,
    set_gradient_divide_factor,
)
from lightning_fsdp_toy.sharding.norm import grad_norm
from lightning_fsdp_toy.sharding.optim import clip_grad_norm_
from tests.core_helpers import (
    Stack,
    assert_equal,
    full_gradients,
    full_parameters,
    make_batches,
    mse_loss,
)
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks


def _accumulate(is_synced, options):
    """Two windows, of 4 and of 2 micro-batches; unsynced but the last of each."""
    torch.manual_seed(0)
    model = fully_shard(Stack(num_blocks=9), **options)
    root, batches = get_root(model), make_batches(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mine, reduces, peaks = batches[dist.get_rank() :: dist.get_world_size()], [], []
    for window in (mine[:4], mine[4:6]):
        root.ledger.reset()
        root.memory.reset_peak()
        for batch in window:
            if is_synced or batch is window[-1]:
                mse_loss(model, batch).backward()
            else:
                with no_sync(model):
                    mse_loss(model, batch).backward()
                assert all(unit.is_sharded for unit in root.units)
        reduces.append(root.ledger.calls_by_operation().get("reduce_scatter", 0))
        peaks.append(root.memory.peak_bytes)
        grads = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        assert root.memory.held["reduce"] == 0
    return reduces, peaks, grads, len(root.units), sum(f.layout.padded_numel for f in root.flats)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_both_modes_agree_and_reduce_as_often_as_asked(strategy):  # C49
    options = {"sharding_strategy": strategy}
    every = run_ranks(_accumulate, 2, True, options)[0]
    last = run_ranks(_accumulate, 2, False, options)[0]
    num_units, padded = every[3:]
    assert every[0] == [4 * num_units, 2 * num_units]
    assert last[0] == [num_units, num_units]
    for name, grad in every[2].items():  # added in another order
        torch.testing.assert_close(last[2][name], grad, rtol=2e-6, atol=1e-7)
    # Without synchronisation a rank holds whole gradients of every unit.
    assert last[1][0] > every[1][0]
    assert last[1][0] >= 4 * padded


def _exact_sums(order):
    """Whole numbers add up without rounding: both modes then give the same bits."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) % 3)
    reference = copy.deepcopy(model)
    fully_shard(model, auto_wrap_policy=["Linear"])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.full((1, 4), float(m + 1)) for m in range(4 * world_size)]
    for x in inputs:
        (reference(x).sum() / world_size).backward()
    for index, is_synced in enumerate(order):
        x = inputs[index * world_size + rank]
        if is_synced:
            model(x).sum().backward()
        else:
            with no_sync(model):
                model(x).sum().backward()
    grads = full_gradients(model)
    for name, param in reference.named_parameters():
        assert torch.equal(grads[name], param.grad), name


@pytest.mark.parametrize(
    "order", [(True,) * 4, (False, False, False, True), (True, False, True, True)]
)
def test_synced_and_unsynced_micro_batches_mix(order):
    run_ranks(_exact_sums, 2, order)


class TwoPaths(nn.Module):
    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x, index):
        return self.paths[index](x)


def _unit_of_an_earlier_micro_batch():
    torch.manual_seed(0)
    reference = TwoPaths()
    model = fully_shard(copy.deepcopy(reference))
    x = torch.ones(1, 3)
    reference(x, 0).sum().backward()
    reference(x, 1).sum().backward()
    with no_sync(model):
        model(x, 0).sum().backward()
    model(x, 1).sum().backward()
    grads = full_gradients(model)
    for name, param in reference.named_parameters():
        assert torch.equal(grads[name], param.grad), name


def test_units_that_only_unsynced_micro_batches_used_are_reduced_too():
    run_ranks(_unit_of_an_earlier_micro_batch, 2)


def _a_failed_backward_under_no_sync():
    torch.manual_seed(0)
    model = fully_shard(Stack())
    batch = make_batches(1)[0]
    with no_sync(model):
        mse_loss(model, batch).backward()
        loss = mse_loss(model, batch)
        handle = model.inp.register_full_backward_hook(_fail)
        loss = mse_loss(model, batch)
        with pytest.raises(RuntimeError, match="planted"):
            loss.backward()
        handle.remove()
    with pytest.warns(UserWarning, match="gradients of .* from earlier micro-batches"):
        mse_loss(model, batch)
    mse_loss(model, batch).backward()
    assert all(torch.isfinite(grad).all() for grad in full_gradients(model).values())


def _fail(*_):
    raise RuntimeError("planted")


def test_gradients_lost_with_a_failed_backward_are_told():
    run_ranks(_a_failed_backward_under_no_sync, 2)


def _masked_loss(kind):
    """1 valid token on rank 0, 7 on rank 1 (C32)."""
    torch.manual_seed(0)
    reference = nn.Linear(3, 5)
    model = fully_shard(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(8, 3, generator=generator)
    targets = torch.randint(5, (8,), generator=generator)
    rank = dist.get_rank()
    parts = [slice(0, 1), slice(1, 8)]
    if kind == "mean":
        for part in parts:
            (F.cross_entropy(reference(tokens[part]), targets[part]) / 2).backward()
        F.cross_entropy(model(tokens[parts[rank]]), targets[parts[rank]]).backward()
    else:
        for part in parts:
            (F.cross_entropy(reference(tokens[part]), targets[part], reduction="sum")).backward()
        for param in reference.parameters():
            param.grad /= 8
        set_gradient_divide_factor(model, 8)
        loss = F.cross_entropy(model(tokens[parts[rank]]), targets[parts[rank]], reduction="sum")
        loss.backward()
    grads = full_gradients(model)
    for name, param in reference.named_parameters():
        assert torch.equal(grads[name], param.grad), name


def test_gradients_are_the_mean_of_the_ranks():
    run_ranks(_masked_loss, 2, "mean")


def test_a_divide_factor_gives_the_mean_over_all_tokens():
    run_ranks(_masked_loss, 2, "token mean")


def test_a_divide_factor_must_be_positive():
    with pytest.raises(ValueError, match="`factor`: expected a number above 0, got 0"):
        set_gradient_divide_factor(fully_shard(nn.Linear(2, 2)), 0)


class TiedAndScalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 33)
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.head = nn.Linear(33, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def _norms(planted, norm_types):
    """Norms of the gradients of the same global batch of 4 micro-batches."""
    torch.manual_seed(0)
    model = fully_shard(TiedAndScalar())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(9, (4, 2, 5), generator=torch.Generator().manual_seed(1))
    for batch in tokens[rank::world_size]:
        (model(batch).pow(2).mean() / (4 // world_size)).backward()
    params = list(model.parameters())
    if planted is not None and rank == world_size - 1:
        next(p for p in reversed(params) if p.numel()).grad[0] = planted
    norms = [grad_norm(get_root(model), params, p).item() for p in norm_types]
    scaled = clip_grad_norm_(get_root(model), params, 1e-3).item()
    return norms, scaled, {n: g.flatten()[0].item() for n, g in full_gradients(model).items()}


NORM_TYPES = (1.0, 2.0, 3.0, 2.5, math.inf)


def _reference_norms():
    torch.manual_seed(0)
    reference = TiedAndScalar()
    tokens = torch.randint(9, (4, 2, 5), generator=torch.Generator().manual_seed(1))
    for batch in tokens:
        (reference(batch).pow(2).mean() / 4).backward()
    grads = torch.cat([p.grad.flatten().double() for p in reference.parameters()])
    return [torch.linalg.vector_norm(grads, p).item() for p in NORM_TYPES]


def test_the_gradient_norm_has_the_same_bits_at_every_world_size():  # C33
    one = run_ranks(_norms, 1, None, NORM_TYPES)[0]
    assert one[0] == pytest.approx(_reference_norms(), rel=1e-12)
    for world_size in (2, 4):
        for each in run_ranks(_norms, world_size, None, NORM_TYPES):
            assert each == one


def _clipped_in_double():
    torch.manual_seed(0)
    model = TiedAndScalar().double()
    reference = copy.deepcopy(model)
    fully_shard(model)
    tokens = torch.arange(8).view(2, 4)
    for each, clip in (
        (model, functools.partial(clip_grad_norm_, get_root(model))),
        (reference, nn.utils.clip_grad_norm_),
    ):
        each(tokens).pow(2).sum().backward()
        clip(each.parameters(), 0.1)
    for name, grad in full_gradients(model).items():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(grad, expected, rtol=1e-13, atol=0)


def test_double_precision_models_are_clipped_in_double_precision():
    run_ranks(_clipped_in_double, 2)


@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_every_rank_sees_nan_and_infinity_of_one(planted):
    for norms, scaled, _ in run_ranks(_norms, 2, planted, NORM_TYPES):
        for value in (*norms, scaled):
            assert math.isnan(value) if math.isnan(planted) else value == math.inf


def test_a_norm_of_order_zero_is_refused():
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`norm_type`: expected a number above 0 or inf, got 0"):
        grad_norm(get_root(model), model.parameters(), 0)


def _held_gradients(is_partly):
    torch.manual_seed(0)
    model = fully_shard(Stack(), auto_wrap_policy=None)
    x = torch.ones(2, 5)
    model(x).sum().backward()
    params = [p for name, p in model.named_parameters() if not is_partly or name == "inp.weight"]
    held = [param.grad for param in params]
    values = [grad.clone() for grad in held]
    for param in params:
        param.grad = None
    model(2 * x).sum().backward()
    assert all(torch.equal(grad, value) for grad, value in zip(held, values, strict=True))


@pytest.mark.parametrize("is_partly", [False, True])
def test_gradients_that_somebody_keeps_do_not_change(is_partly):  # as for gradient surgery
    run_ranks(_held_gradients, 2, is_partly)


def _frozen_after_no_sync():
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.ones(2, 5)
    with no_sync(model):
        model(x).sum().backward()
    reference(x).sum().backward()
    for each in (model, reference):
        next(each.parameters()).requires_grad_(False)
        each(x).sum().backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad)


def test_freezing_keeps_gradients_of_earlier_micro_batches():
    run_ranks(_frozen_after_no_sync, 2)


def _kept_by_one_rank():
    model = fully_shard(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    root = get_root(model)
    with no_sync(model):
        first, second = (layer(torch.ones(2, 4)).sum() for layer in model)
        (first + second if dist.get_rank() == 0 else first).backward()
    for unit in root.units:
        for flat in unit.flats:
            flat.gradient.keep()  # as a rank does whether it has gradients or not
        unit.drop_kept()
    return any(flat.gradient.is_kept or flat.gradient.buffer is not None for flat in root.flats)


def test_all_ranks_forget_that_they_kept():
    assert run_ranks(_kept_by_one_rank, 2) == [False, False]


class Stops(LitStack):
    fails = False

    def training_step(self, batch, index):
        if self.fails and index == 1:
            raise ArithmeticError("stop")
        return super().training_step(batch, index)


def _fit_again(directory, stops_first):
    torch.manual_seed(0)
    module = Stops()

    def fit():
        strategy = ToyFSDPStrategy(gradient_sync="last_micro_batch")
        make_trainer(strategy, directory, accumulate_grad_batches=2).fit(module, regression_data())

    if stops_first:
        module.fails = True
        with pytest.raises(ArithmeticError):
            fit()
        assert get_root(module).memory.held["reduce"] == 0
        module.fails = False
    fit()
    return full_parameters(module)


def test_gradients_of_a_window_that_never_ended_are_not_the_next_runs(tmp_path):
    [(expected, _), (found, _)] = (
        run_ranks(_fit_again, 2, str(tmp_path), stops_first) for stops_first in (False, True)
    )
    assert_equal(found, expected)
