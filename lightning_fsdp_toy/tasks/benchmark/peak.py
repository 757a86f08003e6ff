"""The largest sum of tensor bytes in a step: measured, and what the closed form needs for it.

Note: the closed form of the peak
    `ShardingSizes.peak_bytes` knows what sharding holds in every phase of a step, but not the
    activations of a model. Those are measured phase by phase in one process that shares nothing
    with anybody (`measure_activations`), so that what several ranks hold beyond the formula shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_fsdp_toy.monitors.counting import count_tensor_bytes
from lightning_fsdp_toy.monitors.live_tensors import LiveTensors
from lightning_fsdp_toy.sharding import get_root
from lightning_fsdp_toy.sharding.memory import MemoryCounter
from lightning_fsdp_toy.sharding.observer import Observer
from lightning_fsdp_toy.tasks.benchmark.plain import AFTER_BACKWARD, PlainSteps

__all__ = ["Activations", "Phases", "TensorPeak", "measure_activations"]

Activations = dict[tuple[str, int], int]
"""Largest bytes of activations in each phase, by its pass and place."""


class TensorPeak(LiveTensors):
    """Measures on the CPU how many bytes of tensors made inside it live at most.

    Memory that ranks share counts wholly, whether or not something is in it.
    """

    def __init__(self) -> None:
        super().__init__([], self._look)
        self.peak_bytes = 0

    def restart(self, model: nn.Module) -> None:
        """Begin anew from what lives now."""
        root = model.__dict__.get("_fsdp_root")
        pool = getattr(root.mesh.shards, "pool", None) if root is not None else None
        if pool is not None:
            self.follow(pool)
        self.peak_bytes = self.bytes

    def _look(self, live: int, is_before: bool) -> None:
        self.peak_bytes = max(self.peak_bytes, live)


class Phases(Observer):
    """Knows in which phase of the formulas a step is.

    Args:
        memory: The root's.
        units: Names of all units, the root first.
        is_serial: Nothing else happens while a unit is reduced (no prefetch).
    """

    def __init__(self, memory: MemoryCounter, units: Sequence[str], is_serial: bool) -> None:
        super().__init__(memory)
        self.is_serial = is_serial
        self.numbers = {unit: number for number, unit in enumerate(units)}
        self.phase = ("forward", 0)

    def note(self, unit: str, what: str) -> None:
        """Something happens now."""
        number, last = self.numbers[unit], len(self.numbers)
        is_root = number == 0
        if what == "backward" and self.phase == ("collect", number):
            return  # its first gradient came before its weights were needed
        if what in ("forward", "backward") and not is_root:
            self.phase = (what, number)
        elif what == "end_forward" and not is_root:
            is_last = number == last - 1
            self.phase = ("forward", last if is_last else number + 1)
        elif what == "collect" and not is_root:
            self.phase = ("collect", number)
        elif what == "collect" and self.phase[0] == "backward" and self.phase[1] == last:
            self.phase = ("collect", last)
        elif what == "backward" and is_root:
            self.phase = ("backward", last)
        elif what == "end_backward" and not is_root:
            self.phase = ("reduce", number) if self.is_serial else ("backward", number - 1)
        elif what == "end_backward":
            self.phase = ("reduce", 0)


class _ActivationCounter(LiveTensors):
    """Notes what lives in each phase beside what the core and the optimizer hold.

    The core counts a buffer after the operation that made it, so what such an operation has just
    made is not looked at; all of its buffers are made empty.
    """

    _MAKE_BUFFERS = ("aten.empty", "aten.new_empty")

    def __init__(self) -> None:
        super().__init__([], self._look)
        self.found: Activations = {}
        self.phases: Phases | None = None  # nothing is noted before there is one
        self.optimizer_bytes = 0
        self._is_buffer = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_buffer = str(func).startswith(self._MAKE_BUFFERS)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, live: int, is_before: bool) -> None:
        if self.phases is not None and (is_before or not self._is_buffer):
            phase, known = self.phases.phase, self.phases.memory.total_bytes + self.optimizer_bytes
            self.found[phase] = max(self.found.get(phase, 0), live - known)


def measure_activations(make: Callable[[], PlainSteps]) -> Activations:
    """Return what lives in each phase of a step beside what the core and the optimizer hold.

    Args:
        make: Makes a sharded model and what trains it.
    """
    counter = _ActivationCounter()
    with counter:
        steps = make()
        root = get_root(steps.model)
        for _ in range(2):  # the order of units is known from the second on
            steps.step()
        is_serial = root.options.num_prefetch == 0
        phases = Phases(root.memory, [unit.fqn for unit in root.units], is_serial)
        root.observers.append(phases)
        counter.optimizer_bytes = count_tensor_bytes(steps.model, [steps.optimizer]).optimizer
        counter.phases = phases

        def note(point: str) -> None:
            if point == AFTER_BACKWARD:
                phases.phase = ("step", 0)

        steps.step(note)
    return counter.found
