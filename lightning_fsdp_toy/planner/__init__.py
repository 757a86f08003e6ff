"""What a sharded run holds and sends, computed."""

from lightning_fsdp_toy.planner.formulas import FlatSize, ShardingSizes
from lightning_fsdp_toy.planner.reading import read_sizes

__all__ = ["FlatSize", "ShardingSizes", "read_sizes"]
