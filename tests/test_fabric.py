"""The sharding core under Lightning Fabric: steps, accumulation, clipping, precision."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fsdp_toy.sharding.stalls import StallError, stall_detector
from tests.core_helpers import (
    OPTIMIZERS,
    Stack,
    assert_equal,
    make_batches,
    mse_loss,
    train_reference,
)
from tests.fabric_helpers import make_fabric, train, whole
from tests.ranks import run_ranks


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def _loop(optimizer, per_step, batches, options):
    fabric = make_fabric(**options)
    torch.manual_seed(fabric.global_rank)  # rank 0's weights must win
    model = Stack()
    if fabric.global_rank == 0:
        model.load_state_dict(_stack().state_dict())
    model, optimizer = fabric.setup(model, OPTIMIZERS[optimizer](model.parameters()))
    train(fabric, model, optimizer, batches, per_step)
    return whole(fabric, model)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("FULL_SHARD", "sgd"), ("FULL_SHARD", "adamw"), ("SHARD_GRAD_OP", "sgd"), ("NO_SHARD", "sgd")],
)
def test_a_loop_on_any_power_of_two_equals_one_process(strategy, optimizer):
    batches = make_batches(12)
    expected = train_reference(_stack(), batches, 4, optimizer)
    options = {"sharding_strategy": strategy}
    for world_size in (1, 2, 4):
        for actual in run_ranks(_loop, world_size, optimizer, 4, batches, options):
            assert_equal(actual, expected)


def test_a_loop_on_three_ranks_matches_one_process():
    batches = make_batches(9)
    expected = train_reference(_stack(), batches, 3)
    for actual in run_ranks(_loop, 3, "sgd", 3, batches, {}):
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


def _accumulate(batches, sync_last_only):
    fabric = make_fabric()
    model = _stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    ledger = fabric.strategy.ledger(model)
    ledger.reset()
    train(fabric, model, optimizer, batches, 8, sync_last_only)
    return whole(fabric, model), ledger.calls_by_operation()["reduce_scatter"]


def test_no_backward_sync_reduces_once_per_step():
    batches = make_batches(16)  # two steps of four micro-batches on two ranks
    expected = train_reference(_stack(), batches, 8)
    every = run_ranks(_accumulate, 2, batches, False)
    last = run_ranks(_accumulate, 2, batches, True)
    for (_, num_every), (actual, num_last) in zip(every, last, strict=True):
        assert num_every == 4 * num_last
        for name, value in expected.items():  # summed per rank first: another order
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


def _no_sync_of_a_stranger():
    fabric = make_fabric()
    with pytest.raises(TypeError, match=r"expected a model that `fabric.setup` has sharded"):
        fabric.strategy._backward_sync_control.no_backward_sync(nn.Linear(2, 2), True)


def test_no_backward_sync_wants_a_sharded_model():
    run_ranks(_no_sync_of_a_stranger, 1)


def _clipped(batches, max_norm, norm_type, clip_val):
    fabric = make_fabric()
    model = _stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    norms = []

    def clip():
        given = {"clip_val": clip_val} if clip_val else {"max_norm": max_norm}
        norms.append(fabric.clip_gradients(model, optimizer, norm_type=norm_type, **given))

    train(fabric, model, optimizer, batches, 4, before_step=clip)
    return whole(fabric, model), [norm if norm is None else norm.item() for norm in norms]


def _clipped_reference(batches, max_norm, norm_type, clip_val):
    model = _stack()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    norms = []
    for start in range(0, len(batches), 4):
        for batch in batches[start : start + 4]:
            (mse_loss(model, batch) / 4).backward()
        if clip_val:
            nn.utils.clip_grad_value_(model.parameters(), clip_val)
        else:
            norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type).item()
            )
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_norm_is_over_all_ranks(norm_type):
    batches = make_batches(12)
    expected, norms = _clipped_reference(batches, 0.05, norm_type, None)
    assert min(norms) > 0.05  # it bites
    for world_size in (1, 2, 4):
        for actual, seen in run_ranks(_clipped, world_size, batches, 0.05, norm_type, None):
            assert seen == pytest.approx(norms, rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value.detach(), rtol=1e-5, atol=1e-7)


def test_clipping_by_value_equals_one_process():
    batches = make_batches(12)
    expected, _ = _clipped_reference(batches, None, 2.0, 0.01)
    for actual, _ in run_ranks(_clipped, 2, batches, None, 2.0, 0.01):
        assert_equal(actual, {name: value.detach() for name, value in expected.items()})


def _recomputed(batches, policy, reentrant):
    fabric = make_fabric(
        activation_checkpointing_policy=policy, activation_checkpointing_reentrant=reentrant
    )
    model = _stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    calls = []
    model.module.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    train(fabric, model, optimizer, batches, 2)
    return whole(fabric, model), len(calls)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_again_and_changes_nothing(reentrant):
    batches = make_batches(4)
    expected = train_reference(_stack(), batches, 2)
    for actual, num_calls in run_ranks(_recomputed, 2, batches, "auto", reentrant):
        assert num_calls == 4  # twice a step
        assert_equal(actual, expected)


def _compiled(batches, path):
    fabric = make_fabric()
    model = torch.compile(_stack(), backend="eager")
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    train(fabric, model, optimizer, batches, 2)
    fabric.save(path, {"model": model})


@pytest.mark.slow
def test_a_compiled_model_is_right_and_saved_under_clean_names(tmp_path):
    batches = make_batches(4)
    run_ranks(_compiled, 2, batches, tmp_path / "file.pt", timeout=90)
    assert_equal(torch.load(tmp_path / "file.pt")["model"], train_reference(_stack(), batches, 2))


def _hybrid(batches):
    fabric = make_fabric(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    model = _stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    train(fabric, model, optimizer, batches, 4)
    return whole(fabric, model), sum(p.numel() for p in model.parameters())


def test_hybrid_sharding_over_a_mesh():
    batches = make_batches(8)
    expected = train_reference(_stack(), batches, 4)
    num_elements = sum(value.numel() for value in expected.values())
    results = run_ranks(_hybrid, 4, batches)
    assert [one + two for one, two in zip(*[iter(n for _, n in results)] * 2, strict=True)] == [
        num_elements
    ] * 2
    for actual, _ in results:
        for name, value in expected.items():  # summed inside groups first: another order
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


def _not_a_number():
    fabric = make_fabric()
    model = _stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    fabric.backward(mse_loss(model, make_batches(1)[0]))
    held = [p for p in model.parameters() if p.grad is not None and p.numel() > 0]
    if fabric.global_rank == 1:
        held[0].grad[0] = float("nan")
    before = [p.grad.nan_to_num() for p in held]
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    after = [p.grad.nan_to_num() for p in held]
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_norm_that_is_no_number_raises_on_every_rank_and_changes_nothing():
    assert run_ranks(_not_a_number, 2) == [True, True]


def _apart():
    fabric = make_fabric()
    model = fabric.setup_module(_stack())
    stall_detector().after_s = 0.4
    with pytest.raises(StallError, match=r"barrier `here`.*all-gather|all-gather.*barrier `here`"):
        if fabric.global_rank == 0:
            fabric.barrier("here")
        else:
            model(torch.ones(2, 5))


def test_ranks_that_wait_in_different_places_are_told():
    run_ranks(_apart, 2)


def _precision_loop(precision, batches):
    fabric = make_fabric(precision=precision)
    with fabric.init_module():
        torch.manual_seed(0)
        model = Stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["adamw"](model.parameters()))
    output = model(batches[0][0])
    train(fabric, model, optimizer, batches, 2)
    shard = next(p for p in model.parameters() if p.numel() > 0)
    moments = optimizer.optimizer.state[shard]["exp_avg"].dtype
    ledger = fabric.strategy.ledger(model)
    ledger.reset()
    loss = fabric.all_reduce(mse_loss(model, batches[0]).detach()).item()
    sent = ledger.bytes_by_operation()["all_gather"]
    return output.dtype, shard.dtype, moments, sent, loss


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)]
)
def test_low_precision_gathers_half_the_bytes_and_follows_full_precision(precision, dtype):
    batches = make_batches(16)
    *_, full_sent, expected = run_ranks(_precision_loop, 2, "32-true", batches)[0]
    output, shard, moments, sent, loss = run_ranks(_precision_loop, 2, precision, batches)[0]
    assert (output, shard, moments) == (torch.float32, dtype, dtype)
    assert 2 * sent == full_sent
    assert loss != expected and loss == pytest.approx(expected, rel=0.05)


def _refused_precision():
    with pytest.raises(ValueError, match=r"does not support the precision plugin `FSDPPrecision`"):
        from lightning.fabric.plugins import FSDPPrecision

        Fabric(strategy="toy_fsdp", accelerator="cpu", plugins=FSDPPrecision("32-true"))


def test_a_precision_made_for_another_strategy_is_refused():
    run_ranks(_refused_precision, 1)
