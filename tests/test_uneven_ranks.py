"""Ranks that do not do the same: all end within seconds, and each says why (C19, C20, C30, C55)."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_fsdp_toy import processes
from lightning_fsdp_toy.monitors import (
    CommunicationMonitor,
    MemoryMonitor,
    PlanMonitor,
    ThroughputMonitor,
)
from lightning_fsdp_toy.sharding import fully_shard, unsharded
from tests.core_helpers import Stack, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import RankError, run_ranks
from tests.scripts import start_script, wait_for_ranks
from tests.test_cli import TINY, finish, start

REPO = Path(__file__).parents[1]
TIMEOUT_S = 120  # that of the process group is 2/3; its message would be another one


class Stream(IterableDataset):
    """As many batches as this rank is given."""

    def __init__(self, counts):
        self.count = counts[dist.get_rank()]

    def __iter__(self):
        for _ in range(self.count):
            yield torch.randn(4, 5), torch.randn(4, 3)


def _outcome(function, *args, **options):
    """Return the text of what a call raised."""
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- unequal numbers of batches (C19) ----------------------------------------------------------


def _run_uneven(directory, stage, counts, max_epochs):
    module = LitStack()
    module.log = lambda *_, **__: None  # nothing else in which ranks would meet
    trainer = make_trainer("toy_fsdp", directory, max_epochs=max_epochs)
    loader = DataLoader(Stream(counts), batch_size=None)
    run = {"fit": trainer.fit, "validate": trainer.validate, "predict": trainer.predict}[stage]
    return _outcome(run, module, loader)


@pytest.mark.parametrize(
    ("stage", "counts", "max_epochs"),
    [
        ("fit", (3, 5), 1),
        ("fit", (5, 3), 1),
        ("fit", (3, 0), 1),
        ("fit", (2, 4), 2),
        ("validate", (3, 5), 1),
        ("validate", (3, 0), 1),
        ("predict", (4, 2), 1),
    ],
)
def test_unequal_batch_counts_end_on_every_rank_with_both_counts(
    tmp_path, stage, counts, max_epochs
):
    results = run_ranks(_run_uneven, 2, tmp_path, stage, counts, max_epochs, timeout=TIMEOUT_S)
    word = {"fit": "training", "validate": "validation", "predict": "prediction"}[stage]
    fewer = min(counts)
    for rank, text in enumerate(results):
        assert text.startswith(f"StallError: rank {rank} of 2: ")
        assert "They ran unequal numbers of batches" in text
        short, long = (0, 1) if counts[0] < counts[1] else (1, 0)
        for which, count in ((short, fewer), (long, rf"({fewer}|{fewer + 1})")):
            pattern = rf"rank {which} waits in [^;]*, {count} {word} batches begun"
            if max_epochs == 2 and which == short:
                pattern = rf"rank {which} waits in barrier `start of an epoch` number 1, 1 training"
            assert re.search(pattern, text), text


def _run_uneven_with_monitors(directory):
    kinds = (MemoryMonitor, CommunicationMonitor, ThroughputMonitor, PlanMonitor)
    callbacks = [kind(every_n_steps=5) for kind in kinds]  # the shorter rank logs a rest alone
    trainer = make_trainer(
        "toy_fsdp", directory, max_epochs=1, callbacks=callbacks, logger=CSVLogger(directory)
    )
    module = LitStack()
    module.log = lambda *_, **__: None
    return _outcome(trainer.fit, module, DataLoader(Stream((4, 6)), batch_size=None))


def test_unequal_batch_counts_are_told_with_monitors_too(tmp_path):
    for text in run_ranks(_run_uneven_with_monitors, 2, tmp_path, timeout=TIMEOUT_S):
        assert "They ran unequal numbers of batches" in text


def _run_even(directory, counts):
    module = LitStack()
    trainer = make_trainer("toy_fsdp", directory, max_epochs=2)
    loader = DataLoader(Stream(counts), batch_size=None)
    result = _outcome(trainer.fit, module, loader, loader)
    return result, len(module.losses)


def test_streams_of_equal_length_train_to_the_end(tmp_path):
    assert run_ranks(_run_even, 2, tmp_path, (3, 3)) == [("no error", 6)] * 2


# -- ranks that run different code (C55) --------------------------------------------------------


def _swapped():
    model = fully_shard(Stack(), num_prefetch=0)  # gathered ahead, both would be there in time
    batch = torch.randn(3, 5)
    model(batch).sum().backward()
    if dist.get_rank() == 1:
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    return _outcome(model, batch)


def test_units_in_another_order_on_one_rank_are_named():
    for rank, text in enumerate(run_ranks(_swapped, 2, timeout=TIMEOUT_S)):
        unit = f"blocks.{rank}"
        assert f"rank {rank} of 2: all-gather number 3 of unit `{unit}` cannot end" in text
        assert "rank 0 waits in all-gather number 3 of unit `blocks.0`" in text
        assert "rank 1 waits in all-gather number 3 of unit `blocks.1`" in text


def _skipped():
    model = fully_shard(Stack())
    out = model.inp(torch.randn(3, 5))
    for block in list(model.blocks)[dist.get_rank() :]:
        out = block(out)
    return _outcome(out.sum().backward)


def test_a_unit_skipped_on_one_rank_is_named():
    with pytest.raises(RankError, match=r"rank \d waits in all-gather number 1 of unit `blocks.0`"):
        run_ranks(_skipped, 2)


def _some_enter_unsharded(module_name):
    model = fully_shard(Stack())
    module = model.get_submodule(module_name)

    def enter():
        with unsharded(model, module):
            pass

    if dist.get_rank() == 1:
        return _outcome(enter)
    return _outcome(lambda: model(torch.randn(3, 5)).sum().backward())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["", "blocks.1"])
def test_unsharded_entered_by_some_ranks_fails_fast(world_size, name):
    texts = run_ranks(_some_enter_unsharded, world_size, name, timeout=TIMEOUT_S)
    for rank, text in enumerate(texts):
        assert f"rank {rank} of {world_size}: " in text
        assert "an `unsharded` block that not all ranks ran" in text


def _barrier_against_gather(directory):
    module = LitStack()
    trainer = make_trainer("toy_fsdp", directory)

    def uneven_step(batch, batch_idx):
        if dist.get_rank() == 1 and batch_idx == 1:
            trainer.strategy.barrier("of the user")
        return module.net(batch[0]).sum()

    module.training_step = uneven_step
    return _outcome(trainer.fit, module, regression_data())


def test_a_barrier_on_one_rank_against_a_gather_on_another(tmp_path):
    for text in run_ranks(_barrier_against_gather, 2, tmp_path, timeout=TIMEOUT_S):
        assert "rank 1 waits in barrier `of the user` number 1, 2 training batches" in text
        assert re.search(r"of unit `net.blocks.\d`, 2 training batches begun in epoch 0", text), (
            text
        )


# -- a rank that raises (C20) ---------------------------------------------------------------------


class RaisesOnRank1(LitStack):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise KeyError("planted in step 2")
        return super().training_step(batch, batch_idx)


def _raise_in_step_2(directory, has_checkpoint):
    callbacks = [OnExceptionCheckpoint(directory)] if has_checkpoint else []
    trainer = make_trainer("toy_fsdp", directory, callbacks=callbacks, enable_checkpointing=True)
    outcome = _outcome(trainer.fit, RaisesOnRank1(), regression_data())
    time.sleep(1)  # lives on, as in a notebook
    return outcome


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_rank_that_raises_stops_those_that_live_on(tmp_path, has_checkpoint):
    other, own = run_ranks(_raise_in_step_2, 2, tmp_path, has_checkpoint, timeout=TIMEOUT_S)
    assert "KeyError: 'planted in step 2'" in other or not has_checkpoint
    if has_checkpoint:
        assert own.startswith("StallError") and "while handling KeyError: 'planted" in own
    else:
        assert own == "KeyError: 'planted in step 2'"
        assert other.startswith("StallError: rank 0 of 2: ")


SCRIPT = """
import time

