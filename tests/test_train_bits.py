"""Whole jobs give the same bits under DDP and ours, and at 1, 2 and 4 ranks."""

from pathlib import Path

import pytest
import torch

from lightning_fsdp_toy.launch import launch
from tests.core_helpers import assert_equal
from tests.test_launch_jobs import compose, read_scalars

SMALL = ("model.dropout=0.1", "data.max_bytes=65536", "task.evaluate_before_fit=false")


def _run(directory: Path, *overrides: str) -> Path:
    launch(compose(directory, *SMALL, *overrides))
    return directory


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]


def test_train_loss_equals_ddps(tmp_path):
    ours = _run(tmp_path / "ours", "trainer.max_steps=20", "strategy=toy_fsdp")
    ddp = _run(tmp_path / "ddp", "trainer.max_steps=20", "strategy=ddp")
    losses = read_scalars(ours, "train/loss")
    assert len(losses) == 20
    assert losses == read_scalars(ddp, "train/loss")
    assert_equal(_weights(ours), _weights(ddp))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_final_weights_do_not_depend_on_the_number_of_ranks(tmp_path, optimizer):
    runs = {
        ranks: _run(
            tmp_path / str(ranks),
            "trainer.max_steps=6",
            f"devices={ranks}",
            f"trainer.accumulate_grad_batches={4 // ranks}",
            f"optimizer={optimizer}",
        )
        for ranks in (1, 2, 4)
    }
    expected = _weights(runs[1])
    assert_equal(_weights(runs[2]), expected)
    assert_equal(_weights(runs[4]), expected)
    assert read_scalars(runs[2], "train/loss") == read_scalars(runs[1], "train/loss")
    val = {ranks: read_scalars(run, "val/loss")[-1] for ranks, run in runs.items()}
    assert val[2] == pytest.approx(val[1], rel=1e-6)  # a sum in another order
    assert val[4] == pytest.approx(val[1], rel=1e-6)
