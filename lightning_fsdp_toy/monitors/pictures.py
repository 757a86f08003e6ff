"""Pictures of one training step, as files and in TensorBoard's image tab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from typing_extensions import override

from lightning_fsdp_toy.monitors.drawing import (
    bytes_figure,
    memory_figure,
    ownership_figure,
    units_figure,
)
from lightning_fsdp_toy.monitors.monitor import root_of
from lightning_fsdp_toy.monitors.planned import plan
from lightning_fsdp_toy.monitors.recording import StepRecorder, make_folder

__all__ = ["Pictures"]


class Pictures(StepRecorder):
    """Draws one step of rank 0, and who owns what.

    ==================  ==========================================================================
    `units.png`         what every unit did when
    `memory.png`        tensor bytes over the step by kind, and the formula's largest sum
    `bytes.png`         bytes others get by operation, counted and by the formula
    `ownership.png`     which rank owns which slice of which parameter
    ==================  ==========================================================================

    Under this package's strategy only; rank 0 draws at the end of training.

    Args:
        directory: where the files go; made if needed.
        first_step: the optimizer step that is drawn, all its micro-batches, counted from the start
            of this run. The order of units is known from the second on.
    """

    def __init__(self, directory: str, first_step: int = 2) -> None:
        super().__init__(first_step)
        self.directory = Path(directory)
        self._num_steps = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._num_steps = 0
        if self._draws(trainer):
            make_folder(self.directory, "directory")

    @override
    def begins(self, trainer: L.Trainer) -> bool:
        return self._num_steps == self.first_step

    @override
    def ends(self, trainer: L.Trainer) -> bool:
        return self._num_steps > self.first_step

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._num_steps += not trainer.fit_loop._should_accumulate()
        super().on_train_batch_end(trainer, *args)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        root = root_of(trainer)
        if root is None or not self._draws(trainer):
            return
        figures = {"ownership": ownership_figure(root)}
        if self.recording is not None and self.recording.steps:
            is_planned = pl_module.automatic_optimization
            planned = plan(trainer, root, len(self.recording.steps)) if is_planned else {}
            figures["units"] = units_figure(self.recording, trainer.world_size)
            figures["memory"] = memory_figure(self.recording, planned)
            figures["bytes"] = bytes_figure(self.recording, planned)
        for name, figure in figures.items():
            image = _render(figure)
            figure.savefig(self.directory / f"{name}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    step = trainer.global_step
                    logger.experiment.add_image(f"pictures/{name}", image, step, dataformats="HWC")

    def _draws(self, trainer: L.Trainer) -> bool:
        is_dry = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        return trainer.is_global_zero and root_of(trainer) is not None and not is_dry


def _render(figure: Figure) -> np.ndarray:
    """Draw; return the pixels, (height, width, 3), uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: np.ndarray = np.array(canvas.buffer_rgba())
    return pixels[..., :3]
