"""Full state dicts: what a replicated run would save, from shards and back.

Note: full state
    Flat parameters are gathered one after the other; rank 0 copies each parameter to CPU memory of
    its own, so nothing it returns shares memory with a shard or a buffer that training goes on to
    change. The other ranks never hold more than one of them. All copies are allocated before the
    first gather: buffers that come and go between them would leave holes as large as the model,
    which the allocator does not use again for tensors of the same size. Loading goes the other way
    without a collective: every rank cuts its pieces out of the tensors it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.flat_param import FlatParameter
from lightning_fsdp_toy.sharding.layout import ParamSlot
from lightning_fsdp_toy.sharding.names import clean_keys, keys_for
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.whole import show_faces

__all__ = [
    "full_model_state",
    "full_optimizer_state",
    "full_shapes",
    "is_elementwise",
    "load_model_state",
    "load_optimizer_state",
    "meta_parameter",
    "saved_buffer_dtypes",
    "shard_optimizer_state",
]


_Pieces = dict[OriginalParameter, Any]

_SCALARS = ("step", "mu_product", "eta", "mu")  # of NAdam and ASGD, beside every step count


def full_shapes(root: RootState) -> Any:
    """Context in which modules show meta parameters of the original shapes (for counting)."""
    return show_faces(root, meta_parameter)


@torch.no_grad()
def full_model_state(
    root: RootState, make_state_dict: Callable[[], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the state dict of the whole model on rank 0 and an empty one elsewhere.

    A collective. Keys, order, shapes, strides and dtypes are those of the unsharded module; tensors
    are copies in CPU memory.

    Args:
        root: the sharded model, at rest.
        make_state_dict: called where modules show whole parameters; ``root.module.state_dict`` if
            None. Gives state-dict hooks and overrides their say.
    """
    root.rest()
    root.edits.keep(stays_open=True)
    root.sync_buffers()
    is_first = root.mesh.world.rank == 0
    originals = root.originals() if is_first else iter(())
    copies = {original: _empty_whole(original, original.sharded) for original in originals}
    for flat in root.flats:
        whole = flat.master.tensor if flat.is_readable else _gather_whole(flat, flat.shard)
        if is_first:
            for original in flat.originals:
                copies[original].copy_(original.view_of(whole))
        del whole
    if not is_first:
        return {}
    faces = {o: nn.Parameter(copy, o.sharded.requires_grad) for o, copy in copies.items()}
    with show_faces(root, faces.__getitem__):
        state = (make_state_dict or root.module.state_dict)()
    ours = {copy.data_ptr() for copy in copies.values()}
    dtypes = saved_buffer_dtypes(root)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.data_ptr() not in ours:
            state[key] = value.detach().to("cpu", dtypes.get(key), copy=True)
    return clean_keys(state)


def saved_buffer_dtypes(root: RootState) -> dict[str, torch.dtype]:
    """Return, by state-dict key, the dtype of buffers that the policy gave another one."""
    return {
        f"{prefix}.{name}" if prefix else name: root.buffer_dtypes[module, name]
        for prefix, module in root.module.named_modules()
        for name in module._buffers
        if (module, name) in root.buffer_dtypes
    }


@torch.no_grad()
def load_model_state(
    root: RootState,
    state: Mapping[str, Any],
    strict: bool = True,
    load_state_dict: Callable[..., Any] | None = None,
) -> Any:
    """Load a full state dict into the shards of this rank and the buffers.

    A collective where a module has a ``_load_from_state_dict`` of its own, or the model a
    ``load_state_dict`` that knows no ``assign``: those copy into whole weights.

    Args:
        root: the sharded model, at rest.
        state: as the unsharded module's ``state_dict()`` returns.
        strict: refuse missing and unexpected keys.
        load_state_dict: ``root.module.load_state_dict`` if None.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        RuntimeError: keys or shapes do not match; nothing has been changed.
    """
    root.rest()
    state = keys_for(root.module, state)
    load = load_state_dict or root.module.load_state_dict
    buffers = [(m, name, b) for m in root.module.modules() for name, b in m._buffers.items()]
    loaded: list[tuple[OriginalParameter, Tensor]] = []
    # An override without `assign` copies instead, into parameters that must then have memory.
    assigns = "assign" in inspect.signature(load).parameters
    options = {"assign": True} if assigns else {}

    stand_ins = _stand_ins(root, assigns)

    def face(original: OriginalParameter) -> nn.Parameter:
        is_copied = original in stand_ins
        return stand_ins[original] if is_copied else meta_parameter(original)

    try:
        with show_faces(root, face):
            result = load(state, strict=strict, **options)
            for original in root.originals():
                value = _given(original, stand_ins.get(original))
                loaded += [] if value is None else [(original, value)]
            new_buffers = [module._buffers[name] for module, name, _ in buffers]
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
    for original, value in loaded:
        original.sharded.copy_(cut_piece(value, original))
    for (_, _, buffer), new in zip(buffers, new_buffers, strict=True):
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(new)
    return result


