"""Reads the sizes that the formulas need from a model that has been sharded."""

from __future__ import annotations

from lightning_fsdp_toy.planner.formulas import FlatSize, ShardingSizes
from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.transports.native import NativeTransport
from lightning_fsdp_toy.sharding.transports.shared_memory import SharedMemoryTransport

__all__ = ["read_sizes"]


def read_sizes(root: RootState) -> ShardingSizes:
    """Return the sizes of a sharded model; frozen parameters are those frozen now."""
    flats = []
    pool = getattr(root.mesh.shards, "pool", None)
    reserved = {} if pool is None else {r.name: r.is_trainable for r in pool.plan.reservations}
    for number, unit in enumerate(root.units):
        for flat in unit.flats:
            flats.append(
                FlatSize(
                    name=flat.name,
                    unit=number,
                    padded_numel=flat.layout.padded_numel,
                    own_numel=sum(original.piece.numel for original in flat.originals),
                    master_bytes=flat.dtype.itemsize,
                    compute_bytes=flat.compute_dtype.itemsize,
                    reduce_bytes=flat.gradient.dtype.itemsize,
                    is_trainable=flat.is_trainable,
                    is_reserved=reserved.get(flat.name, flat.is_trainable),
                )
            )
    replicas = root.mesh.replicas
    return ShardingSizes(
        flats=tuple(flats),
        strategy=root.options.sharding_strategy,
        num_shards=root.mesh.shards.world_size,
        num_replicas=1 if replicas is None else replicas.world_size,
        num_prefetch=root.options.num_prefetch,
        transport=_transport_of(root),
    )


def _transport_of(root: RootState) -> str:
    """Return the name of what moves bytes inside a shard group."""
    shards = root.mesh.shards
    if isinstance(shards, SharedMemoryTransport) and shards.pool is not None:
        return "shared_memory"
    return "native" if isinstance(root.mesh.world, NativeTransport) else "pairwise"
