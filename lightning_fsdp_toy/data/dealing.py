"""Deals out the same micro-batches whatever the world size.

Note: Dealing
    An epoch is a list of micro-batches that depends on (seed, epoch) only. Micro-batch m belongs
    to rank m % world_size, so the ranks together walk along the list:

        epoch          m0   m1   m2   m3   m4   m5   m6   m7   (m8)
        1 rank, A=4    r0   r0   r0   r0 | r0   r0   r0   r0 |   A = accumulate_grad_batches
        2 ranks, A=2   r0   r1   r0   r1 | r0   r1   r0   r1 |   | = optimizer step
        4 ranks, A=1   r0   r1   r2   r3 | r0   r1   r2   r3 |

    What does not fill a whole optimizer step at the end of an epoch (m8) is left out of it. So
    an equal world_size * A means equal data in every step. The next epoch has another order.
"""

import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logger = logging.getLogger(__name__)


def derive_seed(*parts: int) -> int:
    """Mix integers into one 32-bit seed, so that neighbours give unrelated random numbers."""
    return zlib.crc32("/".join(map(str, parts)).encode())


class MicroBatchSampler(DistributedSampler[int]):
    """Yields the samples of this rank's micro-batches, see Note: Dealing.

    A `DistributedSampler`, so that Lightning tells it the epoch and puts none of its own in place.

    Args:
        dataset: A dataset with a length.
        batch_size: Samples in a micro-batch.
        world_size: Number of ranks that share the epoch.
        rank: This rank.
        multiple: The epoch is cut to a multiple of this many micro-batches, all ranks together;
            itself a multiple of `world_size`.
        shuffle: Whether each epoch has its own order.
        seed: Decides the orders, with the epoch.
        position: Called when an epoch starts: how many micro-batches this rank has had of it.
        limit: Micro-batches of an epoch at most, all ranks together; None for all there are.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        world_size: int = 1,
        rank: int = 0,
        multiple: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        position: Callable[[], int] = lambda: 0,
        limit: int | None = None,
    ) -> None:
        super().__init__(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=True)
        self.batch_size = batch_size
        self.position = position
        self.num_dataset_samples = len(dataset)  # type: ignore[arg-type]
        num_micro_batches = self.num_dataset_samples // batch_size // multiple * multiple
        if limit is not None:
            num_micro_batches = min(num_micro_batches, limit // world_size * world_size)
        self.total_size = num_micro_batches * batch_size
        self.num_samples = self.total_size // world_size  # of this rank, what len() returns

    def __iter__(self) -> Iterator[int]:
        order = self.epoch_order()
        for index in range(self.position(), self.num_samples // self.batch_size):
            start = (index * self.num_replicas + self.rank) * self.batch_size
            yield from order[start : start + self.batch_size]

    def epoch_order(self) -> list[int]:
        """Return the samples of this epoch in the order of its micro-batches."""
        if not self.shuffle:
            return list(range(self.num_dataset_samples))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        return torch.randperm(self.num_dataset_samples, generator=generator).tolist()


class MicroBatchLoader(DataLoader[Any]):
    """A loader that reads its sampler when the first batch is asked for, not before.

    Lightning makes the iterator before it tells the sampler the epoch, and before it settles how
    many batches a resumed epoch has had; with workers, a plain loader would start too early.

    Where a resumed epoch goes on is read from Lightning's own count of batches. The state is
    there to notice that a run resumes on other data.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, int]:
        """Return what decides which samples a micro-batch holds."""
        return {
            "num_samples": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": self.batch_size or 0,
            "seed": getattr(self.sampler, "seed", 0),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Warn if the data are not those of the run that is resumed."""
        now = self.state_dict()
        changed = [f"{k} {state.get(k)} -> {now[k]}" for k in now if state.get(k) != now[k]]
        if changed:
            logger.warning(
                "resuming on other training data than before (%s): the epoch goes on at the same"
                " count of micro-batches, but they hold other samples",
                ", ".join(changed),
            )
