"""What comes of one comparison: of one rank, and of all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_fsdp_toy.tasks.verify.comparison import Difference, Divergence

__all__ = ["Claim", "Outcome", "Sizes", "Verdict", "merge"]


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    name: str  # short and unique beside size and optimizer; begins with the row
    text: str  # what equals what
    world_size: int
    optimizer: str
    steps: tuple[int, int]  # first and last step that must have been compared

    @property
    def row(self) -> str:
        """A to f."""
        return self.name[0]

    @property
    def tag(self) -> str:
        """What it is called in TensorBoard."""
        return f"verify/{self.name}/{self.optimizer}"


@dataclass(frozen=True)
class Sizes:
    """Bytes that this rank holds between steps."""

    shards_bytes: int
    optimizer_bytes: int
    pool_bytes: int  # to gather and reduce in


@dataclass(frozen=True)
class Outcome:
    """What one rank found for one claim."""

    claim: Claim
    divergence: Divergence
    numel: int  # of all parameters
    needed: int  # elements that all ranks together must have compared after each step
    facts: dict[str, Any] = field(default_factory=dict)  # of the plain run, and of a planted fault
    sizes: Sizes | None = None


@dataclass(frozen=True)
class Verdict:
    """What all ranks found for one claim."""

    claim: Claim
    largest: dict[int, float]  # absolute difference by step, of all ranks
    first: Difference | None
    gap: str  # why too little was compared; empty if all was

    @property
    def is_equal(self) -> bool:
        """Whether everything was compared and no bit differs."""
        return self.first is None and not self.gap

    @property
    def max_divergence(self) -> float:
        """Largest absolute difference of any element after any step."""
        return max(self.largest.values(), default=0.0)


def merge(outcomes: Sequence[Outcome]) -> Verdict:
    """Put together what the ranks found for the same claim, in rank order."""
    claim = outcomes[0].claim
    divergences = [outcome.divergence for outcome in outcomes]
    first_step, last_step = claim.steps
    largest: dict[int, float] = {}
    for divergence in divergences:
        for step, size in divergence.largest.items():
            largest[step] = max(size, largest.get(step, 0.0))
    firsts = [each.first for each in divergences if each.first is not None]
    first = min(firsts, key=lambda each: (each.step, each.rank), default=None)
    gap = ""
    for step in range(first_step, last_step + 1):
        count = sum(each.num_compared.get(step, 0) for each in divergences)
        if count < outcomes[0].needed:
            gap = f"only {count:,} of {outcomes[0].needed:,} weights were compared in step {step}"
            break
    return Verdict(claim, dict(sorted(largest.items())), first, gap)
