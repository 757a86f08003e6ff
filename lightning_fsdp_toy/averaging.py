"""Weight averaging in shards: every rank averages its own pieces.

Note: averages of pieces
    Lightning's ``WeightAveraging`` copies the module in its ``setup``, before it is sharded: a
    whole copy on every rank, which then no longer fits the parameters beside it. Here its average
    is built after sharding from what this rank holds, one piece for each parameter and all
    buffers::

        rank 0    sharded parameters  [##] [#] [ ]       average  [##] [#] [ ]
        rank 1    sharded parameters  [# ] [#] [##]      average  [# ] [#] [##]

    The arithmetic is torch's ``AveragedModel``, for which a piece is a parameter like any other.
    An averaging function acts on each element alone, so the average of the pieces is the piece of
    the average. Checkpoints are those of an unsharded run: the average under ``state_dict``, the
    weights that training goes on with under ``current_model_state``, whole or as shards.

    Only rank 0's buffers count, as everywhere; the others' averages follow before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging, weight_averaging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_fsdp_toy.checkpointing import ShardedCheckpointing
from lightning_fsdp_toy.sharding import RootState
from lightning_fsdp_toy.sharding.build import broadcast_buffers
from lightning_fsdp_toy.sharding.sharded_checkpoint import ShardOfTensor

__all__ = ["ShardedAverage", "adapt_averaging", "attach_averages"]


class ShardedAverage(AveragedModel):
    """What ``WeightAveraging`` keeps as its average under a sharding strategy.

    Made like an ``AveragedModel``, but of no module: it holds nothing until ``attach``.

    Args:
        model: not copied.
        device: where the average is kept.
        avg_fn: see ``AveragedModel``.
        multi_avg_fn: see ``AveragedModel``.
        use_buffers: average buffers too; else they follow the model's.
    """

    strategy: ShardedCheckpointing

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(nn.Module(), device, avg_fn, multi_avg_fn, use_buffers)
        self._device = device

    def attach(self, strategy: ShardedCheckpointing) -> None:
        """Start from a copy of this rank's pieces of the weights."""
        self.__dict__["strategy"] = strategy
        pieces = _Pieces(strategy.root)
        self.__dict__["root"] = strategy.root
        self.module = pieces.copy(self._device)

    def is_of(self, root: RootState) -> bool:
        """Whether its pieces are cut like those of ``root``."""
        return self.__dict__.get("root") is root

    @override
    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(_Pieces(self.strategy.root))

    @torch.no_grad()
    def meet(self) -> None:
        """Make the model show its pieces, and buffers equal on all ranks; a collective."""
        root = self.strategy.root
        root.rest()
        root.sync_buffers()
        broadcast_buffers(list(self.module.buffers()), root.mesh.world)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the average and of the model."""
        self.meet()
        current = _Pieces(self.strategy.root)
        for ours, theirs in zip(_tensors(self.module), _tensors(current), strict=True):
            before = ours.data.clone()
            ours.data.copy_(theirs.data)
            theirs.data.copy_(before)

    @override
    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return what an ``AveragedModel`` of the whole module would, whole or as shards."""
        pieces = [*_Pieces(self.strategy.root).parameters()]
        self.swap()
        try:
            state = self.strategy.lightning_module_state_dict()
        finally:
            self.swap()
        average_of = dict(zip(map(id, pieces), self.module.parameters(), strict=True))
        for key, value in state.items():
            if isinstance(value, ShardOfTensor):  # it refers to the model's own memory
                average = average_of[id(value.original.sharded)]
                state[key] = ShardOfTensor(value.original, average.detach())
        whole = {f"module.{key}": value for key, value in state.items()}
        return {"n_averaged": self.n_averaged.detach().clone(), **whole}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Take the average from the model, into which the strategy has loaded it."""
        self.take_current()
        self.n_averaged.copy_(state_dict["n_averaged"])

    @torch.no_grad()
    def take_current(self) -> None:
        """Make the average equal to the model."""
        self.meet()
        current = _Pieces(self.strategy.root)
        for ours, theirs in zip(_tensors(self.module), _tensors(current), strict=True):
            ours.data.copy_(theirs.data)


class _Pieces(nn.Module):
    """This rank's parameters and all buffers of a model at rest, in its own order."""

    def __init__(self, root: RootState) -> None:
        super().__init__()
        root.rest()
        for index, param in enumerate(root.module.parameters()):
            self.register_parameter(f"parameter_{index}", param)
        for index, buffer in enumerate(root.module.buffers()):
            self.register_buffer(f"buffer_{index}", buffer)

    def copy(self, device: int | torch.device | None) -> nn.Module:
        """Return a module with copies of the same tensors."""
        copied = nn.Module()
        for name, param in self.named_parameters():
            value = param.detach().to(device, copy=True)
            copied.register_parameter(name, nn.Parameter(value, param.requires_grad))
        for name, buffer in self.named_buffers():
            copied.register_buffer(name, buffer.detach().to(device, copy=True))
        return copied


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def adapt_averaging(trainer: Trainer) -> None:
    """Make averaging callbacks right in shards; called before their ``setup``.

    Raises:
        ValueError: one of them cannot be.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ValueError(
                f"`{type(callback).__name__}` copies and averages whole modules, which no rank "
                f"holds under `{type(trainer.strategy).__name__}`. Use `WeightAveraging` (equal "
                f"weights, with `torch.optim.swa_utils.SWALR` as the scheduler) or "
                f"`EMAWeightAveraging` instead: they are averaged in shards."
            )
        if isinstance(callback, WeightAveraging):
            for name, method in _METHODS.items():
                callback.__dict__[name] = partial(method, callback)


def attach_averages(trainer: Trainer) -> None:
    """Give averages their pieces; called when the model has been sharded."""
    strategy = trainer.strategy
    assert isinstance(strategy, ShardedCheckpointing)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging) or callback._average_model is None:
            continue
        average = callback._average_model
        if trainer.state.fn == TrainerFn.FITTING:
            if not isinstance(average, ShardedAverage):
                raise ValueError(
                    f"`{type(callback).__name__}.setup` makes an average of its own, of the whole "
                    f"module. Leave that to `WeightAveraging.setup`, which averages in shards."
                )
            average.attach(strategy)
        elif not isinstance(average, ShardedAverage) or not average.is_of(strategy.root):
            # Of an earlier fit under another strategy; its weights are in the module.
            callback._average_model = None


# -- methods of the callback, each called with what Lightning calls it with ------------------------


def _setup(
    callback: WeightAveraging, trainer: Trainer, module: LightningModule, stage: str
) -> None:
    """Let ``setup`` make a ``ShardedAverage``, and leave ``configure_model`` to the strategy."""
    if not isinstance(trainer.strategy, ShardedCheckpointing):
        type(callback).setup(callback, trainer, module, stage)
        return
    plain = partial(LightningModule.configure_model, module)
    with (
        _replaced(vars(weight_averaging), "AveragedModel", ShardedAverage),
        _replaced(module.__dict__, "configure_model", plain),
    ):
        type(callback).setup(callback, trainer, module, stage)


def _on_load_checkpoint(
    callback: WeightAveraging,
    trainer: Trainer,
    module: LightningModule,
    checkpoint: dict[str, Any],
) -> None:
    """Load the average and the current weights; the strategy has loaded ``state_dict``."""
    average = callback._average_model
    if not isinstance(average, ShardedAverage):
        type(callback).on_load_checkpoint(callback, trainer, module, checkpoint)
        return
    if "current_model_state" not in checkpoint or "averaging_state" not in checkpoint:
        rank_zero_warn(
            "The checkpoint holds no average: the average starts from the weights in it."
        )
        average.take_current()  # Lightning would copy the whole state on every rank
        return
    before = module.__dict__.get("load_state_dict")

    def load_current(*_: Any, **__: Any) -> None:
        _restore(module.__dict__, "load_state_dict", before)
        average.strategy.load_weights(checkpoint, "current_model_state", module.strict_loading)

    with _replaced(module.__dict__, "load_state_dict", load_current):
        type(callback).on_load_checkpoint(callback, trainer, module, checkpoint)


def _swap_models(callback: WeightAveraging, module: LightningModule) -> None:
    average = callback._average_model
    if isinstance(average, ShardedAverage):
        average.swap()
    else:
        type(callback)._swap_models(callback, module)


def _copy_average_to_current(callback: WeightAveraging, module: LightningModule) -> None:
    if isinstance(callback._average_model, ShardedAverage):
        callback._average_model.meet()
    type(callback)._copy_average_to_current(callback, module)


_METHODS: dict[str, Callable[..., None]] = {
    "setup": _setup,
    "on_load_checkpoint": _on_load_checkpoint,
    "_swap_models": _swap_models,
    "_copy_average_to_current": _copy_average_to_current,
}


@contextmanager
def _replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Put ``value`` under ``name`` for a while."""
    before = names.get(name)
    names[name] = value
    try:
        yield
    finally:
        _restore(names, name, before)


def _restore(names: dict[str, Any], name: str, before: Any) -> None:
    if before is None:
        names.pop(name, None)
    else:
        names[name] = before
