"""Train, from one command: `python train.py strategy=toy_fsdp devices=4`.

Composes the config in `conf/` and hands it on; everything else is in `lightning_fsdp_toy`.
`python train.py --help` lists the groups and keys, `-m` runs a sweep.
"""

import multiprocessing
import os
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float | None:
    """Run one job and return the metric that a sweep minimizes."""
    from lightning_fsdp_toy.launch import run

    return run(cfg)


def start_fork_server() -> None:
    """Let a second process import what the ranks need while this one does.

    All ranks of all jobs are forked from it: a job of a sweep starts in a fraction of a second.
    """
    is_given = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun has started the ranks
    if not is_given and "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver  # not there on Windows

        multiprocessing.set_forkserver_preload(
            ["lightning_fsdp_toy.launch", "lightning_fsdp_toy.tasks.fit"]
        )
        forkserver.ensure_running()


if __name__ == "__main__":
    start_fork_server()  # before the slow imports
    from lightning_fsdp_toy.launch import cli

    cli(train, Path(__file__).parent / "conf")
