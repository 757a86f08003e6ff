"""The public checkpoint bugs at 1, 3 and 4 ranks, in files and in directories of shards."""

from functools import reduce
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp_toy import ToyFSDPStrategy
from tests.core_helpers import assert_equal, full_parameters, make_batches
from tests.lit_helpers import LitStack, make_trainer
from tests.ranks import run_ranks

STEP = 12  # micro-batches of an optimizer step, all ranks together: a multiple of 1, 2, 3 and 4


class Odd(nn.Module):
    """Nothing of it is a multiple of the ranks; some ranks hold nothing of some parameters."""

    def __init__(self):
        super().__init__()
        # Weights of more elements than ``ALIGNMENT``, so that they are cut, inside a row.
        self.blocks = nn.ModuleList([nn.Linear(5, 37), nn.Linear(37, 19), nn.Linear(19, 7)])
        self.head = nn.Linear(7, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.register_buffer("shift", torch.linspace(0, 1, 3))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x):
        hidden = reduce(lambda value, block: block(value).tanh(), self.blocks, x)
        return self.head(hidden) * self.temperature + x @ self.turned.t() + self.shift * self.cache


def _module(net=Odd):
    torch.manual_seed(0)
    return LitStack(net())


def _deal(batches):
    return DataLoader(batches[dist.get_rank() :: dist.get_world_size()], batch_size=None)


def _trainer(strategy, directory, **options):
    accumulation = STEP // dist.get_world_size()
    defaults = {"accumulate_grad_batches": accumulation, "use_distributed_sampler": False}
    return make_trainer(strategy, directory, **defaults | options)


def _state(trainer):
    """Whole weights and moments, on rank 0."""
    strategy = trainer.strategy
    if isinstance(strategy, ToyFSDPStrategy):
        strategy.state_dict_type = "full"
    weights = strategy.lightning_module_state_dict()
    return weights, strategy.optimizer_state(trainer.optimizers[0]).get("state")


