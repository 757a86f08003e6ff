"""torch.compile of blocks, whole models and LightningModules, before and after sharding (C28)."""

import copy

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import fully_shard, get_root, unsharded
from lightning_fsdp_toy.sharding.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp_toy.sharding.names import clean_keys, clean_name, keys_for
from lightning_fsdp_toy.sharding.policy import select_units
from lightning_fsdp_toy.sharding.sharded_checkpoint import (
    MODEL_KEY,
    load_sharded_model,
    load_sharded_optimizer,
    save_sharded,
    sharded_model_state,
    sharded_optimizer_state,
)
from lightning_fsdp_toy.sharding.state_dict import (
    full_model_state,
    full_optimizer_state,
    load_model_state,
)
from tests.core_helpers import Block, Stack, full_gradients, make_batches, mse_loss
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks

TIMEOUT = 100.0  # compiling takes seconds, on busy cores tens of them


def _compile(how, model, backend, **options):
    """Compile `model` in one of five ways; return what is called then."""
    options = {"backend": backend, **options}
    if how == "blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, **options)
    elif how == "blocks_in_place":
        for block in model.blocks:
            block.compile(**options)
    elif how == "one_block":
        model.blocks[1] = torch.compile(model.blocks[1], **options)
    elif how == "whole_in_place":
        model.compile(**options)
    elif how == "whole":
        return torch.compile(model, **options)
    return model


