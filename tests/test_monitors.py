"""Monitors: what they log, when, and how ranks are compared (C68, C72, C73)."""

import mmap
import warnings
from collections import defaultdict

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.monitors import (
    CommunicationMonitor,
    MemoryMonitor,
    Pictures,
    PlanMonitor,
    ThroughputMonitor,
)
from tests.core_helpers import Stack
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks

MIB = 2**20


def monitors(**options):
    kinds = (MemoryMonitor, CommunicationMonitor, ThroughputMonitor, PlanMonitor)
    return [kind(**options) for kind in kinds]


def logging_trainer(strategy, directory, **options):
    """A Trainer with all monitors that logs to TensorBoard."""
    logger = TensorBoardLogger(directory, name="", version="")
    return make_trainer(strategy, directory, logger=logger, callbacks=monitors(), **options)


def fit_as_planned(trainer, *args):
    """Fit; a warning that the plan does not hold is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*planned")
        trainer.fit(*args)


def read(directory):
    """All scalars of an event file: {tag: [(step, value), ...]}."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def _every_stage(directory, strategy):
    logger = TensorBoardLogger(directory, name="", version="")
    trainer = make_trainer(
        strategy,
        directory,
        logger=logger,
        callbacks=monitors(),
        max_steps=5,
        max_epochs=-1,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        num_sanity_val_steps=2,
        val_check_interval=4,
        check_val_every_n_epoch=None,
    )
    module, data = LitStack(), regression_data()
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)


@pytest.mark.parametrize("strategy", ["toy_fsdp", "ddp"])
def test_every_stage_is_logged_on_the_steps_of_the_loss(tmp_path, strategy):
    run_ranks(_every_stage, 2, str(tmp_path), strategy, timeout=60)
    scalars = read(tmp_path)
    of_loss = [step for step, _ in scalars["train/loss"]]
    assert of_loss == [1, 3]
    of_memory = [step for step, _ in scalars["memory/shards_mib"]]
    # Also before a validation interrupts training, and for the rest at the end.
    assert of_memory == [1, 3, 4]
    for stage in ("validate", "test", "predict"):
        tags = [tag for tag in scalars if f"/{stage}/" in tag]
        groups = {tag.split("/")[0] for tag in tags}
        assert groups == {"memory", "throughput"} | ({"comm"} if strategy == "toy_fsdp" else set())
    in_fit = [step for step, _ in scalars["memory/validate/process_mib"]]
    assert in_fit[0] == 1  # not the sanity check, which is at step 0
    for tag, points in scalars.items():
        steps = [step for step, _ in points]
        assert steps == sorted(steps), tag
        if "/validate/" not in tag and tag != "epoch":
            assert len(set(steps)) == len(steps), tag


def _accumulated(directory, options):
    trainer = logging_trainer(
        ToyFSDPStrategy(**options),
        directory,
        max_steps=4,
        max_epochs=-1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    fit_as_planned(trainer, LitStack(), regression_data(64))


def _interrupted(directory, options):
    trainer = logging_trainer(
        "toy_fsdp",
        directory,
        max_steps=4,
        max_epochs=-1,
        accumulate_grad_batches=4,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        **options,
    )
    fit_as_planned(trainer, LitStack(), regression_data(128), regression_data())


def test_a_validation_within_an_optimizer_step_changes_nothing_of_what_training_logs(tmp_path):
    every = {"check_val_every_n_epoch": None}
    options = {"without": {"limit_val_batches": 0}, "within": {**every, "val_check_interval": 10}}
    scalars = {}
    for name, given in options.items():
        run_ranks(_interrupted, 2, str(tmp_path / name), given)
        scalars[name] = read(tmp_path / name)
    within = scalars["within"]
    assert "memory/validate/process_mib" in within
    tags = [tag for tag in scalars["without"] if tag.split("/")[0] in ("comm", "plan", "memory")]
    for tag in tags:
        steps = [step for step, _ in scalars["without"][tag]]
        assert [step for step, _ in within[tag]] == steps == [1, 3], tag
        is_counted = tag.endswith("_mib") and "process" not in tag
        if is_counted:
            assert within[tag] == scalars["without"][tag], tag


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}


