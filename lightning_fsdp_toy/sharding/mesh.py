"""The ranks, and how they divide the work: shard groups and replicas.

Note: a mesh of ranks
    ``FULL_SHARD`` cuts every unit over all ranks. ``HYBRID_SHARD`` cuts it inside a *shard group*
    (the ranks of one machine, say) and keeps a replica in every group; gradients are first
    reduce-scattered inside the group, then the shards are all-reduced across groups. ``NO_SHARD``
    is the same with shard groups of one rank. ``device_mesh=(2, 3)``::

                      shard 0   shard 1   shard 2
        replica 0      rank 0    rank 1    rank 2     <- a shard group: all-gather, reduce-scatter
        replica 1      rank 3    rank 4    rank 5
                         ^
                         `-- ranks that hold the same shard: all-reduce
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding.collectives import Transport
from lightning_fsdp_toy.sharding.groups import backend_for, timeout_of
from lightning_fsdp_toy.sharding.ledger import Ledger
from lightning_fsdp_toy.sharding.options import TRANSPORTS, check_device_mesh
from lightning_fsdp_toy.sharding.transports.native import LocalTransport, NativeTransport
from lightning_fsdp_toy.sharding.transports.pairwise import PairwiseTransport, StagedTransport
from lightning_fsdp_toy.sharding.transports.segment import can_share
from lightning_fsdp_toy.sharding.transports.shared_memory import SharedMemoryTransport

__all__ = ["RankMesh", "make_mesh", "make_transport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankMesh:
    """The transports of one model.

    Attributes:
        world: all ranks: agreements, initial values, buffers.
        shards: the ranks that a unit is cut over.
        replicas: the ranks that hold the same shard; None if this is the only one.
    """

    world: Transport
    shards: Transport
    replicas: Transport | None = None

    @property
    def transports(self) -> list[Transport]:
        """Each transport once."""
        all_of_them = (self.world, self.shards, self.replicas)
        return list(dict.fromkeys(each for each in all_of_them if each is not None))


def make_mesh(
    sharding_strategy: str,
    device_mesh: tuple[int, int] | None,
    transport: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    ledger: Ledger,
) -> RankMesh:
    """Return the mesh for a sharding strategy; a collective where there are several groups.

    Args:
        sharding_strategy: one of ``SHARDING_STRATEGIES``.
        device_mesh: ``(replicas, shards)`` for ``HYBRID_SHARD``; None: a shard group is the ranks
            of one machine, as ``LOCAL_WORLD_SIZE`` says (``torchrun`` sets it).
        transport: see ``make_transport``.
        group: all ranks, None for a single process.
        device: where parameters live.
        ledger: where collectives are counted.

    Raises:
        ValueError: ``device_mesh`` does not fit the strategy or the number of ranks.
    """
    if sharding_strategy == "HYBRID_SHARD" and device_mesh is None and group is not None:
        world_size = dist.get_world_size(group)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        device_mesh = (max(world_size // num_local, 1), min(num_local, world_size))
    if device_mesh is not None:
        world_size = 1 if group is None else dist.get_world_size(group)
        check_device_mesh(sharding_strategy, device_mesh, world_size)
    world = make_transport(transport, group, device, ledger)
    if sharding_strategy == "NO_SHARD":
        alone = LocalTransport(None, ledger)
        return RankMesh(world, alone, world if world.world_size > 1 else None)
    if sharding_strategy != "HYBRID_SHARD" or group is None:
        return RankMesh(world, world)
    assert device_mesh is not None
    num_replicas, num_shards = device_mesh
    ranks = dist.get_process_group_ranks(group)
    rows = [ranks[start : start + num_shards] for start in range(0, len(ranks), num_shards)]
    columns = [ranks[index::num_shards] for index in range(num_shards)]
    shards = make_transport(transport, _own_group(rows, group), device, ledger)
    replicas = make_transport(transport, _own_group(columns, group), device, ledger)
    return RankMesh(world, shards, replicas if num_replicas > 1 else None)


def _own_group(groups: list[list[int]], world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Make every group (all ranks make all of them, in order) and return this rank's."""
    rank, own = dist.get_rank(), None
    for ranks in groups:
        made = dist.new_group(ranks, backend=dist.get_backend(world), timeout=timeout_of(world))
        if rank in ranks and len(ranks) > 1:
            own = made
    return own


def make_transport(
    name: str, group: dist.ProcessGroup | None, device: torch.device, ledger: Ledger
) -> Transport:
    """Return the transport called ``name`` for ``group``.

    Args:
        name: ``"native"``, ``"pairwise"``, ``"shared_memory"`` or ``"auto"``: native on NCCL,
            shared memory among ranks of one machine on CPU, pairwise otherwise.
        group: process group, None for a single process.
        device: where parameters live.
        ledger: where collectives are counted.

    Raises:
        ValueError: unknown name, a process group that cannot move the device's memory, pairwise
            with a backend that has no CPU messages, or shared memory where there cannot be any.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"`transport`: expected one of {', '.join(TRANSPORTS)}, got {name!r}.")
    if group is None or dist.get_world_size(group) == 1:
        return LocalTransport(group, ledger)
    backend = backend_for(group, device.type)
    if backend is None:
        raise ValueError(
            f"The parameters are on {device.type!r}, whose memory the process group "
            f"({dist.get_backend_config(group)}) does not move. Pass `device=` to shard elsewhere, "
            f"or initialise the group with a backend for {device.type!r}."
        )
    is_wanted = name == "shared_memory"
    if name == "auto":
        may_share = backend == "gloo" and device.type == "cpu" and can_share()
        gloo = "shared_memory" if may_share else "pairwise"
        name = "native" if backend == "nccl" else gloo
    if name in ("pairwise", "shared_memory") and backend != "gloo":
        raise ValueError(
            f"`transport='{name}'` needs the gloo backend, got {backend!r}. Use "
            f"transport='native' or 'auto'."
        )
    if is_wanted and not (device.type == "cpu" and can_share()):
        raise ValueError(
            f"`transport='shared_memory'` needs parameters on CPU and Linux on x86_64, got "
            f"{device.type!r} on {platform.system()} {platform.machine()}. Use transport='auto'."
        )
    logger.debug("transport %s for %d ranks on %s", name, dist.get_world_size(group), device)
    if name == "shared_memory":
        return SharedMemoryTransport(group, ledger, is_wanted)
    if name == "native":
        return NativeTransport(group, ledger, backend)
    kind = PairwiseTransport if device.type == "cpu" else StagedTransport
    return kind(group, ledger)
