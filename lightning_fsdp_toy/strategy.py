"""``ToyFSDPStrategy``: Lightning's hooks around the sharding core; no algorithm here.

Members stand in the order in which Lightning's own strategies have them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist

# Lightning keeps these to itself, but every strategy of its own is built from them.
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_fsdp_toy.checkpointing import ShardedCheckpointing
from lightning_fsdp_toy.precision import to_toy_precision
from lightning_fsdp_toy.sharding import (
    SHARDING_STRATEGIES,
    Ledger,
    RootState,
    fully_shard,
    get_root,
    register_forward_method,
)
from lightning_fsdp_toy.sharding.optim import check_optimizer, whole_shapes_for
from lightning_fsdp_toy.sharding.policy import WrapPolicy
from lightning_fsdp_toy.sharding.whole import hold_unsharded, restore
from lightning_fsdp_toy.spawning import ShardedLauncher
from lightning_fsdp_toy.steps import ShardedSteps
from lightning_fsdp_toy.trainer_adapter import adapt_trainer

__all__ = ["ToyFSDPStrategy"]

logger = logging.getLogger(__name__)


class ToyFSDPStrategy(ShardedSteps, ShardedCheckpointing):
    """Fully sharded data parallel, written to be read, on CPU (gloo) and CUDA (NCCL).

    Arguments that Lightning's ``FSDPStrategy`` has too mean the same here.

    Args:
        auto_wrap_policy: which submodules become units: ``"auto"`` (every block that repeats in a
            ``ModuleList`` or ``Sequential``), None (the whole model is one unit), a set or list
            of classes or class names, or a callable ``(module) -> bool``.
        sharding_strategy: ``FULL_SHARD`` (weights, gradients and optimizer state are sharded),
            ``SHARD_GRAD_OP`` (weights stay whole between forward and backward) or ``NO_SHARD``
            (everything is replicated, as under DDP).
        state_dict_type: ``"full"``: one file, as DDP writes it. ``"sharded"``: a directory to which
            every rank writes its shards.
        transport: how bytes move: ``"native"`` collectives of the process group, ``"pairwise"``
            messages (gloo), or ``"auto"``: native on NCCL, pairwise on gloo.
        allow_optimizers: optimizer classes you vouch update every element on its own.
        timeout: longest wait for another rank, in any collective.
        start_method: how a user's own script starts ranks: ``popen``, ``spawn``, ``fork`` or
            ``forkserver``, as in ``DDPStrategy``.
        process_group_backend: ``gloo`` or ``nccl``; by device if None.
        **kwargs: accelerator, parallel_devices, cluster_environment, checkpoint_io and
            precision_plugin, as for every Lightning strategy.

    Raises:
        ValueError: an argument is none of those above.
    """

    strategy_name = "toy_fsdp"

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy = "auto",
        sharding_strategy: str = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        transport: Literal["auto", "native", "pairwise"] = "auto",
        allow_optimizers: tuple[type[Optimizer], ...] = (),
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_choice("sharding_strategy", sharding_strategy, SHARDING_STRATEGIES)
        _check_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        _check_choice("transport", transport, ("auto", "native", "pairwise"))
        _check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        self.auto_wrap_policy = auto_wrap_policy
        self.sharding_strategy = sharding_strategy
        self.state_dict_type = state_dict_type
        self.transport = transport
        self.allow_optimizers = tuple(allow_optimizers)
        self.num_nodes = 1
        self._timeout = timeout
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

    # -- Lightning's members --------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning asks strategies it does not know; without it nothing would be distributed."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

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
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = ShardedLauncher(self, start_method=self._start_method)
        elif not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(
                self.root_device
            )
        assert self.cluster_environment is not None
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device_id,
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for helper in (rank_zero_only, utils_rank_zero_only):
            helper.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self._setup_model(self.precision_plugin.convert_module(self.model))
        adapt_trainer(trainer, self.root)
        self.barrier()
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Shard ``model``, or take it as it is if an earlier run sharded it in the same way."""
        if "_fsdp_root" in model.__dict__:
            root = get_root(model)
            if self._fits(root):
                root.settle()
            else:
                restore(root)
        if "_fsdp_root" not in model.__dict__:
            for module in model.modules():
                if isinstance(module, Metric):  # its state is no buffer
                    module.to(self.root_device)
            fully_shard(
                model,
                device=self.root_device,
                auto_wrap_policy=self.auto_wrap_policy,
                sharding_strategy=self.sharding_strategy,
                transport=self.transport,
            )
        root = get_root(model)
        self.precision_plugin.root = root  # type: ignore[attr-defined]
        return model

    def _fits(self, root: RootState) -> bool:
        same_group = root.transport.group is (dist.group.WORLD if dist.is_initialized() else None)
        return (
            same_group
            and root.sharding_strategy == self.sharding_strategy
            and root.policy == self.auto_wrap_policy
            and root.requested_transport == self.transport
        )

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        optimizers: list[Optimizer] = []
        with whole_shapes_for(self.root, optimizers):
            super().setup_optimizers(trainer)
            optimizers += self.optimizers
        for optimizer in self.optimizers:
            check_optimizer(self.root, optimizer, self.allow_optimizers)

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
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> Tensor | Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def teardown(self) -> None:
        """End the run; the model stays sharded, so that the next run finds it as it is."""
        if self.lightning_module is not None and "_fsdp_root" in self.lightning_module.__dict__:
            self.root.settle()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, start_method in (
            ("toy_fsdp", "popen"),
            ("toy_fsdp_spawn", "spawn"),
            ("toy_fsdp_notebook", "fork"),
        ):
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"Fully sharded data parallel by hand, ranks by {start_method}",
                    start_method=start_method,
                )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}`: expected one of {', '.join(choices)}, got {value!r}.")