@pytest.mark.parametrize("transport", ["pairwise", "native", "shared_memory"])
@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}, HYBRID], ids=str)
def test_planned_equals_measured_with_accumulation(tmp_path, options, transport):
    world_size = 4 if options is HYBRID else 2
    run_ranks(_accumulated, world_size, str(tmp_path), {**options, "transport": transport})
    scalars = read(tmp_path)
    compared = [tag for tag in scalars if tag.startswith("plan/") and "peak" not in tag]
    assert len(compared) == 9
    for tag in compared:
        name = tag.removeprefix("plan/")
        measured = scalars.get(f"memory/{name}") or scalars.get(f"comm/{name}")
        if measured is None:  # none of the kind
            assert scalars[tag][-1][1] == 0
            continue
        assert scalars[tag][1:] == measured[1:], tag  # the first step gathers one unit more


def _short_epoch(directory):
    trainer = logging_trainer(
        ToyFSDPStrategy(),
        directory,
        max_epochs=2,
        limit_train_batches=4,
        accumulate_grad_batches=3,
        log_every_n_steps=1,
    )
    fit_as_planned(trainer, LitStack(), regression_data(64))


def test_the_plan_knows_of_the_short_window_at_the_end_of_an_epoch(tmp_path):
    run_ranks(_short_epoch, 2, str(tmp_path))
    scalars = {tag: dict(points) for tag, points in read(tmp_path).items()}
    for name in ("all_gather_mib", "reduce_scatter_mib"):
        planned, measured = scalars[f"plan/{name}"], scalars[f"comm/{name}"]
        assert [planned[step] for step in (1, 2, 3)] == [measured[step] for step in (1, 2, 3)]
        assert planned[2] == pytest.approx(3 * planned[3])


class Wrong(PlanMonitor):
    """Its formulas are wrong."""

    def measure(self, trainer, pl_module, stage):
        values = super().measure(trainer, pl_module, stage)
        return {**values, "unsharded_mib": values["unsharded_mib"] / 2}


