"""Saved-tensor hooks: how weights come back for backward.

Note: getting weights back
    Autograd saves weights (or views of them) in the forward and needs them again in backward, when
    they have been resharded. While a sharded module's forward runs, saved-tensor hooks replace
    every saved view of a unit's buffer by a *handle*: unit, place, time. When autograd unpacks a
    handle, the unit is unsharded and the view is made anew. So weights come back exactly when they
    are needed, whatever forward returned: a stored intermediate, a view changed in place, a
    container nobody knows (pytorch issues 77812, 173709, 181832). Hooks on output tensors stay as
    the early trigger, so that units that save no weights behave like the others.

Note: hooks of the user
    Autograd asks the innermost saved-tensor hooks only. Hooks around the sharded module's call, or
    around a unit's inside it (``save_on_cpu``), are therefore asked from here, for everything that
    is not a view of a weight.
    Those of ``torch.utils.checkpoint`` are left in charge: they run forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _checkpoint_hook

from lightning_fsdp_toy.sharding.memory import SavedBytes
from lightning_fsdp_toy.sharding.residency import current_reader

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.buffers import GatheredBuffer
    from lightning_fsdp_toy.sharding.faces import OriginalParameter
    from lightning_fsdp_toy.sharding.flat_param import FlatParameter
    from lightning_fsdp_toy.sharding.passes import ForwardPass
    from lightning_fsdp_toy.sharding.root import RootState
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["SavedTensors"]

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack


class _Handle(NamedTuple):
    """What a saved view of a unit's buffer is replaced by until backward needs it."""

    unit: Unit
    flat: FlatParameter
    buffer: GatheredBuffer
    tick: int
    forward_pass: ForwardPass | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    original: OriginalParameter
    version: int  # of its sharded face: a step in between would give wrong gradients


class _Counted:
    """A saved tensor whose memory counts as an activation's until autograd drops it."""

    __slots__ = ("_activations", "_ptr", "tensor", "version")

    def __init__(self, tensor: Tensor, activations: SavedBytes, storage: UntypedStorage) -> None:
        self.tensor, self.version = tensor, tensor._version
        self._activations, self._ptr = activations, storage.data_ptr()
        activations.hold(self._ptr, storage.nbytes())

    def __del__(self) -> None:
        self._activations.free(self._ptr)


class _Foreign(NamedTuple):
    """What hooks around the sharded module's call made of a tensor."""

    unpack: Callable[[Any], Tensor]
    packed: Any


