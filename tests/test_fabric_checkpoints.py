"""Saving and loading under Fabric: either form, any number of ranks, anything beside the model."""

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from tests.core_helpers import OPTIMIZERS, Stack, assert_equal, make_batches
from tests.fabric_helpers import make_fabric, train, whole
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import RankError, run_ranks

FORMS = ["full", "sharded"]
BATCHES = make_batches(24)


def _build(fabric, seed=0, optimizer="adamw"):
    torch.manual_seed(seed)
    model = Stack()
    return fabric.setup(model, OPTIMIZERS[optimizer](model.parameters()))


def _save(form, path):
    fabric = make_fabric(state_dict_type=form)
    model, optimizer = _build(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    train(fabric, model, optimizer, BATCHES[:12], 12)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 12}
    fabric.save(path, state)


def _load_and_go_on(form, path, per_step):
    fabric = make_fabric(state_dict_type=form)
    model, optimizer = _build(fabric, seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    remainder = fabric.load(path, state)
    assert (state["step"], remainder, scheduler.last_epoch) == (12, {}, 1)
    train(fabric, model, optimizer, BATCHES[12:], per_step)
    return whole(fabric, model)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_at_any_number_of_ranks_in_the_other_form_too(tmp_path, form):
    run_ranks(_save, 2, form, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (tmp_path / "checkpoint").is_dir() == (form == "sharded")
    other = FORMS[1 - FORMS.index(form)]
    (expected,) = run_ranks(_load_and_go_on, 1, form, tmp_path / "checkpoint", 12)
    for actual in run_ranks(_load_and_go_on, 2, other, tmp_path / "checkpoint", 12):
        assert_equal(actual, expected)
    for actual in run_ranks(_load_and_go_on, 3, form, tmp_path / "checkpoint", 12):
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


def test_saved_and_resumed_equals_uninterrupted(tmp_path):
    run_ranks(_save, 2, "sharded", tmp_path / "checkpoint")
    torch.manual_seed(0)
    model = Stack()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for start in (0, 12):
        for batch in BATCHES[start : start + 12]:
            (nn.functional.mse_loss(model(batch[0]), batch[1]) / 12).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
    for actual in run_ranks(_load_and_go_on, 4, "full", tmp_path / "checkpoint", 12):
        assert_equal(actual, {name: p.detach() for name, p in model.named_parameters()})


def test_a_file_is_what_ddp_writes_and_ddps_file_can_be_read(tmp_path):
    run_ranks(_save, 2, "full", tmp_path / "ours.pt")
    ours = torch.load(tmp_path / "ours.pt")
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = _build(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    train(fabric, model, optimizer, BATCHES[:12], 12)
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 12}
    fabric.save(tmp_path / "theirs.pt", state)
    theirs = torch.load(tmp_path / "theirs.pt")
    assert list(ours) == list(theirs) and ours["scheduler"] == theirs["scheduler"]
    assert_equal(ours["model"], theirs["model"])
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    for index, entry in theirs["optimizer"]["state"].items():
        assert_equal(ours["optimizer"]["state"][index], entry)
    from_ours = run_ranks(_load_and_go_on, 2, "full", tmp_path / "ours.pt", 12)
    from_theirs = run_ranks(_load_and_go_on, 2, "full", tmp_path / "theirs.pt", 12)
    assert_equal(from_ours[0], from_theirs[0])


def _save_filtered(form, path):
    fabric = make_fabric(state_dict_type=form)
    model, optimizer = _build(fabric)
    keep = {"model": lambda name, value: "head" not in name and value.ndim > 0}
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3}, filter=keep)
    return whole(fabric, model)


