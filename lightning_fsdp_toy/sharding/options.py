"""The options of ``fully_shard``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy, WrapPolicy

__all__ = ["SHARDING_STRATEGIES", "ShardingOptions"]

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


@dataclass(frozen=True)
class ShardingOptions:
    """How a model is sharded; see ``fully_shard`` for what each means.

    Raises:
        ValueError: an option is out of its range.
        TypeError: it is of the wrong kind.
    """

    auto_wrap_policy: WrapPolicy = "auto"
    sharding_strategy: str = "FULL_SHARD"
    transport: str = "auto"
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    device_mesh: tuple[int, int] | None = None
    num_prefetch: int = 1
    cpu_offload: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        """Refuse what no rank could run."""
        if self.sharding_strategy not in SHARDING_STRATEGIES:
            raise ValueError(
                f"`sharding_strategy`: expected one of {', '.join(SHARDING_STRATEGIES)}, "
                f"got {self.sharding_strategy!r}."
            )
        is_whole_number = isinstance(self.num_prefetch, int) and self.num_prefetch is not True
        if not is_whole_number or self.num_prefetch < 0:
            raise ValueError(
                f"`num_prefetch`: expected a whole number of units, at least 0, "
                f"got {self.num_prefetch!r}."
            )
        if not isinstance(self.precision, MixedPrecisionPolicy):
            raise TypeError(
                f"`mixed_precision`: expected a MixedPrecisionPolicy or None, "
                f"got {type(self.precision).__name__}."
            )
