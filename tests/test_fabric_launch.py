"""Names of the Fabric strategy, and ranks that Fabric starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_fsdp_toy import ToyFSDPFabricStrategy
from tests.core_helpers import (
    Stack,
    assert_equal,
    make_batches,
    train_reference,
)
from tests.ranks import run_ranks


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


_SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
import lightning_fsdp_toy
from lightning_fsdp_toy import ToyFSDPFabricStrategy
from tests.core_helpers import OPTIMIZERS, Stack, make_batches
from tests.fabric_helpers import train, whole


def main(fabric):
    torch.manual_seed(0)
    model = Stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model.parameters()))
    train(fabric, model, optimizer, make_batches(4), 2)
    weights = whole(fabric, model)
    fabric.save(sys.argv[2], {"model": model})
    return fabric.world_size, sum(value.sum() for value in weights.values())  # a tensor


if __name__ == "__main__":
    torch.set_num_threads(1)
    method = sys.argv[1]
    if method == "cli":  # strategy, devices and accelerator come from `fabric run`
        result = main(Fabric())
    else:
        strategy = ToyFSDPFabricStrategy(start_method=method)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        if method == "popen":
            fabric.launch()
        result = main(fabric) if method == "popen" else fabric.launch(main)
    sys.stdout.write(f"result {result}\\n")  # in one piece: ranks share the pipe
"""


def _run_script(directory: Path, method: str, command: list[str], **env: str) -> dict:
    script, file = directory / "script.py", directory / "weights.pt"
    script.write_text(_SCRIPT)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*command, str(script), method, str(file)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **env},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "result (2, " in done.stdout
    return torch.load(file)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["popen", "spawn", "fork", "forkserver"])
def test_ranks_that_fabric_starts(tmp_path, method):
    expected = train_reference(_stack(), make_batches(4), 2)
    assert_equal(_run_script(tmp_path, method, [sys.executable]), expected)


@pytest.mark.slow
def test_ranks_that_fabric_run_starts(tmp_path):
    expected = train_reference(_stack(), make_batches(4), 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = {"LT_CLI_USED": "1", "LT_STRATEGY": "toy_fsdp", "LT_DEVICES": "2"}
    assert_equal(_run_script(tmp_path, "cli", torchrun, LT_ACCELERATOR="cpu", **given), expected)


def _notebook_launcher():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="toy_fsdp_notebook")
    return fabric.strategy.launcher.is_interactive_compatible


def test_the_notebook_name_may_be_used_in_a_notebook():
    assert run_ranks(_notebook_launcher, 1) == [True]


def test_names_and_arguments_are_those_of_the_trainers_strategy():
    for name in ("toy_fsdp", "toy_fsdp_spawn", "toy_fsdp_notebook", "toy_fsdp_cpu_offload"):
        assert isinstance(STRATEGY_REGISTRY.get(name), ToyFSDPFabricStrategy)
    ToyFSDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)  # a second time
    with pytest.raises(ValueError, match="expected one of full, sharded"):
        ToyFSDPFabricStrategy(state_dict_type="local")
    with pytest.raises(ValueError, match="expected one of popen, spawn, fork, forkserver"):
        ToyFSDPFabricStrategy(start_method="thread")
    with pytest.raises(ValueError, match="`sharding_strategy`: expected one of FULL_SHARD"):
        ToyFSDPFabricStrategy(sharding_strategy="SOME")
    with pytest.raises(ValueError, match="`num_prefetch`: expected a whole number"):
        ToyFSDPFabricStrategy(num_prefetch=-1)