@torch.no_grad()
def full_optimizer_state(root: RootState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with whole tensors on rank 0, an empty one elsewhere.

    A collective; one unit's state of one kind is gathered at a time.
    """
    state_dict = optimizer.state_dict()
    # The entries are the optimizer's own dicts, which hold step counts that go on counting.
    state: dict[int, dict[str, Any]] = {
        index: {key: _own_scalar(value) for key, value in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    index_of = _parameter_indices(optimizer)
    is_first = root.mesh.world.rank == 0
    gathers: list[tuple[FlatParameter, _Pieces, _Pieces]] = []
    for flat in root.flats:
        members = [o for o in flat.originals if index_of.get(id(o.sharded)) in state]
        entries = {original: state[index_of[id(original.sharded)]] for original in members}
        keys = dict.fromkeys(
            key
            for original, entry in entries.items()
            for key, value in entry.items()
            if is_elementwise(key, value, original.sharded.shape)
        )
        for key in keys:
            pieces = {original: e[key] for original, e in entries.items() if key in e}
            for original, piece in pieces.items():
                entries[original][key] = _empty_whole(original, piece) if is_first else None
            gathers.append((flat, pieces, {o: entries[o][key] for o in pieces}))
    for flat, pieces, wholes in gathers:
        gathered = _gather_pieces(flat, list(pieces), list(pieces.values()))
        for original, whole in wholes.items():
            if whole is not None:
                whole.copy_(original.view_of(gathered))
    return {**state_dict, "state": state} if is_first else {}


def shard_optimizer_state(
    root: RootState, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``full`` (a whole-tensor optimizer state dict) cut to this rank's pieces."""
    originals = {id(original.sharded): original for original in root.originals()}
    by_index = {index: originals[key] for key, index in _parameter_indices(optimizer).items()}
    state = {}
    for index, entry in full["state"].items():
        original = by_index.get(index)
        if original is None:
            raise ValueError(
                f"The optimizer state holds parameter {index}, but this optimizer has "
                f"{len(by_index)} parameters. Resume with the optimizer that was saved."
            )
        state[index] = cut_state(entry, original)
    return {**full, "state": state}


def cut_state(entry: Mapping[str, Any], original: OriginalParameter) -> dict[str, Any]:
    """Return one parameter's optimizer state with whole tensors cut to this rank's piece."""
    shape = torch.Size(original.slot.shape)
    return {
        key: cut_piece(value, original).clone() if is_elementwise(key, value, shape) else value
        for key, value in entry.items()
    }


def load_optimizer_state(
    root: RootState, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> None:
    """Load a whole-tensor optimizer state dict, as any replicated run saves it."""
    optimizer.load_state_dict(shard_optimizer_state(root, optimizer, full))


def cut_piece(value: Tensor, original: OriginalParameter) -> Tensor:
    """Return this rank's 1D piece of a whole tensor of the original shape."""
    slot, piece = original.slot, original.piece
    return in_memory_order(value.detach(), slot)[piece.start : piece.stop]


def in_memory_order(value: Tensor, slot: ParamSlot) -> Tensor:
    """Return the elements of ``value`` as 1D in the order in which the parameter lies in memory."""
    if slot.is_contiguous:
        return value.reshape(-1)
    strided = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device)
    strided.copy_(value)
    return strided.as_strided((slot.numel,), (1,))


def _own_scalar(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _empty_whole(original: OriginalParameter, piece: Tensor) -> Tensor:
    """Return memory on the CPU for the whole tensor of which ``piece`` is this rank's part."""
    return torch.empty_strided(original.slot.shape, original.slot.stride, dtype=piece.dtype)


def _stand_ins(root: RootState, assigns: bool) -> dict[OriginalParameter, nn.Parameter]:
    """Return whole parameters for modules that copy into what is there, maybe a part of it."""
    found: dict[OriginalParameter, nn.Parameter] = {}
    for flat in root.flats:
        copied = [
            original
            for original in flat.originals
            if not (assigns and all(_loads_by_assignment(m) for m, _ in original.homes))
        ]
        if copied:
            whole = _gather_whole(flat, flat.shard)
            for original in copied:
                value = original.view_of(whole).clone()
                found[original] = nn.Parameter(value, original.sharded.requires_grad)
            del whole
    return found


def _given(original: OriginalParameter, stand_in: nn.Parameter | None) -> Tensor | None:
    """Return what loading has put in the place of a parameter, or made of its stand-in."""
    shown = [module._parameters[name] for module, name in original.homes]
    assigned = [v for v in shown if v is not None and not v.is_meta and v is not stand_in]
    return assigned[-1] if assigned else stand_in


def _loads_by_assignment(module: nn.Module) -> bool:
    """Whether loading puts new parameters into a module; those of torch do."""
    return type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")


def meta_parameter(original: OriginalParameter) -> nn.Parameter:
    """Return a parameter of the original shape without data."""
    sharded, slot = original.sharded, original.slot
    tensor = torch.empty_strided(slot.shape, slot.stride, dtype=sharded.dtype, device="meta")
    return nn.Parameter(tensor, sharded.requires_grad)


def _parameter_indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Map ``id(parameter)`` to the index that ``Optimizer.state_dict`` gives it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(param): index for index, param in enumerate(params)}


def is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether optimizer state has one element per element of a parameter of ``shape``."""
    # A scalar of the optimizer looks like an element of a 0-dim parameter.
    return isinstance(value, Tensor) and key not in _SCALARS and value.shape == shape


def _gather_pieces(
    flat: FlatParameter, originals: list[OriginalParameter], pieces: list[Tensor]
) -> Tensor:
    """All-gather 1D pieces into a new tensor laid out like the flat parameter."""
    shard = flat.shard.new_zeros(flat.shard.shape, dtype=pieces[0].dtype)
    for original, piece in zip(originals, pieces, strict=True):
        original.piece_of(shard).copy_(piece)
    return _gather_whole(flat, shard, f"<optimizer state of {flat.name}>")


def _gather_whole(flat: FlatParameter, shard: Tensor, name: str | None = None) -> Tensor:
    """All-gather shards (1D, any dtype) into a new tensor laid out like the flat parameter."""
    if flat.is_whole:
        return shard
    transport = flat.mesh.shards
    whole = torch.zeros(flat.layout.padded_numel, dtype=shard.dtype, device=flat.gradient.device)
    own = whole.chunk(transport.world_size)[transport.rank]
    own.copy_(shard)
    transport.all_gather_(whole, own, name or flat.name)
    return whole
