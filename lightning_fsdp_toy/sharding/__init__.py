"""The algorithm: fully sharded data parallel on plain PyTorch modules."""

from lightning_fsdp_toy.sharding.fully_shard import (
    full_state_dict,
    fully_shard,
    get_root,
    no_sync,
    register_forward_method,
    set_gradient_divide_factor,
    unsharded,
)
from lightning_fsdp_toy.sharding.ledger import Ledger
from lightning_fsdp_toy.sharding.optim import build_optimizer
from lightning_fsdp_toy.sharding.options import SHARDING_STRATEGIES
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy
from lightning_fsdp_toy.sharding.root import RootState

__all__ = [
    "SHARDING_STRATEGIES",
    "Ledger",
    "MixedPrecisionPolicy",
    "RootState",
    "build_optimizer",
    "full_state_dict",
    "fully_shard",
    "get_root",
    "no_sync",
    "register_forward_method",
    "set_gradient_divide_factor",
    "unsharded",
]
