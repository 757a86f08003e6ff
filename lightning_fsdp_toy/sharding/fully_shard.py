"""The entry function and what a user may do with a sharded module.

Note: read this package in this order
    ``layout`` (where elements lie), ``flat_param`` and ``buffers`` (one tensor and its shard),
    ``faces`` (what modules and optimizers see of it), ``gradients`` (from autograd to the
    optimizer), ``unit`` (one step), ``residency`` (what is gathered ahead), ``saved`` and
    ``backward`` (how weights come back and when a unit is finished), ``root`` (the whole model),
    ``mesh``, ``collectives`` and ``pairwise`` (how bytes move). Aside: ``build`` (setup),
    ``whole``, ``state_dict`` and ``sharded_checkpoint`` (weights outside a step), ``optim``.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.sharding.debug import unit_table
from lightning_fsdp_toy.sharding.fp32_vectors import give_batch_norms_fp32_vectors
from lightning_fsdp_toy.sharding.heap import keep_freed_memory
from lightning_fsdp_toy.sharding.ledger import Ledger
from lightning_fsdp_toy.sharding.mesh import make_mesh
from lightning_fsdp_toy.sharding.names import unwrapped
from lightning_fsdp_toy.sharding.options import SHARDING_STRATEGIES, ShardingOptions
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy, WrapPolicy
from lightning_fsdp_toy.sharding.root import RootState
from lightning_fsdp_toy.sharding.state_dict import full_model_state
from lightning_fsdp_toy.sharding.trees import Copied, cast_floating, return_additions
from lightning_fsdp_toy.sharding.whole import hold_unsharded, show_faces

__all__ = [
    "SHARDING_STRATEGIES",
    "full_state_dict",
    "fully_shard",
    "get_root",
    "no_sync",
    "register_forward_method",
    "set_gradient_divide_factor",
    "unsharded",
]

logger = logging.getLogger(__name__)


def fully_shard(
    module: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    auto_wrap_policy: WrapPolicy = "auto",
    sharding_strategy: str = "FULL_SHARD",
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    device_mesh: tuple[int, int] | None = None,
    num_prefetch: int = 1,
    transport: str = "auto",
    debug: bool = False,
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
        device: where buffers live and forward runs; the parameters' own device if None.
        auto_wrap_policy: which submodules become units, see ``policy.select_units``.
        sharding_strategy: ``FULL_SHARD`` (weights are freed between forward and backward),
            ``SHARD_GRAD_OP`` (kept), ``NO_SHARD`` (replicated), ``HYBRID_SHARD`` (as ``FULL_SHARD``
            inside a group of ranks, replicated across groups).
        mixed_precision: dtypes of gathered weights, reductions, buffers and outputs.
        cpu_offload: shards and the gradients for the optimizer live in pinned CPU memory, and so
            the optimizer works and keeps its state on the CPU. Without effect where everything is
            there anyway.
        device_mesh: ``(replicas, shards)`` for ``HYBRID_SHARD``, see the note on a mesh of ranks.
        num_prefetch: units gathered ahead of need; at most ``1 + num_prefetch`` beside the root are
            unsharded at any time. With 0 no communication overlaps with computation.
        transport: ``auto``, ``native``, ``pairwise`` or ``shared_memory``; see the note on three
            transports in ``collectives.py``.
        debug: log the units, compare every collective with the other ranks' before it starts, and
            warn of gradients that never came. Slow.

    Returns:
        ``module``.

    Raises:
        ValueError: unknown option, a parameter that cannot be sharded, ranks that differ.
        RuntimeError: ``module`` or a module of it is sharded already.
    """
    options = ShardingOptions(
        auto_wrap_policy=auto_wrap_policy,
        sharding_strategy=sharding_strategy,
        transport=transport,
        precision=MixedPrecisionPolicy() if mixed_precision is None else mixed_precision,
        device_mesh=device_mesh,
        num_prefetch=num_prefetch,
        cpu_offload=cpu_offload,
        debug=debug,
    )
    return shard_with_options(module, options, process_group, device)


