"""The variants: how each spreads the model over the ranks."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp_toy.peers import UnitsPolicy, apply_fsdp2
from lightning_fsdp_toy.planner import ShardingSizes
from lightning_fsdp_toy.sharding import fully_shard
from lightning_fsdp_toy.tasks.benchmark.device import Device

__all__ = ["BASE", "FLOOR", "LIGHTNING", "OURS", "SCALED", "VARIANTS", "OurForm"]
__all__ += ["formula_wire_bytes", "spread"]


@dataclass(frozen=True)
class OurForm:
    """How `fully_shard` is called."""

    sharding_strategy: str
    transport: str

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place; a collective where there are several ranks."""
        return fully_shard(
            model, sharding_strategy=self.sharding_strategy, transport=self.transport
        )


BASE = "toy_fsdp"  # that others are compared with
FLOOR = "floor"
LIGHTNING = "lightning"
OURS = {
    BASE: OurForm("FULL_SHARD", "auto"),
    "toy_fsdp_pairwise": OurForm("FULL_SHARD", "pairwise"),
    "toy_fsdp_grad_op": OurForm("SHARD_GRAD_OP", "pairwise"),
}
VARIANTS = (*OURS, "ddp", "fsdp", "fsdp2", FLOOR, LIGHTNING)
SCALED = (BASE, "toy_fsdp_pairwise", "ddp", FLOOR)  # those whose growth is measured


def spread(variant: str, model: nn.Module, device: Device) -> nn.Module:
    """Spread `model`, on its device, over all ranks as `variant` does; a collective.

    Peers are at their documented defaults. FSDP is set up as Lightning's `FSDPStrategy` does it;
    every block is a unit, as for the others.
    """
    if variant in OURS:
        form = OURS[variant]
        if device.kind != "cpu":  # messages in pairs are for gloo
            form = OurForm(form.sharding_strategy, "auto")
        return form.shard(model)
    if variant == "ddp":
        return DistributedDataParallel(model, device_ids=device.ddp_ids)
    if variant == "fsdp":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=UnitsPolicy("auto"),
            cpu_offload=CPUOffload(offload_params=False),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_id=device.torch,
            use_orig_params=True,
        )
    if variant == "fsdp2":
        apply_fsdp2(model, init_device_mesh(device.kind, (dist.get_world_size(),)))
        return model
    assert variant == FLOOR, variant
    return model


def formula_wire_bytes(
    variant: str, sizes: ShardingSizes | None, num_parameters: int, world_size: int
) -> int | None:
    """Return the bytes that a rank sends in a step by the formulas; `None` if there is none.

    Args:
        variant: Which.
        sizes: Of its sharded model, if it is one of this package.
        num_parameters: Of the whole model, float32.
        world_size: Ranks.
    """
    if sizes is not None:  # what is shared in memory does not travel
        return 0 if sizes.transport == "shared_memory" else sum(sizes.sent_bytes().values())
    if variant == "ddp":
        return 2 * 4 * num_parameters * (world_size - 1) // world_size
    return 0 if variant == FLOOR else None
