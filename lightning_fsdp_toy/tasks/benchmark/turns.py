"""A worker's side of the pipe: it waits for its turn, takes some steps, and says what it measured.

Idle workers block in `recv`: they take no time from the one whose turn it is.
"""

import time
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor, nn

from lightning_fsdp_toy.monitors.counting import ProcessPeak
from lightning_fsdp_toy.sharding.policy import select_units
from lightning_fsdp_toy.tasks.benchmark.counters import network_bytes, pss_bytes
from lightning_fsdp_toy.tasks.benchmark.device import Device
from lightning_fsdp_toy.tasks.benchmark.plain import IN_BACKWARD

__all__ = ["MEMORY", "STOP", "TIME", "WIRE", "Points", "Session"]

TIME, MEMORY, WIRE, STOP = "time", "memory", "wire", "stop"


class Points:
    """Looks at the memory of this process at the points of a step, while it is on.

    Args:
        net: The model, before others wrap its blocks: its middle one tells when backward is half
            done.
    """

    def __init__(self, net: nn.Module) -> None:
        units = select_units(net)
        self._middle = units[len(units) // 2][1] if units else None
        self._seen: dict[str, int] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._seen = {}
        if self._middle is not None:
            self._hook = self._middle.register_forward_hook(self._hook_output)

    def stop(self) -> dict[str, int]:
        """Look no more; return the largest bytes at each point."""
        seen, self._seen = self._seen or {}, None
        if self._middle is not None:
            self._hook.remove()
        return seen

    def note(self, point: str) -> None:
        """The step is there."""
        if self._seen is not None:
            now = pss_bytes()
            if now is not None:
                self._seen[point] = max(now, self._seen.get(point, 0))

    def _hook_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.note(IN_BACKWARD))


class _Turn(ABC):
    """What is measured around some steps."""

    def __init__(self, device: Device, points: Points) -> None:
        self.device = device
        self.points = points

    @abstractmethod
    def begin(self) -> None:
        """Right before the first step."""

    @abstractmethod
    def end(self, num_steps: int) -> Any:
        """Right after the last step; return what was measured."""


class _Time(_Turn):
    """Seconds of a step, from when all ranks are ready until all are done."""

    def begin(self) -> None:
        self.device.barrier()
        self.start_s = time.perf_counter()

    def end(self, num_steps: int) -> float:
        self.device.barrier()
        return (time.perf_counter() - self.start_s) / num_steps


class _Memory(_Turn):
    """Memory of this process: resident at most, and shared pages by part at some points."""

    def begin(self) -> None:
        self.device.barrier()
        self.peak = ProcessPeak()
        self.peak.restart()
        self.points.start()

    def end(self, num_steps: int) -> dict[str, Any]:
        seen = self.points.stop()
        return {"rss_bytes": self.peak.bytes(), "pss_bytes": seen}


class _Wire(_Turn):
    """Bytes that this machine sent in a step, whichever rank sent them."""

    def begin(self) -> None:
        self.device.barrier()
        self.before = network_bytes()
        self.device.barrier()  # nobody sends before all have looked

    def end(self, num_steps: int) -> int | None:
        self.device.barrier()
        after = network_bytes()
        if after is None or self.before is None or not self.device.counts_wire:
            return None
        return (after - self.before) // num_steps


_TURNS: dict[str, type[_Turn]] = {TIME: _Time, MEMORY: _Memory, WIRE: _Wire}


class Session:
    """One worker's turns.

    Args:
        connection: To the rank that started the worker.
        device: Of this rank.
    """

    def __init__(self, connection: Connection, device: Device) -> None:
        self.connection = connection
        self.device = device

    def ready(self, points: Points, facts: dict[str, Any]) -> None:
        """The variant is set up; `facts` are for the report."""
        self.points = points
        self.connection.send(("done", facts))

    def begin(self) -> int:
        """Wait for the next turn; return the number of steps to take, 0: leave."""
        kind, num_steps = self.connection.recv()
        if kind == STOP:
            return 0
        self._turn = _TURNS[kind](self.device, self.points)
        self._num_steps = int(num_steps)
        self._turn.begin()
        return self._num_steps

    def end(self) -> None:
        """The steps have been taken."""
        self.connection.send(("done", self._turn.end(self._num_steps)))