def _load_filtered(path):
    fabric = make_fabric()
    model, _ = _build(fabric, seed=1)
    before = whole(fabric, model)
    state = {"model": model, "epoch": 7}
    with pytest.raises(KeyError, match="'epoch' that does not exist"):
        fabric.load(path, state)
    with pytest.raises(RuntimeError, match=r"(?s)head\.weight.*head\.bias"):
        fabric.load(path, {"model": model})
    assert_equal(whole(fabric, model), before)
    remainder = fabric.load(path, state, strict=False)
    assert remainder["step"] == 3 and state["epoch"] == 7
    return before, whole(fabric, model)


@pytest.mark.parametrize("form", FORMS)
def test_a_filtered_checkpoint_leaves_the_rest_as_it_is(tmp_path, form):
    saved = run_ranks(_save_filtered, 2, form, tmp_path / "checkpoint")[0]
    for before, after in run_ranks(_load_filtered, 3, tmp_path / "checkpoint"):
        kept = {name: value for name, value in saved.items() if "head" not in name}
        old = {name: value for name, value in before.items() if "head" in name}
        assert_equal(after, {**kept, **old})


def _two_models(form, path):
    fabric = make_fabric(state_dict_type=form)
    first, first_optimizer = _build(fabric, seed=0, optimizer="sgd")
    second, second_optimizer = _build(fabric, seed=1, optimizer="adamw")
    train(fabric, first, first_optimizer, BATCHES[:6], 6)
    train(fabric, second, second_optimizer, BATCHES[6:12], 6)
    state = {"a/model": first, "b": second, "opt_b": second_optimizer, "opt_a": first_optimizer}
    fabric.save(path, {**state, "plain": nn.Linear(2, 2)})
    expected = [whole(fabric, first), whole(fabric, second)]
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        train(fabric, model, optimizer, BATCHES[12:18], 6)
    gone_on = [whole(fabric, first), whole(fabric, second)]
    fabric.load(path, state)
    assert_equal(whole(fabric, first), expected[0])
    assert_equal(whole(fabric, second), expected[1])
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        train(fabric, model, optimizer, BATCHES[12:18], 6)
    assert_equal(whole(fabric, first), gone_on[0])
    assert_equal(whole(fabric, second), gone_on[1])


@pytest.mark.parametrize("form", FORMS)
def test_several_models_in_one_checkpoint(tmp_path, form):
    run_ranks(_two_models, 2, form, tmp_path / "checkpoint")


