"""`train.py` gives the same bits under DDP and ours, and at 1, 2 and 4 ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.core_helpers import assert_equal

TRAIN = Path(__file__).parents[1] / "train.py"
SMALL = [
    "model.num_layers=2",
    "model.d_model=32",
    "model.dropout=0.1",
    "data.batch_size=2",
    "data.seq_len=16",
    "data.max_bytes=65536",
    "trainer.max_steps=6",
    "trainer.val_check_interval=null",
    "task.evaluate_before_fit=false",
]


def _run(directory: Path, *overrides: str) -> Path:
    command = [sys.executable, str(TRAIN), *SMALL, f"hydra.run.dir={directory}", *overrides]
    done = subprocess.run(
        command, cwd=directory.parent, env=os.environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def _losses(run: Path) -> list[float]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars("train/loss")]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]


@pytest.mark.slow
def test_train_loss_equals_ddps(tmp_path):
    ours = _losses(_run(tmp_path / "ours", "strategy=toy_fsdp"))
    ddp = _losses(_run(tmp_path / "ddp", "strategy=ddp"))
    assert len(ours) == 6
    assert ours == ddp


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_final_weights_do_not_depend_on_the_number_of_ranks(tmp_path, optimizer):
    runs = {
        ranks: _run(
            tmp_path / str(ranks),
            f"devices={ranks}",
            f"trainer.accumulate_grad_batches={4 // ranks}",
            f"optimizer={optimizer}",
        )
        for ranks in (1, 2, 4)
    }
    expected = _weights(runs[1])
    assert_equal(_weights(runs[2]), expected)
    assert_equal(_weights(runs[4]), expected)
