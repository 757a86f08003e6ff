"""Communication of a run, from the ledger: bytes, waits, overlap, bandwidth."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_fsdp_toy.monitors.monitor import MIB, Monitor, Values, root_of
from lightning_fsdp_toy.sharding import Ledger
from lightning_fsdp_toy.sharding.ledger import CollectiveTotal

__all__ = ["CommunicationMonitor"]

_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "control")


class CommunicationMonitor(Monitor):
    """Logs `comm/*` under this package's strategy: means over the steps since the last log.

    =========================  ===================================================================
    `<operation>_mib`          that others get of a rank in an optimizer step (else: in a batch)
    `total_mib`                sum of all operations
    `wire_mib`                 of these, what the process group carried (in shared memory: none)
    `by_unit/<unit>_mib`       the same by unit, all operations
    `exposed_wait_ms`          how long the training thread waited for collectives in a step
    `exposed_fraction`         part of the wall time that this is
    `overlap`                  part of the time in flight that nobody waited for
    `bandwidth_mib_per_s`      bytes sent by time in flight, at least (see the note in `ledger.py`)
    =========================  ===================================================================

    Args:
        every_n_steps: see `Monitor`.
        by_unit: log each unit's bytes, too.
    """

    group = "comm"

    def __init__(self, every_n_steps: int | None = None, by_unit: bool = True) -> None:
        super().__init__(every_n_steps)
        self.by_unit = by_unit
        self._before: dict[tuple[str, str], CollectiveTotal] = {}
        self._clock = 0.0
        # Totals and time at the end of the last training batch, until the next one begins.
        self._between: tuple[dict[tuple[str, str], CollectiveTotal], float] | None = None
        self._num_counted = -1  # at that moment

    @override
    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        ledger = _ledger_of(trainer)
        if ledger is not None:
            self._before = ledger.totals()
        self._clock = time.perf_counter()
        self._between = (self._before, self._clock) if stage == "train" else None
        self._num_counted = -1

    @override
    def pause(self, trainer: L.Trainer) -> Any:
        return self._before, self._clock, self._between

    @override
    def resume(self, trainer: L.Trainer, state: Any) -> None:
        self._before, self._clock, self._between = state

    @override
    def is_per_step(self, name: str) -> bool:
        return name.endswith(("_mib", "_ms"))

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Leave out what happened since the last batch: a checkpoint gathers all weights."""
        ledger = _ledger_of(trainer)
        if ledger is None or self._between is None:
            return
        (totals, clock), self._between = self._between, None
        if ledger.num_counted != self._num_counted:
            nothing = CollectiveTotal()
            for key, total in ledger.totals().items():
                since = total - totals.get(key, nothing)
                if since.calls:
                    self._before[key] = self._before.get(key, nothing) + since
        self._clock += time.perf_counter() - clock

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        ledger = _ledger_of(trainer)
        if ledger is not None:
            self._between = ledger.totals(), time.perf_counter()
            self._num_counted = ledger.num_counted

    @override
    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Values:
        ledger = _ledger_of(trainer)
        if ledger is None:
            return {}
        # Between batches (a validation begins, training ends): as of the end of the last one.
        totals, now = self._between or (ledger.totals(), time.perf_counter())
        nothing = CollectiveTotal()
        changes = {key: total - self._before.get(key, nothing) for key, total in totals.items()}
        seconds = now - self._clock
        self._before, self._clock = totals, now

        def sent(operation: str | None = None, unit: str | None = None) -> float:
            return sum(
                change.sent_bytes
                for (an_operation, a_unit), change in changes.items()
                if operation in (None, an_operation) and unit in (None, a_unit)
            )

        steps = max(1, self.num_steps)
        present = {operation for (operation, _), change in changes.items() if change.calls}
        values: Values = {
            f"{name}_mib": sent(name) / steps / MIB if name in present else None
            for name in _OPERATIONS
        }
        values["total_mib"] = sent() / steps / MIB
        values["wire_mib"] = sum(each.wire_bytes for each in changes.values()) / steps / MIB
        if self.by_unit:
            for flat in trainer.strategy.root.flats:  # type: ignore[attr-defined]
                values[f"by_unit/{flat.name}_mib"] = sent(unit=flat.name) / steps / MIB
        waited = sum(change.waited_s for change in changes.values())
        in_flight = sum(change.in_flight_s for change in changes.values())
        values["exposed_wait_ms"] = 1e3 * waited / steps
        values["exposed_fraction"] = waited / seconds if seconds > 0 else None
        values["overlap"] = 1 - waited / in_flight if in_flight > 0 else None
        values["bandwidth_mib_per_s"] = sent() / in_flight / MIB if in_flight > 0 else None
        return values


def _ledger_of(trainer: L.Trainer) -> Ledger | None:
    """Return the ledger under this package's strategy."""
    root = root_of(trainer)
    return None if root is None else root.ledger
