"""What a run reports in the end: `summary.json`, a short table, the HPARAMS tab."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams

__all__ = ["flatten", "largest_over_ranks", "log_hparams", "print_table", "write_summary"]

_MIB = 2**20
# What the HPARAMS tab, which opens with five columns, shows first.
_FIRST_COLUMNS = ("data.batch_size", "devices", "precision", "strategy.name", "trainer.max_steps")
Number = int | float | None


def largest_over_ranks(values: Mapping[str, Number], device: torch.device) -> dict[str, Number]:
    """Return each value's maximum over all ranks; `None` where no rank has one.

    Called on all ranks with the same keys. One all-reduce of 8 bytes a value.
    """
    known = [-1 if value is None else int(value) for value in values.values()]
    tensor = torch.tensor(known, dtype=torch.int64, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return {
        key: None if value < 0 else value
        for key, value in zip(values, tensor.tolist(), strict=True)
    }


def write_summary(run_dir: str, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`; complete or not at all."""
    path = Path(run_dir, "summary.json")
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as dotted ones; values TensorBoard cannot hold become text.

    >>> flatten({"model": {"d_model": 8}, "files": ["a", "b"]})
    {'model.d_model': 8, 'files': "['a', 'b']"}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            is_plain = isinstance(value, bool | int | float | str)
            flat[f"{prefix}{key}"] = value if is_plain else str(value)
    return flat


def log_hparams(
    trainer: L.Trainer, config: Mapping[str, Any], metrics: Mapping[str, Number]
) -> None:
    """Log the flattened config once; in TensorBoard beside the final `metrics`.

    The HPARAMS tab reads the metrics from the scalars of the same names, which must have been
    logged. Those that this run does not have are named for the other runs of a sweep: the tab takes
    the columns from one of them. Called on all ranks; rank 0 writes.
    """
    if not trainer.is_global_zero:
        return
    params = flatten(config)
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(params)
            continue
        logger.hparams.update(params)  # for hparams.yaml
        writer = logger.experiment.file_writer
        experiment, *session = hparams(params, dict.fromkeys(metrics, 0.0))
        _bring_forward(experiment, _FIRST_COLUMNS)
        for part in (experiment, *session):
            if writer is not None:
                writer.add_summary(part)
        logger.save()


def _bring_forward(experiment: Summary, names: Collection[str]) -> None:
    """Mark hyper-parameters as differing between runs: TensorBoard sorts those to the front."""
    plugin_data = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin_data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    plugin_data.content = content.SerializeToString()


def print_table(summary: Mapping[str, Any], num_parameters: int) -> None:
    """Print the run's outcome on the terminal."""
    table = Table(
        title=f"{summary['strategy']}, {summary['world_size']} rank(s), {summary['steps']} steps",
        title_justify="left",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    metrics, measured = summary["metrics"], summary["memory"]["measured"]
    throughput, sent = summary["throughput"], summary["communication"]["measured"]
    rows: list[tuple[str, Number, str]] = [
        ("parameters", num_parameters, ",d"),
        ("train loss", metrics["train/loss"], ".4f"),
        ("validation loss", metrics["val/loss"], ".4f"),
        ("validation perplexity", metrics["val/perplexity"], ".2f"),
        ("tokens per second, all ranks", throughput["tokens_per_s"], ",.0f"),
    ]
    for label, value, form in rows:
        if value is not None:
            table.add_row(label, format(value, form))
    table.add_section()
    for label, value in (
        ("master weights", measured["shards_bytes"]),
        ("gradients", measured["gradients_bytes"]),
        ("optimizer state", measured["optimizer_bytes"]),
        ("kept to gather and reduce in", measured["pool_bytes"]),
        ("unsharded at most", measured["unsharded_peak_bytes"]),
        ("process at most", measured["process_peak_bytes"]),
        ("exchanged per optimizer step", sent["total_bytes"]),
        ("of this sent over connections", sent["wire_bytes"]),
    ):
        if value is not None:
            table.add_row(f"{label}, per rank", f"{value / _MIB:,.2f} MiB")
    Console().print(table)
