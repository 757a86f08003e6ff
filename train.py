"""Train, from one command: `python train.py strategy=toy_fsdp devices=4`.

Composes the config in `conf/` and hands it on; everything else is in `lightning_fsdp_toy`.
`python train.py --help` lists the groups and keys, `-m` runs a sweep.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONFIG_DIR = Path(__file__).parent / "conf"
# As in `lightning_fsdp_toy.processes`, which takes too long to import here.
PRELOADED = ["lightning_fsdp_toy.launch", "lightning_fsdp_toy.tasks.fit"]


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float | None:
    """Run one job and return the metric that a sweep minimizes."""
    from lightning_fsdp_toy.launch import run

    return run(cfg)


def is_runnable(args: Sequence[str]) -> bool:
    """Whether the command line gives a config, so that ranks will probably be needed.

    Says nothing: what is wrong is said later, in the right order.
    """
    if any(arg.startswith("-") for arg in args):
        return bool({"-m", "--multirun"} & set(args))  # else only a question: --help, --cfg job
    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR.resolve()), version_base="1.3"):
            devices = hydra.compose("train", overrides=list(args)).devices
    except (HydraException, OmegaConfBaseException, ValueError):
        return False
    return isinstance(devices, int) and devices > 0


def start_fork_server() -> None:
    """Let a second process import what the ranks need while this one does.

    All ranks of all jobs are forked from it: a job of a sweep starts in a fraction of a second.
    """
    is_slurm = "SLURM_PROCID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1"
    is_given = "TORCHELASTIC_RUN_ID" in os.environ or is_slurm  # the ranks run already
    if not is_given and "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver  # not there on Windows

        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


if __name__ == "__main__":
    if is_runnable(sys.argv[1:]):
        start_fork_server()  # before the slow imports
    from lightning_fsdp_toy.launch import cli

    cli(train, CONFIG_DIR)
