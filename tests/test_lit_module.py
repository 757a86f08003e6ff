"""The LightningModule: what it logs, its schedule, checkpoints, and resuming on other ranks."""

import functools
import math
from pathlib import Path
from typing import Any

import hydra.utils
import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp_toy.data import SyntheticDataModule
from lightning_fsdp_toy.lit_module import LitLanguageModel, WarmupDecay
from lightning_fsdp_toy.models import GPT, Transformer
from lightning_fsdp_toy.peers import make_fsdp2_strategy
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*GPU available.*")

VOCAB, SEQ_LEN, NUM_BATCHES = 32, 4, 8  # 8 micro-batches of 2 windows in an epoch
STILL = functools.partial(torch.optim.SGD, lr=0.0)  # weights stay, so losses show data and dropout


class Recorder(L.Callback):
    """Writes down each micro-batch and what was logged; saves at one point of the run."""

    def __init__(self, save_at: tuple[str, int] | None = None, path: str = "") -> None:
        self.save_at = save_at
        self.path = path
        self.batches: list[tuple[Any, ...]] = []
        self.points: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        loop = trainer.fit_loop.epoch_loop
        place = (trainer.current_epoch, batch_idx, trainer.global_step, loop._batches_that_stepped)
        self.batches.append((batch[0].tolist(), *place))

    def on_train_batch_end(self, trainer, *args) -> None:
        self.save_if_asked(trainer, "batch_end")

    def on_validation_end(self, trainer, *args) -> None:
        self.save_if_asked(trainer, "validation_end")

    def on_train_epoch_end(self, trainer, *args) -> None:
        self.save_if_asked(trainer, "epoch_end")

    def on_train_end(self, trainer, *args) -> None:
        self.save_if_asked(trainer, "train_end")

    def save_if_asked(self, trainer, name: str) -> None:
        self.points.append((name, len(self.batches)))
        if self.path and self.points[-1] == self.save_at:
            trainer.save_checkpoint(self.path)


