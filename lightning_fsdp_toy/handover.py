"""Ranks that torchrun or SLURM has started, and the store through which rank 0 reaches them."""

import os
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

__all__ = ["given_ranks", "hand_over", "layout", "receive"]

_TIMEOUT = timedelta(minutes=5)


def given_ranks() -> ClusterEnvironment | None:
    """Return what describes this process if torchrun or SLURM started it as a rank."""
    if "RANK" in os.environ and TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    num_tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if num_tasks > 1 and "SLURM_PROCID" in os.environ and SLURMEnvironment.detect():
        return SLURMEnvironment()
    return None


def layout(given: ClusterEnvironment) -> tuple[int, int]:
    """Ranks on each node, and nodes."""
    if isinstance(given, SLURMEnvironment):
        num_nodes = int(os.environ.get("SLURM_NNODES", "1"))
        return given.world_size() // num_nodes, num_nodes
    local = int(os.environ.get("LOCAL_WORLD_SIZE", given.world_size()))
    return local, given.world_size() // local


def hand_over(given: ClusterEnvironment, value: Any) -> None:
    """Give `value` to all other ranks and wait until they have it; called on rank 0."""
    store = _connect(given)
    store.set("value", pickle.dumps(value).hex())
    # This process may be the server, and may end next.
    store.wait([f"read/{rank}" for rank in range(1, given.world_size())])


def receive(given: ClusterEnvironment) -> Any:
    """Return what rank 0 hands over; called on the other ranks."""
    store = _connect(given)
    value = pickle.loads(bytes.fromhex(store.get("value").decode()))
    store.set(f"read/{given.global_rank()}", "")
    return value


def _connect(given: ClusterEnvironment) -> dist.Store:
    """Connect to the store of the rendezvous; rank 0 serves it where no agent does."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        given.main_address,
        given.main_port,
        given.world_size(),
        is_master=given.global_rank() == 0 and not has_agent,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,  # the process group will use the same port
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"lightning_fsdp_toy/{attempt}", store)