def _refusals(directory: Path):
    fabric = make_fabric(state_dict_type="sharded")
    model, optimizer = _build(fabric)
    occupied = directory / "occupied"
    if fabric.global_rank == 0:
        occupied.mkdir()
        (occupied / "thesis.tex").touch()
    with pytest.raises(IsADirectoryError, match="directory with other files"):
        fabric.save(occupied, {"model": model})
    with pytest.raises(ValueError, match=r"`filter\['opt'\]`: the sharded state of an optimizer"):
        fabric.save(directory / "x", {"model": model, "opt": optimizer}, {"opt": lambda *_: True})
    with pytest.raises(ValueError, match="is a directory but no sharded checkpoint"):
        fabric.load(occupied, {"model": model})
    with pytest.raises(FileNotFoundError):
        fabric.load(directory / "missing", {"model": model})
    fabric.save(directory / "shards", {"model": model, "opt": optimizer})
    with pytest.raises(ValueError, match="pass the objects to load into by the names"):
        fabric.load(directory / "shards")
    with pytest.raises(ValueError, match=r"expected a model that `fabric\.setup` has sharded"):
        fabric.load(directory / "shards", {"model": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"expected an optimizer that `fabric\.setup` knows"):
        fabric.load(directory / "shards", {"opt": 3})
    with pytest.raises(ValueError, match=r"`optimizer\.state_dict\(\)` returns whole"):
        optimizer.load_state_dict({})


def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank(tmp_path):
    run_ranks(_refusals, 2, tmp_path)


def _overwrite(form, path, bad):
    fabric = make_fabric(state_dict_type=form)
    model, optimizer = _build(fabric)
    fabric.save(path, {"model": model, "step": 1})
    train(fabric, model, optimizer, BATCHES[:4], 4)
    fabric.save(path, {"model": model, "step": (lambda: 2) if bad else 2})


def _step_of(path):
    fabric = make_fabric()
    model, _ = _build(fabric)
    state = {"model": model, "step": 0}
    fabric.load(path, state)
    return state["step"]


@pytest.mark.parametrize("form", FORMS)
def test_a_save_that_fails_leaves_the_older_checkpoint(tmp_path, form):
    with pytest.raises(RankError, match="pickle"):
        run_ranks(_overwrite, 1, form, tmp_path / "checkpoint", True)
    assert run_ranks(_step_of, 1, tmp_path / "checkpoint") == [1]
    other = FORMS[1 - FORMS.index(form)]
    run_ranks(_overwrite, 2, other, tmp_path / "checkpoint", False)  # over the other form
    assert run_ranks(_step_of, 2, tmp_path / "checkpoint") == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def _raw(directory):
    fabric = make_fabric()
    model, optimizer = _build(fabric, seed=1)
    fabric.load_raw(directory / "model.pt", model)
    fabric.load_raw(directory / "optimizer.pt", optimizer)
    whole_state = optimizer.state_dict()
    assert bool(whole_state) == fabric.is_global_zero
    optimizer.load_state_dict(fabric.broadcast(whole_state))  # whole state is cut
    train(fabric, model, optimizer, BATCHES[12:], 12)
    return whole(fabric, model)


def test_raw_state_of_one_process_is_loaded_into_shards(tmp_path):
    torch.manual_seed(0)
    model = Stack()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for index, batch in enumerate(BATCHES):
        if index == 12:
            torch.save(model.state_dict(), tmp_path / "model.pt")
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        (nn.functional.mse_loss(model(batch[0]), batch[1]) / 12).backward()
        if index % 12 == 11:
            optimizer.step()
            optimizer.zero_grad()
    for actual in run_ranks(_raw, 2, tmp_path):
        assert_equal(actual, {name: p.detach() for name, p in model.named_parameters()})


def _fit_and_save(form, directory):
    torch.manual_seed(0)
    module = LitStack()
    trainer = make_trainer(ToyFSDPStrategy(state_dict_type=form), directory)
    trainer.fit(module, regression_data())
    trainer.save_checkpoint(directory / "trainer")
    with trainer.strategy.unsharded():
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def _read_trainers(directory):
    fabric = make_fabric()
    model = fabric.setup(LitStack())
    fabric.load(directory / "trainer", {"state_dict": model})
    return whole(fabric, model)


@pytest.mark.parametrize("form", FORMS)
def test_a_trainers_checkpoint_can_be_read(tmp_path, form):
    expected = run_ranks(_fit_and_save, 2, form, tmp_path)[0]
    for actual in run_ranks(_read_trainers, 3, tmp_path):
        assert_equal(actual, expected)


def _state_stays(path):
    """What was loaded or returned does not change with the file, nor with training."""
    fabric = make_fabric()
    model, optimizer = _build(fabric)
    given = fabric.strategy.get_module_state_dict(model._forward_module)
    copies = {name: value.clone() for name, value in given.items()}
    fabric.save(path, {"model": model, "extra": torch.ones(3)})
    state = {"model": model, "extra": None}
    fabric.load(path, state)
    if fabric.is_global_zero:
        with open(path, "r+b") as file:
            file.write(bytes(path.stat().st_size))
    fabric.barrier()
    train(fabric, model, optimizer, BATCHES[:4], 4)
    assert torch.equal(state["extra"], torch.ones(3))
    assert_equal(given, copies)
    return len(given)


def test_states_are_copies(tmp_path):
    num_entries, nothing = run_ranks(_state_stays, 2, tmp_path / "file.pt")
    assert num_entries == len(Stack().state_dict()) and nothing == 0
