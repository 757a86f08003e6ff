"""The sharding strategies that this package is compared with: PyTorch's FSDP1 and FSDP2.

Note: FSDP1 on CPU.
Lightning refuses `FSDPStrategy` without a GPU (Lightning #21812). `CPUFSDPStrategy` changes only
what stands in the way: it names the CPU as FSDP's device, autocasts on the CPU, and gathers full
checkpoints without "offload to CPU", which frees the storage it has just returned when that
storage is on the CPU already (Lightning #21804). On CUDA Lightning's own class is used.

Note: equal starts.
Neither FSDP1 nor FSDP2 makes ranks that built different models equal, as DDP does. Both peers
here start from rank 0's parameters and buffers, so that all strategies train the same model.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities import apply_to_collection
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp_toy.sharding.policy import WrapPolicy, select_units

__all__ = [
    "CPUFSDPPrecision",
    "CPUFSDPStrategy",
    "UnitsPolicy",
    "apply_fsdp2",
    "make_fsdp2_strategy",
    "make_fsdp_strategy",
]

_CPU = torch.device("cpu")


class UnitsPolicy(ModuleWrapPolicy):
    """FSDP1 wrap policy that cuts a model into the same units as `toy_fsdp` does.

    Args:
        policy: As `auto_wrap_policy` of `sharding.policy.select_units`.
    """

    def __init__(self, policy: WrapPolicy = "auto") -> None:
        super().__init__(())
        self.policy = policy

    @override
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        units = select_units(root_module, self.policy)
        return {unit: dict(root_kwargs) for _, unit in units if unit not in ignored_modules}


class CPUFSDPPrecision(FSDPPrecision):
    """Lightning's FSDP precision with autocast on the CPU, where Lightning has only "cuda"."""

    def __init__(self, precision: Any) -> None:
        if precision == "16-mixed":
            raise ValueError(
                "`precision='16-mixed'` needs a GPU under `strategy=fsdp`, because its gradient "
                "scaler does; use `precision='bf16-mixed'` on CPU"
            )
        super().__init__(precision)

    @override
    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "bf16-mixed":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return super().forward_context()


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning's `FSDPStrategy` on CPU and gloo, see "Note: FSDP1 on CPU" above.

    Takes the arguments of `FSDPStrategy`. Full states come back on rank 0 only, the other ranks
    get empty ones; no returned tensor shares memory with a live one.
    """

    @override
    def setup_environment(self) -> None:
        mesh_shape = self.kwargs.get("device_mesh")
        if isinstance(mesh_shape, tuple):
            del self.kwargs["device_mesh"]  # `FSDPStrategy` would build a CUDA mesh from it
        super().setup_environment()
        if self.root_device != _CPU:
            raise ValueError(
                f"`CPUFSDPStrategy` runs on CPU only, got the device `{self.root_device}`; set "
                "`accelerator=cpu`"
            )
        if isinstance(mesh_shape, tuple):
            self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh_shape)
        if self.cpu_offload.offload_params:
            rank_zero_warn("`strategy.cpu_offload` has no effect on CPU: the shards are there")
            self.cpu_offload = CPUOffload()  # FSDP would pin the shards for an accelerator
        if type(self.precision_plugin) is FSDPPrecision:
            self.precision_plugin = CPUFSDPPrecision(self.precision_plugin.precision)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # A second run on the same module finds its blocks wrapped; `FSDPStrategy` would then
        # leave out the root and compute with its shards (Lightning #19015).
        root: nn.Module | None = vars(model).get("_fsdp_root")
        if root is not None:
            return root
        if any(isinstance(child, FullyShardedDataParallel) for child in model.modules()):
            return super()._setup_model(model)  # wrapped by hand, with what weights there were
        _broadcast_from_rank_0(model, dist.group.WORLD, _CPU)
        root = FullyShardedDataParallel(model, **self._wrap_arguments())
        _setup_activation_checkpointing(root, self._activation_checkpointing_kwargs)
        vars(model)["_fsdp_root"] = root  # not as a submodule: the root holds the model
        return root

    @contextlib.contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrap_arguments()):
            yield

    def _wrap_arguments(self) -> dict[str, Any]:
        """The arguments that `FSDPStrategy` gives to FSDP, with the CPU as the device."""
        return dict(
            self.kwargs,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=_CPU,
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().lightning_module_state_dict()
        assert self.model is not None
        with self._full_state(self.model):
            state: dict[str, Any] = self.model.state_dict()
        return _without_aliases(state, self._live_tensors())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().optimizer_state(optimizer)
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._full_state(self.model):
            state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
            if self.global_rank == 0:
                state = FullyShardedDataParallel.rekey_optim_state_dict(
                    state, OptimStateKeyType.PARAM_ID, self.model
                )
        return _without_aliases(state, self._live_tensors())

    @staticmethod
    def _full_state(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Gather full states on rank 0 without "offload to CPU"."""
        return FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
        )

    def _live_tensors(self) -> Iterator[torch.Tensor]:
        """What goes on changing while training goes on."""
        assert self.model is not None
        yield from itertools.chain(self.model.parameters(), self.model.buffers())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def make_fsdp_strategy(
    accelerator: str = "auto", *, auto_wrap_policy: Any = "auto", **kwargs: Any
) -> FSDPStrategy:
    """Return Lightning's `FSDPStrategy`, on CPU the thin subclass that makes it run there.

    Args:
        accelerator: The `Trainer`'s accelerator. `"auto"` is CUDA where there is a GPU, else CPU.
        auto_wrap_policy: `"auto"`: every repeated block is a unit, as under `toy_fsdp`. A list of
            classes or class names: their instances. Anything else as `FSDPStrategy` takes it;
            `None` makes the whole model one unit.
        **kwargs: Further arguments of `FSDPStrategy`.

    Raises:
        ValueError: `accelerator` is neither CUDA nor CPU.
    """
    if isinstance(auto_wrap_policy, Sequence):  # a string is one
        auto_wrap_policy = UnitsPolicy(auto_wrap_policy)
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cpu":
        return CPUFSDPStrategy(auto_wrap_policy=auto_wrap_policy, **kwargs)
    if accelerator in ("cuda", "gpu"):
        kwargs.setdefault("sync_module_states", True)  # see "Note: equal starts"
        return FSDPStrategy(auto_wrap_policy=auto_wrap_policy, **kwargs)
    raise ValueError(
        f"`strategy=fsdp` needs `accelerator` cpu, cuda, gpu or auto, got `{accelerator}`"
    )


