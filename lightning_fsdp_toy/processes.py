"""Starts the ranks of one job with torch's elastic launcher and sees that all of them end.

Note: how ranks end.
A rank that raises writes its error down and leaves at once; the launcher then stops the others
with SIGTERM. A rank that only lost its peer ("connection closed") waits a moment before it
leaves, so that the rank that died first is the one that is blamed. A rank that is told to stop,
or whose launcher is gone, has `shutdown_timeout_s` seconds and then ends itself, even when its
main thread hangs in a collective.
"""

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["LOST_PEER", "Rank", "RankError", "redirect_output", "run_ranks"]

logger = logging.getLogger(__name__)

_BLAME_GRACE_S = 1.0  # how long a rank that lost its peer waits for that peer's death to be seen
LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "recvValue failed", "has left: ")
PRELOADED = ["lightning_fsdp_toy.launch", "lightning_fsdp_toy.tasks.fit"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RankError(RuntimeError):
    """A rank raised or died.

    Args:
        rank: The rank that failed first.
        message: What happened, one line.
        trace: Its traceback, empty if it died without one.
        is_expected: The user can act on `message` alone (a refused setting, not a defect).
        exit_code: What the job should end with.
    """

    def __init__(
        self,
        rank: int,
        message: str,
        trace: str = "",
        is_expected: bool = False,
        exit_code: int = 1,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.message = message
        self.trace = trace
        self.is_expected = is_expected
        self.exit_code = exit_code


@dataclass(frozen=True)
class Rank:
    """What a rank needs to know about the way it was started."""

    log_dir: str  # ranks other than 0 write their output here
    error_dir: str  # a rank that fails leaves its error here
    num_threads: int  # intra-op threads
    shutdown_timeout_s: float  # from the order to stop to the end by force
    environment: dict[str, str] = field(default_factory=dict)  # of the process that starts the job


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    log_dir: str,
    num_threads: int = 1,
    max_restarts: int = 0,
    shutdown_timeout_s: int = 5,
) -> list[Any]:
    """Call `function(*args)` in `num_ranks` new processes of this machine.

    The ranks find the variables that torchrun sets. Nothing of the job stays behind: neither
    processes, nor signal handlers, nor environment variables.

    Args:
        function: A module-level function; `args` and results must be picklable.
        *args: Arguments, the same for all ranks.
        num_ranks: Number of processes.
        log_dir: Where ranks other than 0 write their output, one file each.
        num_threads: Intra-op threads of each rank.
        max_restarts: How many times all ranks are started again after one died.
        shutdown_timeout_s: Seconds from the order to stop to the end by force.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank failed; all others have ended.
        SystemExit: 128 + the signal's number, if this process was told to stop.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)  # too late if `train.py` has done it
    os.makedirs(log_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lightning_fsdp_toy_") as error_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # 0: any free port
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.05,
            start_method=_start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            shutdown_timeout=shutdown_timeout_s,
        )
        rank = Rank(log_dir, error_dir, num_threads, shutdown_timeout_s, dict(os.environ))
        # Ranks that start again must not find the addresses of those that died: a new store for
        # each attempt instead of the launcher's.
        store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if max_restarts else {}
        with _environment(**store), _signal_handlers(), _quiet_elastic():
            try:
                results = elastic_launch(config, _rank_main)(rank, function, args)
            except ChildFailedError as failure:
                raise _first_error(failure, error_dir) from None
            except SignalException as stop:
                raise SystemExit(128 + int(stop.sigval)) from None
    return [results[number] for number in range(num_ranks)]


def redirect_output(log_dir: str, rank: int) -> None:
    """Append this process's output to its file in `log_dir`; rank 0 keeps the terminal."""
    if rank == 0:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.makedirs(log_dir, exist_ok=True)
    log = os.open(
        Path(log_dir, f"rank_{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _rank_main(rank: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The life of one rank."""
    number = int(os.environ["RANK"])
    elastic = {name: os.environ[name] for name in os.environ if _is_elastic(name)}
    os.environ.clear()  # the fork server's, perhaps of an earlier job
    os.environ.update(rank.environment, OMP_NUM_THREADS=str(rank.num_threads), **elastic)
    torch.set_num_threads(rank.num_threads)
    redirect_output(rank.log_dir, number)
    _end_in_time(rank.shutdown_timeout_s)
    with _ErrorReport(rank.error_dir, number):
        return function(*args)


def _is_elastic(name: str) -> bool:
    """Whether the elastic launcher sets this variable in its ranks."""
    prefixes = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
    return name in ("RANK", "WORLD_SIZE") or name.startswith(prefixes)


def _end_in_time(timeout_s: float) -> None:
    """End this process `timeout_s` after an order to stop, or after its launcher is gone.

    Signal handlers of Python wait for the main thread, which may hang in a collective; the
    wake-up socket does not.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    parent = multiprocessing.parent_process()

    def watch(_: socket.socket) -> None:
        launcher = [] if parent is None else [parent.sentinel]
        while True:
            if reader not in wait([reader, *launcher]):
                number = int(signal.SIGTERM)
                os.kill(os.getpid(), number)
                break
            stops = [number for number in reader.recv(64) if number in _SIGNALS]
            if stops:
                number = stops[0]
                break
        time.sleep(timeout_s)
        os._exit(128 + number)

    # The thread keeps the writing end alive.
    threading.Thread(target=watch, args=(writer,), name="end-in-time", daemon=True).start()


class _ErrorReport:
    """Writes down what ended a rank early, and makes its exit code say so."""

    def __init__(self, error_dir: str, rank: int) -> None:
        self.path = Path(error_dir, f"{rank}.json")

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(128 + int(signal.SIGINT)) from error
        if type(error).__name__ == "SIGTERMException":  # Lightning's, which has no exit code
            raise SystemExit(128 + int(signal.SIGTERM)) from error
        if isinstance(error, SystemExit):
            if error.code:
                return
            # An exit code of 0 would look like success, and the other ranks would wait for good.
            early = RuntimeError("the rank called `sys.exit` before its job was done")
            error = early.with_traceback(trace)
        text = "".join(traceback.format_exception(error))
        is_lost_peer = any(sign in str(error) for sign in LOST_PEER)
        report = {
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "when": time.time(),
            "message": _one_line(error),
            "trace": text,
            "is_expected": _is_expected(error),
            "is_lost_peer": is_lost_peer,
        }
        self.path.write_text(json.dumps(report), encoding="utf-8")
        if int(os.environ["RANK"]) != 0:
            print(text, file=sys.stderr, flush=True)  # goes into this rank's log
        if is_lost_peer:
            time.sleep(_BLAME_GRACE_S)
        raise SystemExit(1)


def _one_line(error: BaseException) -> str:
    """The error's message, after its class where that says more than "wrong value"."""
    message = " ".join(str(error).split())
    return message if _is_expected(error) else f"{type(error).__name__}: {message}"


def _is_expected(error: BaseException) -> bool:
    """Whether this package, or Lightning's own checks, refused something the user set."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    if not isinstance(error, ValueError | TypeError) or error.__traceback__ is None:
        return False
    *_, last = traceback.walk_tb(error.__traceback__)
    return Path(last[0].f_code.co_filename).is_relative_to(Path(__file__).parent)


def _first_error(failure: ChildFailedError, error_dir: str) -> RankError:
    """The error that ended the job: the earliest that is not the loss of a peer."""
    reports = {
        int(path.stem): json.loads(path.read_text(encoding="utf-8"))
        for path in Path(error_dir).glob("*.json")
    }
    rank, first = failure.get_first_failure()
    last_attempt = max((report["attempt"] for report in reports.values()), default=0)
    causes = {
        number: report
        for number, report in reports.items()
        if report["attempt"] == last_attempt and (not report["is_lost_peer"] or number == rank)
    }
    if not causes:
        name = f" ({first.signal_name()})" if first.exitcode < 0 else ""
        is_stopped = first.exitcode in (-int(signal.SIGTERM), 128 + int(signal.SIGTERM))
        message = f"the process ended with exit code {first.exitcode}{name}"
        return RankError(rank, message, exit_code=128 + int(signal.SIGTERM) if is_stopped else 1)
    rank = min(causes, key=lambda number: (causes[number]["is_lost_peer"], causes[number]["when"]))
    report = causes[rank]
    return RankError(rank, report["message"], report["trace"], report["is_expected"])


def _start_method() -> str:
    """The fastest start method of this platform that gives each rank a fresh process."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """Apply `changes` and put the environment back in the end."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put signal handlers back: the elastic launcher leaves its own."""
    is_main = threading.current_thread() is threading.main_thread()
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items() if is_main else ():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence the launcher's own log: its failures are reported as one `RankError`."""
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
    ]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
