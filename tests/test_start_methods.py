"""A user's own script under every start method: the ranks train, and whole weights come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

from tests.lit_helpers import LitStack, regression_data

REPO = Path(__file__).parents[1]
SCRIPT = """
import sys

import lightning as L
import torch

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import full_state_dict
from tests.lit_helpers import LitStack, regression_data

if __name__ == "__main__":
    torch.manual_seed(0)
    module = LitStack()
    strategy = {strategy}
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, regression_data())
    is_sharded = "_fsdp_root" in module.__dict__
    state = full_state_dict(module) if is_sharded else module.state_dict()
    if trainer.is_global_zero:
        torch.save(
            {{
                "state": state,
                "is_sharded": is_sharded,
                "metrics": {{k: v.item() for k, v in trainer.callback_metrics.items()}},
                "shapes": {{name: tuple(p.shape) for name, p in module.named_parameters()}},
            }},
            "result.pt",
        )
"""


def expected_weights():
    """Weights of one process that averages over the two ranks' batches."""
    torch.manual_seed(0)
    module = LitStack()
    optimizer = module.configure_optimizers()
    dataset = regression_data().dataset
    orders = [list(DistributedSampler(dataset, 2, rank)) for rank in range(2)]  # as Lightning does
    for start in range(0, 16, 4):
        for order in orders:
            inputs, targets = dataset[order[start : start + 4]]
            (F.mse_loss(module.net(inputs), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "is_given_back"),
    [
        ("'toy_fsdp'", False),
        ("'toy_fsdp_spawn'", True),
        ("ToyFSDPStrategy(start_method='fork')", True),
        ("ToyFSDPStrategy(start_method='forkserver')", True),
    ],
)
def test_a_users_script_trains_and_has_the_weights_afterwards(tmp_path, strategy, is_given_back):
    (tmp_path / "script.py").write_text(SCRIPT.format(strategy=strategy))
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt")
    expected = expected_weights()
    assert result["is_sharded"] is not is_given_back
    assert result["state"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(result["state"][name], value), name
    if is_given_back:  # the module of the process that called `fit` is an ordinary one again
        assert result["shapes"] == {name: tuple(value.shape) for name, value in expected.items()}
    assert result["metrics"]["train/loss"] > 0
