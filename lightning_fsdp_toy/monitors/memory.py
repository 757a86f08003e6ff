"""Memory of a run: tensor bytes by kind, and of the whole process or device."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from typing_extensions import override

from lightning_fsdp_toy.monitors.counting import ProcessPeak, count_tensor_bytes, process_bytes
from lightning_fsdp_toy.monitors.monitor import MIB, Monitor, Values, root_of
from lightning_fsdp_toy.sharding.memory import KINDS, MemoryCounter, PeakWindow

__all__ = ["MemoryMonitor"]


class MemoryMonitor(Monitor):
    """Logs `memory/*`, in MiB: peaks since the last log.

    ==========================  ==================================================================
    `shards_mib`                master weights
    `unsharded_mib`             gathered weights
    `reduce_mib`                buffers that gradients are reduced in
    `pool_mib`                  memory kept for these two that nothing is in (shared memory)
    `gradients_mib`             gradients that the optimizer sees
    `optimizer_mib`             optimizer state
    `activations_mib`           what autograd saved for backward
    `tensors_mib`               largest sum of these
    `process_mib`               resident memory of the process now (not on CUDA)
    `process_peak_mib`          and at most
    `allocated_mib`             CUDA: of the allocator at most, all tensors and temporaries
    `reserved_mib`              CUDA: what the allocator took from the device at most
    ==========================  ==================================================================

    Under other strategies than this package's `shards_mib` is what this rank holds of the weights,
    and gradients are counted once between logs, before a step; there is no `unsharded_mib`,
    `reduce_mib`, `pool_mib`, `activations_mib` and `tensors_mib`.

    Args:
        every_n_steps: see `Monitor`.
    """

    group = "memory"

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._process = ProcessPeak()
        self._window: PeakWindow | None = None
        self._carried: dict[str, int] = {}  # largest of what a validation interrupted
        self._gradients: int | None = None
        self._optimizer: tuple[list[int], int] = ([], 0)  # number of states, their bytes

    @override
    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        memory = _memory_of(trainer)
        if memory is not None:
            memory.counts_activations = True
            if self._window is None:
                self._window = memory.open_window()
            self._optimizer = [], 0
            self._count_optimizer(trainer, pl_module)
        self._restart(pl_module.device)

    @override
    def pause(self, trainer: L.Trainer) -> Any:
        memory, window = _memory_of(trainer), self._window
        if memory is not None and window is not None:
            memory.close_window(window)
            self._window = memory.open_window()
        return window, self._gradients, self._of_process(trainer.strategy.root_device)

    @override
    def resume(self, trainer: L.Trainer, state: Any) -> None:
        memory, during = _memory_of(trainer), self._window
        self._restart(trainer.strategy.root_device)
        self._window, self._gradients, self._carried = state
        if memory is not None and self._window is not None and during is not None:
            memory.close_window(during)
            memory.reopen_window(self._window)

    def _restart(self, device: torch.device) -> None:
        self._carried = {}
        if self._window is not None:
            self._window.restart()
        self._gradients = None
        self._process.restart()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _of_process(self, device: torch.device) -> dict[str, int]:
        """Largest bytes since the last restart, of the process or the device."""
        if device.type == "cuda":
            peaks: dict[str, int | None] = {
                "allocated_mib": torch.cuda.max_memory_allocated(device),
                "reserved_mib": torch.cuda.max_memory_reserved(device),
            }
        else:
            peaks = {"process_peak_mib": self._process.bytes()}
        known = {name: peak for name, peak in peaks.items() if peak is not None}
        return {name: max(peak, self._carried.get(name, 0)) for name, peak in known.items()}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *a: Any) -> None:
        self._count_optimizer(trainer, pl_module)  # in the batch in which the state appears
        super().on_train_batch_end(trainer, pl_module, *a)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._window is None and self._gradients is None:
            self._gradients = count_tensor_bytes(pl_module).gradients

    @override
    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> Values:
        optimizer = self._count_optimizer(trainer, pl_module)
        values: dict[str, int | None] = {}
        if self._window is not None:
            values |= {f"{kind}_mib": self._window.by_kind[kind] for kind in KINDS}
            values["tensors_mib"] = self._window.total_bytes
        else:
            values["shards_mib"] = count_tensor_bytes(pl_module).parameters
            if stage == "train":
                values |= {"gradients_mib": self._gradients, "optimizer_mib": optimizer}
        device = pl_module.device
        if device.type != "cuda":
            values["process_mib"] = process_bytes()
        values |= self._of_process(device)
        self._restart(device)
        return {name: None if value is None else value / MIB for name, value in values.items()}

    @override
    def end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        memory = _memory_of(trainer)
        if memory is not None and self._window is not None:
            memory.close_window(self._window)
            memory.counts_activations = False
        self._window = None

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_test_end(trainer, pl_module)
        self.end(trainer, pl_module)

    @override
    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        self.end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != "fit":
            self.end(trainer, pl_module)

    def _count_optimizer(self, trainer: L.Trainer, pl_module: L.LightningModule) -> int:
        """Count optimizer state anew when there is more of it; tell the core."""
        sizes = [len(optimizer.state) for optimizer in trainer.optimizers]
        if sizes != self._optimizer[0]:
            counted = count_tensor_bytes(pl_module, trainer.optimizers).optimizer
            self._optimizer = sizes, counted
        memory = _memory_of(trainer)
        if memory is not None:
            memory.set("optimizer", self._optimizer[1])
        return self._optimizer[1]


def _memory_of(trainer: L.Trainer) -> MemoryCounter | None:
    """Return the core's counter under this package's strategy."""
    root = root_of(trainer)
    return None if root is None else root.memory
