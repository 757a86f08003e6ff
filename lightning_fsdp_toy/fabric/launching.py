"""Ranks that ``fabric.launch(function)`` starts by ``spawn``, ``fork`` or ``forkserver``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.utilities import move_data_to_device
from typing_extensions import override

from lightning_fsdp_toy.spawning import run_processes

__all__ = ["FabricLauncher"]


class FabricLauncher(_MultiProcessingLauncher):
    """Fabric's launcher, which can also return tensors.

    Fabric sends what rank 0's function returns as handles to shared memory. A rank that has ended
    no longer gives its memory away, so a returned tensor is lost with a ``FileNotFoundError``. Here
    the bytes are sent. Ranks that end without a result are noticed (see the note in ``spawning``).
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pickle.loads(run_processes(self, _ByValue(function), args, kwargs))


class _ByValue:
    """Calls a function and returns, on the rank whose result counts, its result as bytes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> bytes | None:
        result = self.function(*args, **kwargs)
        if os.environ["LOCAL_RANK"] != "0":
            return None
        return pickle.dumps(move_data_to_device(result, "cpu"))
