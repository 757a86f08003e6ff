"""Data modules: bytes of real text, and the handbook's random tokens."""

from lightning_fsdp_toy.data.dealing import MicroBatchLoader, MicroBatchSampler, derive_seed
from lightning_fsdp_toy.data.modules import (
    MicroBatchDataModule,
    SyntheticDataModule,
    TextDataModule,
)

__all__ = [
    "TextDataModule",
    "SyntheticDataModule",
    "MicroBatchDataModule",
    "MicroBatchSampler",
    "MicroBatchLoader",
    "derive_seed",
]
