"""A user of Lightning's `FSDPStrategy` swaps the class and keeps the arguments."""

import functools
import inspect
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)

from lightning_fsdp_toy import ToyFSDPFabricStrategy, ToyFSDPStrategy
from lightning_fsdp_toy.fsdp_arguments import _FSDP_ARGUMENTS
from lightning_fsdp_toy.sharding.policy import select_units
from tests.core_helpers import Block, Stack
from tests.ranks import run_ranks


def test_every_argument_of_lightnings_strategy_is_taken():
    base = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}
    base |= {"precision_plugin", "activation_checkpointing", "self", "kwargs"}
    theirs = set(inspect.signature(FSDPStrategy.__init__).parameters)
    ours = set(inspect.signature(ToyFSDPStrategy.__init__).parameters)
    assert theirs - base <= ours
    strategy = ToyFSDPStrategy(activation_checkpointing=nn.Linear)
    assert strategy.activation_checkpointing_policy == [nn.Linear]


def test_every_argument_of_fsdp_is_taken_or_refused_with_a_reason():
    theirs = set(inspect.signature(FullyShardedDataParallel.__init__).parameters)
    ours = set(inspect.signature(ToyFSDPStrategy.__init__).parameters)
    assert theirs - {"self", "module"} <= ours | set(_FSDP_ARGUMENTS)
    ToyFSDPStrategy(use_orig_params=True, sync_module_states=True, limit_all_gathers=True)
    for name, value in [
        ("use_orig_params", False),
        ("forward_prefetch", True),
        ("ignored_modules", [nn.Linear(1, 1)]),
        ("param_init_fn", print),
    ]:
        with pytest.raises(ValueError, match=rf"`{name}=.*not supported by ToyFSDPStrategy: \w+"):
            ToyFSDPStrategy(**{name: value})


@pytest.mark.parametrize("cls", [ToyFSDPStrategy, ToyFSDPFabricStrategy])
def test_torchs_own_objects_are_taken(cls):
    strategy = cls(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=False),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float32),
    )
    assert strategy.sharding_strategy == "SHARD_GRAD_OP"
    assert strategy.cpu_offload is False
    assert strategy.mixed_precision.param_dtype == torch.bfloat16
    assert strategy.mixed_precision.reduce_dtype == torch.bfloat16
    assert strategy.mixed_precision.buffer_dtype == torch.float32
    with pytest.raises(TypeError, match="`cpu_offload`: expected true or false, got 'yes'"):
        cls(cpu_offload="yes")


@pytest.mark.parametrize("cls", [ToyFSDPStrategy, ToyFSDPFabricStrategy])
def test_defaults_of_fsdp_and_arguments_that_ask_for_nothing_are_taken(cls):
    strategy = cls(
        timeout=None,
        sharding_strategy="shard_grad_op",
        forward_prefetch=False,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        ignored_modules=[],
        ignored_states=(),
        ignored_parameters=(),
        mixed_precision=MixedPrecision(torch.bfloat16, _module_classes_to_ignore=()),
    )
    assert strategy._timeout == timedelta(minutes=30)
    assert strategy.sharding_strategy == "SHARD_GRAD_OP"


