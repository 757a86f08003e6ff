"""Records a few training steps: what every unit did when, what was held, what was sent."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fsdp_toy.monitors.monitor import root_of
from lightning_fsdp_toy.sharding.ledger import CollectiveRecord
from lightning_fsdp_toy.sharding.observer import MemorySample, Observer, UnitEvent

__all__ = ["Recording", "Span", "StepRecorder", "make_folder"]


@dataclass(frozen=True)
class Span:
    """Something between two times."""

    name: str
    start_s: float
    end_s: float


@dataclass
class Recording:
    """What one rank did in the recorded steps; times are this rank's ``time.perf_counter``.

    Attributes:
        rank: which.
        host: where it runs: ranks of one machine share a clock.
        clock_offset_s: ``time.time() - time.perf_counter()`` there.
        steps: the batches, each with its number.
        optimizer: the optimizer steps.
        units: names of all units, the root first.
        events: of units.
        samples: of the memory held.
        collectives: those that ran in between.
    """

    rank: int
    units: list[str]
    host: str = field(default_factory=platform.node)
    clock_offset_s: float = field(default_factory=lambda: time.time() - time.perf_counter())
    steps: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    events: list[UnitEvent] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)


class StepRecorder(Callback):
    """Records training batches ``first_step`` to ``first_step + num_steps - 1`` of a run.

    Under this package's strategy only; elsewhere nothing is recorded. Batches are counted from 0
    from where this run starts (or resumes).

    Args:
        first_step: the first batch.
        num_steps: how many.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, first_step: int = 0, num_steps: int = 1) -> None:
        for name, value, least in (("first_step", first_step, 0), ("num_steps", num_steps, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"`{name}`: expected a whole number of at least {least}, got {value!r}"
                )
        self.first_step = first_step
        self.num_steps = num_steps
        self.recording: Recording | None = None
        self._observer: Observer | None = None
        self._num_batches = 0
        self._start_s = self._optimizer_s = 0.0
        self._hooks: list[RemovableHandle] = []  # on optimizers

    def begins(self, trainer: L.Trainer) -> bool:
        """Whether the batch that starts is the first one to record."""
        return self._num_batches == self.first_step

    def ends(self, trainer: L.Trainer) -> bool:
        """Whether the batch that ends is the last one to record."""
        return self._num_batches == self.first_step + self.num_steps - 1

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_batches, self.recording = 0, None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        root = root_of(trainer)
        if root is not None and self.begins(trainer) and self._observer is None:
            names = [unit.fqn for unit in root.units]
            self.recording = Recording(trainer.global_rank, names)
            self._start_s = time.perf_counter()
            self._observer = Observer(root.memory)
            root.observers.append(self._observer)
            root.ledger.listeners.append(self.recording.collectives.append)
            for optimizer in trainer.optimizers:
                self._hooks.append(optimizer.register_step_pre_hook(self._note_begin))
                after = optimizer.register_step_post_hook(self._note_step)
                # Before the core's, which may gather the root unit again.
                hooks: Any = optimizer._optimizer_step_post_hooks
                hooks.move_to_end(after.id, last=False)
                self._hooks.append(after)
        else:
            self._start_s = time.perf_counter()

    def _note_begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A step begins; under automatic optimization when its closure, the backward, is over."""
        self._optimizer_s = time.perf_counter()
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else args[1] if len(args) > 1 else None
        if closure is None:
            return None

        def timed() -> Any:
            result = closure()
            self._optimizer_s = time.perf_counter()
            return result

        if is_named:
            return args, {**kwargs, "closure": timed}
        return (args[0], timed, *args[2:]), kwargs  # the first is the optimizer

    def _note_step(self, *_: Any) -> None:
        if self.recording is not None:
            span = Span("optimizer", self._optimizer_s, time.perf_counter())
            self.recording.optimizer.append(span)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        if self._observer is not None and self.recording is not None:
            name = f"batch {self._num_batches}"
            self.recording.steps.append(Span(name, self._start_s, now))
            if self.ends(trainer):
                self._stop(trainer)
        self._num_batches += 1

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop(trainer)

    def _stop(self, trainer: L.Trainer) -> None:
        root, observer = root_of(trainer), self._observer
        self._observer = None
        if root is None or observer is None or self.recording is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        observer.close()
        root.observers.remove(observer)
        recording = self.recording
        root.ledger.flush()
        root.ledger.listeners.remove(recording.collectives.append)
        if not recording.steps:
            return
        # Training may have ended before the last step that was wanted: what came then is no step.
        start_s, end_s = recording.steps[0].start_s, recording.steps[-1].end_s
        recording.events = [each for each in observer.events if each.time_s <= end_s]
        recording.samples = [each for each in observer.samples if each.time_s <= end_s]
        recording.collectives = [
            each
            for each in recording.collectives
            if start_s <= each.start_s and each.end_s <= end_s
        ]


def make_folder(path: Path, key: str) -> None:
    """Make a folder before the training whose results go there.

    Raises:
        ValueError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`{key}`: cannot make the folder {path}: {error.strerror}") from error