def _wrong(directory):
    trainer = make_trainer(
        ToyFSDPStrategy(),
        directory,
        logger=CSVLogger(directory),
        callbacks=[MemoryMonitor(), Wrong()],
        max_steps=3,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(LitStack(), regression_data())
    return [str(each.message) for each in caught if "planned" in str(each.message)]


def test_a_difference_from_the_plan_warns_once_and_names_the_term(tmp_path):
    first, second = run_ranks(_wrong, 2, str(tmp_path))
    assert len(first) == 1 and first[0].startswith("unsharded: planned ")
    assert second == []


class Heavy(LitStack):
    """Rank 1 holds 64 MiB more than the others; forward takes and frees 96 MiB."""

    def on_fit_start(self):
        if self.global_rank == 1:
            self.ballast = torch.ones(64 * MIB // 4)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            temporary = mmap.mmap(-1, 96 * MIB)  # not of the heap, which keeps what is freed
            temporary[:: mmap.PAGESIZE] = bytes(96 * MIB // mmap.PAGESIZE)
            temporary.close()
        return super().training_step(batch, batch_idx)


def _heavy(directory):
    trainer = make_trainer(
        ToyFSDPStrategy(),
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=[MemoryMonitor()],
        max_steps=5,
        log_every_n_steps=1,
    )
    trainer.fit(Heavy(), regression_data(64))


def test_the_worst_rank_and_a_temporary_inside_forward_are_seen(tmp_path):
    run_ranks(_heavy, 2, str(tmp_path))
    scalars = {tag: dict(points) for tag, points in read(tmp_path).items()}
    process, peak = scalars["memory/process_mib"], scalars["memory/process_peak_mib"]
    assert set(scalars["memory/process_mib/max_rank"].values()) == {1.0}
    spread = process[4] - scalars["memory/process_mib/mean"][4]
    assert 25 < spread < 40  # half of 64 MiB: two ranks
    assert peak[2] - process[2] > 80  # of 96 MiB; the temporary is gone after the step
    assert process[2] - process[1] < 20
    assert peak[3] - process[3] < 20  # a new peak for every log, not the largest of all


def _manual(directory):
    class Gan(LitStack):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = Stack()

        def training_step(self, batch, _):
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                loss = (net(batch[0]) - batch[1]).pow(2).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.log("train/loss", loss)

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]

    trainer = logging_trainer(
        ToyFSDPStrategy(),
        directory,
        max_epochs=1,
        limit_train_batches=4,
        log_every_n_steps=1,
    )
    trainer.fit(Gan(), regression_data(64))


def test_several_optimizers_count_as_one_step_of_the_loss(tmp_path):
    run_ranks(_manual, 2, str(tmp_path))
    scalars = read(tmp_path)
    steps = [step for step, _ in scalars["train/loss"]]
    assert steps == [0, 1, 2, 3]
    for tag in ("memory/shards_mib", "comm/total_mib", "throughput/step_s"):
        assert [step for step, _ in scalars[tag]] == steps
    assert not any(tag.startswith("plan/") for tag in scalars)  # no formula for such loops
    totals = defaultdict(set)
    for _, value in scalars["comm/reduce_scatter_mib"]:
        totals["reduce"].add(value)
    assert len(totals["reduce"]) == 1


@pytest.mark.parametrize(
    "kind, options, text",
    [
        (MemoryMonitor, {"every_n_steps": 0}, "`every_n_steps`: expected a whole number"),
        (PlanMonitor, {"tolerance": -1.0}, "`tolerance`: expected a number of at least 0"),
        (ThroughputMonitor, {"peak_flops": 0.0}, "`peak_flops`: expected a number above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(kind, options, text):
    with pytest.raises(ValueError, match=text):
        kind(**options)


def _mfu(directory, strategy):
    class Tokens(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Embedding(10, 400)
            self.frozen = nn.Parameter(torch.zeros(100), requires_grad=False)

        def training_step(self, batch, _):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = make_trainer(
        strategy,
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=[ThroughputMonitor(peak_flops=1e6)],
        log_every_n_steps=1,
        max_steps=4,
    )
    data = torch.utils.data.DataLoader(torch.randint(0, 10, (16, 3)), batch_size=2)
    trainer.fit(Tokens(), data)


@pytest.mark.parametrize("strategy", ["toy_fsdp", "ddp"])
def test_tokens_and_utilisation(tmp_path, strategy):
    run_ranks(_mfu, 2, str(tmp_path), strategy)
    scalars = {tag: dict(points) for tag, points in read(tmp_path).items()}
    slower, mean = scalars["throughput/step_s"][2], scalars["throughput/step_s/mean"][2]
    tokens = scalars["throughput/tokens_per_s"][2]
    # Two ranks of 2 x 3 tokens, each with its own clock.
    assert tokens == pytest.approx(6 / slower + 6 / (2 * mean - slower), rel=1e-3)
    samples = scalars["throughput/samples_per_s"][2]
    assert tokens / samples == pytest.approx(3)
    # Of the whole model's trained parameters, not of this rank's pieces.
    mean_mfu = scalars["throughput/mfu/mean"][2]
    assert mean_mfu == pytest.approx(6 * 4000 * tokens / 2 / 1e6, rel=1e-3)


def _checkpoints(directory, when, every):
    trainer = make_trainer(
        ToyFSDPStrategy(),
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=[*monitors(), ModelCheckpoint(directory, **when)],
        enable_checkpointing=True,
        max_steps=10,
        max_epochs=-1,
        val_check_interval=4,
        log_every_n_steps=every,
    )
    fit_as_planned(trainer, LitStack(), regression_data(64), regression_data(8))


@pytest.mark.parametrize("when", [{}, {"every_n_train_steps": 2}], ids=["validation", "steps"])
@pytest.mark.parametrize("every", [1, 3])
def test_what_a_checkpoint_gathers_is_not_the_next_steps(tmp_path, when, every):
    run_ranks(_checkpoints, 2, str(tmp_path), when, every)
    scalars = read(tmp_path)
    gathered = [value for step, value in scalars["comm/all_gather_mib"] if step > 3]
    assert len(gathered) > 2 and len(set(gathered)) == 1


def _fit_twice(directory):
    callbacks = [*monitors(), Pictures(f"{directory}/pictures", first_step=1)]
    for number, net in enumerate((Stack(), Stack(num_blocks=2))):
        trainer = make_trainer(
            ToyFSDPStrategy(),
            directory,
            logger=TensorBoardLogger(directory, name="", version=str(number)),
            callbacks=callbacks,
            max_steps=4,
            log_every_n_steps=1,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*planned")
            trainer.fit(LitStack(net), regression_data())
    assert len(callbacks[-1].recording.units) == 3  # of the second


def test_monitors_of_a_second_run_know_its_model(tmp_path):
    run_ranks(_fit_twice, 2, str(tmp_path))
    for number in "01":
        scalars = {tag: dict(points) for tag, points in read(tmp_path / number).items()}
        for kind in ("shards", "optimizer"):
            assert scalars[f"plan/{kind}_mib"] == scalars[f"memory/{kind}_mib"]


def test_what_counts_as_samples_and_tokens():
    ids, labels = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)

    def counted(batch, **options):
        monitor = ThroughputMonitor(**options)
        monitor.note_batch(batch)
        return monitor._samples, monitor._tokens

    assert counted([ids, labels]) == (4, 64)
    assert counted({"label": labels, "ids": ids}, batch_key="ids") == (4, 64)
    assert counted([images, labels]) == (4, 0)
    assert counted([images, labels], batch_key=0) == (4, 4 * 192)
    assert counted("no tensor") == (0, 0)
    with pytest.raises(ValueError, match=r"`batch_key='ids'`: no such entry in a batch \(list\)"):
        counted([ids, labels], batch_key="ids")


def _few_steps(directory, every_n_steps):
    trainer = make_trainer(
        "toy_fsdp",
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        max_steps=3,
        callbacks=[MemoryMonitor(every_n_steps=every_n_steps)],
    )
    trainer.fit(LitStack(), regression_data())
    return trainer.strategy.root.memory.held["optimizer"]


def test_optimizer_state_is_counted_from_the_step_that_makes_it(tmp_path):
    scalars = {}
    for every_n_steps in (1, 10):
        directory = str(tmp_path / str(every_n_steps))
        [held] = run_ranks(_few_steps, 1, directory, every_n_steps)
        scalars[every_n_steps] = read(directory)
    assert held >= 2 * 4 * sum(param.numel() for param in Stack().parameters())
    [(_, optimizer)], [(_, total)] = (
        scalars[10][tag] for tag in ("memory/optimizer_mib", "memory/tensors_mib")
    )
    assert optimizer * MIB == pytest.approx(held)
    assert total == max(value for _, value in scalars[1]["memory/tensors_mib"])


class _Picky(LitStack):
    """Momentum in one group only, one parameter frozen; AdamW does not get all."""

    def configure_optimizers(self):
        for block in self.net.blocks[:1]:
            block.up.bias.requires_grad_(False)
        momentum = list(self.net.blocks.parameters())
        plain = [*self.net.inp.parameters(), *self.net.head.parameters()]
        groups = [{"params": plain}, {"params": momentum, "momentum": 0.9}]
        if self.lr == 1e-3:
            for param in plain:
                param.requires_grad_(False)
            return torch.optim.AdamW(groups[1]["params"], lr=self.lr)
        return torch.optim.SGD(groups, lr=self.lr)


def _picky(directory, lr):
    trainer = logging_trainer(
        "toy_fsdp",
        directory,
        max_steps=4,
        log_every_n_steps=1,
    )
    fit_as_planned(trainer, _Picky(lr=lr), regression_data())


@pytest.mark.parametrize("lr", [1e-2, 1e-3], ids=["sgd", "adamw"])
def test_the_plan_of_optimizer_state_follows_groups_and_frozen_parameters(tmp_path, lr):
    run_ranks(_picky, 2, str(tmp_path), lr)
    scalars = read(tmp_path)
    planned, measured = scalars["plan/optimizer_mib"], scalars["memory/optimizer_mib"]
    assert planned[1:] == measured[1:] and measured[-1][1] > 0


class StopAfter(L.Callback):
    """Stops training after some batches."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, trainer, *_):
        self.batches -= 1
        trainer.should_stop = self.batches == 0


def _stopped(directory, batches, every_n_steps, ckpt_path=None, max_epochs=1):
    trainer = make_trainer(
        "toy_fsdp",
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        callbacks=[*monitors(every_n_steps=every_n_steps), StopAfter(batches)],
        accumulate_grad_batches=3,
        max_epochs=max_epochs,
    )
    trainer.fit(LitStack(), regression_data(128), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{directory}/saved.ckpt")


def test_training_stopped_within_an_optimizer_step_logs_what_it_knows(tmp_path):
    run_ranks(_stopped, 2, str(tmp_path), 8, 2)
    scalars = read(tmp_path)
    # Two whole steps, then the one that was not ended.
    assert [step for step, _ in scalars["memory/tensors_mib"]] == [1, 2]
    assert [step for step, _ in scalars["comm/total_mib"]] == [1]


def test_a_resumed_run_that_stops_at_once_logs_at_the_step_where_it_stands(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(_stopped, 2, str(first), 99, 10)  # 16 batches
    run_ranks(_stopped, 2, str(second), 1, 10, f"{first}/saved.ckpt", 2)
    scalars = read(second)
    assert [step for step, _ in scalars["memory/tensors_mib"]] == [6]
    assert "throughput/samples_per_s" in scalars and "comm/overlap" in scalars
    assert not {"throughput/step_s", "comm/total_mib", "plan/shards_mib"} & set(scalars)
