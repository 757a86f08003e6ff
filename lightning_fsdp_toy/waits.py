"""The members of a strategy in which a rank waits for others, and what ends such waits early.

Note: where ranks that ran unequal numbers of batches meet
    A rank with fewer batches than the others leaves its loop while they wait for it in a
    collective of the next step. It must wait somewhere, too, or it would go on to something else
    and end well while the others fail. So all ranks meet at the end of every loop over batches and
    at the start of every further epoch of training; there the stall detector finds and names them.

Note: SIGTERM
    Lightning's handler broadcasts: whatever collective it interrupts on one rank meets that
    broadcast on another, and both hang. Before every training batch Lightning broadcasts again,
    outside of any named wait, and takes an error of it for "no signal". Here the handler only takes
    note; before every training batch the ranks agree whether any of them has been told to stop, so
    that all stop at the same batch and may save what they have. The exit code is 143.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy import process_group
from lightning_fsdp_toy.sharding.stalls import StallDetector, stall_detector

__all__ = ["NamedWaits"]

_SIGTERM_EXIT_CODE = 143  # 128 + SIGTERM


class NamedWaits(ParallelStrategy):
    """Barriers, broadcasts and reductions that end with a message when they are in vain."""

    _stalls: StallDetector | None = None
    _has_sigterm = False
    _agreement_group: dist.ProcessGroup | None = None  # None: the default group

    def watch_for_stalls(self, trainer: Trainer) -> None:
        """A run of ``trainer`` begins on all ranks."""
        self._stalls = stall_detector()
        self._has_sigterm = False
        if self._stalls is not None:
            self._stalls.begin_run()
            self._stalls.describe = partial(_describe_progress, trainer)
            if dist.get_backend() == "nccl" and self._agreement_group is None:
                self._agreement_group = dist.new_group(backend="gloo")  # never waits for the device
        trainer._signal_connector._sigterm_notifier_fn = (  # type: ignore[method-assign]
            self._note_sigterm
        )
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = (  # type: ignore[method-assign]
            self._agree_on_sigterm
        )

    def end_watch(self) -> None:
        """The run has ended, in whatever way."""
        if self._stalls is not None:
            self._stalls.describe = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            exception.code = _SIGTERM_EXIT_CODE  # Lightning would report success
        if self._stalls is not None:
            self._stalls.leave(exception)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        if batch_idx == 0 and self.lightning_module.current_epoch > 0:
            self.barrier("start of an epoch")

    @override
    def on_train_end(self) -> None:
        self.barrier("end of training")
        self._agree_on_sigterm()

    @override
    def on_validation_end(self) -> None:
        self.barrier("end of validation")

    @override
    def on_test_end(self) -> None:
        self.barrier("end of testing")

    @override
    def on_predict_end(self) -> None:
        self.barrier("end of prediction")

    @override
    def barrier(self, name: str | None = None) -> None:
        process_group.barrier(self.root_device, name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return process_group.broadcast(obj, src)

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> Tensor | Any:
        return process_group.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Any:
        return process_group.all_gather(tensor, group, sync_grads)

    def _note_sigterm(self, signum: int, _: Any) -> None:
        """The handler of SIGTERM; passes it on to the ranks this process has started."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not self._has_sigterm and self.launcher is not None:
            self.launcher.kill(signum)
        self._has_sigterm = True
        if trainer.state.fn != TrainerFn.FITTING:  # there the loop looks after each batch
            trainer._signal_connector.received_sigterm = True

    def _agree_on_sigterm(self) -> None:
        """Stop on all ranks if any of them has been told to."""
        assert self.lightning_module is not None
        flag = torch.tensor([self._has_sigterm], dtype=torch.uint8)
        if dist.is_initialized():
            with process_group.waiting("agreement on SIGTERM", self._agreement_group):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._agreement_group)
        if flag.item():
            self.lightning_module.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException


def _describe_progress(trainer: Trainer) -> str:
    """Say which batch a rank is at."""
    if trainer.training:
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return f"{ready} training batches begun in epoch {trainer.current_epoch}"
    if trainer.sanity_checking or trainer.evaluating:
        ready = trainer._evaluation_loop.batch_progress.current.ready
        return f"{ready} {'test' if trainer.testing else 'validation'} batches begun"
    if trainer.predicting:
        return f"{trainer.predict_loop.batch_progress.current.ready} prediction batches begun"
    return ""