class SavedTensors:
    """Packs and unpacks what autograd saves while sharded modules run.

    Args:
        root: is told when backward reaches a unit.
    """

    def __init__(self, root: RootState) -> None:
        self.root = root
        self._activations = SavedBytes(root.memory)
        # By the memory address of each unsharded buffer, when it was gathered.
        self._by_ptr: dict[int, tuple[Unit, FlatParameter, GatheredBuffer]] = {}
        self._ptrs: dict[GatheredBuffer, int] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward of the root or of a unit runs (see the note)."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and (self._is_own(outer[0]) or _is_of_checkpoint(outer[0])):
            return nullcontext()
        return saved_tensors_hooks(partial(self.pack, outer), self.unpack)

    def _is_own(self, pack: Callable[[Tensor], Any]) -> bool:
        return isinstance(pack, partial) and pack.func == self.pack

    def add(self, unit: Unit, flat: FlatParameter, buffer: GatheredBuffer) -> None:
        """A buffer has memory now."""
        # Of two precisions the master's views, too, where the shard is the whole: the face that
        # forward saved shows the compute buffer later.
        if flat.is_mixed or not buffer.is_permanent:
            ptr = buffer.ptr
            self._by_ptr[ptr] = unit, flat, buffer
            self._ptrs[buffer] = ptr

    def remove(self, buffer: GatheredBuffer) -> None:
        """A buffer is about to lose its memory."""
        ptr = self._ptrs.pop(buffer, None)
        if ptr is not None:
            self._by_ptr.pop(ptr, None)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a unit's buffer."""
        return bool(self._by_ptr) and self._find(tensor.untyped_storage().data_ptr()) is not None

    def _find(self, ptr: int) -> tuple[Unit, FlatParameter, GatheredBuffer] | None:
        found = self._by_ptr.get(ptr)
        if found is not None and found[2].ptr != ptr:
            return None  # `share_memory_` has moved that buffer, and this memory is another's now
        return found

    def pack(self, outer: _Hooks | None, tensor: Tensor) -> Any:
        """Replace a view of a unit's buffer by a handle; give others to ``outer``, or keep them."""
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        ptr = -1 if storage is None else storage.data_ptr()
        found = self._find(ptr) if ptr in self._by_ptr else None
        if found is None:
            return self._pack_other(outer, tensor, storage)
        unit, flat, buffer = found
        original = flat.original_at(int(tensor.storage_offset()))
        self.root.edits.keep_before_saving(original)
        return _Handle(
            unit,
            flat,
            buffer,
            self.root.tick,
            self.root.current_pass,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            original,
            original.sharded._version,
        )

    def _pack_other(
        self, outer: _Hooks | None, tensor: Tensor, storage: UntypedStorage | None
    ) -> Any:
        if outer is not None:
            pack, unpack = outer
            return _Foreign(unpack, pack(tensor))
        if tensor.grad_fn is not None:  # an output of the node: they would keep each other alive
            tensor = tensor.detach()
        if storage is None:
            return tensor
        if not self.root.memory.counts_activations or storage.data_ptr() in self._shards:
            return tensor, tensor._version  # the version autograd checks where there are no hooks
        return _Counted(tensor, self._activations, storage)

    @cached_property
    def _shards(self) -> set[int]:
        """Addresses of weights that are saved as they are: the shard is the whole."""
        return {flat.shard.untyped_storage().data_ptr() for flat in self.root.flats}

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor again, unsharding its unit if it was a view of one."""
        if isinstance(packed, _Handle):
            return self._unpack_handle(packed)
        if isinstance(packed, _Counted):
            packed = packed.tensor, packed.version
        if type(packed) is tuple:
            tensor: Tensor = packed[0]
            version: int = packed[1]
            if tensor._version != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tensor.type()} {list(tensor.shape)} is at version "
                    f"{tensor._version}; expected version {version} instead."
                )
            return tensor
        if isinstance(packed, _Foreign):
            return packed.unpack(packed.packed)
        saved: Tensor = packed
        return saved

    def _unpack_handle(self, handle: _Handle) -> Tensor:
        unit = handle.unit
        if handle.original.sharded._version != handle.version:
            raise RuntimeError(
                f"weights (`{handle.original.slot.fqn}`) were updated between this forward and its "
                f"backward; gradients would be wrong. Run backward before the optimizer step."
            )
        if torch._C._current_graph_task_id() != -1:
            if torch.is_grad_enabled() and not self.root.is_in_forward:
                raise RuntimeError(
                    f"backward with create_graph=True outside forward: weights of unit "
                    f"`{unit.fqn}` could not be found again. Call torch.autograd.grad inside the "
                    f"sharded module's forward (under Lightning, inside `training_step`)."
                )
            self.root.backward.reach(unit, handle.tick, handle.forward_pass)
            unit.reader = current_reader()
            if not handle.buffer.has_memory:  # read in its own dtype, inside `unsharded`
                handle.buffer.start_gather(handle.flat.shard)
                handle.buffer.wait()
        elif not unit.is_unsharded:
            raise RuntimeError(
                f"a saved weight of unit `{unit.fqn}` was read outside backward, where it is "
                f"sharded. Read it inside `unsharded(module)`."
            )
        whole = handle.buffer.tensor
        if handle.dtype != whole.dtype:
            whole = whole.view(handle.dtype)
        return whole.as_strided(handle.size, handle.stride, handle.offset)


def _is_of_checkpoint(pack: Callable[[Tensor], Any]) -> bool:
    return getattr(pack, "__qualname__", "").startswith(_checkpoint_hook.__name__ + ".")
