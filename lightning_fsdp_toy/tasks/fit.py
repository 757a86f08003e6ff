"""`task=fit`: train, evaluate before and after, save the last step, report."""

import logging
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_fsdp_toy.models import count_parameters
from lightning_fsdp_toy.monitors import (
    MemoryMonitor,
    Timeline,
    count_tensor_bytes,
    process_peak_bytes,
)
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.summary import (
    Number,
    largest_over_ranks,
    log_hparams,
    print_table,
    write_summary,
)

__all__ = ["fit"]

logger = logging.getLogger(__name__)

_NUM_WARM_UP_STEPS = 1  # optimizer steps that the throughput leaves out
_LAST = "checkpoints/last.ckpt"
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
_NO_HPARAMS = ("callbacks", "logger", "launch", "run_dir", "task")


def fit(job: Job, build: Build) -> float | None:
    """Train the job's model and return the final validation loss, if there was a validation.

    Called on all ranks. Writes `checkpoints/`, the loggers' files and `summary.json` into the run
    dir.
    """
    config = job.config
    L.seed_everything(config["seed"], workers=True, verbose=False)
    model = build("model")
    num_parameters = count_parameters(model).total
    module = build("lit_module", model=model, optimizer=build("optimizer"))
    data = build("data")
    probe, is_dry = Probe(), bool(config["trainer"].get("fast_dev_run"))
    keeps_checkpoints = not is_dry and config["trainer"].get("enable_checkpointing") is not False
    unwanted = switched_off(config["trainer"])
    callbacks: list[Callback] = [
        probe,
        Bookends(
            evaluate_before=config["task"]["evaluate_before_fit"] and config["ckpt_path"] is None,
            last_checkpoint=Path(job.run_dir, _LAST) if keeps_checkpoints else None,
        ),
        *(each for each in build_all(build, config, "callbacks") if not isinstance(each, unwanted)),
    ]
    if config.get("trace"):
        options: dict[str, Any] = {"path": str(Path(job.run_dir, "trace.json"))}
        options |= config["trace"] if isinstance(config["trace"], dict) else {}
        callbacks.append(Timeline(**options))
    trainer = L.Trainer(
        **config["trainer"],
        strategy=config["strategy"] if config["strategy"] == "auto" else build("strategy"),
        accelerator=config["accelerator"],
        devices=config["devices"],
        num_nodes=config["num_nodes"],
        precision=config["precision"],
        logger=build_all(build, config, "logger"),
        callbacks=callbacks,
    )
    trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
    if trainer.received_sigterm:
        raise SystemExit(143)  # 128 + SIGTERM; Lightning would report success
    if not probe.has_ended:
        raise ValueError(
            f"nothing is left to train: `ckpt_path={config['ckpt_path']}` is at step"
            f" {trainer.global_step}; raise `trainer.max_steps` or `trainer.max_epochs`"
        )
    if is_dry:
        return None  # nothing was logged or saved
    summary = make_summary(job, trainer, probe)
    report(job, trainer, summary, num_parameters)
    loss = summary["metrics"]["val/loss"]
    return None if loss is None else float(loss)


def build_all(build: Build, config: dict[str, Any], group: str) -> list[Any]:
    """Make every object of a group of named configs; a name set to null is left out."""
    named = config.get(group) or {}
    return [build(f"{group}.{name}") for name, node in named.items() if node is not None]


def switched_off(options: dict[str, Any]) -> tuple[type[Callback], ...]:
    """Return the classes of callbacks that the Trainer's `options` do not want."""
    kinds: dict[str, type[Callback]] = {
        "enable_checkpointing": Checkpoint,
        "enable_progress_bar": ProgressBar,
    }
    return tuple(kind for key, kind in kinds.items() if options.get(key) is False)


