"""The progress bar of rank 0."""

from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override

__all__ = ["ProgressBar"]


class ProgressBar(RichProgressBar):
    """Lightning's rich progress bar for runs that are counted in optimizer steps.

    Lightning counts such a run's batches without accumulation, and names an epoch -2.
    """

    @property
    @override
    def total_train_batches(self) -> int | float:
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        steps_left = trainer.max_steps - trainer.global_step
        batches_left = steps_left * trainer.accumulate_grad_batches
        # Not `completed`: the last batch of the run that was saved counts, too.
        done: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        return min(trainer.num_training_batches, done + batches_left)

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs in (None, -1):
            return f"Epoch {current_epoch}"
        return super()._get_train_description(current_epoch)
