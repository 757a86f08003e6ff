"""The options of ``fully_shard``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy, WrapPolicy, check_policy

__all__ = ["SHARDING_STRATEGIES", "TRANSPORTS", "ShardingOptions", "check_device_mesh"]

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
TRANSPORTS = ("auto", "native", "pairwise", "shared_memory")


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
        check_policy(self.auto_wrap_policy)
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
        for name in ("cpu_offload", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}`: expected true or false, got {getattr(self, name)!r}.")
        if not isinstance(self.precision, MixedPrecisionPolicy):
            raise TypeError(
                f"`mixed_precision`: expected a MixedPrecisionPolicy or None, "
                f"got {type(self.precision).__name__}."
            )
        if self.device_mesh is not None:
            check_device_mesh(self.sharding_strategy, self.device_mesh)


def check_device_mesh(
    sharding_strategy: str, device_mesh: object, world_size: int | None = None
) -> None:
    """Refuse a ``device_mesh`` that does not fit the strategy or, if given, the number of ranks.

    Raises:
        ValueError: it does not.
    """
    if sharding_strategy != "HYBRID_SHARD":
        raise ValueError(
            f"`device_mesh` is for sharding_strategy='HYBRID_SHARD', got it with "
            f"{sharding_strategy!r}. Leave it out."
        )
    sizes = device_mesh if isinstance(device_mesh, tuple) else ()
    if len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        number = "" if world_size is None else f" ({world_size})"
        raise ValueError(
            f"`device_mesh`: expected (replicas, shards), two whole numbers above 0 whose product "
            f"is the number of ranks{number}, got {device_mesh!r}."
        )
    if world_size is not None and sizes[0] * sizes[1] != world_size:
        raise ValueError(
            f"`device_mesh`: {sizes[0]} replicas x {sizes[1]} shards are {sizes[0] * sizes[1]} "
            f"ranks, but there are {world_size}."
        )
