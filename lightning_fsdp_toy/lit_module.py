"""The LightningModule: next-token training of any model that maps tokens to logits."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

from lightning_fsdp_toy.data.dealing import derive_seed
from lightning_fsdp_toy.data.modules import MicroBatchDataModule
from lightning_fsdp_toy.data.progress import align_progress

Batch = tuple[Tensor, Tensor]  # tokens and targets, each int64 (B, T)

_ADAMW = functools.partial(torch.optim.AdamW, lr=3e-4)
_CHECKPOINT_KEY = "micro_batches"  # how they were dealt out in the run that saved it


class WarmupDecay:
    """Factor of the learning rate for each optimizer step (not micro-batch), in three phases.

    1. warm-up: rises in equal parts from 1 / warmup_steps to 1;
    2. decay: falls along half a cosine from 1 towards `min_lr_ratio`, reached at `max_steps`;
    3. floor: stays at `min_lr_ratio`.

    With `schedule="constant"` the factor stays at 1 after the warm-up. A run that is shorter than
    its warm-up never leaves phase 1.
    """

    def __init__(
        self, warmup_steps: int, max_steps: int, min_lr_ratio: float, schedule: str
    ) -> None:
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr_ratio = min_lr_ratio
        self.schedule = schedule

    def __call__(self, step: int) -> float:
        """Return the factor for optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.warm_up(step)
        if self.schedule == "constant":
            return 1.0
        return self.decay(step) if step < self.max_steps else self.floor()

    def warm_up(self, step: int) -> float:
        """Phase 1."""
        return (step + 1) / self.warmup_steps

    def decay(self, step: int) -> float:
        """Phase 2."""
        progress = (step - self.warmup_steps) / (self.max_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine

    def floor(self) -> float:
        """Phase 3."""
        return self.min_lr_ratio


class LitLanguageModel(L.LightningModule):
    """Trains a model on (tokens, targets), the same way under every strategy and world size.

    Logs `train/loss` and `lr` for every optimizer step; `val/loss` and `val/perplexity` for every
    validation, and the same under `test/`. All parameters are under `net.`; nothing else is in
    the state dict.

    Random numbers (dropout) restart from (`seed`, epoch, micro-batch) before every micro-batch of
    training: they differ from rank to rank, but not with the number of ranks or a resume.

    Args:
        model: Maps int64 tokens (B, T) to logits (B, T, vocabulary).
        optimizer: Called with the parameters, for example a `functools.partial`.
        warmup_steps: Optimizer steps of the warm-up phase, see `WarmupDecay`.
        max_steps: Optimizer steps until the learning rate is lowest; None: those of the Trainer.
        min_lr_ratio: Lowest learning rate, as a part of the optimizer's.
        schedule: "cosine", or "constant" for none after the warm-up.
        seed: Decides the random numbers of training.

    Raises:
        ValueError: An argument is out of its range; the model's vocabulary is smaller than that
            of the data.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _ADAMW,
        warmup_steps: int = 0,
        max_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        schedule: str = "cosine",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ValueError(f"`warmup_steps` must be at least 0, got {warmup_steps}")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"`max_steps` must be at least 1 or None, got {max_steps}")
        if not 0.0 <= min_lr_ratio <= 1.0:
            raise ValueError(f"`min_lr_ratio` must be between 0 and 1, got {min_lr_ratio}")
        if schedule not in ("cosine", "constant"):
            raise ValueError(f"`schedule` must be 'cosine' or 'constant', got {schedule!r}")
        self.save_hyperparameters(ignore=["model", "optimizer"], logger=False)
        self.net = model
        self.make_optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr_ratio = min_lr_ratio
        self.schedule = schedule
        self.seed = seed
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()
        self._step_losses: list[Tensor] = []  # this rank's, since the last optimizer step

    def setup(self, stage: str) -> None:
        """Refuse data with tokens that the model does not know."""
        needed = getattr(getattr(self.trainer, "datamodule", None), "vocab_size", 0)
        vocab_size = getattr(self.net, "vocab_size", needed)
        if vocab_size < needed:
            raise ValueError(
                f"`model.vocab_size`={vocab_size} is too small for data with {needed} different"
                f" tokens: set `model.vocab_size={needed}`"
            )

    def configure_model(self) -> None:
        """Shard with FSDP2 under Lightning's `ModelParallelStrategy`, once; else do nothing."""
        if self.device_mesh is None or isinstance(self.net, FSDPModule):
            return
        from lightning_fsdp_toy.peers import apply_fsdp2

        apply_fsdp2(self.net, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Make the optimizer, and a schedule that moves once per optimizer step."""
        optimizer = self.make_optimizer(self.parameters())
        factor = WarmupDecay(
            self.warmup_steps, self._total_steps(), self.min_lr_ratio, self.schedule
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, T) to logits (B, T, vocabulary)."""
        logits: Tensor = self.net(tokens)
        return logits

    def on_train_start(self) -> None:
        """Forget losses of an interrupted optimizer step."""
        self._step_losses.clear()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Restart the random numbers for this micro-batch."""
        micro_batch = batch_idx * self.trainer.world_size + self.trainer.global_rank
        torch.manual_seed(derive_seed(self.seed, self.current_epoch, micro_batch))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch."""
        tokens, targets = batch
        loss = token_loss(self.net(tokens), targets)
        self._step_losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the mean loss over all micro-batches of this optimizer step, of all ranks.

        One small all-gather per optimizer step. The losses are added in the order of the
        micro-batches, so that the logged bits do not depend on the world size.
        """
        losses = torch.stack(self._step_losses).float()  # 1D, micro-batches of this rank
        self._step_losses.clear()
        if self.trainer.world_size > 1:
            gathered = self.all_gather(losses)  # (world_size, micro-batches of a rank)
            assert isinstance(gathered, Tensor)
            losses = gathered.t().reshape(-1)
        self.log("train/loss", losses.mean(), prog_bar=True)
        self.log("lr", optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one micro-batch to `val/loss` and `val/perplexity`."""
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one micro-batch to `test/loss` and `test/perplexity`."""
        self._evaluate(batch, "test", self.test_perplexity)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely next token at every position, int64 (B, T)."""
        return self.forward(batch[0]).argmax(dim=-1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how micro-batches are dealt out, which the saved counts of batches depend on."""
        checkpoint[_CHECKPOINT_KEY] = {
            "world_size": self.trainer.world_size,
            "accumulate": self.trainer.accumulate_grad_batches,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make a resumed run go on with the right micro-batch, see Note: Progress.

        Other data modules than this package's keep the counts as they are.
        """
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        saved, datamodule = checkpoint.get(_CHECKPOINT_KEY), self.trainer.datamodule  # type: ignore[attr-defined]
        if saved and "loops" in checkpoint and isinstance(datamodule, MicroBatchDataModule):
            align_progress(
                checkpoint["loops"]["fit_loop"],
                saved_world_size=saved["world_size"],
                saved_accumulate=saved["accumulate"],
                world_size=self.trainer.world_size,
                accumulate=self.trainer.accumulate_grad_batches,
                num_batches=len(datamodule.train_dataloader()),
            )

    def _evaluate(self, batch: Batch, stage: str, perplexity: Perplexity) -> None:
        tokens, targets = batch
        logits = self.net(tokens)
        perplexity.update(logits.float(), targets)
        loss = token_loss(logits, targets)
        self.log(f"{stage}/loss", loss, on_epoch=True, sync_dist=True, batch_size=len(tokens))
        self.log(f"{stage}/perplexity", perplexity, on_epoch=True, batch_size=len(tokens))

    def _total_steps(self) -> int:
        """Return after how many optimizer steps the learning rate is lowest."""
        if self.max_steps is not None:
            return self.max_steps
        if self.trainer.max_steps > 0:
            return self.trainer.max_steps
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            if self.schedule == "constant":
                return 1  # never read
            raise ValueError("a cosine schedule needs an end: set `trainer.max_steps`")
        return int(steps)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, vocabulary), in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
