"""Counts the bytes of all tensors that operations make, exactly: for comparisons with formulas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_fsdp_toy.sharding.transports.pool import SharedPool

__all__ = ["LiveTensors"]


class LiveTensors(TorchDispatchMode):
    """Inside it every storage that an operation returns is counted until it is freed.

    Operations of the thread that entered it, those that C++ calls there included; not what a
    backend's own threads allocate. CPU only.

    Args:
        known: Tensors that live already.
        on_change: Called before and after every operation with the bytes that live then, and
            whether it is before.
    """

    def __init__(self, known: Iterable[Tensor], on_change: Callable[[int, bool], None]) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.on_change = on_change
        self._pool: SharedPool | None = None
        self._in_segment: list[tuple[int, int]] = []  # addresses
        for tensor in known:
            self._add(tensor)

    def follow(self, pool: SharedPool) -> None:
        """Count memory that ranks share by the kernel's count of the segment, used or not.

        Tensors in it are not counted besides. Call it when all units have been gathered once, so
        that all that is ever mapped of the segment is.
        """
        self._pool, self._in_segment = pool, pool.segment.mapped_at()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what one operation returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which lets it call operations on the local tensors
        self.on_change(self.bytes, True)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._add(leaf)
        self.on_change(self.bytes, False)
        return out

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self.storages.setdefault(storage._cdata, self._ref(storage))

    def _ref(self, storage: torch.UntypedStorage) -> weakref.ref[Any]:
        key, storages = storage._cdata, self.storages
        return weakref.ref(storage, lambda _: storages.pop(key, None))

    @property
    def bytes(self) -> int:
        """Bytes that live now: storages lose and regain memory while they live."""
        live = (ref() for ref in list(self.storages.values()))
        outside: list[int] = [
            storage.nbytes()
            for storage in live
            if storage is not None and not self._is_shared(storage)
        ]
        return sum(outside) + (0 if self._pool is None else self._pool.held_bytes)

    def _is_shared(self, storage: torch.UntypedStorage) -> bool:
        address = storage.data_ptr()
        return any(first <= address < end for first, end in self._in_segment)
