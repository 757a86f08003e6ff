"""Sharded checkpoints: every rank writes its shards, any number of ranks reads them.

Note: shards as boxes
    torch's distributed checkpoint describes a tensor by rectangular blocks. A shard cuts an
    N-dimensional parameter at any element, so its piece is written as the few blocks that cover it
    (``layout.boxes_of_range``). The files therefore hold tensors of the original names and shapes:
    they reshard to any world size, other readers of the format understand them, and no element of
    padding is ever saved::

        piece of a (4, 3) weight, elements 2 to 10      blocks
            . . x                                       row 0, last column
            x x x                                       rows 1 and 2
            x x x
            x . .                                       row 3, first column
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.layout import boxes_of_range
from lightning_fsdp_toy.sharding.names import clean_keys, keys_for
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.state_dict import (
    cut_piece,
    is_elementwise,
    meta_parameter,
    saved_buffer_dtypes,
)
from lightning_fsdp_toy.sharding.whole import show_faces

__all__ = [
    "MODEL_KEY",
    "ShardOfTensor",
    "load_sharded_model",
    "load_sharded_optimizer",
    "save_sharded",
    "sharded_model_state",
    "sharded_optimizer_state",
]

MODEL_KEY = "model"


class ShardOfTensor(Tensor):
    """Stands for a whole tensor of which this rank holds one piece; only checkpoints use it.

    Has the whole tensor's shape and dtype and no data of its own. Implements the three methods by
    which distributed checkpoint writes and reads tensors that are spread over ranks.
    """

    original: OriginalParameter
    piece: Tensor

    @staticmethod
    def __new__(cls, original: OriginalParameter, piece: Tensor) -> ShardOfTensor:
        """Wrap ``piece`` (1D) of a tensor laid out like ``original``."""
        shape = original.slot.shape
        self: ShardOfTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=piece.dtype, device=piece.device
        )
        self.original, self.piece = original, piece
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardOfTensor({self.original.slot.fqn}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(
            f"{func} on a shard of `{args[0].original.slot.fqn}`: a sharded checkpoint holds no "
            f"whole tensors. Use state_dict_type='full' to work with whole weights."
        )

    def _blocks(self) -> dict[tuple[int, ...], Tensor]:
        """Blocks of the piece, each a view of its elements, by their offsets in the whole."""
        slot, piece = self.original.slot, self.original.piece
        order = sorted(range(len(slot.shape)), key=lambda dim: -slot.stride[dim])
        inverse = [order.index(dim) for dim in range(len(order))]
        blocks = {}
        for box in boxes_of_range([slot.shape[dim] for dim in order], piece.start, piece.stop):
            numel = torch.Size(box.sizes).numel()
            start = box.start - piece.start
            block = self.piece[start : start + numel].view(box.sizes).permute(inverse)
            blocks[tuple(box.offsets[i] for i in inverse)] = block
        return blocks

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), block.size()),
                    properties=TensorProperties.create_from_tensor(block),
                    size=self.size(),
                ),
            )
            for offsets, block in self._blocks().items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), block.size())
            for offsets, block in self._blocks().items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._blocks()[tuple(index.offset)]


def sharded_model_state(root: RootState) -> dict[str, Any]:
    """Return the model's state dict with a ``ShardOfTensor`` for every sharded parameter."""
    root.rest()
    root.edits.keep(stays_open=True)
    root.sync_buffers()
    state = root.module.state_dict(keep_vars=True)
    dtypes = saved_buffer_dtypes(root)
    originals = _originals(root)
    # Modules show whole weights inside a forward call, maybe in a low dtype, and inside `unsharded`
    # blocks, where they may have been edited.
    whole = {id(original.unsharded): original for original in root.originals()}
    for key, value in state.items():
        original = originals.get(id(value)) or whole.get(id(value))
        if original is not None:
            piece = original.sharded.detach()
            if value is original.unsharded and value.dtype == piece.dtype:
                piece = cut_piece(value, original).clone()
            state[key] = ShardOfTensor(original, piece)
        elif isinstance(value, Tensor):
            state[key] = value.detach().to(dtypes.get(key), copy=True)
    return clean_keys(state)


