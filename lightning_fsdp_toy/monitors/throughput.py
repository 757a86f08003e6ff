"""Speed of a run: steps, samples, tokens, and how much of the hardware's arithmetic is used."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_fsdp_toy.models import count_parameters
from lightning_fsdp_toy.monitors.monitor import Monitor, Values, root_of

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(Monitor):
    """Logs `throughput/*`: means since the last log, validation left out.

    ===================  =========================================================================
    `step_s`             seconds of an optimizer step (in other stages: of a batch)
    `samples_per_s`      of all ranks: rows of one tensor of every batch, see `batch_key`
    `tokens_per_s`       of all ranks: elements of that tensor, where those are whole numbers
    `mfu`                model FLOPs utilisation, where the peak is known: 6 FLOPs for each trained
                         parameter and token (PaLM, arXiv 2204.02311, without its attention term)
                         by time and peak of a rank's device
    ===================  =========================================================================

    Args:
        every_n_steps: see `Monitor`.
        peak_flops: FLOP per second that a rank's device can do; None: what Lightning knows of the
            GPU, nothing on CPU.
        batch_key: key or index of the batch's entry that counts; None: the first tensor, whose
            elements are not taken for tokens where they are bytes or truth values.
    """

    group = "throughput"
    added = frozenset({"samples_per_s", "tokens_per_s"})

    def __init__(
        self,
        every_n_steps: int | None = None,
        peak_flops: float | None = None,
        batch_key: str | int | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"`peak_flops`: expected a number above 0, got {peak_flops!r}")
        self.peak_flops = peak_flops
        self.batch_key = batch_key
        self._clock = 0.0
        self._samples = self._tokens = 0
        self._num_parameters = 0

    @override
    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "train" and self.peak_flops is None and pl_module.device.type == "cuda":
            dtype = _compute_dtype(str(trainer.precision))
            self.peak_flops = get_available_flops(pl_module.device, dtype)
        if stage == "train" and self.peak_flops is not None:
            self._num_parameters = _count_trained(trainer, pl_module)
        self._restart(pl_module.device)

    @override
    def pause(self, trainer: L.Trainer) -> Any:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - self._clock, self._samples, self._tokens

    @override
    def resume(self, trainer: L.Trainer, state: Any) -> None:
        self._restart(trainer.strategy.root_device)
        seconds, self._samples, self._tokens = state
        self._clock -= seconds

    @override
    def is_per_step(self, name: str) -> bool:
        return name == "step_s"

    def _restart(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # work of the steps that are counted
        self._clock = time.perf_counter()
        self._samples = self._tokens = 0

    @override
    def note_batch(self, batch: Any) -> None:
        try:
            counted = batch if self.batch_key is None else batch[self.batch_key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"`batch_key={self.batch_key!r}`: no such entry in a batch ({type(batch).__name__})"
            ) from error
        first = next((leaf for leaf in tree_leaves(counted) if isinstance(leaf, Tensor)), None)
        if first is None:
            return
        self._samples += first.shape[0] if first.ndim else 1
        is_chosen = self.batch_key is not None
        if not (first.is_floating_point() or first.is_complex()) and (
            is_chosen or first.dtype not in (torch.uint8, torch.bool)
        ):
            self._tokens += first.numel()

    @override
    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Values:
        samples, tokens, before = self._samples, self._tokens, self._clock
        self._restart(pl_module.device)
        seconds = max(self._clock - before, 1e-9)
        values: Values = {
            "step_s": seconds / max(1, self.num_steps),
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens / seconds if tokens else None,
        }
        if stage == "train" and self.peak_flops is not None:  # on every rank, whatever its batches
            flops = 6 * self._num_parameters * tokens / seconds
            values["mfu"] = flops / self.peak_flops if tokens else None
        return values


def _count_trained(trainer: L.Trainer, pl_module: L.LightningModule) -> int:
    """Count the elements of the whole model's trained parameters; called on all ranks."""
    root = root_of(trainer)
    if root is not None:
        originals = [original for flat in root.flats for original in flat.originals]
        return sum(each.slot.numel for each in originals if each.sharded.requires_grad)
    counted = count_parameters(pl_module).trainable
    if isinstance(trainer.strategy, FSDPStrategy):  # each rank sees its pieces
        total = torch.tensor(counted, dtype=torch.int64, device=trainer.strategy.root_device)
        dist.all_reduce(total)
        counted = int(total)
    return counted


def _compute_dtype(precision: str) -> torch.dtype:
    """Return what matrices are multiplied in."""
    if "bf16" in precision:
        return torch.bfloat16
    return torch.float16 if "16" in precision else torch.float32