class Losses(L.pytorch.loggers.logger.DummyLogger):
    """Keeps what is logged, as (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append((step, dict(metrics)))

    def column(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


def make_trainer(**kwargs: Any) -> L.Trainer:
    defaults = dict(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    return L.Trainer(**(defaults | kwargs))


def make_module(dropout: float = 0.0, **kwargs: Any) -> LitLanguageModel:
    torch.manual_seed(0)
    return LitLanguageModel(GPT(VOCAB, 8, 2, 1, SEQ_LEN, dropout), **kwargs)


def make_data(batch_size: int = 2) -> SyntheticDataModule:
    return SyntheticDataModule(VOCAB, batch_size, SEQ_LEN, NUM_BATCHES, seed=1)


def record(ckpt_path=None, save_at=None, path="", **kwargs: Any) -> Recorder:
    recorder = Recorder(save_at, path)
    trainer = make_trainer(callbacks=[recorder], limit_val_batches=2, **kwargs)
    trainer.fit(make_module(), make_data(), ckpt_path=ckpt_path)
    return recorder


# ---- schedule ----


def test_schedule_warms_up_decays_and_stays_at_the_floor() -> None:
    factor = WarmupDecay(warmup_steps=4, max_steps=12, min_lr_ratio=0.1, schedule="cosine")
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)  # half way
    assert factor(11) > factor(12) == factor(1000) == 0.1
    assert WarmupDecay(2, 1, 0.1, "constant")(1000) == 1.0
    assert WarmupDecay(10, 5, 0.1, "cosine")(4) == 0.5  # shorter than its warm-up


def test_learning_rate_moves_once_per_optimizer_step() -> None:
    logger = Losses()
    trainer = make_trainer(
        max_steps=6, accumulate_grad_batches=2, limit_val_batches=0, logger=logger
    )
    trainer.fit(
        make_module(warmup_steps=2, optimizer=functools.partial(torch.optim.SGD, lr=2.0)),
        make_data(),
    )
    rates = logger.column("lr")
    assert [step for step, _ in rates] == list(range(6))
    expected = [2 * WarmupDecay(2, 6, 0.1, "cosine")(step) for step in range(6)]
    assert [rate for _, rate in rates] == pytest.approx(expected)


def test_schedule_ends_with_the_epochs_of_the_trainer() -> None:
    module = make_module()
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=2, limit_val_batches=0)
    trainer.fit(module, make_data())
    assert trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].max_steps == 8
    endless = make_trainer(max_epochs=-1, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"set `trainer\.max_steps`"):
        endless.fit(make_module(), SyntheticDataModule(VOCAB, 2, SEQ_LEN, NUM_BATCHES))


# ---- logging, the same on any number of ranks ----


def logged_on_ranks(accumulate: int) -> tuple[list[tuple[int, float]], float, float]:
    """Run on all ranks under DDP with dropout; return train/loss, val/loss, val/perplexity."""
    logger = Losses()
    world_size = torch.distributed.get_world_size()
    trainer = make_trainer(
        devices=world_size,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        logger=logger,
    )
    trainer.fit(make_module(0.5, optimizer=STILL), make_data())
    metrics = trainer.callback_metrics
    losses = torch.distributed.get_rank() == 0 and logger.column("train/loss")
    return losses, metrics["val/loss"].item(), metrics["val/perplexity"].item()


def test_train_loss_has_the_same_bits_at_any_world_size_and_perplexity_is_over_all_ranks() -> None:
    one = run_ranks(logged_on_ranks, 1, 4)[0]
    assert [step for step, _ in one[0]] == [0, 1, 2, 3]
    assert len({loss for _, loss in one[0]}) == 4
    assert one[2] == pytest.approx(math.exp(one[1]), rel=1e-5)
    for world_size, accumulate in ((2, 2), (4, 1)):
        ranks = run_ranks(logged_on_ranks, world_size, accumulate)
        assert ranks[0][0] == one[0]
        for _, loss, perplexity in ranks:
            assert (loss, perplexity) == pytest.approx(one[1:], rel=1e-6)


def test_train_loss_is_the_mean_over_the_micro_batches_of_a_step() -> None:
    logger = Losses()
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=4, logger=logger)
    module, data = make_module(optimizer=STILL), make_data()
    trainer.fit(module, data)
    by_hand = []
    for tokens, targets in data.train_dataloader():
        logits = module(tokens)
        by_hand.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    expected = [torch.stack(by_hand[:4]).mean().item(), torch.stack(by_hand[4:]).mean().item()]
    assert [loss for _, loss in logger.column("train/loss")] == pytest.approx(expected)


def test_dropout_differs_between_micro_batches_and_epochs_but_not_between_runs() -> None:
    def losses(seed: int) -> list[float]:
        data = SyntheticDataModule(VOCAB, 2, SEQ_LEN, 4, fixed_batch=True)
        logger = Losses()
        trainer = make_trainer(max_epochs=2, limit_val_batches=0, logger=logger)
        trainer.fit(make_module(0.5, optimizer=STILL, seed=seed), data)
        return [loss for _, loss in logger.column("train/loss")]

    assert len(set(losses(0))) == 8
    assert losses(0) == losses(0) != losses(1)


def test_validate_test_and_predict() -> None:
    module, data, trainer = make_module(), make_data(), make_trainer()
    (val,) = trainer.validate(module, data, verbose=False)
    (test,) = trainer.test(module, data, verbose=False)
    assert set(val) == {"val/loss", "val/perplexity"}
    assert list(test.values()) == list(val.values())
    predictions = trainer.predict(module, data)
    tokens, _ = next(iter(data.val_dataloader()))
    assert torch.equal(predictions[0], module(tokens).argmax(-1))


# ---- state ----


def test_state_dict_holds_the_network_only() -> None:
    module = make_module()
    assert set(module.state_dict()) == {f"net.{name}" for name in module.net.state_dict()}
    assert all(name.startswith("net.") for name, _ in module.named_parameters())
    assert not list(module.buffers())


def test_checkpoint_loads_into_a_module_without_a_trainer(tmp_path) -> None:
    module = make_module(warmup_steps=3)
    trainer = make_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    fresh = GPT(VOCAB, 8, 2, 1, SEQ_LEN)
    loaded = LitLanguageModel.load_from_checkpoint(tmp_path / "x.ckpt", model=fresh)
    assert loaded.warmup_steps == 3
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_optimizer_may_be_a_partial_made_by_hydra() -> None:
    partial = hydra.utils.instantiate(
        {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.9}
    )
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(make_module(optimizer=partial), make_data())
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    default = make_module().make_optimizer(make_module().parameters())
    assert isinstance(default, torch.optim.AdamW) and default.defaults["lr"] == 3e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0, got -1"),
        ({"max_steps": 0}, "`max_steps` must be at least 1 or None, got 0"),
        ({"min_lr_ratio": 2.0}, "`min_lr_ratio` must be between 0 and 1, got 2.0"),
        ({"schedule": "linear"}, "`schedule` must be 'cosine' or 'constant', got 'linear'"),
    ],
)
def test_bad_arguments_are_named(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_module(**arguments)


def test_vocabulary_smaller_than_the_data_is_refused() -> None:
    module = LitLanguageModel(Transformer(16, 8, 2, 1, 8))
    with pytest.raises(ValueError, match=r"set `model\.vocab_size=32`"):
        make_trainer(max_steps=1).fit(module, make_data())


# ---- resuming ----

RUNS = {
    "steps": dict(max_steps=8, max_epochs=-1),
    "epochs": dict(max_epochs=2),
    "validation inside": dict(
        max_steps=8, max_epochs=-1, val_check_interval=4, check_val_every_n_epoch=None
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "save_at",
    [
        ("batch_end", 3),  # between the micro-batches of a step: the step is made again
        ("batch_end", 4),
        ("validation_end", 4),
        ("batch_end", 8),
        ("validation_end", 8),
        ("epoch_end", 8),
        ("batch_end", 13),
    ],
)
def test_resume_goes_on_with_the_next_micro_batch(tmp_path, run: str, save_at) -> None:
    kwargs = RUNS[run] | {"accumulate_grad_batches": 2}
    whole = record(**kwargs, save_at=save_at, path=str(tmp_path / "x.ckpt"))
    if save_at not in whole.points:
        assert save_at == ("validation_end", 4) and run != "validation inside"
        return
    resumed = record(**kwargs, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.batches == whole.batches[save_at[1] // 2 * 2 :]


@pytest.mark.parametrize("num_steps", [3, 4])
@pytest.mark.parametrize("name", ["batch_end", "epoch_end", "train_end"])
def test_longer_run_goes_on_where_a_shorter_one_ended(tmp_path, num_steps: int, name) -> None:
    whole = record(max_steps=8, max_epochs=-1, accumulate_grad_batches=2)
    record(
        max_steps=num_steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        save_at=(name, 2 * num_steps),
        path=str(tmp_path / "x.ckpt"),
    )
    resumed = record(
        max_steps=8, max_epochs=-1, accumulate_grad_batches=2, ckpt_path=tmp_path / "x.ckpt"
    )
    assert resumed.batches == whole.batches[2 * num_steps :]


def fit_on_ranks(accumulate: int, max_steps: int, ckpt_path: str | None, path: str) -> list:
    """Run on all ranks and save at the end; return this rank's micro-batches."""
    recorder = Recorder(("train_end", max_steps * accumulate), path)
    trainer = make_trainer(
        devices=torch.distributed.get_world_size(),
        strategy="ddp",
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        callbacks=[recorder],
    )
    trainer.fit(make_module(), make_data(), ckpt_path=ckpt_path)
    return [(tokens, epoch, step) for tokens, epoch, _, step, _ in recorder.batches]