def sharded_optimizer_state(root: RootState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return optimizer state by parameter name.

    ``state`` holds a ``ShardOfTensor`` for each tensor with an element per parameter element,
    ``scalars`` the rest (step counts), ``param_groups`` the options, with names for parameters.
    """
    originals = _originals(root)
    names = {key: original.slot.fqn for key, original in originals.items()}
    state: dict[str, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for param, entry in optimizer.state.items():
        original = originals[id(param)]
        fqn = original.slot.fqn
        for key, value in entry.items():
            if is_elementwise(key, value, param.shape):
                state.setdefault(fqn, {})[key] = ShardOfTensor(original, value)
            else:
                scalars.setdefault(fqn, {})[key] = value
    groups = [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "scalars": scalars, "param_groups": groups}


def save_sharded(
    root: RootState,
    path: Path,
    models: Mapping[str, Mapping[str, Any]],
    optimizers: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Write shards to the directory ``path``; a collective.

    Args:
        root: the sharded model.
        path: directory, the same on every rank.
        models: by name (``MODEL_KEY`` for the model's own), states that ``sharded_model_state``
            returned, possibly with fewer entries.
        optimizers: from ``sharded_optimizer_state``.

    Returns:
        For each optimizer what is small and not in the files (``load_sharded_optimizer`` asks for
        it): the caller keeps it beside them.
    """
    state: dict[str, Any] = {
        name: {key: value for key, value in model.items() if isinstance(value, Tensor)}
        for name, model in models.items()
    }
    small = []
    for index, optimizer in enumerate(optimizers):
        state[f"optimizer_{index}"] = {"state": optimizer["state"]}
        keys = {fqn: list(entry) for fqn, entry in optimizer["state"].items()}
        small.append({k: v for k, v in optimizer.items() if k != "state"} | {"sharded_keys": keys})
    group = root.mesh.world.group
    dcp.save(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    return small


@torch.no_grad()
def load_sharded_model(
    root: RootState,
    path: Path,
    strict: bool = True,
    small: Mapping[str, Any] | None = None,
    load_state_dict: Callable[..., Any] | None = None,
    name: str = MODEL_KEY,
) -> None:
    """Read the model's shards from the directory ``path``; optimizer state is not read.

    Args:
        root: the sharded model, at rest.
        path: directory that ``save_sharded`` wrote.
        strict: refuse missing and unexpected keys.
        small: entries of the saved state dict that are no tensors (extra state).
        load_state_dict: ``root.module.load_state_dict`` if None.
        name: which of the states that ``save_sharded`` was given.

    Raises:
        RuntimeError: ``strict`` and keys are missing or unexpected, or a shape differs; every rank
            names them all and nothing has been changed.
    """
    root.rest()
    state = sharded_model_state(root)
    for value in state.values():
        if isinstance(value, ShardOfTensor):  # also of those that are shown whole now
            value.piece = value.original.sharded.detach()
    small = dict(small or {})
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = f"{name}."
    present = {key.removeprefix(prefix): md for key, md in saved.items() if key.startswith(prefix)}
    errors = []
    for key, value in state.items():
        md = present.get(key)
        if isinstance(md, TensorStorageMetadata) and md.size != value.shape:
            shapes = f"{tuple(md.size)} in the checkpoint, {tuple(value.shape)} here"
            errors.append(f"`{key}` has shape {shapes}")
    if strict:
        known = {**present, **small}
        # Of a parameter without elements no shard is written, so there is no trace of it.
        needed = [k for k, v in state.items() if not (isinstance(v, Tensor) and not v.numel())]
        errors += [f"missing key `{key}`" for key in needed if key not in known]
        errors += [f"unexpected key `{key}`" for key in present if key not in state]
    if errors:
        raise RuntimeError(f"Cannot load the sharded checkpoint {path}: {'; '.join(errors)}.")
    found = {k: v for k, v in state.items() if k in present and isinstance(v, Tensor)}
    _read(root, path, {name: found})
    others = {k: v for k, v in found.items() if not isinstance(v, ShardOfTensor)} | small
    with show_faces(root, meta_parameter):  # buffers, metrics, extra state; no parameters
        load = load_state_dict or root.module.load_state_dict
        load(keys_for(root.module, others), strict=False)


@torch.no_grad()
def load_sharded_optimizer(
    root: RootState,
    optimizer: torch.optim.Optimizer,
    path: Path,
    index: int,
    small: Mapping[str, Any],
) -> None:
    """Read this rank's optimizer state from the directory ``path``.

    Args:
        root: the sharded model.
        optimizer: built for its sharded parameters.
        path: directory that ``save_sharded`` wrote.
        index: position of the optimizer when it was saved.
        small: what ``save_sharded`` returned for it.

    Raises:
        ValueError: it was saved for other parameters.
    """
    by_name = {original.slot.fqn: original for original in _originals(root).values()}
    saved_names = [name for group in small["param_groups"] for name in group["params"]]
    ours = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    here = {o.slot.fqn for o in by_name.values() if id(o.sharded) in ours}
    if set(saved_names) != here:
        gone, new = sorted(set(saved_names) - here), sorted(here - set(saved_names))
        raise ValueError(
            f"The optimizer state in {path} is for other parameters: {gone[:3]} only there, "
            f"{new[:3]} only here."
        )
    pieces: dict[str, dict[str, Any]] = {
        fqn: {key: torch.zeros_like(by_name[fqn].sharded) for key in keys}
        for fqn, keys in small["sharded_keys"].items()
    }
    wrapped = {
        fqn: {key: ShardOfTensor(by_name[fqn], piece) for key, piece in entry.items()}
        for fqn, entry in pieces.items()
        if by_name[fqn].slot.numel  # else nothing was written
    }
    _read(root, path, {f"optimizer_{index}": {"state": wrapped}})
    state: dict[int, dict[str, Any]] = {}
    for fqn in {**pieces, **small["scalars"]}:
        entry = pieces.get(fqn, {}) | small["scalars"].get(fqn, {})
        state[ours[id(by_name[fqn].sharded)]] = entry
    groups = [
        {**group, "params": [ours[id(by_name[name].sharded)] for name in group["params"]]}
        for group in small["param_groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read(root: RootState, path: Path, state: dict[str, Any]) -> None:
    group = root.mesh.world.group
    dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)


def _originals(root: RootState) -> dict[int, OriginalParameter]:
    return {id(original.sharded): original for original in root.originals()}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
