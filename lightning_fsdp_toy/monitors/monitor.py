"""What all monitors share: when they measure, how ranks are compared, where values are logged.

Note: when a monitor logs
    In training on the step axis of the loss, every `every_n_steps` optimizer steps (of the Trainer:
    batches after which it stepped, however many optimizers there are): what happened since the last
    time, not a sample. In validation, test and prediction once, at the end, with the stage in the
    tag (`memory/validate/process_mib`). A validation inside training interrupts: what training did
    until then is logged first, but not in the middle of an accumulation, which then goes on as if
    there had been no validation. The sanity check is left out.

Note: ranks
    A value `memory/x` is the largest of any rank, `memory/x/mean` the mean over ranks and
    `memory/x/max_rank` the rank that has the largest; what adds up over ranks (tokens per second)
    is one value, the sum. All monitors of a Trainer share one small all-gather when they log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.sharding import RootState

__all__ = ["MIB", "Monitor", "root_of"]

MIB = 2**20
Values = dict[str, float | None]


class Monitor(Callback):
    """Measures in every stage and logs between steps; see the notes at the top.

    Args:
        every_n_steps: optimizer steps between two logs; None: the Trainer's `log_every_n_steps`.

    Raises:
        ValueError: `every_n_steps` is no whole number above 0.
    """

    group = ""  # first part of its tags
    added: frozenset[str] = frozenset()  # names whose values add up over ranks
    names_rank = True  # mean and rank of the largest are logged, too, but not of `by_unit/...`

    def __init__(self, every_n_steps: int | None = None) -> None:
        is_number = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and not (is_number and every_n_steps >= 1):
            raise ValueError(
                f"`every_n_steps`: expected a whole number of at least 1, or null for the "
                f"Trainer's log_every_n_steps, got {every_n_steps!r}"
            )
        self.every_n_steps = every_n_steps
        self.num_steps = 0  # since the last measurement: optimizer steps, elsewhere batches
        self._pending: tuple[str, Values] | None = None  # stage, values
        self._stage = ""
        self._last_step = 0  # of training
        self._is_within_step = False  # gradients of batches wait for those of others
        self._paused: tuple[int, Any] | None = None  # steps, and what `pause` returned

    # -- what a monitor does --------------------------------------------------------------------

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start to measure."""

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Values:
        """Return this rank's values since `begin` or the last call.

        The same names on all ranks; None where there is none.
        """
        raise NotImplementedError

    def pause(self, trainer: L.Trainer) -> Any:
        """Return what `resume` needs: a validation begins in the middle of an optimizer step."""

    def resume(self, trainer: L.Trainer, state: Any) -> None:
        """Go on to measure as if there had been no validation."""

    def is_per_step(self, name: str) -> bool:
        """Whether a value is one of an optimizer step."""
        return False

    def note_batch(self, batch: Any) -> None:
        """A batch is done."""

    def note_logged(self, values: Mapping[str, float]) -> None:
        """What all monitors are about to log, after the comparison of ranks; on every rank."""

    # -- training -------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_within_step, self._paused = False, None
        self._begin(trainer, pl_module, "train")

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.note_batch(batch)
        self._is_within_step = trainer.fit_loop._should_accumulate()
        if self._is_within_step:
            return
        self.num_steps += 1
        self._last_step = _loss_step(trainer)
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self._last_step + 1) % every == 0:
            self._pending = "train", self.measure(trainer, pl_module, "train")
            self.num_steps = 0
        self._flush_after_last(trainer, self._last_step)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_rest(trainer, pl_module)
        self.end(trainer, pl_module)

    # -- other stages ---------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit" and self._is_within_step:
            self._paused = self.num_steps, self.pause(trainer)
        elif trainer.state.fn == "fit":
            self._log_rest(trainer, pl_module)
        self._begin(trainer, pl_module, "validate")

    @override
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if not trainer.sanity_checking:
            self._note_evaluated(batch)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._end_evaluation(trainer, pl_module)
        if self._paused is not None:
            (self.num_steps, state), self._paused = self._paused, None
            self._stage = "train"
            self.resume(trainer, state)
        elif trainer.state.fn == "fit":
            self._begin(trainer, pl_module, "train")

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(trainer, pl_module, "test")

    @override
    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._note_evaluated(batch)

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_evaluation(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(trainer, pl_module, "predict")

    @override
    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._note_evaluated(batch)

    @override
    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_evaluation(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.end(trainer, pl_module)

    def end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training is over, in whatever way: give back what `begin` took."""

    # -- shared ---------------------------------------------------------------------------------

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stage, self.num_steps = stage, 0
        self.begin(trainer, pl_module, stage)

    def _note_evaluated(self, batch: Any) -> None:
        self.note_batch(batch)
        self.num_steps += 1

    def _log_rest(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the steps since the last log, before something interrupts training."""
        if self._stage == "train" and (self.num_steps or self._is_within_step):
            values = self.measure(trainer, pl_module, "train")
            if self._is_within_step:  # training ended there: values of whole steps are unknown
                values = {k: None if self.is_per_step(k) else v for k, v in values.items()}
            self._pending = "train", values
        self.num_steps = 0
        step = _loss_step(trainer) if self._is_within_step else self._last_step
        self._flush_after_last(trainer, step)

    def _end_evaluation(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.num_steps:
            self._pending = self._stage, self.measure(trainer, pl_module, self._stage)
        self.num_steps = 0
        self._flush_after_last(trainer, _loss_step(trainer))

    def _flush_after_last(self, trainer: L.Trainer, step: int) -> None:
        """Log what this Trainer's monitors have measured, if this is the last one of them."""
        monitors = [each for each in trainer.callbacks if isinstance(each, Monitor)]  # type: ignore[attr-defined]
        if self is not monitors[-1]:
            return
        own: Values = {}
        added: set[str] = set()
        plain: set[str] = set()
        for monitor in monitors:
            (stage, values), monitor._pending = monitor._pending or ("train", {}), None
            place = "" if stage == "train" else f"{stage}/"
            for name, value in values.items():
                tag = f"{monitor.group}/{place}{name}"
                own[tag] = value
                if name in monitor.added:
                    added.add(tag)
                elif not monitor.names_rank or "/" in name:
                    plain.add(tag)
        if not own:
            return
        logged = _over_ranks(trainer, own, added, plain)
        for monitor in monitors:
            monitor.note_logged(logged)
        if trainer.is_global_zero:
            _write(trainer, logged, step)


def _loss_step(trainer: L.Trainer) -> int:
    """Return the step at which Lightning logs the loss of the batch that runs.

    Its own monitors ask the same.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _over_ranks(
    trainer: L.Trainer, own: Values, added: set[str], plain: set[str]
) -> dict[str, float]:
    """Compare ranks: one all-gather of 8 bytes a value, on all ranks."""
    known = [math.nan if value is None else float(value) for value in own.values()]
    rows = torch.tensor([known], dtype=torch.float64)
    if trainer.world_size > 1:
        # By the strategy, which tells who waits where if ranks disagree about the end.
        gathered = trainer.strategy.all_gather(rows[0].to(trainer.strategy.root_device))
        assert isinstance(gathered, Tensor)
        rows = gathered.cpu().reshape(trainer.world_size, len(known))
    logged: dict[str, float] = {}
    for tag, column in zip(own, rows.t().tolist(), strict=True):
        present = [value for value in column if not math.isnan(value)]
        if not present:
            continue
        if tag in added:
            logged[tag] = sum(present)
            continue
        logged[tag] = max(present)
        if tag not in plain:
            logged[f"{tag}/mean"] = sum(present) / len(present)
            logged[f"{tag}/max_rank"] = column.index(logged[tag])
    return logged


def _write(trainer: L.Trainer, values: Mapping[str, float], step: int) -> None:
    """Write to all loggers; to TensorBoard as one event, which costs far less than one a value."""
    for logger in trainer.loggers:
        writer = logger.experiment.file_writer if isinstance(logger, TensorBoardLogger) else None
        if writer is not None:  # it is closed at the end of a run, and opened by the next log
            parts = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_summary(Summary(value=parts), step)
        else:
            logger.log_metrics(dict(values), step=step)


def root_of(trainer: L.Trainer) -> RootState | None:
    """Return the sharded model under this package's strategy."""
    try:
        root = getattr(trainer.strategy, "root", None)
    except (ValueError, AssertionError):  # not sharded yet
        return None
    return root if isinstance(root, RootState) else None
