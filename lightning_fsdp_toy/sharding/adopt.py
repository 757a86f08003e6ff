"""Optimizers that were built before sharding, for whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.fully_shard import get_root
from lightning_fsdp_toy.sharding.optim import give_shards

__all__ = ["adopt_optimizers"]


@contextmanager
def adopt_optimizers(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Let optimizers that hold the whole parameters of ``module`` go on with its shards.

    ``module`` is sharded inside the block. Afterwards every parameter group has the sharded face of
    each parameter it had, in the same order and with the same options; state that exists already
    (Adagrad makes it when it is built, others when they have stepped or loaded) is cut. Groups
    chosen by ``param.ndim`` or size are therefore right, which they are not where an optimizer is
    built for shards.

    Example::

        optimizer = torch.optim.AdamW(model.parameters())
        with adopt_optimizers(model, [optimizer]):
            fully_shard(model)

    Args:
        module: the module given to ``fully_shard`` inside the block.
        optimizers: built for its parameters. What else they hold stays as it is.

    Raises:
        ValueError: an optimizer has state for parameters on the meta device, which have no values.
    """
    for optimizer in optimizers:
        _refuse_meta_state(optimizer)
    before = [
        (home, name, param)
        for home in module.modules()
        for name, param in home._parameters.items()
        if param is not None
    ]
    yield
    originals = get_root(module).originals()
    at_home = {(home, name): original for original in originals for home, name in original.homes}
    faces = {id(param): (param, at_home[home, name]) for home, name, param in before}
    for optimizer in optimizers:
        give_shards(optimizer, faces)
        _state_to_devices(optimizer)


def _refuse_meta_state(optimizer: torch.optim.Optimizer) -> None:
    values = (value for entry in optimizer.state.values() for value in entry.values())
    if any(isinstance(value, Tensor) and value.is_meta for value in values):
        raise ValueError(
            f"`{type(optimizer).__name__}` has made state for parameters on the meta device, which "
            f"have no values yet. Shard the model first, then build the optimizer for its "
            f"parameters."
        )


def _state_to_devices(optimizer: torch.optim.Optimizer) -> None:
    """Bring state with an element per parameter element to where its parameter is."""
    for param, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                entry[key] = value.to(param.device)
