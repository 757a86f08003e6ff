"""The variant `lightning`: the whole job as `train.py` runs it, between batches of which it waits.

Trainer, `toy_fsdp` as configured, loggers, monitors, data loader and learning rate schedule; no
validation, no checkpoints, no progress bar. A turn lasts from the end of one batch, the last hook
of all, to the end of another: whatever the Trainer does for a batch is in it.
"""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from typing_extensions import override

from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.benchmark.plain import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_STEP,
    make_model,
)
from lightning_fsdp_toy.tasks.benchmark.turns import Points, Session

__all__ = ["fit_in_turns"]

_MANY = 10**9  # steps: the schedule of the learning rate hardly moves
_WHOLE_JOB = {  # what is no part of a training step
    "max_steps": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class _Turns(Callback):
    """Waits for the next turn after the last batch of one; ends the fit when told to."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._left = 0  # batches of this turn

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.session.ready(Points(pl_module), {})
        self._wait(trainer)

    @override
    def on_before_backward(self, *args: Any) -> None:
        self.session.points.note(AFTER_FORWARD)

    @override
    def on_after_backward(self, *args: Any) -> None:
        self.session.points.note(AFTER_BACKWARD)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not self._left:
            return  # the one batch after the order to leave
        self.session.points.note(AFTER_STEP)
        self._left -= 1
        if not self._left:
            self.session.end()
            self._wait(trainer)

    def _wait(self, trainer: L.Trainer) -> None:
        self._left = self.session.begin()
        if not self._left:
            trainer.should_stop = True


def fit_in_turns(job: Job, build: Build, sizes: dict[str, int], session: Session) -> None:
    """Train until told to leave; called on every rank, where the process group exists.

    Args:
        job: The job.
        build: Makes what its config describes.
        sizes: Arguments of the model that replace configured ones.
        session: What gives turns.
    """
    config, scratch = job.config, scratch_dir(job)
    model = make_model(build, config["seed"], sizes)
    optimizer = build("optimizer")
    module = build("lit_module", model=model, optimizer=optimizer, max_steps=_MANY)
    left_out = (Checkpoint, ProgressBar)
    callbacks = [
        each
        for each in _build_below(build, config, "callbacks", scratch)
        if not isinstance(each, left_out)
    ]
    trainer = L.Trainer(
        **(config["trainer"] | _WHOLE_JOB),
        strategy=build("strategy"),
        accelerator=config["accelerator"],
        devices=config["devices"],
        num_nodes=config["num_nodes"],
        precision=config["precision"],
        logger=_build_below(build, config, "logger", scratch),
        callbacks=[*callbacks, _Turns(session)],
    )
    trainer.fit(module, datamodule=build("data"))


def scratch_dir(job: Job) -> Path:
    """Where files are kept that nobody needs when the job has ended."""
    return Path(job.run_dir, "scratch")


def _build_below(build: Build, config: dict[str, Any], group: str, folder: Path) -> list[Any]:
    """Make every object of a group of named configs; what they write goes below `folder`."""
    made = []
    for name, node in (config.get(group) or {}).items():
        if node is not None:
            keys = [key for key in ("save_dir", "directory") if key in node]
            made.append(build(f"{group}.{name}", **{key: str(folder) for key in keys}))
    return made
