"""Process groups that the GPUs of this machine allow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_fsdp_toy.sharding import mesh
from lightning_fsdp_toy.sharding.collectives import Transport
from lightning_fsdp_toy.sharding.transports.native import LocalTransport, NativeTransport
from tests.ranks import run_ranks

GROUPS = [("nccl", 1), ("gloo", 2)]  # gloo lets two ranks share a GPU
if torch.cuda.device_count() >= 2:
    GROUPS.append(("nccl", 2))

every_group = pytest.mark.parametrize(
    "group", GROUPS, ids=[f"{backend}-{world_size}" for backend, world_size in GROUPS]
)


def on_gpus(fn: Callable[..., Any], group: tuple[str, int], *args: Any) -> list[Any]:
    """Call `fn(*args)` on the ranks of `group`, each with a GPU; one rank uses NCCL as well."""
    backend, world_size = group
    return run_ranks(_call, world_size, fn, backend, args, timeout=110, gpu_backend=backend)


def _call(fn: Callable[..., Any], backend: str, args: tuple[Any, ...]) -> Any:
    if backend == "nccl":
        mesh.make_transport = _native
    return fn(*args)


def _native(_name: Any, group: Any, _device: Any, ledger: Any) -> Transport:
    return LocalTransport(None, ledger) if group is None else NativeTransport(group, ledger, "nccl")