def make_fsdp2_strategy(
    world_size: int, *, timeout: timedelta | None = None, **kwargs: Any
) -> ModelParallelStrategy:
    """Return Lightning's `ModelParallelStrategy` set up for FSDP2 over all ranks.

    The LightningModule shards itself: its `configure_model` calls `apply_fsdp2`.

    Args:
        world_size: Number of ranks in the whole job.
        timeout: Limit of every wait; Lightning's default if `None`.
        **kwargs: Further arguments of `ModelParallelStrategy`. Checkpoints are full by default.
    """
    if timeout is not None:
        kwargs["timeout"] = timeout
    kwargs.setdefault("save_distributed_checkpoint", False)
    return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, **kwargs)


def apply_fsdp2(
    net: nn.Module, mesh: DeviceMesh, auto_wrap_policy: WrapPolicy = "auto", **kwargs: Any
) -> None:
    """Shard `net` in place with PyTorch's `fully_shard`: every repeated block, then the rest.

    Called on all ranks of `mesh`. Rank 0's parameters and buffers are broadcast first, one at a
    time. A network that is sharded already is left as it is.

    Args:
        net: Network with its weights on a real device.
        mesh: 1D device mesh of the data-parallel ranks.
        auto_wrap_policy: As in `sharding.policy.select_units`.
        **kwargs: Further arguments of `fully_shard`, such as `mp_policy`.

    Raises:
        ValueError: `net` has parameters or buffers on the meta device.
    """
    if isinstance(net, FSDPModule):
        return
    _broadcast_from_rank_0(net, mesh.get_group(), torch.device(mesh.device_type))
    for _, unit in reversed(select_units(net, auto_wrap_policy)):  # inner units first
        fully_shard(unit, mesh=mesh, **kwargs)
    fully_shard(net, mesh=mesh, **kwargs)


@torch.no_grad()
def _broadcast_from_rank_0(
    module: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Give all ranks of `group` the parameters and buffers of its first rank."""
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"`{name}` is on the meta device, where no weights exist to start from; build the "
                "model on a real device for `strategy=fsdp` and `strategy=fsdp2`"
            )
        values = tensor.to(device).contiguous()
        dist.broadcast(values, group=group, group_src=0)
        if values is not tensor:
            tensor.copy_(values)


def _without_aliases(state: dict[str, Any], live: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return `state` with copies in place of tensors that share memory with a `live` one."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in live}

    def copy_if_live(tensor: torch.Tensor) -> torch.Tensor:
        is_live = tensor.untyped_storage().data_ptr() in storages
        return tensor.detach().clone() if is_live else tensor

    copied: dict[str, Any] = apply_to_collection(state, torch.Tensor, copy_if_live)
    return copied
