"""Saving and loading under ``ToyFSDPFabricStrategy``: whole files and directories of shards.

Note: what a directory holds
    ``meta.pt`` holds what is not sharded, under the names the user gave, and under ``toy_fsdp`` one
    ``_Group`` for each model. The shards of one model and its optimizers lie at the top, those of
    several in folders ``0``, ``1``, ... Directories that a ``Trainer`` wrote have no such entry;
    of them the model can be read, under any name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO

# Lightning keeps these to itself, but they decide what `fabric.save` and `fabric.load` mean.
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _apply_filter, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_fsdp_toy.checkpoint_files import StreamedCheckpointIO
from lightning_fsdp_toy.checkpoint_paths import (
    META_FILE,
    clear_the_way,
    is_sharded_checkpoint,
    partial_path,
    put_in_place,
)
from lightning_fsdp_toy.fabric.wrapping import root_of
from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.sharded_checkpoint import (
    MODEL_KEY,
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

__all__ = ["FabricCheckpointing"]

T = TypeVar("T")

_GROUPS_KEY = "toy_fsdp"
_Filter = dict[str, Callable[[str, Any], bool]]


@dataclass
class _Group:
    """One model and its optimizers in a directory of shards.

    Attributes:
        folder: where their shards lie, below the directory.
        model: the name the user gave the model; None if it was not saved.
        extra: entries of its state dict that are no tensors.
        optimizers: for each optimizer by name what is not in the files, in the order of saving.
    """

    folder: str = ""
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)


class FabricCheckpointing(ParallelStrategy):
    """The members of a Fabric strategy that save and load."""

    state_dict_type: str

    @abstractmethod
    def _root_of_optimizer(self, optimizer: Optimizer) -> RootState | None:
        """Return the sharded model whose parameters ``optimizer`` holds."""

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole weights on rank 0 and nothing elsewhere; a collective."""
        root = root_of(module)
        if root is None:
            return super().get_module_state_dict(module)
        return full_model_state(root)

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load whole weights."""
        root = root_of(module)
        if root is None:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            load_model_state(root, state_dict, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole state on rank 0 and nothing elsewhere; a collective."""
        root = self._root_of_optimizer(optimizer)
        if root is None:
            return super().get_optimizer_state(optimizer)
        return full_optimizer_state(root, optimizer)

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: _Filter | None = None,
    ) -> None:
        """Save models, optimizers and anything else to a file or a directory of shards.

        A collective. It is written beside its place and then moved: an older checkpoint is lost
        only for a whole one.

        Args:
            path: rank 0's is used.
            state: may hold any number of sharded models, their optimizers, and other objects.
            storage_options: for a ``CheckpointIO`` that takes them.
            filter: for a name of ``state``, which entries to save; the same on every rank. It sees
                shards with the shape and dtype of the whole, but without values.

        Raises:
            IsADirectoryError: ``path`` is a directory and no checkpoint.
            ValueError: a filter for an optimizer whose shards are saved.
        """
        path = Path(self.broadcast(path))
        error = self.broadcast(clear_the_way(path) if self.is_global_zero else None)
        if error:
            raise IsADirectoryError(error)
        if self.state_dict_type == "sharded":
            meta = self._write_shards(partial_path(path), state, filter or {})
            if self.is_global_zero:
                torch.save(meta, partial_path(path) / META_FILE)
                put_in_place(path)
        else:
            content = self._convert_stateful_objects_in_state(state, filter or {})
            if self.is_global_zero:
                self._write_file(content, path, storage_options)
        self.barrier()

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file or a directory of shards into objects, whichever the strategy saves.

        A collective; works at any number of ranks.

        Args:
            path: rank 0's is used.
            state: objects to load into, by the names they were saved under; one module or optimizer
                for a file that holds its state alone; None to get what a file holds.
            strict: refuse names, and keys of models, that are missing or unexpected.
            weights_only: as for ``torch.load``.

        Returns:
            What was saved under other names, models and optimizers of a directory excepted.

        Raises:
            ValueError: ``path`` is no checkpoint, or ``state`` does not fit it.
            KeyError: ``strict`` and a name is missing.
            RuntimeError: weights do not fit; see ``sharding.state_dict.load_model_state``.
        """
        path = Path(self.broadcast(path))
        if is_sharded_checkpoint(path):
            return self._load_shards(path, state, strict, weights_only)
        if path.is_dir():
            raise ValueError(
                f"{path} is a directory but no sharded checkpoint ({META_FILE} is missing: it was "
                f"not saved to the end, or it is something else)."
            )
        content = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if isinstance(state, nn.Module | Optimizer):
            content, state = {"": content}, {"": state}
        if not state:
            return _own(content)
        _validate_keys_for_strict_loading(state.keys(), content.keys(), strict)
        for name in [name for name in state if name in content]:
            self._restore(state, name, content.pop(name), strict)
        return _own(content)

    def _restore(self, state: dict[str, Any], name: str, value: Any, strict: bool) -> None:
        target = state[name]
        root = self._root_of_optimizer(target) if isinstance(target, Optimizer) else None
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict)
        elif root is not None:
            load_optimizer_state(root, target, value)
        elif isinstance(target, _Stateful):
            target.load_state_dict(_own(value))
        else:
            state[name] = _own(value)

    # -- files ----------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = StreamedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _write_file(self, content: dict[str, Any], path: Path, storage_options: Any) -> None:
        if type(self.checkpoint_io) is not StreamedCheckpointIO or storage_options is not None:
            self.checkpoint_io.save_checkpoint(content, path, storage_options)
            return
        self.checkpoint_io.save_checkpoint(content, partial_path(path))
        put_in_place(path)  # also in that of a directory

    # -- directories ----------------------------------------------------------------------------

    def _write_shards(self, path: Path, state: dict[str, Any], filters: _Filter) -> dict[str, Any]:
        """Write what is sharded to ``path`` and return what is not."""
        groups: list[tuple[_Group, RootState, dict[str, Any]]] = []  # with the model's state
        optimizers: list[tuple[str, Optimizer, RootState]] = []
        meta: dict[str, Any] = {}
        for name, value in state.items():
            root = root_of(value)
            owner = self._root_of_optimizer(value) if isinstance(value, Optimizer) else None
            if root is not None:
                model: dict[str, Any] = {}
                _apply_filter(name, filters, sharded_model_state(root), model)
                groups.append((_Group(model=name), root, model.get(name, {})))
            elif owner is not None and name in filters:
                raise ValueError(
                    f"`filter[{name!r}]`: the sharded state of an optimizer cannot be filtered. "
                    f"Use state_dict_type='full'."
                )
            elif owner is not None:
                optimizers.append((name, value, owner))
            else:
                _apply_filter(name, filters, _plain_state(value), meta)
        for _, _, owner in optimizers:
            if all(root is not owner for _, root, _ in groups):
                groups.append((_Group(), owner, {}))
        path.mkdir(parents=True, exist_ok=True)
        for index, (group, root, model) in enumerate(groups):
            group.folder = str(index) if len(groups) > 1 else ""
            mine = {n: o for n, o, owner in optimizers if owner is root}
            optimizers = [entry for entry in optimizers if entry[0] not in mine]
            states = [sharded_optimizer_state(root, optimizer) for optimizer in mine.values()]
            small = save_sharded(root, path / group.folder, {MODEL_KEY: model}, states)
            group.extra = {k: v for k, v in model.items() if not isinstance(v, Tensor)}
            group.optimizers = dict(zip(mine, small, strict=True))
        return {**meta, _GROUPS_KEY: [asdict(group) for group, _, _ in groups]}

    def _load_shards(
        self,
        path: Path,
        state: nn.Module | Optimizer | dict[str, Any] | None,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = torch.load(
            path / META_FILE, map_location="cpu", weights_only=weights_only
        )
        saved = meta.pop(_GROUPS_KEY, None)
        if isinstance(state, nn.Module):
            models = [entry["model"] for entry in saved or [] if entry["model"] is not None]
            state = {models[0] if len(models) == 1 else "state_dict": state}
            meta.clear()
        if not state or isinstance(state, Optimizer):
            raise ValueError(
                f"{path} is a directory of shards: pass the objects to load into by the names they "
                f"were saved under, as in `fabric.load(path, {{'model': model}})`."
            )
        if saved is None:  # written by a Trainer
            extra = meta.pop("state_dict", {})
            names = [name for name, value in state.items() if root_of(value) is not None]
            groups = [_Group(model=name, extra=extra) for name in names]
        else:
            groups = [_Group(**entry) for entry in saved]
        sharded = [name for g in groups for name in (g.model, *g.optimizers) if name is not None]
        _validate_keys_for_strict_loading(state.keys(), [*meta, *sharded], strict)
        for group in groups:
            self._load_group(path / group.folder, group, state, strict)
        for name in [name for name in state if name in meta]:
            self._restore(state, name, meta.pop(name), strict)
        return meta

    def _load_group(self, folder: Path, group: _Group, state: dict[str, Any], strict: bool) -> None:
        if group.model is not None and group.model in state:
            root = root_of(state[group.model])
            if root is None:
                raise ValueError(
                    f"`{group.model}` was saved as shards; expected a model that `fabric.setup` "
                    f"has sharded, got {type(state[group.model]).__name__}."
                )
            load_sharded_model(root, folder, strict, group.extra)
        for index, (name, small) in enumerate(group.optimizers.items()):
            optimizer = state.get(name)
            if optimizer is None:
                continue
            owner = self._root_of_optimizer(optimizer) if isinstance(optimizer, Optimizer) else None
            if owner is None:
                raise ValueError(
                    f"`{name}` was saved as the sharded state of an optimizer; expected an "
                    f"optimizer that `fabric.setup` knows, got {type(optimizer).__name__}."
                )
            load_sharded_optimizer(owner, optimizer, folder, index, small)


def _plain_state(value: Any) -> Any:
    return value.state_dict() if isinstance(value, _Stateful) else value


def _own(value: T) -> T:
    """Copy tensors in any nest of containers out of the file they may be mapped to."""
    copied: T = tree_map_only(Tensor, torch.clone, value)
    return copied
