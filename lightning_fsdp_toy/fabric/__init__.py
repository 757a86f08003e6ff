"""The sharding core under Lightning Fabric."""

from lightning_fsdp_toy.fabric.strategy import ToyFSDPFabricStrategy

__all__ = ["ToyFSDPFabricStrategy"]
