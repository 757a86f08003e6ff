"""What a Trainer must be told about a strategy that Lightning does not know."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    ModelSummary,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fsdp_toy.averaging import adapt_averaging, attach_averages
from lightning_fsdp_toy.finetuning import adapt_finetuning
from lightning_fsdp_toy.sharding.state_dict import full_shapes

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding import RootState

__all__ = ["adapt_trainer", "prepare_trainer", "warn_of_idle_options"]


@dataclass
class _Counted:
    """What ``ModelSummary`` reads from a summary, taken while modules showed whole shapes."""

    data: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.data


def prepare_trainer(trainer: Trainer) -> None:
    """Make callbacks ready for a module that will be sharded; called before their ``setup``.

    Raises:
        ValueError: a callback or logger needs the whole module.
    """
    adapt_averaging(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"`{type(callback).__name__}` replaces parameters and masks whole weights, which "
                f"no rank holds under `{type(trainer.strategy).__name__}`. Prune before training "
                f"and make it permanent (`torch.nn.utils.prune.remove`), or train under `ddp`."
            )
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise ValueError(
                f"`TensorBoardLogger(log_graph=True)` traces the module on rank 0 alone, where "
                f"`{type(trainer.strategy).__name__}` holds a part of it. Leave `log_graph` out, "
                f"or log the graph once in a run with devices=1 and another strategy."
            )


def adapt_trainer(trainer: Trainer, root: RootState) -> None:
    """Make evaluation and model summaries right for a sharded module.

    Every evaluation uses ``no_grad``: Lightning's ``inference_mode`` would leave tensors that a
    later training step cannot use; Lightning spares its own FSDP strategy and gloo from it, but not
    strategies it does not know. ``ModelSummary`` callbacks (plain and rich) count whole parameters,
    and finetuning callbacks add the same parameters on every rank.
    """
    fit_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        _sync_after(trainer.lightning_module, name, root)
    attach_averages(trainer)
    adapt_finetuning(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            callback._summary = _summary_of(callback, root)  # type: ignore[method-assign]


def warn_of_idle_options(trainer: Trainer, strategy: Any) -> None:
    """Warn of options of the strategy that change nothing in this run."""
    idle = []
    if strategy.activation_checkpointing_reentrant and not strategy.activation_checkpointing_policy:
        idle.append(
            "`activation_checkpointing_reentrant=True` without `activation_checkpointing_policy`"
        )
    schedules = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if (
        strategy.gradient_sync == "last_micro_batch"
        and trainer.state.fn == TrainerFn.FITTING
        and trainer.lightning_module.automatic_optimization
        and trainer.accumulate_grad_batches == 1
        and not schedules
    ):
        idle.append("`gradient_sync='last_micro_batch'` without `accumulate_grad_batches`")
    for what in idle:
        rank_zero_warn(f"{what} has no effect.")


def _summary_of(callback: ModelSummary, root: RootState) -> Any:
    def summary(trainer: Trainer, module: LightningModule) -> _Counted:
        # An example input is run while parameters are sharded; only counting sees whole shapes.
        made = type(callback)._summary(callback, trainer, module)
        root.settle()
        with full_shapes(root):
            return _Counted(
                made._get_summary_data(),
                made.total_parameters,
                made.trainable_parameters,
                made.model_size,
                made.total_training_modes,
                getattr(made, "total_flops", 0),
            )

    return summary


def _sync_after(module: LightningModule, name: str, root: RootState) -> None:
    """Let whole parameters follow what a method of the module froze or unfroze."""
    method = getattr(type(module), name).__get__(module)

    @functools.wraps(method)
    def with_sync(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        root.sync_frozen()

    module.__dict__[name] = with_sync
