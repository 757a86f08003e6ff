"""Resuming inside an epoch goes on as if nothing had happened (C27)."""

import functools
import shutil

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.data import SyntheticDataModule
from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from lightning_fsdp_toy.lit_module import LitLanguageModel
from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.tasks.check_checkpoint import check_checkpoint
from tests.core_helpers import Stack, assert_equal, make_batches
from tests.lit_helpers import make_trainer
from tests.ranks import run_ranks
from tests.test_launch_jobs import compose

STEP = 4  # micro-batches of an optimizer step, all ranks together
SAVED_AFTER, NUM_STEPS = 3, 10  # an epoch has 8 steps


class Recorder(L.Callback):
    """Writes down the samples of each micro-batch, and loss and rate of each step; saves once."""

    def __init__(self, path=None):
        self.path = path
        self.samples, self.steps = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.samples.append(batch[0].flatten().tolist())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > len(self.steps) + trainer.first_step:
            loss = trainer.callback_metrics["train/loss"].item()
            self.steps.append((trainer.global_step, loss, self.rate))
            if self.path is not None and trainer.global_step == SAVED_AFTER:
                trainer.save_checkpoint(self.path)

    def on_train_start(self, trainer, pl_module):
        trainer.first_step = trainer.global_step


def _run(module, data, form, save_to, resume_from, accumulate, directory):
    """Return this rank's samples, all steps, and whole final weights (of rank 0)."""
    recorder = Recorder(save_to)
    trainer = make_trainer(
        ToyFSDPStrategy(state_dict_type=form),
        directory,
        max_steps=NUM_STEPS,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[recorder],
    )
    trainer.fit(module, data, ckpt_path=resume_from)
    trainer.strategy.state_dict_type = "full"
    return recorder.samples, recorder.steps, trainer.strategy.lightning_module_state_dict()


def _language_model(form, save_to, resume_from, accumulate, directory):
    torch.manual_seed(0)
    module = LitLanguageModel(
        GPT(32, 12, 3, 2, 4, dropout=0.3),
        functools.partial(torch.optim.AdamW, lr=1e-2),
        warmup_steps=5,
    )
    data = SyntheticDataModule(32, 2, 4, num_batches=8 * STEP, seed=1)
    return _run(module, data, form, save_to, resume_from, accumulate, directory)


def _in_global_order(ranks):
    return [
        batch for turn in zip(*(samples for samples, *_ in ranks), strict=True) for batch in turn
    ]


