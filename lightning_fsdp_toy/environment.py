"""The ranks of a run: started and numbered; no sharding here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_fsdp_toy import process_group
from lightning_fsdp_toy.spawning import ShardedLauncher

__all__ = ["RankEnvironment"]


class RankEnvironment(ParallelStrategy):
    """The members of a strategy that start ranks, as in ``DDPStrategy``."""

    num_nodes: int
    _timeout: timedelta
    _start_method: Literal["popen", "spawn", "fork", "forkserver"]
    _process_group_backend: str | None

    @property
    def is_distributed(self) -> bool:
        """Lightning asks strategies it does not know; without it nothing would be distributed."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = ShardedLauncher(self, start_method=self._start_method)
        else:  # where ranks are given it starts none, but compares their number with the Trainer's
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as Lightning's own: what `configure_model` draws is what it draws there
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._process_group_backend = process_group.connect(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            process_group.tell_rank(
                self.cluster_environment, self.local_rank, self.num_processes, self.num_nodes
            )