class Bookends(Callback):
    """Evaluates the untrained model at step 0; evaluates and saves the last step.

    All of it happens inside the one `fit`, so that every strategy sets the model up once.
    """

    def __init__(self, evaluate_before: bool, last_checkpoint: Path | None) -> None:
        self.evaluate_before = evaluate_before
        self.last_checkpoint = last_checkpoint
        self.last_step = -1  # the last one that was evaluated

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.evaluate_before:
            self._evaluate(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.last_step = trainer.global_step

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.received_sigterm:
            return
        if self.last_step != trainer.global_step:
            self._evaluate(trainer)
        if self.last_checkpoint is not None:
            trainer.save_checkpoint(self.last_checkpoint)

    @staticmethod
    def _evaluate(trainer: L.Trainer) -> None:
        if not trainer.enable_validation:
            return
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True


class Probe(Callback):
    """Measures speed, memory and communication of the training steps; adds no collectives."""

    def __init__(self) -> None:
        self.num_steps = 0  # optimizer steps of this run
        self.num_tokens = 0  # of this rank, after the warm-up
        self.seconds = 0.0  # after the warm-up, without validation
        self.sent: dict[str, int] = {}  # bytes by operation, all training steps
        self.bytes: dict[str, Number] = {}
        self.has_ended = False  # Lightning skips the end where nothing is left to train
        self._is_timing = False
        self._clock = 0.0
        self._first_step = 0
        self._sent_before: dict[str, int] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._sent_before = _bytes_sent(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if "gradients_bytes" not in self.bytes:
            counted = count_tensor_bytes(pl_module, trainer.optimizers)
            self.bytes["gradients_bytes"] = counted.gradients

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        for operation, num_bytes in _bytes_sent(trainer).items():
            grown = num_bytes - self._sent_before.get(operation, 0)
            self.sent[operation] = self.sent.get(operation, 0) + grown
        self.num_steps = trainer.global_step - self._first_step
        if self._is_timing:
            now = time.perf_counter()
            self.seconds += now - self._clock
            self.num_tokens += batch[0].numel()
            self._clock = now
        elif self.num_steps >= _NUM_WARM_UP_STEPS:
            self._is_timing = True
            _synchronize(pl_module.device)
            self._clock = time.perf_counter()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock -= time.perf_counter()  # stop the clock: only the difference stays

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock += time.perf_counter()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_ended = True
        if self._is_timing:
            start = time.perf_counter()
            _synchronize(pl_module.device)
            self.seconds += time.perf_counter() - start
        counted = count_tensor_bytes(pl_module, trainer.optimizers)
        core = getattr(getattr(trainer.strategy, "root", None), "memory", None)
        is_cuda = pl_module.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(pl_module.device) if is_cuda else None
        if not is_cuda and any(isinstance(each, MemoryMonitor) for each in trainer.callbacks):  # type: ignore[attr-defined]
            peak = getattr(core, "peak_bytes", None)  # without it activations are not counted
        self.bytes = {
            "shards_bytes": counted.parameters,
            "gradients_bytes": self.bytes.get("gradients_bytes"),
            "optimizer_bytes": counted.optimizer,
            "pool_bytes": None if core is None else core.held["pool"],
            "unsharded_peak_bytes": getattr(core, "unsharded_peak_bytes", None),
            "peak_bytes": peak,
            "process_peak_bytes": process_peak_bytes(),
        }


def make_summary(job: Job, trainer: L.Trainer, probe: Probe) -> dict[str, Any]:
    """Put together `summary.json`; called on all ranks."""
    device = trainer.strategy.root_device
    memory = largest_over_ranks(probe.bytes, device)
    sent: dict[str, Number] = {
        f"{name}_bytes": round(probe.sent.get(name, 0) / max(1, probe.num_steps))
        if hasattr(trainer.strategy, "ledger")
        else None
        for name in (*_OPERATIONS, "wire")
    }
    parts = [sent[f"{name}_bytes"] for name in _OPERATIONS]
    sent["total_bytes"] = None if None in parts else sum(part or 0 for part in parts)
    sent["wire_bytes"] = sent.pop("wire_bytes")  # the last
    metrics = {
        name: float(trainer.callback_metrics[name]) if name in trainer.callback_metrics else None
        for name in ("train/loss", "val/loss", "val/perplexity")
    }
    speed: dict[str, float | None] = {"tokens_per_s": None, "step_s": None}
    if probe.num_steps > _NUM_WARM_UP_STEPS:
        speed["tokens_per_s"] = probe.num_tokens * trainer.world_size / probe.seconds
        speed["step_s"] = probe.seconds / (probe.num_steps - _NUM_WARM_UP_STEPS)
    return {
        "task": job.choices["task"],
        "strategy": job.choices["strategy"],
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "steps": trainer.global_step,
        "metrics": metrics,
        "throughput": speed,
        "memory": {"planned": {}, "measured": memory},
        "communication": {"planned": {}, "measured": largest_over_ranks(sent, device)},
    }


@rank_zero_only
def report(job: Job, trainer: L.Trainer, summary: dict[str, Any], num_parameters: int) -> None:
    """Write and print what the run came to; on rank 0."""
    measured = summary["memory"]["measured"]
    parts = [measured[f"{name}_bytes"] for name in ("shards", "gradients", "optimizer")]
    mib = {
        "memory/run_peak_mib": measured["peak_bytes"],
        "memory/run_process_peak_mib": measured["process_peak_bytes"],
        "memory/run_tensors_mib": sum(part or 0 for part in parts),  # of any strategy
    }
    metrics = summary["metrics"]
    extra: dict[str, float | None] = {
        "throughput/run_tokens_per_s": summary["throughput"]["tokens_per_s"],
        **{name: None if size is None else size / 2**20 for name, size in mib.items()},
    }
    known = {name: value for name, value in extra.items() if value is not None}
    for each in trainer.loggers:
        each.log_metrics(known, step=trainer.global_step)
    # The tab opens with the first five of them.
    order = ("train/loss", "val/loss", *extra, "val/perplexity")
    columns = {name: (metrics | extra)[name] for name in order}
    given = job.config["strategy"]
    strategy = {"name": job.choices["strategy"]} | (given if isinstance(given, dict) else {})
    # Without what says nothing about the result and would fill the columns.
    params = {key: value for key, value in job.config.items() if key not in _NO_HPARAMS}
    log_hparams(trainer, params | {"strategy": strategy}, columns)
    write_summary(job.run_dir, summary)
    print_table(summary, num_parameters)
    print(f"tensorboard --logdir {job.run_dir}", flush=True)


def _bytes_sent(trainer: L.Trainer) -> dict[str, int]:
    """Bytes others got of this rank so far by operation, and `wire`: what of them was sent.

    Empty where the strategy keeps no ledger.
    """
    ledger = getattr(trainer.strategy, "ledger", None)
    if ledger is None:
        return {}
    return {**ledger.bytes_by_operation(), "wire": ledger.wire_bytes(*_OPERATIONS)}


def _synchronize(device: torch.device) -> None:
    """Wait for work that the device still has; CPU work is done when its call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
