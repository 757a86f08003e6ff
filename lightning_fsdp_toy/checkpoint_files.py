"""Checkpoint files that no rank holds whole in memory while it writes or reads them.

Note: files and memory
    Lightning builds the whole file in memory before it writes it (twice the model beside the model)
    and every rank reads all of a file to use a part of it. Here a local file is written from the
    tensors themselves, beside its place, and moved there when it is whole. It is read by mapping
    it: tensors are addresses in the file, of which the kernel keeps one copy for all ranks, and a
    rank takes memory only for what it copies out. Remote files, and files older than torch 1.6,
    are read and written as Lightning does.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.checkpoint_paths import partial_path, put_in_place

__all__ = ["StreamedCheckpointIO", "local_path"]

_SMALL_BYTES = 2**16


class StreamedCheckpointIO(TorchCheckpointIO):
    """Reads and writes the files that ``TorchCheckpointIO`` does, without copies in memory."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(local)
        try:
            with partial.open("wb") as file:  # by name, torch would put the name into the file
                torch.save(checkpoint, file)
            # A run that was loaded from the file in its place may still have that one mapped.
            put_in_place(local)
        finally:
            partial.unlink(missing_ok=True)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is None or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint: dict[str, Any] = torch.load(
            local, map_location=map_location, weights_only=weights_only, mmap=True
        )
        own_small_tensors(checkpoint)
        return checkpoint


def local_path(path: str | Path) -> Path | None:
    """Return ``path`` as a path on this machine, None if it is elsewhere (``s3://...``)."""
    filesystem, inner = url_to_fs(str(path))
    return Path(inner) if isinstance(filesystem, LocalFileSystem) else None


def own_small_tensors(value: Any) -> Any:
    """Replace the small tensors in ``value`` by copies, in place where it can be.

    What a run keeps of a checkpoint beyond weights and moments is small: step counts, states of
    callbacks. As addresses in the file they would keep all of it mapped for as long as they live.
    """
    if isinstance(value, Tensor):
        is_small = value.untyped_storage().nbytes() <= _SMALL_BYTES
        return value.detach().clone() if is_small and type(value) is Tensor else value
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = own_small_tensors(entry)
    elif isinstance(value, list):
        value[:] = [own_small_tensors(entry) for entry in value]
    elif type(value) is tuple:
        return tuple(own_small_tensors(entry) for entry in value)
    return value