def _train(strategy, directory, max_epochs, save_to=None, ckpt_path=None):
    """Three optimizer steps in an epoch."""
    trainer = _trainer(strategy, directory, max_epochs=max_epochs)
    trainer.fit(_module(), _deal(make_batches(3 * STEP)), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return _state(trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directory of one epoch's checkpoints: by DDP, and by two ranks of ours in both forms."""
    directory = tmp_path_factory.mktemp("saved")
    for name in ("full", "sharded"):
        strategy = ToyFSDPStrategy(state_dict_type=name)
        run_ranks(_train, 2, strategy, directory, 1, directory / name)
    run_ranks(_train, 2, "ddp", directory, 1, directory / "ddp")
    return directory


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Weights and moments of one process after six steps."""
    return run_ranks(_train, 1, "auto", tmp_path_factory.mktemp("unbroken"), 2)[0]


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_three_more_steps_equal_an_unbroken_run(saved, unbroken, tmp_path, form, world_size):  # C08
    strategy = ToyFSDPStrategy(state_dict_type=form)
    arguments = (strategy, tmp_path, 2, None, saved / form)
    weights, moments = run_ranks(_train, world_size, *arguments)[0]
    expected, expected_moments = unbroken
    # Thirds are not exact: within a few ulps at three ranks, in bits otherwise.
    rtol, atol = (1e-5, 1e-6) if world_size == 3 else (0, 0)
    assert list(weights) == list(expected)
    torch.testing.assert_close(dict(weights), dict(expected), rtol=rtol, atol=atol)
    torch.testing.assert_close(moments, expected_moments, rtol=rtol, atol=atol)


def test_no_padding_is_saved(saved):  # C08
    expected = {f"model.{k}": v.shape for k, v in _module().state_dict().items()}
    for name, param in _module().named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"optimizer_0.state.{name}.{key}"] = param.shape
    tensors = dcp.FileSystemReader(saved / "sharded").read_metadata().state_dict_metadata
    assert {key: tensor.size for key, tensor in tensors.items()} == expected
    for key, tensor in tensors.items():
        sizes = [prod(chunk.sizes) for chunk in tensor.chunks]
        assert sum(sizes) == prod(expected[key]), key
        assert 0 not in sizes or not prod(expected[key]), key
    full = torch.load(saved / "full", weights_only=False)
    shapes = [param.shape for param in _module().parameters()]
    for index, entry in full["optimizer_states"][0]["state"].items():
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == shapes[index]
        assert entry["exp_avg"].untyped_storage().nbytes() == 4 * shapes[index].numel()


class WithAdapter(Odd):
    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(7, 3)
        self.scales = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scales


class SavesAdapterOnly(LitStack):
    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if "adapter" in k}


def _save_adapter(directory, form):
    module = SavesAdapterOnly(WithAdapter())
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.25)
    trainer = _trainer(ToyFSDPStrategy(state_dict_type=form), directory)
    trainer.validate(module, _deal(make_batches(STEP)), verbose=False)
    trainer.save_checkpoint(directory / form)


def _load(net, path, strict):
    """The message, if loading is refused; weights before and after; buffers after."""
    module = _module(net)
    module.strict_loading = strict
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    trainer = _trainer(ToyFSDPStrategy(), path.parent)
    try:
        trainer.validate(module, _deal(make_batches(STEP)), ckpt_path=path, verbose=False)
    except RuntimeError as error:
        return str(error), before, full_parameters(module)
    return None, before, full_parameters(module)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_filtered_checkpoint_changes_what_it_holds_only(tmp_path, form, world_size):  # C09
    run_ranks(_save_adapter, 2, tmp_path, form)
    path = tmp_path / form
    for message, before, after in run_ranks(_load, world_size, WithAdapter, path, False):
        assert message is None
        for name, value in after.items():
            expected = torch.full_like(value, 0.25) if "adapter" in name else before[name]
            assert torch.equal(value, expected), name
    for message, before, after in run_ranks(_load, world_size, Odd, path, False):
        assert message is None  # nothing of it is known here: ignored
        assert_equal(after, before)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_strict_loading_names_every_key_on_all_ranks(saved, tmp_path, form, world_size):  # C09
    run_ranks(_save_adapter, 2, tmp_path, form)
    adapter = {f"net.{name}" for name in ("adapter.weight", "adapter.bias")}
    own = _module().state_dict().keys()
    for net, path, missing, unexpected in (
        (WithAdapter, saved / form, adapter | {"net.scales"}, set()),
        (WithAdapter, tmp_path / form, own | {"net.scales"}, set()),
        (Odd, tmp_path / form, own, adapter),
    ):
        ranks = run_ranks(_load, world_size, net, path, True)
        assert len({message for message, _, _ in ranks}) == 1
        for message, before, after in ranks:
            for name in missing | unexpected:
                assert f"`{name}`" in message or f'"{name}"' in message, (name, message)
            assert ("issing" in message, "nexpected" in message) == (True, bool(unexpected))
            assert_equal(after, before)  # nothing has been changed


def _test_and_predict(path):
    """Loss and predictions of a new module, and the names of what was read of the shards."""
    read, read_data = [], dcp.FileSystemReader.read_data

    def spy(self, plan, planner):
        read.extend(item.storage_index.fqn for item in plan.items)
        return read_data(self, plan, planner)

    dcp.FileSystemReader.read_data = spy
    results = []
    for stage in ("test", "predict"):
        module = LitStack(Odd())
        trainer = _trainer(ToyFSDPStrategy(), path.parent)
        loop = getattr(trainer, stage)
        options = {"verbose": False} if stage == "test" else {}
        results.append(loop(module, _deal(make_batches(STEP)), ckpt_path=path, **options))
    (metrics,), predictions = results
    return metrics["test/loss"], torch.stack(predictions), read


def _reference(path):
    module = LitStack(Odd())
    module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    outputs = torch.stack([module.net(batch) for batch, _ in make_batches(STEP)]).detach()
    targets = torch.stack([target for _, target in make_batches(STEP)])
    return (outputs - targets).square().mean().item(), outputs


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_test_and_predict_read_the_model_only(saved, form, world_size):  # C11
    loss, outputs = _reference(saved / "full")
    ranks = run_ranks(_test_and_predict, world_size, saved / form)
    for rank, (rank_loss, predictions, read) in enumerate(ranks):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert torch.equal(predictions, outputs[rank::world_size])
        assert all(name.startswith("model.") for name in read)
    assert bool(read) == (form == "sharded")


def _describe(value):
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.stride(), value.device.type)
    if isinstance(value, dict):
        return {key: _describe(entry) for key, entry in value.items()}
    return [_describe(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_keys_and_shapes_are_ddps_at_any_world_size(saved, tmp_path, sharding, world_size):  # C15
    strategy = ToyFSDPStrategy(sharding_strategy=sharding)
    run_ranks(_train, world_size, strategy, tmp_path, 1, tmp_path / "ours")
    ours, theirs = (
        torch.load(path, weights_only=False) for path in (tmp_path / "ours", saved / "ddp")
    )
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert "net.cache" not in ours["state_dict"]
    for key in ("state_dict", "optimizer_states"):
        assert _describe(ours[key]) == _describe(theirs[key])
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=1e-5, atol=1e-6)


def _resume_with(strategy, path, directory):
    return _train(strategy, directory, 2, None, path)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_optimizer_state_crosses_from_ddp_and_back(saved, unbroken, tmp_path, world_size):  # C15
    to_ours = run_ranks(_resume_with, world_size, ToyFSDPStrategy(), saved / "ddp", tmp_path)[0]
    to_ddp = run_ranks(_resume_with, world_size, "ddp", saved / "full", tmp_path)[0]
    for weights, moments in (to_ours, to_ddp):  # DDP sums in another order
        torch.testing.assert_close(dict(weights), dict(unbroken[0]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments, unbroken[1], rtol=1e-5, atol=1e-6)


class GathersOnce(Callback):
    """Gathers everything after the first step of a fit."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1 and not hasattr(self, "gathered"):
            weights, moments = _state(trainer)
            self.gathered = dict(weights) | {
                f"{index}.{name}": value
                for index, entry in (moments or {}).items()
                for name, value in entry.items()
            }
            self.kept = {key: value.clone() for key, value in self.gathered.items()}


def _gather_and_train_on(sharding, directory):
    callback = GathersOnce()
    strategy = ToyFSDPStrategy(sharding_strategy=sharding)
    trainer = _trainer(strategy, directory, callbacks=[callback])
    trainer.fit(_module(), _deal(make_batches(3 * STEP)))
    gathered, kept = callback.gathered, callback.kept
    return len(gathered), [key for key in gathered if not torch.equal(gathered[key], kept[key])]


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_gathered_state_is_a_copy_step_counts_too(tmp_path, sharding, world_size):  # C04
    first, *others = run_ranks(_gather_and_train_on, world_size, sharding, tmp_path)
    num_params = len(list(_module().parameters()))
    assert first == (num_params + 1 + 3 * num_params, [])
    assert others == [(0, [])] * (world_size - 1)