def _train(model, optimizer, num=2):
    for batch in make_batches(2 * num)[dist.get_rank() :: 2]:
        mse_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(actual, expected):
    """Nested containers of tensors: same keys in the same order, same bits."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            _assert_same(actual[key], value)
    else:
        assert actual == expected


def _check_training(how, when, backend, options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    plain = Stack(num_blocks=2)
    model = copy.deepcopy(plain)
    fully_shard(plain, auto_wrap_policy=["Block"])
    called = _compile(how, model, backend, **options) if when == "before" else model
    fully_shard(called, auto_wrap_policy=["Block"])
    called = _compile(how, model, backend, **options) if when == "after" else called
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, called)]
    for each, optimizer in zip((plain, called), optimizers, strict=True):
        _train(each, optimizer)
    expected, actual = get_root(plain), get_root(called)
    assert [unit.fqn for unit in actual.units] == [unit.fqn for unit in expected.units]
    whats = [[record[:4] for record in each.ledger.records] for each in (actual, expected)]
    assert whats[0] == whats[1]
    counts = [
        (m.held, m.peak_bytes, m.unsharded_peak_bytes) for m in (actual.memory, expected.memory)
    ]
    assert counts[0] == counts[1]
    assert actual.memory.held["unsharded"] == 0
    _assert_same(full_model_state(actual), full_model_state(expected))
    pairs = [(actual, optimizers[1]), (expected, optimizers[0])]
    _assert_same(*(full_optimizer_state(*pair) for pair in pairs))
    assert list(sharded_model_state(actual)) == list(sharded_model_state(expected))
    groups = [sharded_optimizer_state(*pair)["param_groups"] for pair in pairs]
    assert groups[0] == groups[1]
    with unsharded(called):
        assert called.inp.weight.shape == (7, 5)
    stats = torch._dynamo.utils.counters["stats"]
    return stats["unique_graphs"], stats["calls_captured"]


def _check_all(check, arguments):
    """Many checks in one process, as the first compilation in a process takes seconds."""
    results = []
    for each in arguments:
        try:
            results.append(check(*each))
        except BaseException as error:
            raise AssertionError(f"{check.__name__}{each}") from error
    return results


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks_train_the_same_bits_as_one_graph_each(when):
    ways = ["blocks", "blocks_in_place", "one_block"]
    options = {"fullgraph": True}
    cases = [(how, when, backend, options) for how in ways for backend in ("eager", "aot_eager")]
    for counts in run_ranks(_check_all, 2, _check_training, cases, timeout=TIMEOUT):
        # norm, up, gelu, down, add
        assert counts == [(2, 10), (2, 10), (2, 10), (2, 10), (1, 5), (1, 5)]


def test_whole_compiled_models_train_the_same_bits():
    ways = ["whole", "whole_in_place"]
    cases = [(how, when, "aot_eager", {}) for how in ways for when in ("before", "after")]
    for counts in run_ranks(_check_all, 2, _check_training, cases, timeout=TIMEOUT):
        # Split where units are unsharded: two blocks, what is before and behind them.
        assert counts == [(4, 12)] * 4


def _check_checkpointed(how, policy):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Stack(num_blocks=2)
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, policy)
    _compile(how, model, "aot_eager")
    fully_shard(plain, auto_wrap_policy=["Block"])
    fully_shard(model, auto_wrap_policy=["Block"])
    for batch in make_batches(4)[dist.get_rank() :: 2]:
        for each in (plain, model):
            each.zero_grad()
            mse_loss(each, batch).backward()
        _assert_same(full_gradients(model), full_gradients(plain))
    assert get_root(model).ledger.calls_by_operation() == (
        get_root(plain).ledger.calls_by_operation()
    )
    assert get_root(model).memory.held["unsharded"] == 0


def test_compiled_and_checkpointed():
    ways = ["blocks", "blocks_in_place", "whole_in_place"]
    cases = [(how, policy) for how in ways for policy in (["Block"], ["Linear"])]
    run_ranks(_check_all, 2, _check_checkpointed, cases, timeout=TIMEOUT)


_ENTRY = ("exp_avg", "exp_avg_sq", "step")


def _check_checkpoints(directory):
    """Save compiled and load uncompiled, and the other way; whole and in shards."""
    models, optimizers = {}, {}
    for how in ("plain", "blocks", "whole"):
        torch.manual_seed(len(how))
        called = _compile(how, Stack(num_blocks=2), "eager")
        models[how] = fully_shard(called, auto_wrap_policy=["Block"])
        optimizers[how] = torch.optim.AdamW(called.parameters(), lr=0.1)
        _train(called, optimizers[how], num=1)
    for saver, loader in (("blocks", "plain"), ("plain", "blocks"), ("whole", "blocks")):
        saved, loaded = get_root(models[saver]), get_root(models[loader])
        _train(models[saver], optimizers[saver], num=1)
        box = [full_model_state(saved)]
        expected_optimizer = full_optimizer_state(saved, optimizers[saver])
        path = directory / f"{saver}_{loader}"
        model_shards = sharded_model_state(saved)
        states = [sharded_optimizer_state(saved, optimizers[saver])]
        (small,) = save_sharded(saved, path, {MODEL_KEY: model_shards}, states)
        load_sharded_model(loaded, path)
        load_sharded_optimizer(loaded, optimizers[loader], path, 0, small)
        _assert_same(full_model_state(loaded), box[0])
        actual_optimizer = full_optimizer_state(loaded, optimizers[loader])
        for index, entry in expected_optimizer.get("state", {}).items():
            _assert_same(actual_optimizer["state"][index], {k: entry[k] for k in _ENTRY})
        _train(models[loader], optimizers[loader], num=1)
        dist.broadcast_object_list(box, 0)
        load_model_state(loaded, box[0])
        _assert_same(full_model_state(loaded), box[0] if dist.get_rank() == 0 else {})


def test_checkpoints_of_compiled_and_uncompiled_models_are_the_same(tmp_path):
    run_ranks(_check_checkpoints, 2, tmp_path, timeout=TIMEOUT)


def _nested():
    """A compiled block that holds a compiled layer, and one that is not compiled."""
    model = Stack(num_blocks=2)
    model.blocks[0].up = torch.compile(model.blocks[0].up)
    model.blocks[0] = torch.compile(model.blocks[0])
    return model


def test_keys_saved_by_any_compiled_model_load_in_any_other():
    plain, nested = Stack(num_blocks=2).state_dict(), _nested().state_dict()
    assert any("_orig_mod" in key for key in nested)
    assert list(clean_keys(nested)) == list(plain)
    for state in (plain, nested):
        for model in (Stack(num_blocks=2), _nested(), torch.compile(_nested())):
            renamed = keys_for(model, state)
            assert list(renamed) == list(model.state_dict())
            assert renamed._metadata.keys() <= model.state_dict()._metadata.keys()
            model.load_state_dict(renamed)
    assert clean_name("a._orig_mod.b._orig_mod") == "a.b"
    assert clean_name("my_orig_mod.b") == "my_orig_mod.b"


def test_policies_see_through_compiled_wrappers():
    model = _nested()
    for policy in ("auto", {Block}, ["Block"], lambda module: isinstance(module, Block)):
        units = select_units(model, policy)
        assert [name for name, _ in units] == ["blocks.0", "blocks.1"]
        assert units[0][1] is model.blocks[0]  # hooks on the wrapper are outside compiled code
    assert [name for name, _ in select_units(model, ["Linear"])] == [
        *("inp", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head")
    ]
    compiled = torch.compile(Stack(num_blocks=2))
    assert [name for name, _ in select_units(compiled, ["Block"])] == ["blocks.0", "blocks.1"]


class PlainSteps(LitStack):
    """Without the list of losses, whose `.item()` would split compiled steps."""

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss


def _fit(how, directory):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    L.seed_everything(0, verbose=False)
    module = PlainSteps(Stack(num_blocks=2))
    if how == "module":
        given = torch.compile(module, backend="eager")
    else:
        given = module
        module.net = _compile(how, module.net, "eager")
    strategy = ToyFSDPStrategy(auto_wrap_policy=["Block"])
    trainer = make_trainer(strategy, directory, max_steps=3)
    trainer.fit(given, regression_data(24), regression_data(8))
    path = directory / f"{how}.ckpt"
    trainer.save_checkpoint(path)
    metrics = dict(trainer.callback_metrics)
    assert ("log" in module.__dict__) is False
    if how == "module":
        assert to_uncompiled(module) is module
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    trainer.fit(module, regression_data(24))  # the same module again, not compiled any more
    checkpoint = torch.load(path, weights_only=True)
    fresh = PlainSteps(Stack(num_blocks=2))
    fresh.load_state_dict(checkpoint["state_dict"])
    return metrics, checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]


def _fit_all(directory):
    expected, *others = _check_all(
        _fit, [(how, directory) for how in ("plain", "module", "whole", "one_block")]
    )
    for other in others:
        for actual, right in zip(other, expected, strict=True):
            _assert_same(dict(actual), dict(right))


def test_compiled_lightning_modules_fit_as_uncompiled_ones(tmp_path):
    run_ranks(_fit_all, 2, tmp_path, timeout=TIMEOUT)