@pytest.mark.parametrize("num_steps", [1, 2])  # inside an epoch, at its end
def test_resume_on_another_world_size_goes_on_with_the_next_micro_batch(
    tmp_path: Path, num_steps: int
) -> None:
    def in_global_order(per_rank: list[list]) -> list:
        return [batch for turn in zip(*per_rank, strict=True) for batch in turn]

    path = str(tmp_path / "x.ckpt")
    whole = in_global_order(run_ranks(fit_on_ranks, 1, 4, 4, None, ""))
    start = in_global_order(run_ranks(fit_on_ranks, 2, 2, num_steps, None, path))
    assert start == whole[: 4 * num_steps]
    for world_size, accumulate in ((1, 4), (4, 1)):
        rest = run_ranks(fit_on_ranks, world_size, accumulate, 4, path, "")
        assert in_global_order(rest) == whole[4 * num_steps :]


# ---- FSDP2 ----


def fit_twice_with_fsdp2() -> tuple[bool, list[float]]:
    module, logger = make_module(), Losses()
    for max_steps in (2, 4):
        trainer = make_trainer(
            devices=2,
            strategy=make_fsdp2_strategy(2),
            max_steps=max_steps,
            logger=logger,
            limit_val_batches=0,
        )
        trainer.fit(module, make_data())
        module.configure_model()  # once more: does nothing
    return isinstance(module.net, FSDPModule), [loss for _, loss in logger.column("train/loss")]


def test_configure_model_shards_once_under_fsdp2() -> None:
    is_sharded, losses = run_ranks(fit_twice_with_fsdp2, 2)[0]
    assert is_sharded
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses)
    plain = make_module()
    plain.configure_model()
    assert not isinstance(plain.net, FSDPModule)
