"""Host memory of saving and loading: only rank 0 of a full save holds the whole model (C16)."""

import threading
import time
from contextlib import contextmanager

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp_toy import ToyFSDPStrategy
from tests.lit_helpers import make_trainer
from tests.ranks import run_ranks

NUM_BLOCKS, WIDTH = 25, 1024
MODEL = NUM_BLOCKS * WIDTH * WIDTH * 4  # bytes: 100 MiB in blocks of 4 MiB
WORLD_SIZE = 4
SHARD = MODEL // WORLD_SIZE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=WIDTH**-0.5)

    def forward(self, x):
        return x @ self.weight


class Large(L.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):  # no rank ever holds it whole
            self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))

    def training_step(self, batch, _):
        return self.blocks(batch).square().mean()

    def validation_step(self, batch, _):
        self.blocks(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WholeTwice(ToyFSDPStrategy):
    """What this file must notice: every rank builds the whole state."""

    def lightning_module_state_dict(self):
        with self.unsharded():
            return {k: v.clone() for k, v in self.lightning_module.state_dict().items()}


def _anonymous_bytes() -> int:
    """Memory of this process that is no file and not shared."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def _rise():
    """Yield a list that then holds the largest rise of this process's own memory, in bytes."""
    rises, stop = [0], threading.Event()
    dist.barrier()
    before = _anonymous_bytes()

    def watch():
        while not stop.is_set():
            rises[0] = max(rises[0], _anonymous_bytes() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield rises
    finally:
        rises[0] = max(rises[0], _anonymous_bytes() - before)
        stop.set()
        thread.join()


def _data():
    return DataLoader(torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(0)), None)


def _trainer(strategy, directory):
    return make_trainer(strategy, directory, max_steps=1, max_epochs=None, limit_val_batches=0)


def _save(strategy, directory, weights_only):
    """Rise of this rank while it saves after a step."""
    trainer = _trainer(strategy, directory)
    trainer.fit(Large(), _data())
    with _rise() as rises:
        trainer.save_checkpoint(directory / "saved", weights_only)
    return rises[0]


def _load(strategy, directory):
    """Rise of this rank from a sharded model at rest to one that has read a checkpoint."""
    module = Large()
    trainer = _trainer(strategy, directory)
    trainer.fit(module, _data())
    restore = trainer._checkpoint_connector
    with _rise() as rises:
        restore.resume_start(directory / "saved")
        restore.restore_model()
        restore.restore_training_state()
        restore.resume_end()
    return rises[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints with momentum, so 200 MiB, in both forms, and the rise of each rank."""
    directory = tmp_path_factory.mktemp("large")
    rises = {}
    for form in ("full", "sharded"):
        strategy = ToyFSDPStrategy(state_dict_type=form)
        rises[form] = run_ranks(_save, WORLD_SIZE, strategy, directory / form, False, timeout=100)
    return directory, rises


def test_full_save_of_weights_takes_one_model_on_rank_0_only(tmp_path):
    first, *others = run_ranks(_save, WORLD_SIZE, ToyFSDPStrategy(), tmp_path, True, timeout=100)
    assert MODEL * 0.5 < first < MODEL * 1.5
    assert max(others) < MODEL / 2


def test_full_save_takes_what_the_file_holds_on_rank_0_only(saved):
    first, *others = saved[1]["full"]
    assert MODEL < first < 2.5 * MODEL  # weights and momentum
    assert max(others) < MODEL / 2


def test_sharded_save_takes_less_than_two_shards_on_every_rank(saved):
    assert max(saved[1]["sharded"]) < 2 * SHARD


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_loading_takes_no_whole_model_on_any_rank(saved, form):
    rises = run_ranks(_load, WORLD_SIZE, ToyFSDPStrategy(), saved[0] / form, timeout=100)
    # Momentum anew (one shard) beside what it replaces, and one tensor at a time.
    assert max(rises) < 3 * SHARD


def test_a_state_built_on_every_rank_would_be_noticed(tmp_path):
    rises = run_ranks(_save, WORLD_SIZE, WholeTwice(), tmp_path, True, timeout=100)
    assert min(rises) > MODEL / 2