@pytest.fixture(scope="module", params=["full", "sharded"])
def unbroken(request, tmp_path_factory):
    """A run on two ranks that saves in between: form, path, samples, steps, final weights."""
    directory = tmp_path_factory.mktemp(request.param)
    path = directory / "saved.ckpt"
    ranks = run_ranks(_language_model, 2, request.param, path, None, STEP // 2, directory)
    assert ranks[0][1] == ranks[1][1]
    return request.param, path, _in_global_order(ranks), *ranks[0][1:]


@pytest.mark.parametrize("world_size", [2, 1, 4])
def test_language_model_goes_on_with_the_same_samples_losses_and_rates(
    unbroken, tmp_path, world_size
):
    form, path, samples, steps, weights = unbroken
    assert len(steps) == NUM_STEPS and len(samples) == NUM_STEPS * STEP
    assert len({rate for _, _, rate in steps}) > 7  # rises and falls
    arguments = (form, None, path, STEP // world_size, tmp_path)
    ranks = run_ranks(_language_model, world_size, *arguments)
    assert _in_global_order(ranks) == samples[SAVED_AFTER * STEP :]
    assert all(rank[1] == steps[SAVED_AFTER:] for rank in ranks)
    assert_equal(ranks[0][2], weights)


def test_three_ranks_go_on_with_the_samples_that_two_ranks_left(unbroken, tmp_path):
    """Other optimizer steps, of 3 micro-batches; each micro-batch of the epoch still comes once."""
    form, path, samples, _, _ = unbroken
    ranks = run_ranks(_language_model, 3, form, None, path, 1, tmp_path)
    rest = _in_global_order(ranks)
    assert [step for step, _, _ in ranks[0][1]] == [4, 5, 6, 7, 8, 9, 10]
    epoch = samples[SAVED_AFTER * STEP : 30]
    assert rest[: len(epoch)] == epoch


class Plain(L.LightningModule):
    """Dropout, a warm-up, and random numbers that restart with every micro-batch."""

    def __init__(self, reseeds=True):
        super().__init__()
        self.net = nn.Sequential(Stack(), nn.Dropout(0.3), nn.Linear(3, 3))
        self.reseeds = reseeds

    def on_train_batch_start(self, batch, batch_idx):
        if self.reseeds:
            place = (self.current_epoch * 1000 + batch_idx) * self.trainer.world_size
            torch.manual_seed(place + self.trainer.global_rank)

    def training_step(self, batch, _):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StatefulLoader:
    """This rank's batches; its state says how many of the epoch it has given."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for index in range(self.position, len(self.batches)):
            self.position = index + 1
            yield self.batches[index]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def _plain(form, save_to, resume_from, directory, reseeds=True):
    torch.manual_seed(0)
    module = Plain(reseeds)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    loader = StatefulLoader(make_batches(8 * world_size)[rank::world_size])
    torch.manual_seed(5 if resume_from is None else 6)  # another process draws other numbers
    return _run(module, loader, form, save_to, resume_from, 1, directory)


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plain_module_with_a_stateful_loader_goes_on(tmp_path, form, world_size):
    path = tmp_path / "saved.ckpt"
    whole = run_ranks(_plain, world_size, form, path, None, tmp_path)
    resumed = run_ranks(_plain, world_size, form, None, path, tmp_path)
    for (samples, steps, _), (rest, later, _) in zip(whole, resumed, strict=True):
        assert len(samples) == len(steps) == NUM_STEPS
        assert rest == samples[SAVED_AFTER:]
        assert later == steps[SAVED_AFTER:]
    assert_equal(resumed[0][2], whole[0][2])


def test_random_numbers_are_not_in_a_checkpoint(tmp_path):
    """The gap that the note on random numbers in `checkpointing.py` states."""
    path = tmp_path / "saved.ckpt"
    _, steps, _ = run_ranks(_plain, 2, "full", path, None, tmp_path, False)[0]
    _, later, _ = run_ranks(_plain, 2, "full", None, path, tmp_path, False)[0]
    assert [(step, rate) for step, _, rate in later] == [(s, r) for s, _, r in steps[SAVED_AFTER:]]
    assert [loss for _, loss, _ in later] != [loss for _, loss, _ in steps[SAVED_AFTER:]]


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    """The folder of a run that saved a sharded checkpoint after two steps."""
    run_dir = tmp_path_factory.mktemp("sharded")
    launch(compose(run_dir, "trainer.max_steps=2", "strategy.state_dict_type=sharded"))
    return run_dir / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    "overrides, text",
    [
        (["strategy=ddp"], "is a sharded checkpoint, which this `strategy` cannot read"),
        (["model.num_layers=3"], "holds other weights than `model`: net.layers.2"),
        (["optimizer=sgd"], "was saved with another `optimizer` than SGD: .* momentum"),
    ],
)
def test_sharded_checkpoints_of_other_runs_are_refused(sharded_run, tmp_path, overrides, text):
    options = [f"ckpt_path={sharded_run}", "trainer.max_steps=4", *overrides]
    with pytest.raises(JobError, match=text):
        launch(compose(tmp_path / "run", *options))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("damage", ["cut", "part", "metadata"])
def test_damaged_sharded_checkpoints_are_refused(sharded_run, tmp_path, damage):
    copy = tmp_path / "last.ckpt"
    shutil.copytree(sharded_run, copy)
    part = next(copy.glob("__1_*.distcp"))
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:100])
    else:
        (part if damage == "part" else copy / ".metadata").unlink()
    with pytest.raises(JobError, match="is a damaged sharded checkpoint"):
        launch(compose(tmp_path / "run", f"ckpt_path={copy}", "trainer.max_steps=4"))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"tokens_seen": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_no_weight(tmp_path):
    module = WithExtraState(2, 2)
    path = tmp_path / "last.ckpt"
    content = {"loops": {"fit_loop": {}}, "global_step": 1, "optimizer_states": []}
    torch.save(content | {"state_dict": module.state_dict()}, path)
    check_checkpoint({"ckpt_path": str(path), "strategy": "auto", "trainer": {}}, module)


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict": ["weights"]},
        {"global_step": "two"},
        {"optimizer_states": 3},
        {"optimizer_states": [None]},
        {"loops": {}},
        {"loops": None},
    ],
    ids=str,
)
def test_whatever_is_wrong_in_a_checkpoint_is_one_line(tmp_path, change):
    module, path = nn.Linear(2, 2), tmp_path / "last.ckpt"
    content = {"loops": {"fit_loop": {}}, "global_step": 1, "optimizer_states": []}
    torch.save(content | {"state_dict": module.state_dict()} | change, path)
    config = {"ckpt_path": str(path), "strategy": "auto", "trainer": {"max_steps": 4}}
    with pytest.raises(ValueError, match=r"^`ckpt_path=") as caught:
        check_checkpoint(config, module)
    assert "\n" not in str(caught.value)
