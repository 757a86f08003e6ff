"""Ranks of a user's own script by ``spawn``, ``fork`` or ``forkserver``.

Note: ranks that end without a result
    Lightning waits until its processes have ended and then for rank 0's result, for ever if rank 0
    ended well without one: ``sys.exit()``, ``os._exit(0)``, or SIGTERM, which ends a training loop
    with exit code 0. A result that is larger than a pipe holds (64 KiB) is not written before it is
    read, so that rank 0 does not end either. Here the result is read as soon as it is there, and
    ranks that have ended without one are an error.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch.multiprocessing as mp

# Lightning keeps these to itself, but its launchers are built from them.
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _GlobalStateSnapshot,
)
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from lightning_fsdp_toy.processes import LOST_PEER
from lightning_fsdp_toy.sharding import full_state_dict

__all__ = ["ShardedLauncher", "run_processes"]

logger = logging.getLogger(__name__)

_SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
_POLL_S = 0.1
_GRACE_S = 5.0


class ShardedLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, which hands whole weights back to the process that called ``fit``."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        is_fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and is_fitting:
            raise NotImplementedError(
                f"A Trainer fits once under start_method={self._start_method!r}, got a second "
                f"`fit`. Make a new Trainer; its `fit(ckpt_path=...)` goes on from a checkpoint."
            )
        output = run_processes(self, trainer, function, args, kwargs)
        if trainer is None:
            return output
        self._already_fit |= is_fitting
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except SIGTERMException as error:
            error.code = _SIGTERM_EXIT_CODE  # its exit code would be 0
            raise

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        if "_fsdp_root" not in module.__dict__:
            return super()._collect_rank_zero_results(trainer, results)
        state = full_state_dict(module)
        module.__dict__["state_dict"] = lambda: state  # what Lightning's method asks for
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]


def run_processes(launcher: Any, *arguments: Any) -> Any:
    """Start the ranks of a launcher of Lightning's, wait for all, return what rank 0 hands back.

    Args:
        launcher: one of the Trainer or of Fabric.
        *arguments: of its ``_wrapping_function``, between the rank and the queue.

    Raises:
        SIGTERMException: a rank was ended by SIGTERM; exits with 143.
        ProcessExitedException: a rank ended by itself or by another signal.
        ProcessRaisedException: a rank raised; with its traceback.
        RuntimeError: rank 0 ended well, but has handed nothing back.
    """
    method, num_ranks = launcher._start_method, launcher._strategy.num_processes
    _check_missing_main_guard() if method == "spawn" else _check_bad_cuda_fork()
    # A free port is chosen here, so that all ranks use the same.
    os.environ["MASTER_PORT"] = str(launcher._strategy.cluster_environment.main_port)
    queue = mp.get_context(method).SimpleQueue()
    states = [_GlobalStateSnapshot.capture()] if method == "spawn" else []
    started = mp.start_processes(
        launcher._wrapping_function,
        args=(*arguments, queue, *states),
        nprocs=num_ranks,
        start_method=method,
        join=False,
    )
    launcher.procs = started.processes
    received: list[Any] = []  # at most one
    early = RuntimeError(
        f"Rank 0 of {num_ranks} ended with exit code 0 before its function returned, so there "
        f"is no result. Look for `sys.exit` or `os._exit` in what it runs, and return instead."
    )
    is_over = False
    while not is_over:
        try:
            is_over = started.join(timeout=_POLL_S)
        except ProcessExitedException as error:
            _explain(error, num_ranks)
        except ProcessRaisedException as error:
            has_left = started.processes[0].exitcode == 0 and not received and queue.empty()
            if has_left and any(sign in str(error) for sign in LOST_PEER):
                raise early from error
            raise
        if not received and not queue.empty():
            received.append(queue.get())
        if not received and started.processes[0].exitcode == 0 and queue.empty():
            _end(started.processes)  # they would wait for rank 0
            raise early
    if not received:
        raise early
    return received[0]


def _end(processes: list[BaseProcess]) -> None:
    """End processes, by force if they do not end when told to."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=_GRACE_S)
        process.kill()
        process.join()


def _explain(error: ProcessExitedException, num_ranks: int) -> NoReturn:
    """Raise what a rank that ended without an exception of its own means for this process."""
    rank = f"Rank {error.error_index} of {num_ranks}"
    if error.exit_code in (-signal.SIGTERM, _SIGTERM_EXIT_CODE):
        logger.error(
            "%s stopped on SIGTERM, to it or another rank. All ranks and this process end.", rank
        )
        stopped = SIGTERMException()
        stopped.code = _SIGTERM_EXIT_CODE
        raise stopped from None
    how = f"signal {error.signal_name}" if error.signal_name else f"exit code {error.exit_code}"
    message = (
        f"{rank} was ended by {how} and raised nothing: expected it to run until its function "
        f"returns. Its own output may say why; SIGKILL often means that memory ran out."
    )
    raise ProcessExitedException(
        message, error.error_index, error.error_pid, error.exit_code, error.signal_name
    ) from None
