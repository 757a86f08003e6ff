"""The Lightning data modules."""

import math
import os
from collections.abc import Callable, Sequence

import lightning as L
from torch.utils.data import Dataset

from lightning_fsdp_toy.data.corpus import (
    ByteWindows,
    RandomTokens,
    Sample,
    read_bytes,
    resolve_files,
)
from lightning_fsdp_toy.data.dealing import MicroBatchLoader, MicroBatchSampler, derive_seed

_EVAL_MULTIPLE = 16  # evaluation takes a multiple of this many micro-batches: same data on 1..16


def check_at_least(minimum: int, **values: int) -> None:
    """Refuse values of `data.<name>` that are no whole number or are below `minimum`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"`data.{name}` must be a whole number, got {value!r}")
        if value < minimum:
            raise ValueError(f"`data.{name}` must be at least {minimum}, got {value}")


class MicroBatchDataModule(L.LightningDataModule):
    """What the data modules share: sizes, and loaders that deal as Note: Dealing says.

    Subclasses make `train_set` and `val_set` in `setup`. Test and prediction use the validation
    data. Without a Trainer the loaders are those of a single process.
    """

    train_set: Dataset[Sample]
    val_set: Dataset[Sample]
    vocab_size: int
    shuffle = True

    def __init__(
        self, batch_size: int, seq_len: int, val_batches: int | None, seed: int, num_workers: int
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, seq_len=seq_len)
        if val_batches is not None:
            check_at_least(1, val_batches=val_batches)
        check_at_least(0, num_workers=num_workers)
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.val_batches = val_batches
        self.seed = seed
        self.num_workers = num_workers

    def train_dataloader(self) -> MicroBatchLoader:
        """Return this rank's training micro-batches; a resumed epoch goes on where it was."""
        num_accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        multiple = self._world_size() * num_accumulate
        num_samples, needed = len(self.train_set), multiple * self.batch_size  # type: ignore[arg-type]
        if num_samples < needed:
            raise ValueError(
                f"{self.describe_train_set()} are {num_samples} samples of"
                f" `data.seq_len`={self.seq_len} tokens, but one optimizer step takes {needed}"
                f" (`data.batch_size`={self.batch_size} x {multiple} micro-batches): give more"
                f" data, or lower `data.batch_size` or `data.seq_len`"
            )
        return self._loader(self.train_set, self.batch_size, multiple, self.shuffle, self._position)

    def val_dataloader(self) -> MicroBatchLoader:
        """Return this rank's validation micro-batches, as many on every rank.

        Together they are a multiple of 16, and so the same on 1, 2, 4, 8 and 16 ranks, unless
        there are fewer than 16 samples. Few samples make the micro-batches smaller. At most
        `val_batches` are taken, all ranks together.
        """
        num_samples, world_size = len(self.val_set), self._world_size()  # type: ignore[arg-type]
        if num_samples < world_size:
            raise ValueError(
                f"validation has {num_samples} samples of `data.seq_len`={self.seq_len} tokens for"
                f" {world_size} ranks: raise `data.val_fraction` or give more data"
            )
        if self.val_batches is not None and self.val_batches < world_size:
            raise ValueError(
                f"`data.val_batches`={self.val_batches} is fewer than the {world_size} ranks, each"
                f" of which validates on as many: use `data.val_batches={world_size}` or more"
            )
        multiple = math.lcm(_EVAL_MULTIPLE, world_size)
        multiple = multiple if num_samples >= multiple else world_size
        batch_size = min(self.batch_size, num_samples // multiple)
        return self._loader(self.val_set, batch_size, multiple, False, lambda: 0, self.val_batches)

    def test_dataloader(self) -> MicroBatchLoader:
        """Return the validation micro-batches."""
        return self.val_dataloader()

    def predict_dataloader(self) -> MicroBatchLoader:
        """Return the validation micro-batches."""
        return self.val_dataloader()

    def describe_train_set(self) -> str:
        """Name the training data in an error, as a plural and with the key that decides it."""
        raise NotImplementedError

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _position(self) -> int:
        """Return how many training micro-batches of the running epoch this rank has had."""
        if self.trainer is None or not self.trainer.training:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _loader(
        self,
        dataset: Dataset[Sample],
        batch_size: int,
        multiple: int,
        shuffle: bool,
        position: Callable[[], int],
        limit: int | None = None,
    ) -> MicroBatchLoader:
        sampler = MicroBatchSampler(
            dataset,
            batch_size,
            world_size=self._world_size(),
            rank=self.trainer.global_rank if self.trainer else 0,
            multiple=multiple,
            shuffle=shuffle,
            seed=self.seed,
            position=position,
            limit=limit,
        )
        return MicroBatchLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=True,
            num_workers=self.num_workers,
        )


