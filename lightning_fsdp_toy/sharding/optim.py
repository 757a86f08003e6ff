"""Optimizers over shards: which are right, and the gradient norm over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.fully_shard import get_root
from lightning_fsdp_toy.sharding.norm import grad_norm
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.state_dict import cut_state
from lightning_fsdp_toy.sharding.whole import show_faces

__all__ = [
    "ELEMENTWISE_OPTIMIZERS",
    "build_optimizer",
    "check_optimizer",
    "clip_grad_norm_",
    "tell_of_steps",
    "whole_shapes_for",
]

# Optimizers whose update of an element depends on that element alone (and on scalars).
ELEMENTWISE_OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def build_optimizer(
    module: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Build an optimizer for a sharded module where parameters have their original shapes.

    Parameter groups chosen by ``param.ndim``, size or name come out as they would on the whole
    module. After sharding, ``module.parameters()`` yields 1D pieces, so such a choice would go
    wrong without a word.

    Example::

        def make(module):
            params = list(module.parameters())
            return torch.optim.AdamW([
                {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
            ])

        optimizer = build_optimizer(model, make)

    Args:
        module: the module given to ``fully_shard``.
        make: called with ``module``. The parameters it sees exist for it only: keep none of them.
    """
    optimizers: list[torch.optim.Optimizer] = []
    with whole_shapes_for(get_root(module), optimizers):
        optimizers.append(make(module))
    return optimizers[0]


@contextmanager
def whole_shapes_for(root: RootState, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Show parameters of the original shapes, without data; then give optimizers the shards.

    Args:
        root: the sharded model, at rest.
        optimizers: those built inside the block, filled by the caller.
    """
    faces: dict[int, tuple[nn.Parameter, OriginalParameter]] = {}

    def face(original: OriginalParameter) -> nn.Parameter:
        sharded, slot = original.sharded, original.slot
        one = sharded.new_zeros(())  # one element, seen everywhere: a shape without memory
        param = nn.Parameter(one.expand(slot.shape), sharded.requires_grad)
        param.__dict__.update(sharded.__dict__)
        faces[id(param)] = (param, original)
        return param

    with show_faces(root, face):
        yield
    for param, original in faces.values():  # frozen or marked inside the block
        original.sharded.__dict__.update(param.__dict__)
        original.sharded.requires_grad_(param.requires_grad)
        original.sync_requires_grad()
        original.take_hooks(param)
    for optimizer in optimizers:
        give_shards(optimizer, faces)


def give_shards(
    optimizer: torch.optim.Optimizer, faces: dict[int, tuple[nn.Parameter, OriginalParameter]]
) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in faces and param in optimizer.state:  # made when it was built
                entry: dict[str, Any] = optimizer.state.pop(param)
                _, original = faces[id(param)]
                optimizer.state[original.sharded] = cut_state(entry, original)
        group["params"] = [
            faces[id(param)][1].sharded if id(param) in faces else param
            for param in group["params"]
        ]


def check_optimizer(
    root: RootState,
    optimizer: torch.optim.Optimizer,
    allowed: Iterable[type[torch.optim.Optimizer]] = (),
) -> None:
    """Refuse an optimizer that would be silently wrong on shards.

    An optimizer that looks at a whole tensor (its norm, its rows, a matrix product) sees one rank's
    1D piece instead.

    Raises:
        ValueError: its class is neither known to be elementwise nor in ``allowed``, or it holds
            parameters that are not the model's sharded ones.
    """
    cls = type(optimizer)
    if cls not in ELEMENTWISE_OPTIMIZERS and cls not in tuple(allowed):
        raise ValueError(
            f"Optimizer `{cls.__name__}` is not known to update elements independently; on a shard "
            f"it could be silently wrong. If it does, pass `allow_optimizers=({cls.__name__},)`."
        )
    ours = {id(original.sharded) for original in root.originals()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in ours:
                raise ValueError(
                    f"Optimizer `{cls.__name__}` holds a parameter of shape {tuple(param.shape)} "
                    f"that is not a sharded parameter of the model. Build optimizers after "
                    f"sharding (under Lightning: in `configure_optimizers`)."
                )


def tell_of_steps(root: RootState, optimizer: torch.optim.Optimizer) -> None:
    """Let ``root`` know of every step of ``optimizer``, however it is called."""
    ref = weakref.ref(root)

    def begins(*_: Any) -> None:
        alive = ref()
        if alive is not None:
            alive.edits.keep()

    def stepped(*_: Any) -> None:
        alive = ref()
        if alive is not None:
            alive.note_step()

    optimizer.register_step_pre_hook(begins)
    optimizer.register_step_post_hook(stepped)


@torch.no_grad()
def clip_grad_norm_(
    root: RootState, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on whole gradients; returns the norm before clipping.
    """
    params = [param for param in parameters if param.grad is not None]
    norm = grad_norm(root, params, norm_type)
    is_double = any(param.dtype == torch.float64 for param in root.module.parameters())
    scale = torch.clamp(max_norm / ((norm if is_double else norm.float()) + 1e-6), max=1.0)
    scales = {device: scale.to(device) for device in {param.device for param in params}}
    for param in params:
        assert param.grad is not None
        param.grad.mul_(scales[param.device].to(param.grad.dtype))
    return norm
