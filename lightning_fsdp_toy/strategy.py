"""``ToyFSDPStrategy``: Lightning's hooks around the sharding core; no algorithm here.

Members stand in the order in which Lightning's own strategies have them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist

# Lightning keeps these to itself, but every strategy of its own is built from them.
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_fsdp_toy import conversion
from lightning_fsdp_toy.arguments import check_choice, convert_arguments, register, sharding_options
from lightning_fsdp_toy.checkpointing import ShardedCheckpointing
from lightning_fsdp_toy.compiled import CompiledModules
from lightning_fsdp_toy.environment import RankEnvironment
from lightning_fsdp_toy.fsdp_arguments import checkpointing_policy, refuse_arguments, timeout_of
from lightning_fsdp_toy.precision import to_toy_precision
from lightning_fsdp_toy.sharding import (
    Ledger,
    MixedPrecisionPolicy,
    RootState,
    get_root,
    no_sync,
    register_forward_method,
    set_gradient_divide_factor,
)
from lightning_fsdp_toy.sharding.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp_toy.sharding.fp32_vectors import (
    give_batch_norms_fp32_vectors,
    take_back_fp32_vectors,
)
from lightning_fsdp_toy.sharding.fully_shard import shard_with_options
from lightning_fsdp_toy.sharding.heap import give_back_freed_memory
from lightning_fsdp_toy.sharding.optim import check_optimizer, tell_of_steps, whole_shapes_for
from lightning_fsdp_toy.sharding.options import ShardingOptions
from lightning_fsdp_toy.sharding.policy import WrapPolicy
from lightning_fsdp_toy.sharding.transports.shared_memory import share_memory, stop_sharing
from lightning_fsdp_toy.sharding.whole import hold_unsharded, restore
from lightning_fsdp_toy.steps import ShardedSteps
from lightning_fsdp_toy.trainer_adapter import adapt_trainer, prepare_trainer, warn_of_idle_options
from lightning_fsdp_toy.waits import NamedWaits

__all__ = ["ToyFSDPStrategy"]


class ToyFSDPStrategy(
    CompiledModules, ShardedSteps, ShardedCheckpointing, NamedWaits, RankEnvironment
):
    """Fully sharded data parallel, written to be read, on CPU (gloo) and CUDA (NCCL).

    Arguments that Lightning's ``FSDPStrategy`` has too mean the same here.

    Args:
        auto_wrap_policy: which submodules become units: ``"auto"`` (every block that repeats in a
            ``ModuleList`` or ``Sequential``), None (the whole model is one unit), a set or list
            of classes or class names, or a callable ``(module) -> bool``.
        sharding_strategy: ``FULL_SHARD`` (weights, gradients and optimizer state are sharded),
            ``SHARD_GRAD_OP`` (weights stay whole between forward and backward), ``NO_SHARD``
            (everything is replicated, as under DDP) or ``HYBRID_SHARD`` (``FULL_SHARD`` inside
            groups of ranks, replicated across them).
        mixed_precision: dtypes of gathered weights, reductions, buffers and outputs; from the
            Trainer's ``precision`` if None.
        cpu_offload: shards and gradients live in pinned CPU memory, the optimizer works there
            (CUDA; without effect on CPU, with a warning).
        activation_checkpointing_policy: which modules run their forward again in backward instead
            of keeping its activations; as ``auto_wrap_policy``, None: no module.
        activation_checkpointing_reentrant: use the re-entrant form of ``torch.utils.checkpoint``.
        state_dict_type: ``"full"``: one file, as DDP writes it. ``"sharded"``: a directory to which
            every rank writes its shards.
        device_mesh: ``(replicas, shards)`` for ``HYBRID_SHARD``; None: one shard group per machine.
        num_prefetch: units gathered ahead of need; 0: no overlap.
        gradient_sync: with accumulation, reduce gradients after ``"every_micro_batch"`` (a rank
            never holds whole gradients) or the ``"last_micro_batch"`` (fewer bytes, more memory:
            the whole gradients in the reduce dtype).
        transport: how bytes move: ``"native"`` collectives of the process group, ``"pairwise"``
            messages (gloo), ``"shared_memory"`` of one machine's ranks (CPU), or ``"auto"``: native
            on NCCL, else shared memory where it can be, pairwise where not.
        allow_optimizers: optimizer classes you vouch update every element on its own.
        timeout: longest wait for another rank, in any collective; None: 30 minutes.
        debug: log the units, compare every collective with the other ranks' before it starts, warn
            of gradients that never came. Slow.
        start_method: how a user's own script starts ranks: ``popen``, ``spawn``, ``fork`` or
            ``forkserver``, as in ``DDPStrategy``.
        process_group_backend: ``gloo`` or ``nccl``; by device if None.
        **kwargs: accelerator, parallel_devices, cluster_environment, checkpoint_io and
            precision_plugin, as for every Lightning strategy; arguments of
            ``FullyShardedDataParallel`` as ``fsdp_arguments`` says.

    Raises:
        ValueError: an argument is none of those above.
    """

    strategy_name = "toy_fsdp"

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy = "auto",
        sharding_strategy: str = "FULL_SHARD",
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        activation_checkpointing_policy: WrapPolicy = None,
        activation_checkpointing_reentrant: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: tuple[int, int] | None = None,
        num_prefetch: int = 1,
        gradient_sync: Literal["every_micro_batch", "last_micro_batch"] = "every_micro_batch",
        transport: Literal["auto", "native", "pairwise", "shared_memory"] = "auto",
        allow_optimizers: tuple[type[Optimizer], ...] = (),
        timeout: timedelta | None = timedelta(minutes=30),
        debug: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        activation_checkpointing_policy = checkpointing_policy(
            activation_checkpointing_policy, kwargs
        )
        refuse_arguments(kwargs, ToyFSDPStrategy, ParallelStrategy)
        self._timeout = timeout_of(timeout)
        super().__init__(**kwargs)
        check_choice("gradient_sync", gradient_sync, ("every_micro_batch", "last_micro_batch"))
        self.auto_wrap_policy = auto_wrap_policy
        self.sharding_strategy = sharding_strategy
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.activation_checkpointing_reentrant = activation_checkpointing_reentrant
        self.state_dict_type = state_dict_type
        self.device_mesh = device_mesh
        self.num_prefetch = num_prefetch
        self.gradient_sync = gradient_sync
        self.transport = transport
        self.debug = debug
        self.allow_optimizers = allow_optimizers
        convert_arguments(self, start_method)
        self.num_nodes = 1
        sharding_options(self, self.mixed_precision, self.device_mesh)  # refused before ranks start
        self._start_method = start_method
        self._process_group_backend = process_group_backend

    # -- what this strategy adds ----------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Counts of this rank's collectives."""
        return self.root.ledger

    def unsharded(
        self, module: nn.Module | None = None, writeback: bool = True
    ) -> AbstractContextManager[None]:
        """Show the whole weights of ``module`` (all if None); see ``sharding.unsharded``."""
        return hold_unsharded(self.root, module or self.root.module, writeback)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let ``module.<name>()`` use weights; see ``sharding.register_forward_method``."""
        register_forward_method(self.root.module, module, name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients on this rank in a ``with`` block; see ``sharding.no_sync``."""
        return no_sync(self.root.module)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``; see ``sharding.set_gradient_divide_factor``."""
        set_gradient_divide_factor(self.root.module, factor)

    # -- Lightning's members --------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if precision_plugin is None else to_toy_precision(precision_plugin)
        )

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            prepare_trainer(self.lightning_module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.watch_for_stalls(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync is not None:
            self.model = conversion.sync_batch_norms(self.model, self._layer_sync, self.root_device)
        self.model = self._setup_model(self.precision_plugin.convert_module(self.model))
        adapt_trainer(trainer, self.root)
        warn_of_idle_options(trainer, self)
        self.barrier()
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and not self.cpu_offload:  # its state belongs where the shards are
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Shard ``model``, or take it as it is if an earlier run sharded it in the same way."""
        if "_fsdp_root" in model.__dict__:
            root = get_root(model)
            if self._fits(root):
                root.settle()
                share_memory(root)
            else:
                restore(root)
        apply_activation_checkpointing(
            model, self.activation_checkpointing_policy, self.activation_checkpointing_reentrant
        )
        if "_fsdp_root" not in model.__dict__:
            for module in model.modules():
                if isinstance(module, Metric):  # its state is no buffer
                    module.to(self.root_device)
            shard_with_options(model, self._run_options(), device=self.root_device)
        give_batch_norms_fp32_vectors(model, self.mixed_precision)  # taken back by a teardown
        _update_properties(model, device=self.root_device)  # `self.device` of LightningModules
        root = get_root(model)
        self.precision_plugin.root = root  # type: ignore[attr-defined]
        return model

    def _run_options(self) -> ShardingOptions:
        """The options, with what depends on the Trainer filled in."""
        mesh = self.device_mesh
        if self.sharding_strategy == "HYBRID_SHARD" and mesh is None:
            mesh = (self.num_nodes, self.num_processes)
        return sharding_options(self, self.mixed_precision_policy, mesh)

    def _fits(self, root: RootState) -> bool:
        same_group = root.mesh.world.group is (dist.group.WORLD if dist.is_initialized() else None)
        return same_group and root.is_complete and root.options == self._run_options()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        optimizers: list[Optimizer] = []
        with whole_shapes_for(self.root, optimizers):
            super().setup_optimizers(trainer)
            optimizers += self.optimizers
        for optimizer in self.optimizers:
            check_optimizer(self.root, optimizer, self.allow_optimizers)
            tell_of_steps(self.root, optimizer)

    @override
    def model_to_device(self) -> None:
        pass  # sharding puts every shard where it belongs

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # A model on the meta device is given memory and initial values unit by unit in `setup`.
        empty_init_context = torch.device("meta") if empty_init else nullcontext()
        with empty_init_context, self.precision_plugin.tensor_init_context():
            yield

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """What Lightning holds around every micro-batch of a window but the last."""
        return self.no_sync() if self.gradient_sync == "last_micro_batch" else nullcontext()

    @override
    def teardown(self) -> None:
        """End the run; the model stays sharded, so that the next run finds it as it is."""
        if self.lightning_module is not None and "_fsdp_root" in self.lightning_module.__dict__:
            self.root.settle()
            for unit in self.root.units:
                unit.drop_kept()
            stop_sharing(self.root)
            take_back_fp32_vectors(self.lightning_module)
            give_back_freed_memory()
        self._end_compiled_run()
        self.end_watch()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        register(cls, strategy_registry)
