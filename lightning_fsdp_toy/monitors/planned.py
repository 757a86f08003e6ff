"""The formulas' values beside the measured ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_fsdp_toy.monitors.monitor import MIB, Monitor, Values, root_of
from lightning_fsdp_toy.planner import read_sizes
from lightning_fsdp_toy.sharding import RootState

__all__ = ["PlanMonitor"]

logger = logging.getLogger(__name__)

_STATES: dict[type[torch.optim.Optimizer], int] = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.SGD: 0,
}
_CHARTS = {
    "memory": ("shards", "unsharded", "reduce", "pool", "gradients", "optimizer"),
    "comm": ("all_gather", "reduce_scatter", "all_reduce"),
}


class PlanMonitor(Monitor):
    """Logs `plan/*`, what the formulas say of each value that other monitors measure.

    In TensorBoard's Custom Scalars each stands in one chart with the measured one. Warns, once for
    each, where the two differ by more than `tolerance`.

    Under this package's strategy and automatic optimization only.

    Args:
        every_n_steps: see `Monitor`.
        tolerance: part of the planned value that the measured one may differ by.
    """

    group = "plan"
    names_rank = False

    def __init__(self, every_n_steps: int | None = None, tolerance: float = 0.02) -> None:
        super().__init__(every_n_steps)
        if not tolerance >= 0:
            raise ValueError(f"`tolerance`: expected a number of at least 0, got {tolerance!r}")
        self.tolerance = tolerance
        self._warned: set[str] = set()
        self._planned_root: RootState | None = None
        self._num_batches = 0  # since the last measurement
        self._trained: tuple[bool, ...] = ()  # which flat parameters were when it was last planned
        self._is_even = False  # all steps since the last log had the same work to do

    @override
    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._num_batches = 0
        root = root_of(trainer)
        if stage != "train" or root is None or not pl_module.automatic_optimization:
            return
        if self._planned_root is not root:  # another model: another `fit`
            self._planned_root, self._trained = root, ()
            self._warned.clear()
            for each in trainer.loggers:
                if isinstance(each, TensorBoardLogger) and trainer.is_global_zero:
                    each.experiment.add_custom_scalars(_layout())

    @override
    def pause(self, trainer: L.Trainer) -> Any:
        return self._num_batches

    @override
    def resume(self, trainer: L.Trainer, state: Any) -> None:
        self._num_batches = state

    @override
    def is_per_step(self, name: str) -> bool:
        return True

    @override
    def note_batch(self, batch: Any) -> None:
        self._num_batches += 1

    @override
    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Values:
        root = root_of(trainer)
        if stage != "train" or root is None or self._planned_root is not root:
            return {}
        trained = tuple(flat.is_trainable for flat in root.flats)
        # Not the first: its first step gathers one unit more, see `sent_bytes`.
        self._is_even, self._trained = trained == self._trained, trained
        planned = plan(trainer, root, self._num_batches, max(1, self.num_steps))
        self._num_batches = 0
        return {f"{name}_mib": value / MIB for name, value in planned.items()}

    @override
    def note_logged(self, values: Mapping[str, float]) -> None:
        if "plan/shards_mib" not in values or not self._is_even:
            return
        for group, names in _CHARTS.items():
            for name in names:
                # Both are those of the rank that has most: the last rank may own less.
                of_plan, found = f"plan/{name}_mib", f"{group}/{name}_mib"
                if of_plan in values and found in values:
                    self._compare(name, values[of_plan] * MIB, values[found] * MIB)

    def _compare(self, name: str, planned: float, measured: float) -> None:
        if name in self._warned:
            return
        if abs(measured - planned) > self.tolerance * planned + 0.5:
            self._warned.add(name)
            rank_zero_warn(
                f"{name}: planned {planned:,.0f} bytes, measured {measured:,.0f}: the formulas of "
                f"`planner/formulas.py` do not hold for this model (units that run twice, in "
                f"another order or not at all, trained parameters that no optimizer clears?)"
            )


def plan(
    trainer: L.Trainer, root: RootState, micro_batches: int | None = None, steps: int = 1
) -> dict[str, float]:
    """Return what the formulas say of a run's memory and of the bytes of an optimizer step.

    `peak` is the largest sum of all kinds but activations.

    Args:
        trainer: of the run.
        root: of its model.
        micro_batches: of a rank in `steps` (the last of an epoch may have fewer); None: what the
            Trainer accumulates in one.
        steps: optimizer steps; bytes are the mean over them.
    """
    sizes = read_sizes(root)
    if micro_batches is None:
        micro_batches = trainer.accumulate_grad_batches * steps
    is_last_only = getattr(trainer.strategy, "gradient_sync", "") == "last_micro_batch"
    sent = sizes.sent_bytes(micro_batches, steps if is_last_only else micro_batches)
    planned: dict[str, float] = {
        "shards": sizes.shards_bytes,
        "unsharded": sizes.unsharded_peak_bytes,
        "pool": sizes.pool_bytes,
        "gradients": sizes.gradients_bytes,
        **{name: num_bytes / steps for name, num_bytes in sent.items()},
    }
    accumulates = micro_batches > steps
    # Every unit its reduce buffer: no formula.
    keeps_buffers = is_last_only and (accumulates or trainer.accumulate_grad_batches > 1)
    if not keeps_buffers:
        planned["reduce"] = sizes.reduce_peak(accumulates)
    optimizer = _optimizer_bytes(trainer.optimizers)
    if optimizer is not None:
        planned["optimizer"] = optimizer
        if not keeps_buffers:
            planned["peak"] = sizes.peak_bytes(
                optimizer, keeps_gradients=True, accumulates=accumulates
            )
    return planned


def _optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int | None:
    """Return the bytes of this rank's optimizer state, None if an optimizer is not known.

    Every trained parameter's piece has tensors like it and, for Adam, a step count of 4 bytes.
    """
    total = 0
    for optimizer in optimizers:
        if type(optimizer) not in _STATES:
            return None
        for group in optimizer.param_groups:
            extra = bool(group.get("amsgrad")) + bool(group.get("momentum"))
            num_tensors = _STATES[type(optimizer)] + extra
            count = 4 if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) else 0
            for param in group["params"]:
                if param.requires_grad or param in optimizer.state:
                    total += num_tensors * param.numel() * param.element_size() + count
    return total


def _layout() -> dict[str, dict[str, list[object]]]:
    """The charts of TensorBoard's Custom Scalars."""
    return {
        f"planned and measured: {group}": {
            # Regular expressions: `memory/x_mib/max_rank` does not belong there.
            f"{name} (MiB)": ["Multiline", [f"^{group}/{name}_mib$", f"^plan/{name}_mib$"]]
            for name in names
        }
        for group, names in _CHARTS.items()
    }
