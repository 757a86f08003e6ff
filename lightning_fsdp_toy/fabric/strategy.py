"""``ToyFSDPFabricStrategy``: Lightning Fabric's hooks around the sharding core; no algorithm here.

Members stand in the order in which Fabric's own strategies have them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch

# Lightning keeps these to itself, but every strategy of its own is built from them.
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import ParallelStrategy, _StrategyRegistry
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp_toy import process_group
from lightning_fsdp_toy.arguments import convert_arguments, register, sharding_options
from lightning_fsdp_toy.fabric.checkpointing import FabricCheckpointing
from lightning_fsdp_toy.fabric.launching import FabricLauncher
from lightning_fsdp_toy.fabric.models import ShardedModels
from lightning_fsdp_toy.fabric.precision import policy_of, to_sharded_precision
from lightning_fsdp_toy.fabric.wrapping import BackwardSync
from lightning_fsdp_toy.fsdp_arguments import checkpointing_policy, refuse_arguments, timeout_of
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy
from lightning_fsdp_toy.sharding.options import ShardingOptions
from lightning_fsdp_toy.sharding.policy import WrapPolicy

__all__ = ["ToyFSDPFabricStrategy"]

T = TypeVar("T")


class ToyFSDPFabricStrategy(ShardedModels, FabricCheckpointing):
    """Fully sharded data parallel for Lightning Fabric, on CPU (gloo) and CUDA (NCCL).

    Arguments mean the same as for ``ToyFSDPStrategy``, and those that Fabric's ``FSDPStrategy`` has
    too the same as there. Several modules may be set up; an optimizer belongs to one of them.

    Example::

        fabric = Fabric(strategy="toy_fsdp", accelerator="cpu", devices=2)
        fabric.launch()
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = fabric.setup(model, optimizer)
        fabric.backward(loss_fn(model(tokens), targets))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()

    Args:
        auto_wrap_policy: which submodules become units: ``"auto"`` (every block that repeats in a
            ``ModuleList`` or ``Sequential``), None (the whole model is one unit), a set or list
            of classes or class names, or a callable ``(module) -> bool``.
        sharding_strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD`` or ``HYBRID_SHARD``.
        mixed_precision: dtypes of gathered weights, reductions and buffers; from Fabric's
            ``precision`` if None.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory (CUDA).
        activation_checkpointing_policy: which modules run their forward again in backward instead
            of keeping its activations; as ``auto_wrap_policy``, None: no module.
        activation_checkpointing_reentrant: use the re-entrant form of ``torch.utils.checkpoint``.
        state_dict_type: ``"full"``: checkpoints are files, as DDP writes them. ``"sharded"``:
            directories to which every rank writes its shards. Either can be read.
        device_mesh: ``(replicas, shards)`` for ``HYBRID_SHARD``; None: one shard group per machine.
        num_prefetch: units gathered ahead of need; 0: no overlap.
        transport: ``"native"``, ``"pairwise"``, ``"shared_memory"`` or ``"auto"``.
        allow_optimizers: optimizer classes you vouch update every element on its own.
        timeout: longest wait for another rank, in any collective; None: 30 minutes.
        debug: log the units, compare every collective with the other ranks', see ``fully_shard``.
        start_method: how ``fabric.launch`` starts ranks: ``popen``, ``spawn``, ``fork`` or
            ``forkserver``, as in ``DDPStrategy``.
        process_group_backend: ``gloo`` or ``nccl``; by device if None.
        **kwargs: accelerator, parallel_devices, cluster_environment, checkpoint_io and precision,
            as for every Fabric strategy; arguments of ``FullyShardedDataParallel`` as
            ``fsdp_arguments`` says.

    Raises:
        ValueError: an argument is none of those above.
    """

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
        transport: str = "auto",
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
        refuse_arguments(kwargs, ToyFSDPFabricStrategy, ParallelStrategy)
        self._timeout = timeout_of(timeout)
        super().__init__(**kwargs)
        self.auto_wrap_policy = auto_wrap_policy
        self.sharding_strategy = sharding_strategy
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.activation_checkpointing_reentrant = activation_checkpointing_reentrant
        self.state_dict_type = state_dict_type
        self.device_mesh = device_mesh
        self.num_prefetch = num_prefetch
        self.transport = transport
        self.allow_optimizers = allow_optimizers
        self.debug = debug
        convert_arguments(self, start_method)
        self._num_nodes = 1
        self._options()  # refuses what no rank could run, before any starts
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._backward_sync_control = BackwardSync()

    def _options(self) -> ShardingOptions:
        """What the core is told, with what depends on Fabric filled in."""
        mesh = self.device_mesh
        if self.sharding_strategy == "HYBRID_SHARD" and mesh is None and self.num_processes:
            mesh = (self.num_nodes, self.num_processes)
        policy = self.mixed_precision or policy_of(self.precision)
        return sharding_options(self, policy, mesh)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes of the run; Fabric sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """``gloo`` or ``nccl``; None until it is chosen."""
        return self._process_group_backend

    @property
    @override
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        self._precision = None if precision is None else to_sharded_precision(precision)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method != "popen":
            self._launcher = FabricLauncher(self, start_method=self._start_method)
        else:  # where ranks are given it starts none, but compares their number with Fabric's
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as Lightning's own: what `configure_model` draws is what it draws there
        self._set_world_ranks()
        assert self.cluster_environment is not None
        self._process_group_backend = process_group.connect(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            process_group.tell_rank(
                self.cluster_environment, self.local_rank, self.num_processes, self.num_nodes
            )

    @override
    def module_to_device(self, module: nn.Module) -> None:
        pass  # sharding puts every shard where it belongs

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        # A model on the meta device is given memory and initial values unit by unit in `setup`.
        # Any other is built in CPU memory: a whole one may not fit where its shards do.
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def all_reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> Tensor | Any:
        return process_group.reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        return process_group.all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        process_group.barrier(self.root_device, name)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return process_group.broadcast(obj, src)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        register(cls, strategy_registry)
