"""What is trained in a group of runs that are compared with each other, and how models are made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from lightning_fsdp_toy.lit_module import LitLanguageModel
from lightning_fsdp_toy.tasks import Build, Job, Stage
from lightning_fsdp_toy.tasks.verify.options import (
    CONFIGURED,
    NUM_MICRO_BATCHES,
    VerifyOptions,
    make_optimizer,
)
from lightning_fsdp_toy.tasks.verify.trajectory import Trajectory

__all__ = ["BATCH", "PLAIN", "Family", "VerifyStage", "make_module", "planned_stages"]

PLAIN, BATCH = "plain", "batch"
_CLIP = 0.1  # below any gradient norm of a model that is not trained out
_DROPOUT = 0.1


@dataclass(frozen=True)
class Family:
    """Runs on the same data, whatever their number of ranks.

    Attributes:
        name: ``plain``: one micro-batch a rank and step. ``batch``: a fixed number of micro-batches
            a step, shared by 1, 2 or 4 ranks, with clipping and dropout.
        num_micro_batches: Of an optimizer step, all ranks together.
        clip: Largest gradient norm.
        dropout: Probability, None: as configured.
    """

    name: str
    num_micro_batches: int
    clip: float | None = None
    dropout: float | None = None


@dataclass(frozen=True)
class VerifyStage(Stage):
    """One launch: the runs of a family on some number of ranks, with one optimizer."""

    family: Family
    optimizer: str

    @property
    def accumulate(self) -> int:
        """Micro-batches a rank and step."""
        return self.family.num_micro_batches // self.num_ranks

    def path(self, job: Job) -> Path:
        """Where the weights of this family's plain run are."""
        return scratch_dir(job) / f"{self.optimizer}_{self.family.name}.bin"

    def trajectory(self, job: Job) -> Trajectory:
        """Return the weights of this family's plain run, which has ended."""
        return Trajectory(self.path(job))


def scratch_dir(job: Job) -> Path:
    """Where files are kept that only the runs need."""
    return Path(job.run_dir, "scratch")


def planned_stages(job: Job, options: VerifyOptions) -> tuple[list[VerifyStage], str]:
    """Return the stages in order, and why rows e and f are not whole, if they are not."""
    world_size, rows = job.config["world_size"], set(options.rows)
    has_dropout = "dropout" in job.config["model"]
    configured = job.config["model"].get("dropout") or None
    plain = Family(PLAIN, world_size)
    batch = Family(
        BATCH, NUM_MICRO_BATCHES, _CLIP, (configured or _DROPOUT) if has_dropout else None
    )
    sizes: tuple[int, ...] = (1, 2, 4) if "e" in rows else (2, 4) if "f" in rows else ()
    reason = ""
    if NUM_MICRO_BATCHES % world_size:
        sizes, reason = (), f"{NUM_MICRO_BATCHES} micro-batches do not divide over {world_size}"
    elif job.config["accelerator"] == "cuda" and torch.cuda.device_count() < 4:
        count = torch.cuda.device_count()
        sizes = tuple(size for size in sizes if size <= count)
        reason = f"{count} GPU(s) are too few for all of 1, 2 and 4 ranks"
    stages = []
    for optimizer in options.optimizers:
        if rows & {"a", "b", "c", "d", "f"}:
            stages.append(VerifyStage(world_size, plain, optimizer))
        stages += [VerifyStage(size, batch, optimizer) for size in sizes]
    return stages, reason if rows & {"e", "f"} else ""


def make_module(job: Job, build: Build, stage: VerifyStage) -> LitLanguageModel:
    """Make the model with the same initial weights in every run, and what trains it."""
    L.seed_everything(job.config["seed"], workers=True, verbose=False)
    options = VerifyOptions.of(job.config)
    dropout = stage.family.dropout
    model = build("model") if dropout is None else build("model", dropout=dropout)
    make: Callable[..., torch.optim.Optimizer] = make_optimizer(stage.optimizer, job, build)
    max_steps = job.config["lit_module"].get("max_steps") or options.steps
    module = build("lit_module", model=model, optimizer=make, max_steps=max_steps)
    assert isinstance(module, LitLanguageModel)
    return module


def optimizer_label(job: Job, name: str) -> str:
    """Return how an optimizer is called in the table."""
    if name != CONFIGURED:
        return name
    return str(job.choices.get("optimizer") or job.config["optimizer"]["_target_"].split(".")[-1])
