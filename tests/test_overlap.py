"""Prefetch and asynchronous reductions: the same bits, the same counts, and a bound on memory."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp_toy.sharding import fully_shard, get_root, unsharded
from lightning_fsdp_toy.sharding.residency import Residency
from tests.core_helpers import (
    Block,
    Stack,
    assert_equal,
    full_gradients,
    make_batches,
    mse_loss,
    train_sharded,
)
from tests.ranks import run_ranks


def _train(options):
    torch.manual_seed(0)
    return train_sharded(Stack(num_blocks=5), make_batches(8), 2, "sgd", **options)


def test_overlapped_equals_not_overlapped():
    plain = run_ranks(_train, 2, {"num_prefetch": 0})[0]
    for num_prefetch in (1, 2, 9):
        for actual in run_ranks(_train, 2, {"num_prefetch": num_prefetch}):
            assert_equal(actual, plain)


def _events(num_prefetch):
    """Starts and waits of this rank's gathers over the third step, in order."""
    torch.manual_seed(0)
    model = fully_shard(Stack(num_blocks=4), num_prefetch=num_prefetch)
    root = get_root(model)
    events = []

    def observe(unit, name):
        method = getattr(unit, name)

        def observed():
            events.append((name, unit.fqn))
            method()

        setattr(unit, name, observed)

    for _ in range(2):
        mse_loss(model, make_batches(1)[0]).backward()
    for unit in root.units[1:]:
        observe(unit, "start_unshard")
        observe(unit, "unshard")
    mse_loss(model, make_batches(1)[0]).backward()
    return [event for event in events if event[0] == "start_unshard"], events


def test_gathers_are_started_one_unit_ahead_in_forward_and_backward():
    starts, events = run_ranks(_events, 2, 1)[0]
    order = [0, 1, 2, 3, 2, 1, 0]  # the last one stays for backward
    assert [name for _, name in starts] == [f"blocks.{i}" for i in order]
    # The gather of each has begun when the unit before it starts to compute.
    turn = events.index(("unshard", "blocks.1"))
    assert events.index(("start_unshard", "blocks.1")) < turn
    assert events.index(("start_unshard", "blocks.2")) == turn + 1


def _counts(options):
    torch.manual_seed(0)
    model = fully_shard(Stack(num_blocks=4), **options)
    root, per_step = get_root(model), []
    for _ in range(3):
        root.ledger.reset()
        mse_loss(model, make_batches(1)[0]).backward()
        names = [unit.fqn for unit in root.units]
        per_step.append(
            {
                name: (
                    root.ledger.calls("all_gather", name),
                    root.ledger.calls("reduce_scatter", name),
                )
                for name in names
            }
        )
        assert all(unit.is_sharded for unit in root.units)
    return per_step


@pytest.mark.parametrize("num_prefetch", [0, 1, 3])
def test_two_gathers_and_one_reduction_a_unit_whatever_is_prefetched(num_prefetch):  # C41
    for step in run_ranks(_counts, 2, {"num_prefetch": num_prefetch})[0][1:]:
        assert step.pop("<root>") == (1, 1)
        assert step.pop("blocks.3") == (1, 1)
        assert set(step.values()) == {(2, 1)}
    grad_op = {"num_prefetch": num_prefetch, "sharding_strategy": "SHARD_GRAD_OP"}
    for step in run_ranks(_counts, 2, grad_op)[0]:
        assert set(step.values()) == {(1, 1)}


class Checkpointed(Stack):
    use_reentrant = True

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Plainly(Checkpointed):
    use_reentrant = False