def shard_with_options(
    module: nn.Module,
    options: ShardingOptions,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Do what ``fully_shard`` does, with its options as one object."""
    whole = unwrapped(module)
    if "_fsdp_root" in whole.__dict__:
        raise RuntimeError("This module is sharded already; shard a model once.")
    inner = [name for name, sub in whole.named_modules() if "_fsdp_root" in sub.__dict__]
    if inner:
        raise RuntimeError(
            f"`{inner[0]}` is sharded already, and its parameters are pieces. Shard the whole "
            f"model once; `auto_wrap_policy` says which modules become units."
        )
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"This is rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']} (torchrun), "
            f"but there is no process group, so every rank would train alone. Call "
            f"torch.distributed.init_process_group() before sharding."
        )
    if device is None:
        param = next(module.parameters(), None)
        device = param.device if param is not None and not param.is_meta else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if options.cpu_offload and device.type == "cpu":
        warnings.warn(
            "`cpu_offload=True` has no effect on the CPU: shards are in its memory already.",
            stacklevel=3,
        )
    ledger = Ledger()
    mesh = make_mesh(
        options.sharding_strategy,
        options.device_mesh,
        options.transport,
        process_group,
        device,
        ledger,
    )
    root = RootState(whole, mesh, ledger, device, options)
    if device.type == "cpu":
        keep_freed_memory()  # of activations, for the next step
    give_batch_norms_fp32_vectors(whole, options.precision)
    for sub in whole.modules():
        _clear_pieces(root, sub)
    if options.debug and mesh.world.rank == 0:
        logger.warning("debug mode: the units are\n%s", unit_table(root))
    return module


def _clear_pieces(root: RootState, module: nn.Module) -> None:
    """Let ``module.zero_grad()`` clear the gradients of pieces inside an open forward too.

    Manual optimization of Lightning runs backward inside ``training_step``, which is one.
    """
    method = module.zero_grad

    @functools.wraps(method)
    def with_pieces(*args: Any, **kwargs: Any) -> None:
        with show_faces(root, lambda original: original.sharded):
            method(*args, **kwargs)

    root.replaced_methods[id(module), "zero_grad"] = (module, module.__dict__.get("zero_grad"))
    module.__dict__["zero_grad"] = with_pieces


def get_root(module: nn.Module) -> RootState:
    """Return the state of a module that ``fully_shard`` has sharded.

    Raises:
        ValueError: it has not.
    """
    root = unwrapped(module).__dict__.get("_fsdp_root")
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
    return hold_unsharded(get_root(root), unwrapped(module or root), writeback)


def register_forward_method(root: nn.Module, module: nn.Module, name: str) -> None:
    """Make ``module.<name>()`` unshard weights as ``module.forward()`` does.

    Needed only for methods that use parameters directly (``self.weight``); calls of submodules
    inside any method are noticed on their own. Arguments are cast as those of forward are.

    Args:
        root: the module given to ``fully_shard``.
        module: a module of it.
        name: the method.

    Raises:
        AttributeError: ``module`` has no such method.
        ValueError: ``module`` is not part of the model.
    """
    state = get_root(root)
    if (id(module), name) in state.replaced_methods:
        return
    unit = state.unit_of(module)
    if unit is None:
        raise ValueError(f"{type(module).__name__} is not part of the sharded model.")
    method = getattr(module, name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register.")

    @functools.wraps(method)
    def with_whole_weights(*args: Any, **kwargs: Any) -> Any:
        policy, copied = state.precision, list[Copied]()
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype, copied)
        with state.forward_scope(unit) as outputs:
            outputs.append(method(*args, **kwargs))
        return_additions(copied)
        return outputs[0]

    state.replaced_methods[id(module), name] = (module, module.__dict__.get(name))
    module.__dict__[name] = with_whole_weights


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keep gradients on this rank: a backward inside the ``with`` block reduces nothing.

    For gradient accumulation in loops of your own. The first backward outside reduces what has
    been collected, so fewer bytes travel; until then a rank holds whole gradients of every unit
    that was used (``padded numel`` elements of the reduce dtype each). Contributions are then added
    micro-batch by micro-batch on each rank first, so results equal those without ``no_sync`` within
    rounding. ``zero_grad`` does not touch gradients that have not been reduced.

    All ranks use it for the same micro-batches.

    Args:
        module: the module given to ``fully_shard``.
    """
    root = get_root(module)
    before, root.is_syncing = root.is_syncing, False
    try:
        yield
    finally:
        root.is_syncing = before


def set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks.

    With a loss that is the sum over a rank's tokens and the number of tokens of all ranks as
    ``factor``, gradients are those of the mean over all tokens, however they are spread; with 1
    they are the sum over ranks. Holds from the next backward on.

    Args:
        module: the module given to ``fully_shard``.
        factor: above 0, the same on every rank.
    """
    if not factor > 0:
        raise ValueError(f"`factor`: expected a number above 0, got {factor!r}.")
    get_root(module).gradient_scale = 1.0 / factor