class TextDataModule(MicroBatchDataModule):
    """Bytes of real text: a token is a byte, a target is the byte that follows.

    The last `val_fraction` of every file is for validation, the rest for training.

    Args:
        files: Path or glob, or a list of them; None for the source files of Python's standard
            library, which every machine has (their text depends on Python's version only).
            Relative paths are resolved when the data module is made.
        batch_size: Windows in a micro-batch, per rank.
        seq_len: Tokens in a window.
        val_fraction: Part of each file that is kept for validation, between 0 and 1.
        max_bytes: Files are read in order until this many bytes.
        val_batches: Micro-batches of a validation at most, all ranks together; cut to a multiple
            of the ranks. None for all.
        seed: Decides the order of the training windows in each epoch.
        num_workers: Processes per rank that load ahead; 0 loads in the rank itself.

    Raises:
        ValueError: Names the argument, as the key `data.<argument>`.
    """

    vocab_size = 256

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str] | None = None,
        batch_size: int = 8,
        seq_len: int = 128,
        val_fraction: float = 0.02,
        max_bytes: int = 2**21,
        val_batches: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seq_len, val_batches, seed, num_workers)
        check_at_least(1, max_bytes=max_bytes)
        if not isinstance(val_fraction, int | float) or not 0.0 < val_fraction < 1.0:
            raise ValueError(f"`data.val_fraction` must be between 0 and 1, got {val_fraction}")
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.paths = resolve_files(files)

    def setup(self, stage: str | None = None) -> None:
        """Read the text, once; on every rank."""
        if not hasattr(self, "train_set"):
            train, val = read_bytes(self.paths, self.max_bytes, self.val_fraction)
            self.train_set = ByteWindows(train, self.seq_len)
            self.val_set = ByteWindows(val, self.seq_len)

    def describe_train_set(self) -> str:
        """Name the training data in an error, as a plural and with the key that decides it."""
        return f"the training bytes of `data.files` (up to `data.max_bytes`={self.max_bytes})"


class SyntheticDataModule(MicroBatchDataModule):
    """The handbook's random tokens, the same in every run and on any world size.

    Args:
        vocab_size: Number of different tokens.
        batch_size: Sequences in a micro-batch, per rank.
        seq_len: Tokens in a sequence.
        num_batches: Micro-batches in an epoch, all ranks together.
        fixed_batch: Every micro-batch on every rank, validation too, is the same one, which a
            model can learn by heart. Otherwise there is nothing to learn but the training set.
        val_batches: Micro-batches of a validation at most, all ranks together; cut to a multiple
            of the ranks. None for all.
        seed: Decides the tokens, and the order of the micro-batches in each epoch.
        num_workers: Processes per rank that load ahead; 0 loads in the rank itself.

    Raises:
        ValueError: Names the argument, as the key `data.<argument>`.
    """

    def __init__(
        self,
        vocab_size: int = 10000,
        batch_size: int = 4,
        seq_len: int = 128,
        num_batches: int = 1024,
        fixed_batch: bool = False,
        val_batches: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seq_len, val_batches, seed, num_workers)
        check_at_least(1, vocab_size=vocab_size, num_batches=num_batches)
        self.vocab_size = vocab_size
        self.num_batches = num_batches
        self.fixed_batch = fixed_batch
        self.shuffle = not fixed_batch

    def setup(self, stage: str | None = None) -> None:
        """Describe the samples; each is made when it is asked for."""
        num_val = self.batch_size * math.lcm(_EVAL_MULTIPLE, self._world_size())
        self.train_set = self._tokens(self.num_batches * self.batch_size, self.seed)
        val_seed = self.seed if self.fixed_batch else derive_seed(self.seed, 1)
        self.val_set = self._tokens(num_val, val_seed)

    def describe_train_set(self) -> str:
        """Name the training data in an error, as a plural and with the key that decides it."""
        return f"the `data.num_batches`={self.num_batches} micro-batches"

    def _tokens(self, num_samples: int, seed: int) -> RandomTokens:
        period = self.batch_size if self.fixed_batch else num_samples
        return RandomTokens(self.vocab_size, self.seq_len, num_samples, seed, period)
