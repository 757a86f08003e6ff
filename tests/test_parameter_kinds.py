"""Parameters of every kind: frozen ones, odd shapes, several dtypes in one unit (C43, C44)."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy.sharding import full_state_dict, fully_shard, get_root
from tests.core_helpers import full_gradients
from tests.ranks import run_ranks

WIDTH = 6


class OddBlock(nn.Module):
    """One unit with a parameter of every kind."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(3.7))
        self.transposed = nn.Parameter(0.3 * torch.randn(WIDTH, 5).t())
        self.precise = nn.Parameter(0.3 * torch.randn(WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(0.3 * torch.randn(WIDTH, dtype=torch.complex64))
        self.fixed_phase = nn.Parameter(torch.randn(3, dtype=torch.complex128), False)
        self.codes = nn.Parameter(torch.randint(255, (WIDTH, 2), dtype=torch.uint8), False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        x = x + F.linear(F.linear(x, self.transposed), self.transposed.t()) / self.temperature
        x = x + (x.double() * self.precise).float()
        x = x + (x * self.phase).real + self.fixed_phase.abs().sum().float()
        return (x + self.codes.float().mean() / 255 + self.empty.sum()) * self.mask


def _make_odd():
    torch.manual_seed(0)
    return nn.Sequential(OddBlock(), OddBlock())


def _inputs(rank):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _compare_steps(options):
    reference = _make_odd()
    model = fully_shard(copy.deepcopy(reference), **options)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (reference, model)
    ]
    for _ in range(3):
        for each in range(world_size):
            (reference(_inputs(each)).pow(2).mean() / world_size).backward()
        model(_inputs(rank)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, expected = full_state_dict(model), reference.state_dict()
    if rank > 0:
        assert state == {}
        return
    assert list(state) == list(expected)
    for name, value in expected.items():
        same = state[name]
        assert (same.dtype, same.shape, same.stride()) == (value.dtype, value.shape, value.stride())
        assert torch.equal(same, value), name
        assert not value.is_floating_point() or value.isfinite().all(), name


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_every_kind_of_parameter_trains_as_on_one_process(strategy, world_size):
    run_ranks(_compare_steps, world_size, {"sharding_strategy": strategy})


def test_complex_parameters_travel_natively_too():
    run_ranks(_compare_steps, 2, {"transport": "native"})


class LoraLinear(nn.Module):
    """A frozen base and a trainable adapter in one unit."""

    def __init__(self, rank=2):
        super().__init__()
        self.base = nn.Linear(WIDTH * 32, WIDTH * 32)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH * 32, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH * 32, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def _make_lora():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(LoraLinear() for _ in range(3)))
    blocks[1].requires_grad_(False)  # a wholly frozen unit between two trainable ones
    return blocks


def _lora_gradients():
    reference = _make_lora()
    model = fully_shard(copy.deepcopy(reference))
    root, world_size = get_root(model), dist.get_world_size()
    x = torch.randn(2, WIDTH * 32, generator=torch.Generator().manual_seed(7))
    frozen_bytes = 4 * reference[0].base.weight.numel()
    for step in range(3):
        if step == 2:
            for each in (reference, model):  # unfrozen later
                each[1].up.weight.requires_grad_(True)
                each[0].base.bias.requires_grad_(True)
        root.ledger.reset()
        root.memory.reset_peak()
        reference.zero_grad()
        model.zero_grad()
        for each in range(world_size):
            (reference(x + each).pow(2).sum() / world_size).backward()
        model(x + dist.get_rank()).pow(2).sum().backward()
        grads = full_gradients(model)
        for name, param in reference.named_parameters():
            if param.grad is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], param.grad), name
        if step < 2:
            assert root.ledger.calls("reduce_scatter", "1") == 0
            assert root.ledger.calls("reduce_scatter", "0 (float32, frozen)") == 0
            assert root.ledger.calls("reduce_scatter", "0") == 0  # the frozen ones come first
            held = root.memory.peak_bytes - root.memory.held["shards"]
            assert held < 2 * frozen_bytes + frozen_bytes // 4  # two units of weights, no gradient


def test_adapters_train_and_frozen_weights_cost_no_gradient():
    run_ranks(_lora_gradients, 2)


def _first_unit_frozen():
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    reference[0].requires_grad_(False)
    model = fully_shard(copy.deepcopy(reference))
    reference(_inputs(0)).sum().backward()
    model(_inputs(0)).sum().backward()
    grads = full_gradients(model)
    for name, param in reference.named_parameters():
        assert (grads[name] is None) == (param.grad is None)
        assert param.grad is None or torch.equal(grads[name], param.grad)
    ledger = get_root(model).ledger
    assert [ledger.calls("reduce_scatter", str(index)) for index in range(3)] == [0, 1, 1]


def test_a_frozen_first_unit_is_not_reduced():
    run_ranks(_first_unit_frozen, 2)


def _more_ranks_than_elements():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2))
    model = fully_shard(copy.deepcopy(reference), auto_wrap_policy=["Linear"])
    pieces = [o.piece.numel for o in get_root(model).originals()]
    for _ in range(2):
        reference(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    grads = full_gradients(model)
    assert all(torch.equal(grads[n], p.grad) for n, p in reference.named_parameters())
    return pieces


def test_ranks_without_a_single_element_take_part():
    pieces = run_ranks(_more_ranks_than_elements, 4)
    assert any(sum(each) == 0 for each in pieces)
