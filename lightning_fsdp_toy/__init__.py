"""Fully sharded data parallel under Lightning, written to be read and checked bit for bit."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_fsdp_toy.fabric import ToyFSDPFabricStrategy
from lightning_fsdp_toy.strategy import ToyFSDPStrategy

__all__ = ["ToyFSDPFabricStrategy", "ToyFSDPStrategy", "__version__"]

__version__ = "0.1.0"

ToyFSDPStrategy.register_strategies(StrategyRegistry)
ToyFSDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)
