"""Ends waits that can never end: ranks that wait for each other in different places.

Every wait of the core and of the strategy goes through ``StallDetector.waiting``. A thread looks in
now and then; only when a wait lasts does it write down where this rank is and read what the others
wrote (see the note in ``stall_notes``). In an ordinary step a wait costs a few attribute writes.

Note: how a blocked wait is interrupted
    gloo can abort nothing, but when one receive of a group times out it closes all connections of
    the group, and every wait in it raises. The watchdog thread therefore asks for a message that
    nobody sends and lets it time out after a millisecond. The group cannot be used any more; the
    reason is in the store before that, so that whoever notices the closed connections can name it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding.stall_notes import (
    Note,
    key_of,
    ranks_in_vain,
    tell_departure,
    tell_place,
    tell_places,
)

__all__ = ["StallDetector", "StallError", "stall_detector"]

logger = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=10)  # of one question; it is asked about keys that exist
_RANKS_PER_POLL_S = 64  # larger worlds look less often: every stuck rank reads every note
_COURTESY_S = 1.5  # after another rank's error: time for it to end with its own traceback
_NO_SUCH_TAG = 0x7F5DABC


class StallError(RuntimeError):
    """A wait was ended because what it waited for can never come; the text names all ranks."""


class _Wait:
    """The context manager of one wait."""

    __slots__ = ("detector", "group", "number", "operation", "outer", "unit", "verdict")

    def __init__(
        self,
        detector: StallDetector,
        operation: str,
        unit: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.detector = detector
        self.operation = operation
        self.unit = unit
        self.group = group
        self.number = 0
        self.outer: _Wait | None = None
        self.verdict: str | None = None

    def __enter__(self) -> None:
        detector = self.detector
        key = self.operation, self.unit, self.group
        self.number = detector.entered[key] = detector.entered[key] + 1
        if self.number == 1 and self.group not in detector.members:
            detector.members[self.group] = detector.ranks_of(self.group)
        self.outer = detector.current
        detector.current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detector.current = self.outer
        if not isinstance(error, RuntimeError) or isinstance(error, StallError):
            return
        detector = self.detector
        verdict = self.verdict or detector.find_reason()
        if verdict is not None:
            place = tell_place(self.operation, self.unit, self.number)
            if error.__context__ is None and detector.others_raised():
                time.sleep(_COURTESY_S)  # what went wrong there is to be read first
            raise StallError(
                f"rank {detector.rank} of {detector.world_size}: {place} cannot end: {verdict}"
            ) from error


class StallDetector:
    """Knows where this rank waits and, when that lasts, where the others do (see the notes).

    Args:
        store: reached by all ranks; the detector works on a clone, with a connection of its own.
        rank: of this process.
        world_size: number of ranks.
        after_s: seconds after which a wait is looked into.

    Attributes:
        describe: says where the run is (which batch), for the message; called in a thread.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, after_s: float = 2.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.after_s = after_s
        self.describe: Callable[[], str] | None = None
        self.current: _Wait | None = None
        self.entered: Counter[tuple[str, str, dist.ProcessGroup | None]] = Counter()
        self.members: dict[dist.ProcessGroup | None, list[int]] = {}  # ranks of each group
        self._run = 0
        self._left = ""
        self._written = ""
        self._seen: _Wait | None = None  # at the last look
        self._since = 0.0
        self._doomed: _Wait | None = None  # found to be in vain, not told yet
        self._before: dict[int, str] = {}  # notes at the last poll
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        if world_size > 1:
            own = store.clone()  # type: ignore[attr-defined]
            own.set_timeout(_STORE_TIMEOUT)
            # A store may outlive a process group; every rank has made as many detectors in it.
            number = own.add(f"stalls/{rank}", 1)
            self._store = dist.PrefixStore(f"stalls/{number}", own)
            self._store.set(str(rank), "")
            self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
            self._thread.start()

    def waiting(self, operation: str, unit: str, group: dist.ProcessGroup | None = None) -> _Wait:
        """Return a context manager for one wait.

        Entered once for every collective, on all ranks of the group in the same order.

        Args:
            operation: what is waited for.
            unit: of which unit; may be empty.
            group: whose ranks are waited for; all ranks if None.

        Raises:
            StallError: in the block's place when the wait was interrupted, or when the process
                group failed in it and another rank has said why.
        """
        return _Wait(self, operation, unit, None if group is dist.group.WORLD else group)

    def begin_run(self) -> None:
        """A new run of all ranks begins: what ranks said about the end of earlier ones is void."""
        self._run += 1
        self._left = ""

    def leave(self, reason: BaseException | str) -> None:
        """Tell the other ranks that this one has left the common run, and why.

        They stop as soon as they wait for it. Nothing is said about a stall they know of.
        """
        if self._thread is None or isinstance(reason, StallError) or os.getpid() != self._pid:
            return
        self._left = reason if isinstance(reason, str) else _describe_error(reason)
        with suppress(RuntimeError):  # the store has gone with its rank
            self._write(self.current)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=1.0)
            self._thread = None

    def find_reason(self) -> str | None:
        """Return why a wait of this rank has failed, if some rank has said it."""
        if self._thread is None or os.getpid() != self._pid:
            return None
        try:
            verdict = self._read_verdict()
            if verdict is None:
                notes = self._parse(self._read())
                gone = {rank: note for rank, note in notes.items() if self._is_gone(note)}
                verdict = tell_departure(gone) if gone else None
        except RuntimeError:  # the store has gone with its rank
            return None
        return verdict

    def others_raised(self) -> bool:
        """Whether another rank ends, or handles, an error of its own."""
        with suppress(RuntimeError):  # the store has gone with its rank
            notes = self._parse(self._read())
            return any(
                note.handling or note.left for rank, note in notes.items() if rank != self.rank
            )
        return False

    def ranks_of(self, group: dist.ProcessGroup | None) -> list[int]:
        """Return the ranks that a wait in ``group`` needs; all for None."""
        if group is None:
            return list(range(self.world_size))
        return list(dist.get_process_group_ranks(group))

    # -- the watchdog ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(max(self.after_s / 2, self.world_size / _RANKS_PER_POLL_S)):
            try:
                self._look()
            except RuntimeError as error:  # the store has gone, the connections will, too
                logger.debug("rank %d no longer watches for stalls: %s", self.rank, error)
                return

    def _look(self) -> None:
        wait, now = self.current, time.monotonic()
        if wait is None or wait is not self._seen:
            self._seen, self._since, self._before = wait, now, {}
            if not self._left:
                self._put("")
            return
        if now - self._since < self.after_s:
            return
        if wait.verdict is not None:
            logger.error("rank %d hangs, and cannot be interrupted: %s", self.rank, wait.verdict)
            self._since = float("inf")
            return
        self._write(wait)
        verdict = self._read_verdict() or self._judge()
        if verdict is not None and self.current is wait:
            wait.verdict = verdict
            _interrupt(wait.group)

    def _write(self, wait: _Wait | None) -> None:
        """Write down where this rank is, unless that is there already."""
        entered = {
            key_of(operation, unit, self.members[group]): number
            for (operation, unit, group), number in list(self.entered.items())
        }
        note = Note(
            run=self._run,
            operation=wait.operation if wait is not None else "",
            unit=wait.unit if wait is not None else "",
            number=wait.number if wait is not None else 0,
            members=self.members[wait.group] if wait is not None else [],
            entered=entered,
            progress=self.describe() if self.describe is not None else "",
            handling=_exception_of(self._main),
            left=self._left,
        )
        self._put(json.dumps(note))

    def _put(self, text: str) -> None:
        with self._lock:
            if text != self._written:
                self._store.set(str(self.rank), text)
                self._written = text

    def _read(self) -> dict[int, str]:
        """Return what every rank has written; empty until all ranks have a detector."""
        keys = [str(rank) for rank in range(self.world_size)]
        if not self._store.check(keys):
            return {}
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys]
        return {rank: value.decode() for rank, value in enumerate(values)}

    def _parse(self, texts: dict[int, str]) -> dict[int, Note]:
        return {rank: Note(*json.loads(text)) for rank, text in texts.items() if text}

    def _read_verdict(self) -> str | None:
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def _is_gone(self, note: Note) -> bool:
        return bool(note.left) and not note.operation and note.run >= self._run

    def _judge(self) -> str | None:
        """Return why this rank's wait is in vain; None if it may not be."""
        texts = self._read()
        notes = self._parse(texts)
        gone = {rank: note for rank, note in notes.items() if self._is_gone(note)}
        stuck = {
            rank: note
            for rank, note in notes.items()
            if note.operation and self._before.get(rank) == texts[rank]
        }
        self._before = texts
        if self.rank not in ranks_in_vain(stuck, set(gone)):
            return None
        waiting = {rank: note for rank, note in notes.items() if note.operation}
        others = set(range(self.world_size)) - waiting.keys() - gone.keys()
        if others and not gone and self._doomed is not self.current:
            self._doomed = self.current  # by the next look they may be waiting, too
            return None
        verdict = tell_places(waiting, gone, others)
        # The first to say it is believed, so that all ranks raise the same.
        return self._store.compare_set("verdict", "", verdict).decode()


def _interrupt(group: dist.ProcessGroup | None) -> None:
    """Make every wait in ``group`` raise (see the note on interrupting)."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None, "the process group is gone"
    if dist.get_backend(group) != "gloo":
        group.abort()
        return
    peer = 1 if dist.get_rank(group) == 0 else 0
    with suppress(RuntimeError):  # it always times out
        work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NO_SUCH_TAG)
        assert work is not None, "this rank is not in the group"
        work.wait(timedelta(milliseconds=1))


def _describe_error(error: BaseException) -> str:
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _exception_of(thread: int) -> str:
    """Describe the exception a thread is handling; empty if none."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return _describe_error(error) if isinstance(error, BaseException) else ""


# -- the detector of this process ---------------------------------------------------------------


_made: list[tuple[dist.ProcessGroup, StallDetector]] = []  # at most one


def stall_detector() -> StallDetector | None:
    """Return the detector of the default process group, made on first use; None without a group.

    The first call is made by all ranks.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _made and _made[0][0] is group:
        return _made[0][1]
    if _made:
        _made.pop()[1].close()
    if group is None:
        return None
    detector = StallDetector(group.get_group_store(), group.rank(), group.size())
    _made.append((group, detector))
    return detector
