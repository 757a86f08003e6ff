"""Saving and loading under ``ToyFSDPStrategy``: whole files and directories of shards.

Note: two forms
    ``state_dict_type`` decides what is saved: ``"full"`` is one file with the keys, shapes and
    dtypes that DDP writes, ``"sharded"`` a directory with one file per rank and ``meta.pt`` for all
    that is not sharded. Loading looks at what it is given, so either form can be read whichever the
    strategy saves, at any world size. No rank holds a whole checkpoint but rank 0 while it saves a
    full one, see the note on files and memory in ``checkpoint_files.py``.

Note: random numbers
    As under Lightning's own strategies, no checkpoint holds the state of random number generators:
    a module with dropout that is resumed draws other numbers than an unbroken run. One that seeds
    every micro-batch, as ``LitLanguageModel`` does, resumes exactly, at another world size too.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp_toy.checkpoint_files import StreamedCheckpointIO, local_path
from lightning_fsdp_toy.checkpoint_paths import (
    META_FILE,
    clear_the_way,
    is_sharded_checkpoint,
    partial_path,
    put_in_place,
)
from lightning_fsdp_toy.finetuning import restore_param_groups
from lightning_fsdp_toy.sharding import RootState, get_root
from lightning_fsdp_toy.sharding.sharded_checkpoint import (
    MODEL_KEY,
    ShardOfTensor,
    load_sharded_model,
    load_sharded_optimizer,
    save_sharded,
    sharded_model_state,
    sharded_optimizer_state,
)
from lightning_fsdp_toy.sharding.state_dict import (
    full_model_state,
    full_optimizer_state,
    load_model_state,
    load_optimizer_state,
)

__all__ = ["ShardedCheckpointing"]


class ShardedCheckpointing(ParallelStrategy):
    """The members of a strategy that save and load."""

    state_dict_type: str
    _sharded_path: Path | None = None  # directory that the current run was loaded from

    @property
    def root(self) -> RootState:
        """State of the sharded model; exists from ``setup`` on."""
        assert self.lightning_module is not None, "no model is connected"
        return get_root(self.lightning_module)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = StreamedCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = StreamedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0 and nothing elsewhere; or this rank's shards."""
        assert self.lightning_module is not None
        if self.state_dict_type == "sharded":
            return sharded_model_state(self.root)
        return full_model_state(self.root, self.lightning_module.state_dict)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.load_weights(checkpoint, "state_dict", strict)

    def load_weights(self, checkpoint: Mapping[str, Any], key: str, strict: bool = True) -> None:
        """Load the weights under ``key`` of what ``load_checkpoint`` returned."""
        assert self.lightning_module is not None
        load = self.lightning_module.load_state_dict
        state = checkpoint.get(key, {}) if self._sharded_path is not None else checkpoint[key]
        if self._sharded_path is not None:
            name = _sharded_key(key)
            load_sharded_model(self.root, self._sharded_path, strict, state, load, name)
        else:
            load_model_state(self.root, state, strict, load)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole optimizer state on rank 0 and nothing elsewhere; or this rank's shards."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self.state_dict_type == "sharded":
            return sharded_optimizer_state(self.root, optimizer)
        return full_optimizer_state(self.root, optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        assert self.lightning_module is not None
        restore_param_groups(self.lightning_module.trainer)
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint holds {len(states)} optimizers, the module configures "
                f"{len(self.optimizers)}. Resume with the optimizers that were saved."
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if self._sharded_path is not None:
                load_sharded_optimizer(self.root, optimizer, self._sharded_path, index, state)
            else:
                load_optimizer_state(self.root, optimizer, state)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        filepath = self.broadcast(filepath)
        path = local_path(filepath)
        if path is None and self.state_dict_type == "sharded":
            raise ValueError(
                f"A sharded checkpoint is a directory that all ranks write, got {filepath!s}. Save "
                f"to a file system that is mounted on every rank, or use state_dict_type='full'."
            )
        if path is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        error = self.broadcast(clear_the_way(path) if self.is_global_zero else None)
        if error:
            raise IsADirectoryError(error)
        if self.state_dict_type == "full":
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            self._save_sharded(checkpoint, path)

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write ``checkpoint`` to a directory; it keeps what is not sharded.

        Written beside its place and then moved: an older checkpoint is lost only for a whole one.
        """
        partial = partial_path(path)
        states = checkpoint.pop("optimizer_states", [])
        models = {key: entry for key, entry in checkpoint.items() if _is_sharded_state(key, entry)}
        by_name = {_sharded_key(key): model for key, model in models.items()}
        small = save_sharded(self.root, partial, by_name, states)
        for key, model in models.items():
            checkpoint[key] = {k: v for k, v in model.items() if not isinstance(v, Tensor)}
        if states:
            checkpoint["optimizer_states"] = small
        if self.is_global_zero:
            io: CheckpointIO | None = self.checkpoint_io
            if isinstance(io, _WrappingCheckpointIO):  # it must be there before the directory moves
                io = io.checkpoint_io
            assert io is not None
            io.save_checkpoint(checkpoint, partial / META_FILE)
            put_in_place(path)
        self.barrier()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or what is not sharded of a directory; of either, whichever was saved."""
        checkpoint_path = self.broadcast(checkpoint_path)
        path = local_path(checkpoint_path)
        is_sharded = path is not None and is_sharded_checkpoint(path)
        self._sharded_path = path if is_sharded else None
        if self._sharded_path is not None:
            checkpoint_path = self._sharded_path / META_FILE
        elif path is not None and path.is_dir():
            raise ValueError(
                f"{path} is a directory but no sharded checkpoint ({META_FILE} is "
                f"missing: it was not saved to the end, or it is something else)."
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        path = local_path(filepath)
        if path is not None and self.is_global_zero and is_sharded_checkpoint(path):
            shutil.rmtree(path)
        else:
            super().remove_checkpoint(filepath)


def _sharded_key(key: str) -> str:
    """Return the name in a directory of shards of what a checkpoint holds under ``key``."""
    return MODEL_KEY if key == "state_dict" else key


def _is_sharded_state(key: str, entry: Any) -> bool:
    is_state = isinstance(entry, dict)
    return is_state and (
        key == "state_dict" or any(isinstance(value, ShardOfTensor) for value in entry.values())
    )