import lightning as L
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_fsdp_toy
from tests.lit_helpers import LitStack, regression_data
from tests.test_uneven_ranks import WritePid


class Module(LitStack):
    def training_step(self, batch, batch_idx):
        if batch_idx == {step} and self.global_rank == 1:
            raise KeyError("planted in the step")
        if {step} < 0:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="toy_fsdp",
        accelerator="cpu",
        devices={devices},
        max_epochs=1 if {step} >= 0 else -1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WritePid(), *([OnExceptionCheckpoint(".")] if {checkpoint} else [])],
    )
    trainer.fit(Module(), regression_data(64, 2))
"""


class WritePid(Callback):
    """Tells the test that a rank is in the middle of training."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            Path(f"pid{trainer.global_rank}").write_text(str(os.getpid()))


def _start_script(directory, **values):
    return start_script(directory, SCRIPT.format(**values))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_original_error_comes_first_and_all_processes_end(tmp_path, checkpoint):
    process = _start_script(tmp_path, step=2, checkpoint=checkpoint, devices=3)
    wait_for_ranks(tmp_path, process, 3)
    start = time.monotonic()
    code, _, err = finish(process, 40)
    assert code != 0
    assert time.monotonic() - start < 20
    first_trace = err.index("Traceback (most recent call last)")
    first_error = err.index("\n", err.index("Error: ", first_trace))
    assert "KeyError: 'planted in the step'" in err[first_trace:first_error]


