"""The workers of one rank: started, asked, and ended whatever happens.

Note: who is blamed
    A worker that dies or hangs holds up its peers on other ranks, who complain first. A rank whose
    worker only lost another one says nothing for a moment, so that the rank where it happened
    speaks first; the launcher then ends them all.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from lightning_fsdp_toy.tasks.benchmark.turns import STOP
from lightning_fsdp_toy.tasks.benchmark.worker import WorkerSpec, work

__all__ = ["Crew"]

_PRELOADED = ["lightning_fsdp_toy.launch", "lightning_fsdp_toy.tasks.benchmark.worker"]
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "recvValue failed", "has left: ")
_LATE = ("imed out", "timeout")  # of a wait for another rank
_BLAME_GRACE_S = 2.0
_PEERS_PART = 0.9  # of the time-out: workers wait for each other less long than ranks for them
_LEAVE_S = 10.0  # from the order to leave to the end by force


@dataclass(frozen=True)
class _Worker:
    spec: WorkerSpec
    process: BaseProcess
    connection: Connection

    def __str__(self) -> str:
        return f"the worker of `{self.spec.variant}` on rank {self.spec.rank}"


class Crew:
    """One worker for each variant that has been started; all have ended when the block is left.

    Args:
        timeout_s: Of every wait for a worker.
        run: What workers do instead, see `work`; for tests.
    """

    def __init__(self, timeout_s: float, run: Callable[..., None] | None = None) -> None:
        self.timeout_s = timeout_s
        self.run = run
        self._workers: dict[str, _Worker] = {}
        # A server of this rank's own: workers find its imports done, and end with it.
        multiprocessing.set_forkserver_preload(_PRELOADED)
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        self._context: Any = multiprocessing.get_context(method)

    @property
    def peers_timeout_s(self) -> float:
        """How long workers should wait for each other."""
        return _PEERS_PART * self.timeout_s

    def start(self, spec: WorkerSpec) -> Any:
        """Start a worker, wait until it is ready, and return what it then says."""
        ours, theirs = self._context.Pipe()
        name = f"{spec.variant}-{spec.rank}"
        process = self._context.Process(target=work, args=(spec, theirs, self.run), name=name)
        process.start()
        theirs.close()
        self._workers[spec.variant] = _Worker(spec, process, ours)
        return self._answer(self._workers[spec.variant], "being set up")

    def ask(self, variant: str, kind: str, num_steps: int) -> Any:
        """Let a worker take some steps, and return what it measured."""
        worker = self._workers[variant]
        try:
            worker.connection.send((kind, num_steps))
        except OSError:
            self._blame_dead(worker, "between turns")
        return self._answer(worker, f"{num_steps} step(s), {kind}")

    def _answer(self, worker: _Worker, doing: str) -> Any:
        deadline = time.monotonic() + self.timeout_s
        if not worker.connection.poll(self.timeout_s):
            raise RuntimeError(
                f"{worker} has not answered for {self.timeout_s:g} s ({doing}); see "
                f"{worker.spec.log}, or raise `benchmark.timeout` if it is only slow"
            )
        try:
            status, value = worker.connection.recv()
        except (EOFError, OSError):
            self._blame_dead(worker, doing)
        if status == "done":
            return value
        if any(sign in value for sign in _LATE):
            time.sleep(max(0.0, deadline - time.monotonic()) + _BLAME_GRACE_S)
        elif any(sign in value for sign in _LOST):
            time.sleep(_BLAME_GRACE_S)
        raise RuntimeError(f"{worker} failed ({doing}): {value}; see {worker.spec.log}")

    def _blame_dead(self, worker: _Worker, doing: str) -> NoReturn:
        worker.process.join(timeout=1)
        raise RuntimeError(
            f"{worker} died ({doing}), exit code {worker.process.exitcode}; see {worker.spec.log}"
        )

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for worker in self._workers.values():
            self._dismiss(worker, is_killed=kind is not None)
        deadline = time.monotonic() + _LEAVE_S
        for worker in self._workers.values():
            worker.process.join(timeout=max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    @staticmethod
    def _dismiss(worker: _Worker, is_killed: bool) -> None:
        if is_killed:
            worker.process.kill()
            return
        try:
            worker.connection.send((STOP, 0))
        except OSError:
            pass  # it is gone
