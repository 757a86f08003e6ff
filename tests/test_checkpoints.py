"""Checkpoints: the same as DDP's, loadable anywhere, at any world size (C08, C09, C11, C15)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from tests.core_helpers import Stack, assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks


class WithBuffers(Stack):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(5)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.head.weight = nn.Parameter(torch.randn(3, 7))
        self.also_head = self.head

    def forward(self, x):
        return super().forward(self.bn(x)) * self.temperature + x @ self.turned.t()


def _save(strategy, path, max_epochs=1):
    torch.manual_seed(0)
    module = LitStack(WithBuffers())
    trainer = make_trainer(strategy, path.parent, max_epochs=max_epochs)
    trainer.fit(module, regression_data())
    trainer.save_checkpoint(path)
    return trainer.validate(module, regression_data(), verbose=False)


def _describe(value):
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.stride(), value.device.type)
    if isinstance(value, dict):
        return {key: _describe(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_describe(entry) for entry in value]
    return value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one and the same training: by DDP, and by us at 2 ranks in both forms."""
    directory = tmp_path_factory.mktemp("saved")
    forms = {
        "ddp": "ddp",
        "full": ToyFSDPStrategy(),
        "sharded": ToyFSDPStrategy(state_dict_type="sharded"),
    }
    for name, strategy in forms.items():
        losses = run_ranks(_save, 2, strategy, directory / name)
    return directory, losses[0]


def test_full_checkpoint_has_ddps_keys_shapes_and_values(saved):  # C15
    directory, _ = saved
    ours, theirs = (torch.load(directory / n, weights_only=False) for n in ("full", "ddp"))
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert _describe(ours[key]) == _describe(theirs[key])
    assert ours.keys() == theirs.keys()
    assert_equal(ours["state_dict"], theirs["state_dict"])
    for index, entry in theirs["optimizer_states"][0]["state"].items():
        assert_equal(ours["optimizer_states"][0]["state"][index], entry)


def test_full_checkpoint_loads_without_the_strategy(saved):  # C15
    directory, _ = saved
    module = LitStack.load_from_checkpoint(
        directory / "full", net=WithBuffers(), weights_only=False
    )
    state = torch.load(directory / "ddp", weights_only=False)["state_dict"]
    assert_equal(module.state_dict(), state)


def _validate(strategy, path):
    module = LitStack(WithBuffers())
    trainer = make_trainer(strategy, path.parent)
    return trainer.validate(module, regression_data(), ckpt_path=path, verbose=False)


@pytest.mark.parametrize(
    ("strategy", "form"),
    [("toy_fsdp", "ddp"), ("ddp", "full"), ("toy_fsdp", "full"), ("toy_fsdp", "sharded")],
)
def test_loss_after_loading_is_the_loss_before_saving(saved, strategy, form):  # C11, C15
    directory, losses = saved
    assert run_ranks(_validate, 2, strategy, directory / form)[0] == losses


def _resume(strategy, path, accumulation):
    module = LitStack(WithBuffers())
    trainer = make_trainer(
        strategy, path.parent, max_epochs=2, accumulate_grad_batches=accumulation
    )
    trainer.fit(module, regression_data(), ckpt_path=path)
    weights = full_parameters(module) if strategy != "ddp" else dict(module.named_parameters())
    return {name: value.detach().clone() for name, value in weights.items()}


@pytest.mark.parametrize("form", ["ddp", "full", "sharded"])
def test_resume_equals_an_unbroken_run(saved, form):
    directory, _ = saved
    expected = run_ranks(_resume, 2, "ddp", directory / "ddp", 1)[0]
    assert_equal(run_ranks(_resume, 2, "toy_fsdp", directory / form, 1)[0], expected)


def test_ddp_resumes_from_ours(saved):  # C15
    directory, _ = saved
    expected = run_ranks(_resume, 2, "ddp", directory / "ddp", 1)[0]
    assert_equal(run_ranks(_resume, 2, "ddp", directory / "full", 1)[0], expected)


def _state_after_loading(path):
    module = LitStack(WithBuffers())
    strategy = ToyFSDPStrategy()
    trainer = make_trainer(strategy, path.parent, max_steps=0, max_epochs=None)
    trainer.fit(module, regression_data(), ckpt_path=path)
    state = strategy.lightning_module_state_dict()
    moments = strategy.optimizer_state(trainer.optimizers[0])
    return state, moments


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_other_world_sizes_load_the_same_state(saved, form, world_size):  # C08
    directory, _ = saved
    reference = torch.load(directory / "ddp", weights_only=False)
    state, moments = run_ranks(_state_after_loading, world_size, directory / form)[0]
    assert_equal(state, reference["state_dict"])
    expected = reference["optimizer_states"][0]
    assert moments["param_groups"] == expected["param_groups"]
    for index, entry in expected["state"].items():
        assert_equal(moments["state"][index], entry)


class Larger(WithBuffers):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 3)
        nn.init.constant_(self.extra.weight, 0.25)


def _load_into_a_larger_model(path, strict):
    module = LitStack(Larger())
    module.strict_loading = strict
    before = module.net.extra.weight.detach().clone()
    trainer = make_trainer(ToyFSDPStrategy(), path.parent)
    trainer.validate(module, regression_data(), ckpt_path=path, verbose=False)
    weights = full_parameters(module)
    assert torch.equal(weights["net.extra.weight"], before)
    return weights


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_strict_loading_names_missing_keys_on_every_rank(saved, form):  # C09
    directory, _ = saved
    with pytest.raises(Exception, match=r"net\.extra\.weight(.|\n)*net\.extra\.bias"):
        run_ranks(_load_into_a_larger_model, 2, directory / form, True)
    weights = run_ranks(_load_into_a_larger_model, 2, directory / form, False)[0]
    saved_state = torch.load(directory / "ddp", weights_only=False)["state_dict"]
    assert torch.equal(weights["net.inp.weight"], saved_state["net.inp.weight"])


def _fit_from(path):
    trainer = make_trainer(ToyFSDPStrategy(), path.parent)
    trainer.fit(LitStack(WithBuffers()), regression_data(), ckpt_path=path)


def test_a_directory_that_was_not_saved_to_the_end_is_refused(tmp_path):
    (tmp_path / "broken").mkdir()
    with pytest.raises(Exception, match=r"is a directory but no sharded checkpoint"):
        run_ranks(_fit_from, 2, tmp_path / "broken")


def _overwrite(directory):
    path = directory / "again"
    for form in ("sharded", "full", "sharded", "sharded"):
        _save(ToyFSDPStrategy(state_dict_type=form), path)
        assert path.is_dir() == (form == "sharded")
        dist.barrier()
    assert [p.name for p in directory.iterdir() if "partial" in p.name] == []
    return _validate(ToyFSDPStrategy(), path)


def test_either_form_overwrites_the_other(tmp_path):
    run_ranks(_overwrite, 2, tmp_path, timeout=60)