def _raise_inside_forward(num_steps):
    torch.manual_seed(0)
    model = fully_shard(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_):
        raise KeyError("planted inside forward")

    for step in range(num_steps):
        batch = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        if step == 1:
            handle = model.blocks[1].up.register_forward_pre_hook(fail)
            with pytest.raises(KeyError, match="planted inside forward"):
                model(batch)
            handle.remove()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_after_an_error_inside_forward(world_size):
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(_raise_inside_forward, world_size, 3):
        for name, param in model.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-6)


# -- SIGTERM (C30) ------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_ends_a_users_script_with_143(tmp_path):
    process = _start_script(tmp_path, step=-1, checkpoint=False, devices=3)
    pids = wait_for_ranks(tmp_path, process, 3)
    assert pids[0] == process.pid
    os.kill(pids[0], signal.SIGTERM)
    code, _, err = finish(process, 25)
    assert code == 143, err


@pytest.mark.slow
def test_sigterm_to_rank_0_of_train_py_ends_with_143(tmp_path):
    process = start(
        tmp_path,
        *(*TINY, "devices=3", "trainer.max_steps=99999", "hydra.run.dir=run"),
        "+callbacks.pid._target_=tests.test_uneven_ranks.WritePid",
    )
    pids = wait_for_ranks(tmp_path, process, 3)
    os.kill(pids[0], signal.SIGTERM)
    code, _, err = finish(process, 30)
    assert code == 143, err


def _stop_rank_0():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        raise SIGTERMException  # as Lightning's loops do, under any strategy
    dist.barrier()


def test_a_rank_stopped_by_sigterm_gives_143_whatever_the_strategy(tmp_path):
    with pytest.raises(processes.RankError) as caught:
        processes.run_ranks(_stop_rank_0, num_ranks=2, log_dir=str(tmp_path))
    assert caught.value.exit_code == 143


def _lose_rank_1():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        raise KeyError("the cause")
    raise RuntimeError("rank 0 of 2: barrier cannot end: rank 1 has left: KeyError: the cause")


def test_a_rank_that_stopped_for_another_is_not_blamed(tmp_path):
    with pytest.raises(processes.RankError, match="KeyError: 'the cause'") as caught:
        processes.run_ranks(_lose_rank_1, num_ranks=2, log_dir=str(tmp_path))
    assert caught.value.rank == 1
