"""Processes that `spawn`, `fork` or `forkserver` start and that end without a result."""

import os
import signal

import pytest

from tests.scripts import start_script, wait_for_ranks
from tests.test_cli import finish

TRAINER = """
import os, sys, time
import lightning as L
from lightning_fsdp_toy import ToyFSDPStrategy
from tests.lit_helpers import LitStack, regression_data

class Module(LitStack):
    def training_step(self, batch, batch_idx):
        if sys.argv[2] == "exit":
            os._exit(0)
        time.sleep(0.02)
        with open(f"pid{self.global_rank}", "w") as file:
            file.write(str(os.getpid()))
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    L.Trainer(
        strategy=ToyFSDPStrategy(start_method=sys.argv[1]),
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), regression_data())
"""
FABRIC = """
import os, sys, time
import torch
from lightning.fabric import Fabric
from lightning_fsdp_toy import ToyFSDPFabricStrategy

def main(fabric):
    if sys.argv[2] == "exit":
        os._exit(0)
    if sys.argv[2] == "leave":
        if fabric.global_rank == 0:
            sys.exit(0)
        fabric.barrier()
        time.sleep(60)
    if sys.argv[2] == "large":
        return torch.arange(100_000)
    with open(f"pid{fabric.global_rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    strategy = ToyFSDPFabricStrategy(start_method=sys.argv[1])
    result = Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(main)
    print("last element", result[-1].item())
"""


def _run(directory, script, method, case, rank=0, signum=None):
    """Run a script, send a signal to a rank if given; return the exit code and what it wrote."""
    process = start_script(directory, script, method, case)
    if signum is not None:
        os.kill(wait_for_ranks(directory, process, 2)[rank], signum)
    code, out, err = finish(process, 60 if signum is None else 20)
    return code, out + err


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rank"), [("spawn", 0), ("fork", 1), ("forkserver", 0)])
def test_sigterm_to_a_rank_ends_a_trainers_script_with_143(tmp_path, method, rank):
    code, out = _run(tmp_path, TRAINER, method, "train", rank, signal.SIGTERM)
    assert code == 143, out
    assert "of 2 stopped on SIGTERM" in out


@pytest.mark.slow
def test_sigterm_to_a_rank_ends_a_fabric_script_with_143(tmp_path):
    code, out = _run(tmp_path, FABRIC, "fork", "wait", 1, signal.SIGTERM)
    assert code == 143, out
    assert "Rank 1 of 2 stopped on SIGTERM" in out


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINER, FABRIC], ids=["trainer", "fabric"])
def test_ranks_that_end_well_without_a_result_are_an_error(tmp_path, script):
    code, out = _run(tmp_path, script, "fork", "exit")
    assert code == 1, out
    assert "RuntimeError: Rank 0 of 2 ended with exit code 0 before its function returned" in out


@pytest.mark.slow
def test_nobody_waits_for_a_rank_0_that_has_left(tmp_path):
    code, out = _run(tmp_path, FABRIC, "fork", "leave")
    assert code == 1, out
    assert "RuntimeError: Rank 0 of 2 ended with exit code 0 before its function returned" in out


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINER, FABRIC], ids=["trainer", "fabric"])
def test_a_killed_rank_is_named(tmp_path, script):
    code, out = _run(tmp_path, script, "fork", "wait", 1, signal.SIGKILL)
    assert code == 1, out
    assert "Rank 1 of 2 was ended by signal SIGKILL and raised nothing" in out


@pytest.mark.slow
def test_a_result_larger_than_a_pipe_holds_comes_back(tmp_path):
    code, out = _run(tmp_path, FABRIC, "fork", "large")
    assert code == 0, out
    assert "last element 99999" in out
