"""Who measures what when: the same on every rank, decided on rank 0.

Note: rounds
    All workers of all variants live at once, blocked; one variant at a time takes a turn::

        round 1    toy_fsdp | ddp | fsdp | floor
        round 2    floor | fsdp | ddp | toy_fsdp
        round 3    ddp | fsdp | floor | toy_fsdp

    Machines drift, so a time says little, but the ratio of two times in one round says much. Every
    turn begins with a step that does not count: others have run meanwhile, and nothing of the
    variant's is left in the caches of the processor.
"""

import platform
import statistics
import time
from typing import Any

import torch.distributed as dist

from lightning_fsdp_toy.tasks.benchmark.crew import Crew
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import (
    Measured,
    RankResult,
    compare,
    describe_noise,
)
from lightning_fsdp_toy.tasks.benchmark.turns import MEMORY, TIME, WIRE

__all__ = ["Conductor", "gather", "share"]

_TURN_S = 1.0  # of a turn, if the number of steps is not given
_MEMORY_STEPS = 2
_WIRE_TURNS = 3  # of one step; whatever else sends adds: the least counts


def share(value: Any) -> Any:
    """Return the value of rank 0; a collective of the ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order; a collective of the ranks."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class Conductor:
    """Measures variants that have been started.

    Args:
        crew: This rank's workers.
        options: Of the task.
        num_parameters: Of the model.
    """

    def __init__(self, crew: Crew, options: BenchmarkOptions, num_parameters: int) -> None:
        self.crew = crew
        self.options = options
        self.result = RankResult(platform.node(), num_parameters)

    def note_ready(self, variant: str, facts: dict[str, Any]) -> None:
        """A variant is set up."""
        self.result.variants[variant] = Measured(**facts)

    def warm_up(self) -> None:
        """Take some steps, and decide how many make a turn."""
        seconds = [
            max(gather(self.crew.ask(name, TIME, self.options.warm_up)))
            for name in self.result.variants
        ]
        wanted = max(1, round(_TURN_S / statistics.median(seconds)))
        self.result.num_steps = share(self.options.steps or wanted)

    def measure_memory(self) -> None:
        """Look at the memory of every worker over some steps."""
        for name, measured in self.result.variants.items():
            found = self.crew.ask(name, MEMORY, _MEMORY_STEPS)
            measured.rss_bytes, measured.pss_bytes = found["rss_bytes"], found["pss_bytes"]

    def measure_wire(self) -> None:
        """Count what goes over the network while only one variant runs."""
        for name, measured in self.result.variants.items():
            counts = [self.crew.ask(name, WIRE, 1) for _ in range(_WIRE_TURNS)]
            known = [count for count in counts if count is not None]
            measured.wire_bytes = min(known, default=None)

    def measure_time(self) -> None:
        """Take turns, round by round, until the ratios are sure or there are enough rounds."""
        start_s, number = time.monotonic(), 0
        while share(self._wants_more(number, time.monotonic() - start_s)):
            own = {name: self._time_turn(name) for name in self._order(number)}
            slowest = gather(own)
            for name, measured in self.result.variants.items():
                measured.step_s.append(max(each[name] for each in slowest))
            number += 1

    def _order(self, number: int) -> list[str]:
        """Return whose turn it is in a round: others first every time, and both ways round."""
        names = list(self.result.variants)
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        return order if number % 2 == 0 else order[::-1]

    def _time_turn(self, name: str) -> float:
        self.crew.ask(name, TIME, 1)
        seconds: float = self.crew.ask(name, TIME, self.result.num_steps)
        return seconds

    def _wants_more(self, number: int, seconds: float) -> bool:
        options = self.options
        if number < options.rounds:
            return True
        if number >= options.max_rounds or seconds > options.max_s:
            return False
        times = {name: measured.step_s for name, measured in self.result.variants.items()}
        return bool(describe_noise(compare(times), number, options.max_spread))
