"""Lightning's finetuning callbacks (``BaseFinetuning``) over sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

__all__ = ["adapt_finetuning", "restore_param_groups"]


def adapt_finetuning(trainer: Trainer) -> None:
    """Let finetuning callbacks add the same parameters on every rank.

    Lightning leaves out parameters *equal* to one that the optimizer has. Pieces of different
    parameters may be equal on a rank, empty ones always are: ranks would have different groups.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            callback.__dict__["finetune_function"] = _finetune_by_identity(callback)


def restore_param_groups(trainer: Trainer) -> None:
    """Let finetuning callbacks rebuild the parameter groups that a resumed run had added.

    They do so in ``on_fit_start``, which Lightning calls before it restores callbacks where weights
    are loaded after ``setup``.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning) and callback._restarting:
            callback.on_fit_start(trainer, trainer.lightning_module)


def _finetune_by_identity(callback: BaseFinetuning) -> Any:
    """Return its ``finetune_function`` with parameters told apart by identity."""
    method = type(callback).finetune_function.__get__(callback)

    @functools.wraps(method)
    def finetune(module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        before = BaseFinetuning.filter_on_optimizer
        BaseFinetuning.filter_on_optimizer = staticmethod(_not_in)  # type: ignore[method-assign]
        try:
            method(module, epoch, optimizer)
        finally:
            BaseFinetuning.filter_on_optimizer = staticmethod(before)  # type: ignore[method-assign]

    return finetune


def _not_in(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [param for param in params if id(param) not in held]