class Nested(nn.Module):
    """Units inside units."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


def _two_forwards(model, batch):
    return mse_loss(model, batch) + F.mse_loss(model(batch[0] * 2), batch[1])


@pytest.mark.parametrize("num_prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    ("make_model", "loss_fn"),
    [
        (Stack, mse_loss),
        (Stack, _two_forwards),
        (Checkpointed, mse_loss),
        (Plainly, mse_loss),
        (Nested, mse_loss),
        (Nested, _two_forwards),
    ],
)
def test_never_more_than_the_bound_unsharded(make_model, loss_fn, num_prefetch):
    run_ranks(_watch_bound, 2, make_model, loss_fn, num_prefetch)


def _watch_bound(make_model, loss_fn, num_prefetch):
    torch.manual_seed(0)
    reference = make_model()
    policy = [Block, nn.Sequential] if make_model is Nested else "auto"
    model = fully_shard(
        copy.deepcopy(reference), num_prefetch=num_prefetch, auto_wrap_policy=policy
    )
    root = get_root(model)
    nesting = 2 if make_model is Nested else 1
    most = []
    add = root.residency.add

    def watched(unit):
        add(unit)
        most.append(sum(not each.is_sharded for each in root.units[1:]) + unit.is_sharded)

    root.residency.add = watched
    world_size = dist.get_world_size()
    batches = make_batches(3 * world_size)
    for step in range(3):
        reference.zero_grad()
        model.zero_grad()
        for rank in range(world_size):
            (loss_fn(reference, batches[step * world_size + rank]) / world_size).backward()
        loss_fn(model, batches[step * world_size + dist.get_rank()]).backward()
        grads = full_gradients(model)
        for name, param in reference.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=2e-6, atol=1e-7)
        assert all(unit.is_sharded for unit in root.units)
        assert root.memory.held["reduce"] == 0
    assert max(most) <= nesting + num_prefetch


def test_the_bound_is_asserted():
    class FakeUnit:
        has_buffers, is_unsharded, is_recomputed = True, True, False
        num_pins, num_active, reader = 0, 0, None

        def reshard(self):
            pass  # does not give its memory back

    residency = Residency(FakeUnit(), num_prefetch=1, is_bounded=True, nesting=1)
    residency.add(FakeUnit())
    residency.add(FakeUnit())
    FakeUnit.fqn = "c"
    with pytest.raises(AssertionError, match="3 units are unsharded at `c`, at most 2 may be"):
        residency.add(FakeUnit())


class AroundMany(Stack):
    """A checkpoint around four units: all of them are needed in its recomputation."""

    use_reentrant = True

    def forward(self, x):
        x = checkpoint(self.middle, self.inp(x), use_reentrant=self.use_reentrant)
        return self.head(x)

    def middle(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class AroundManyPlainly(AroundMany):
    use_reentrant = False


def _around_many(make_model):
    torch.manual_seed(0)
    reference = make_model(num_blocks=6)
    model = fully_shard(copy.deepcopy(reference))
    batch = make_batches(1)[0]
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        mse_loss(reference, batch).backward()
        mse_loss(model, batch).backward()
        grads = full_gradients(model)
        for name, param in reference.named_parameters():
            assert torch.equal(grads[name], param.grad), name
        assert all(unit.is_sharded for unit in get_root(model).units)


@pytest.mark.parametrize("make_model", [AroundMany, AroundManyPlainly])
def test_a_checkpoint_around_more_units_than_the_bound_is_right(make_model):
    run_ranks(_around_many, 2, make_model)


def _stale_prefetch():
    """A second forward of the same step sees what the optimizer changed after the first."""
    torch.manual_seed(0)
    reference = Stack()
    model = fully_shard(copy.deepcopy(reference), num_prefetch=2)
    both = [(reference, torch.optim.SGD(reference.parameters(), lr=0.1))]
    both.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    batch = make_batches(1)[0]
    for _ in range(3):
        losses = []
        for net, optimizer in both:
            mse_loss(net, batch).backward()
            with torch.no_grad():
                net(batch[0])  # ends with gathers that nobody needs
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mse_loss(net, batch).item())
        assert losses[0] == losses[1]
    with unsharded(model):
        for name, param in reference.named_parameters():
            assert torch.equal(param, model.get_parameter(name)), name


def test_no_gather_reaches_across_an_optimizer_step():
    run_ranks(_stale_prefetch, 2)


def _another_order():
    """The order of units changes from step to step: prefetched units that are not used."""
    torch.manual_seed(0)

    class Shuffled(Stack):
        order = (0, 1, 2, 3)

        def forward(self, x):
            x = self.inp(x)
            for index in self.order:
                x = self.blocks[index](x)
            return self.head(x)

    reference = Shuffled(num_blocks=4)
    model = fully_shard(copy.deepcopy(reference))
    batch = make_batches(1)[0]
    for order in [(0, 1, 2, 3), (3, 1, 0, 2), (0, 2), (0, 1, 2, 3), (1,), (2, 2, 0)]:
        Shuffled.order = order
        reference.zero_grad()
        model.zero_grad()
        mse_loss(reference, batch).backward()
        mse_loss(model, batch).backward()
        grads = full_gradients(model)
        for name, param in reference.named_parameters():
            if param.grad is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], param.grad), name


def test_units_may_run_in_another_order_or_not_at_all():
    run_ranks(_another_order, 2)
