"""The timeline of a few steps on all ranks, as a Chrome trace (Perfetto, chrome://tracing).

Note: lanes
    Each rank is a process with these lanes::

        compute          forward and backward of every unit, the optimizer
        wait             what the training thread waited for (exposed communication)
        communication    collectives of weights and gradients, until each is seen complete
        <unit>           one lane for each: all-gather, unsharded (with the computing inside it),
                         sharded (with the reducing inside it)
        memory           a counter, MiB by kind

    Collectives under way at the same time overlap: each goes to the first of several communication
    lanes that is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_fsdp_toy.monitors.monitor import root_of
from lightning_fsdp_toy.monitors.recording import (
    Recording,
    Span,
    StepRecorder,
    make_folder,
)
from lightning_fsdp_toy.sharding.memory import KINDS

__all__ = ["Timeline", "chrome_trace", "compute_spans", "unit_spans"]

_MIB = 2**20
_COMPUTE, _WAIT, _COMMUNICATION, _UNITS = 0, 1, 2, 100  # numbers of lanes
_MOVES = ("all_gather", "reduce_scatter", "all_reduce")


class Timeline(StepRecorder):
    """Writes one JSON file with the timeline of some training steps, all ranks in it.

    Called on all ranks; rank 0 writes at the end of training. Under this package's strategy only.

    Args:
        path: of the file.
        first_step: first batch, counted from the start of this run.
        num_steps: how many batches.
    """

    def __init__(self, path: str, first_step: int = 0, num_steps: int = 20) -> None:
        super().__init__(first_step, num_steps)
        self.path = Path(path)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(f"`Timeline`: {self.path} will not be written: this is a fast_dev_run")
        elif root_of(trainer) is None:
            rank_zero_warn(
                f"`Timeline`: {self.path} will not be written: only `toy_fsdp` tells what units do,"
                f" and this is {type(trainer.strategy).__name__}"
            )
        elif trainer.is_global_zero:
            make_folder(self.path.parent, "path")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if root_of(trainer) is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.recording is None:
            rank_zero_warn(
                f"`Timeline`: {self.path} was not written: training ended after "
                f"{self._num_batches} batches, before `first_step={self.first_step}` (from 0)"
            )
            return
        transport = trainer.strategy.root.mesh.world  # type: ignore[attr-defined]
        recordings = transport.collect_objects(self.recording, "<timeline>")
        if recordings is not None and trainer.is_global_zero:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(chrome_trace(recordings)), encoding="utf-8")
            partial.replace(self.path)


def chrome_trace(recordings: Iterable[Recording]) -> dict[str, Any]:
    """Return the recordings in the Chrome trace event format.

    Source: the "Trace Event Format" document of the Chromium project.
    """
    recordings = list(recordings)
    clocks: dict[str, float] = {}  # ranks of one machine share a clock: one offset for all
    for recording in recordings:  # against the first machine: seconds since 1970 would be rounded
        clocks.setdefault(recording.host, recording.clock_offset_s - recordings[0].clock_offset_s)
    origin = min(
        (
            each.steps[0].start_s + clocks[each.host]
            for each in recordings
            if each.steps  # none: training ended before the first recorded step
        ),
        default=0.0,
    )
    events: list[dict[str, Any]] = []
    for recording in recordings:
        shift = clocks[recording.host] - origin
        events += _rank_events(recording, shift)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(recording: Recording, shift: float) -> Iterator[dict[str, Any]]:
    rank = recording.rank

    def slices(lane: int, spans: Iterable[Span], category: str) -> Iterator[dict[str, Any]]:
        for span in spans:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": lane,
                "cat": category,
                "name": span.name,
                "ts": 1e6 * (span.start_s + shift),
                "dur": 1e6 * (span.end_s - span.start_s),
            }

    names = {_COMPUTE: "compute", _WAIT: "wait"}
    yield from slices(_COMPUTE, recording.steps, "step")
    yield from slices(_COMPUTE, [*compute_spans(recording), *recording.optimizer], "compute")
    waits = [
        Span(f"{record.operation} {record.unit}", record.end_s - record.waited_s, record.end_s)
        for record in recording.collectives
        if record.waited_s > 0
    ]
    yield from slices(_WAIT, waits, "wait")
    for lane, record in _on_lanes(recording):
        number = _COMMUNICATION + lane
        names[number] = "communication" + (f" {lane + 1}" if lane else "")
        span = Span(f"{record.operation} {record.unit}", record.start_s, record.end_s)
        [event] = slices(number, [span], "communication")
        sizes = ("payload_bytes", "sent_bytes", "wire_bytes")
        event["args"] = {name: getattr(record, name) for name in sizes}
        event["args"]["waited_us"] = 1e6 * record.waited_s
        yield event
    for number, unit in enumerate(recording.units, _UNITS):
        names[number] = unit
        yield from slices(number, unit_spans(recording, unit), "unit")
    for sample in recording.samples:
        held = {k: b / _MIB for k, b in zip(KINDS, sample.held, strict=True)}
        time_us = 1e6 * (sample.time_s + shift)
        yield {"ph": "C", "pid": rank, "name": "memory (MiB)", "ts": time_us, "args": held}
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for lane, name in names.items():
        about = {"ph": "M", "pid": rank, "tid": lane}
        yield {**about, "name": "thread_name", "args": {"name": name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": lane}}


def compute_spans(recording: Recording) -> list[Span]:
    """Return forward and backward of every unit, as spans that nest."""
    open_calls: dict[tuple[str, str], list[float]] = {}
    spans = []
    for time_s, unit, what in recording.events:
        if what in ("forward", "backward"):
            calls = open_calls.setdefault((unit, what), [])
            if what == "forward" or not calls:  # backward comes to a unit more than once
                calls.append(time_s)
        elif what in ("end_forward", "end_backward"):
            phase = what.removeprefix("end_")
            calls = open_calls.get((unit, phase), [])
            if calls:
                spans.append(Span(f"{phase} {unit}", calls.pop(), time_s))
    return spans


def unit_spans(recording: Recording, unit: str) -> list[Span]:
    """Return the states of a unit, and inside them its computing and reducing."""
    if not recording.steps:
        return []
    end_s = recording.steps[-1].end_s
    names = {"gather": "all-gather", "unsharded": "unsharded", "sharded": "sharded"}
    state, since = "sharded", recording.steps[0].start_s
    spans = []
    for time_s, name, what in recording.events:
        if name == unit and what in names and names[what] != state:
            spans.append(Span(state, since, time_s))
            state, since = names[what], time_s
    spans.append(Span(state, since, end_s))
    computing = [
        Span("computing", span.start_s, span.end_s)
        for span in compute_spans(recording)
        if span.name.split(" ", 1)[1] == unit
    ]
    reducing = [
        Span("reducing", record.start_s, record.end_s)
        for record in recording.collectives
        if record.operation in ("reduce_scatter", "all_reduce")
        and record.unit.split(" (")[0] == unit
    ]
    # A `training_step` with several backwards shards and unshards the root unit inside one forward.
    unsharded = [span for span in spans if span.name == "unsharded"]
    return [*spans, *_inside(computing, unsharded), *_inside(reducing, spans)]


def _inside(spans: Iterable[Span], states: Iterable[Span]) -> Iterator[Span]:
    """Cut spans into the parts that lie in one of the states each."""
    for span in spans:
        for state in states:
            start_s, end_s = max(span.start_s, state.start_s), min(span.end_s, state.end_s)
            if start_s < end_s:
                yield Span(span.name, start_s, end_s)


def _on_lanes(recording: Recording) -> Iterator[tuple[int, Any]]:
    """Give every collective that moves parameters or gradients a lane where nothing else is."""
    free_from: list[float] = []
    for record in sorted(recording.collectives, key=lambda each: each.start_s):
        if record.operation not in _MOVES:
            continue
        lanes = (n for n, free_s in enumerate(free_from) if free_s <= record.start_s)
        lane = next(lanes, len(free_from))
        if lane == len(free_from):
            free_from.append(0.0)
        free_from[lane] = record.end_s
        yield lane, record
