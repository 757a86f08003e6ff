"""Pictures of one training step, as files and in TensorBoard's image tab."""

from __future__ import annotations

from pathlib import Path

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
from lightning_fsdp_toy.monitors.planned import plan
from lightning_fsdp_toy.monitors.recording import StepRecorder, root_of

__all__ = ["Pictures"]


class Pictures(StepRecorder):
    """Draws one step of rank 0, and who owns what.

    ==================  ==========================================================================
    `units.png`         what every unit did when
    `memory.png`        tensor bytes over the step by kind, and the formula's largest sum
    `bytes.png`         bytes sent by operation, counted and by the formula
    `ownership.png`     which rank owns which slice of which parameter
    ==================  ==========================================================================

    Under this package's strategy only; rank 0 draws at the end of training.

    Args:
        directory: where the files go; made if needed.
        first_step: the batch that is drawn, counted from the start of this run. The order of units
            is known from the second on.
    """

    def __init__(self, directory: str, first_step: int = 2) -> None:
        super().__init__(first_step, num_steps=1)
        self.directory = Path(directory)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        root = root_of(trainer)
        if root is None or not trainer.is_global_zero:
            return
        figures = {"ownership": ownership_figure(root)}
        if self.recording is not None and self.recording.steps:
            planned = plan(trainer, root)
            figures["units"] = units_figure(self.recording, trainer.world_size)
            figures["memory"] = memory_figure(self.recording, planned)
            figures["bytes"] = bytes_figure(self.recording, planned)
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            image = _render(figure)
            figure.savefig(self.directory / f"{name}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    step = trainer.global_step
                    logger.experiment.add_image(f"pictures/{name}", image, step, dataformats="HWC")


def _render(figure: Figure) -> np.ndarray:
    """Draw; return the pixels, (height, width, 3), uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: np.ndarray = np.array(canvas.buffer_rgba())
    return pixels[..., :3]
