"""The ranks of a run: started and numbered; no sharding here."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch

# Lightning keeps these to itself, but every strategy of its own is built from them.
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from typing_extensions import override

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
        elif not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(
                self.root_device
            )
        assert self.cluster_environment is not None
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device_id,
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for helper in (rank_zero_only, utils_rank_zero_only):
            helper.rank = self.global_rank  # type: ignore[attr-defined]