def test_what_torchs_mixed_precision_asks_for_beyond_dtypes_is_not_dropped():
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    with pytest.raises(ValueError, match=r"`mixed_precision.keep_low_precision_grads=.*Leave it"):
        ToyFSDPStrategy(mixed_precision=policy)
    policy = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,))
    message = r"`mixed_precision._module_classes_to_ignore`: expected .*, got \(LayerNorm\)"
    with pytest.raises(ValueError, match=message):
        ToyFSDPStrategy(mixed_precision=policy)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"auto_wrap_polcy": "auto"}, "of {}: did you mean `auto_wrap_policy`?"),
        ({"zzz": 1}, "`zzz` is no argument of {}: it takes accelerator, "),
        ({"forward_prefetch": True}, "`forward_prefetch=True` is not supported by {}: use `num_"),
        ({"allow_optimizers": None}, "`allow_optimizers`: expected optimizer classes such as"),
        ({"allow_optimizers": "Muon"}, "(torch.optim.Adafactor,), got 'Muon'."),
        ({"timeout": 5}, "`timeout`: expected a timedelta above 0 such as timedelta(minutes=30)"),
        ({"debug": "false"}, "`debug`: expected true or false, got 'false'."),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "is not supported by {}: use `num"),
        ({"ignored_states": [nn.Parameter(torch.ones(2, 2))]}, "is not supported by {}: every pa"),
        ({"sharding_strategy": "_hybrid_shard_zero2"}, "Use 'HYBRID_SHARD'."),
        ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, "Use 'HYBRID_SHARD'."),
        ({"sharding_strategy": "some"}, "`sharding_strategy`: expected one of FULL_SHARD"),
        (
            {"activation_checkpointing_reentrant": "false"},
            "`activation_checkpointing_reentrant`: expected true or false, got 'false'.",
        ),
        ({"auto_wrap_policy": "Block"}, "For one class name, write ['Block']."),
        ({"auto_wrap_policy": 5}, "`auto_wrap_policy`: expected 'auto', None, classes, class nam"),
        ({"auto_wrap_policy": nn.Linear}, "For one class, write [Linear]."),
        ({"activation_checkpointing_policy": "Block"}, "`activation_checkpointing_policy`: expec"),
        ({"activation_checkpointing_policy": [5]}, "expected module classes or class names, got 5"),
        ({"activation_checkpointing": 5}, "`activation_checkpointing`: expected module classes or"),
    ],
)
@pytest.mark.parametrize("cls", [ToyFSDPStrategy, ToyFSDPFabricStrategy])
def test_wrong_arguments_are_refused_in_one_line(cls, given, message):
    with pytest.raises((TypeError, ValueError)) as info:
        cls(**given)
    assert message.replace("{}", cls.__name__) in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize("cls", [ToyFSDPStrategy, ToyFSDPFabricStrategy])
def test_one_optimizer_class_needs_no_tuple(cls):
    strategy = cls(allow_optimizers=torch.optim.Adafactor)
    assert strategy.allow_optimizers == (torch.optim.Adafactor,)


def _meshes():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    strategy = ToyFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    assert strategy.device_mesh == (2, 2)
    with pytest.raises(ValueError, match=r"expected ranks 0, 1, 2, \.\.\. row by row"):
        ToyFSDPStrategy(
            sharding_strategy="HYBRID_SHARD", device_mesh=DeviceMesh("cpu", [[0, 2], [1, 3]])
        )


def test_a_device_mesh_is_taken():
    run_ranks(_meshes, 4)


def _fsdp_wraps(policy):
    """What torch's own FSDP makes units of."""
    model = FullyShardedDataParallel(
        Stack(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    names = [n for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    return sorted(name.replace("_fsdp_wrapped_module", "").strip(".") for name in names if name)


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({Block}),
        ModuleWrapPolicy({Block, nn.Linear}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=150),
        functools.partial(size_based_auto_wrap_policy, min_num_params=30),
        CustomPolicy(_by_name := lambda module: isinstance(module, nn.LayerNorm)),
        always_wrap_policy,
    ],
)
def test_torchs_wrap_policies_choose_what_they_choose_there(policy):
    if isinstance(policy, CustomPolicy):  # a lambda cannot travel to other processes
        assert len(select_units(Stack(), policy)) == 3
        return
    if policy is always_wrap_policy:  # takes *args: a plain callable here, true everywhere
        assert len(select_units(Stack(), policy)) > 10
        return
    expected = [name.replace("..", ".") for name in run_ranks(_fsdp_wraps, 1, policy)[0]]
    assert sorted(name for name, _ in select_units(Stack(), policy)) == expected
