"""Ranks of a user's own script by ``spawn``, ``fork`` or ``forkserver``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from typing_extensions import override

from lightning_fsdp_toy.sharding import full_state_dict

__all__ = ["ShardedLauncher"]


class ShardedLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, which hands whole weights back to the process that called ``fit``."""

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        if "_fsdp_root" not in module.__dict__:
            return super()._collect_rank_zero_results(trainer, results)
        state = full_state_dict(module)
        module.__dict__["state_dict"] = lambda: state  # what Lightning's method asks for
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]
