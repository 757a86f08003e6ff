"""The entry function and what a user may do with a sharded module.

Note: read this package in this order
    ``layout`` (where elements lie), ``flat_param`` (one tensor and its shard), ``faces`` (what
    modules and optimizers see of it), ``unit`` (one step), ``saved`` (how weights come back),
    ``root`` (the order of everything), ``collectives``. Aside: ``build`` (setup), ``whole``,
    ``state_dict`` and ``sharded_checkpoint`` (weights outside a step), ``optim``.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.sharding.policy import WrapPolicy
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.state_dict import full_model_state
from lightning_fsdp_toy.sharding.whole import hold_unsharded

__all__ = [
    "SHARDING_STRATEGIES",
    "full_state_dict",
    "fully_shard",
    "get_root",
    "register_forward_method",
    "unsharded",
]

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def fully_shard(
    module: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    auto_wrap_policy: WrapPolicy = "auto",
    sharding_strategy: str = "FULL_SHARD",
    transport: str = "auto",
) -> nn.Module:
    """Shard the parameters of ``module`` over the ranks of a process group, in place.

    A collective: every rank calls it with the same model. Rank 0's parameters and buffers win.
    Afterwards ``module.parameters()`` yields sharded parameters (1D pieces, some empty), for which
    the optimizer must be built; between steps a rank holds ``1 / world_size`` of the weights,
    gradients and optimizer state. ``module`` is called and trained as before.

    Example (in each of N processes started by ``torchrun``)::

        dist.init_process_group("gloo")
        model = fully_shard(GPT())
        optimizer = torch.optim.AdamW(model.parameters())
        loss_fn(model(tokens), targets).backward()     # mean over ranks of the gradients
        optimizer.step()

    Args:
        module: the root; may be on the meta device, then it is initialised unit by unit.
        process_group: ranks to shard over; the default group if None. Without an initialised
            process group there is one rank.
        device: where shards live and forward runs; the parameters' own device if None.
        auto_wrap_policy: which submodules become units, see ``policy.select_units``.
        sharding_strategy: ``FULL_SHARD`` (weights are freed between forward and backward),
            ``SHARD_GRAD_OP`` (kept), ``NO_SHARD`` (replicated).
        transport: ``auto``, ``native`` or ``pairwise``, see the note on two transports.

    Returns:
        ``module``.

    Raises:
        ValueError: unknown option, a parameter that cannot be sharded, ranks that differ.
        RuntimeError: ``module`` is sharded already.
    """
    if "_fsdp_root" in module.__dict__:
        raise RuntimeError("This module is sharded already; shard a model once.")
    if sharding_strategy not in SHARDING_STRATEGIES:
        raise ValueError(
            f"`sharding_strategy`: expected one of {', '.join(SHARDING_STRATEGIES)}, "
            f"got {sharding_strategy!r}."
        )
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if device is None:
        param = next(module.parameters(), None)
        device = param.device if param is not None and not param.is_meta else "cpu"
    RootState(
        module, process_group, torch.device(device), auto_wrap_policy, sharding_strategy, transport
    )
    return module


def get_root(module: nn.Module) -> RootState:
    """Return the state of a module that ``fully_shard`` has sharded.

    Raises:
        ValueError: it has not.
    """
    root = module.__dict__.get("_fsdp_root")
    if not isinstance(root, RootState):
        raise ValueError(f"{type(module).__name__} is not the root of a sharded model.")
    return root


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of the whole model on rank 0, an empty one on the other ranks.

    A collective: all ranks call it between steps. Tensors are copies in CPU memory, with the keys
    and shapes of the unsharded module.

    Args:
        module: the module given to ``fully_shard``.
    """
    return full_model_state(get_root(module))


def unsharded(
    root: nn.Module, module: nn.Module | None = None, writeback: bool = True
) -> AbstractContextManager[None]:
    """Show whole weights inside a ``with`` block, outside forward.

    A collective: all ranks enter together. Contexts nest. A rank holds the whole ``module``.

    Args:
        root: the module given to ``fully_shard``.
        module: any module of it; the whole model if None.
        writeback: keep in-place edits made inside the block. Every rank keeps its own part of what
            it wrote itself, so all ranks must write the same.
    """
    return hold_unsharded(get_root(root), module or root, writeback)


def register_forward_method(root: nn.Module, module: nn.Module, name: str) -> None:
    """Make ``module.<name>()`` unshard weights as ``module.forward()`` does.

    Needed only for methods that use parameters directly (``self.weight``); calls of submodules
    inside any method are noticed on their own.

    Args:
        root: the module given to ``fully_shard``.
        module: a module of it.
        name: the method.

    Raises:
        AttributeError: ``module`` has no such method.
        ValueError: ``module`` is not part of the model.
    """
    state = get_root(root)
    if (id(module), name) in state.forward_methods:
        return
    unit = state.unit_of(module)
    if unit is None:
        raise ValueError(f"{type(module).__name__} is not part of the sharded model.")
    method = getattr(module, name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register.")

    @functools.wraps(method)
    def with_whole_weights(*args: Any, **kwargs: Any) -> Any:
        with state.forward_scope(unit) as outputs:
            outputs.append(method(*args, **kwargs))
        return outputs[0]

    state.forward_methods[id(module), name] = (module, module.__dict__.get(name))
    module.__dict__[name] = with_whole_weights
