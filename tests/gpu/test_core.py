"""The sharding core on GPUs, in a plain loop: the same weights as one process without sharding."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root, no_sync
from lightning_fsdp_toy.sharding.norm import grad_norm
from lightning_fsdp_toy.sharding.optim import clip_grad_norm_
from lightning_fsdp_toy.sharding.state_dict import (
    full_model_state,
    full_optimizer_state,
    load_model_state,
    load_optimizer_state,
)
from tests.core_helpers import (
    OPTIMIZERS,
    Stack,
    full_parameters,
    make_batches,
    mse_loss,
    train_reference,
    train_sharded,
)
from tests.gpu.groups import every_group, on_gpus


def _batches(num):
    return [(x.cuda(), y.cuda()) for x, y in make_batches(num)]


def _stack(num_blocks=3):
    torch.manual_seed(0)
    return Stack(num_blocks=num_blocks).cuda()


def _assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=name)


def _compare():
    for optimizer in ("sgd", "adamw", "adamw_fused"):
        _compare_with(optimizer)


def _compare_with(optimizer):
    expected = train_reference(_stack(), _batches(6), 2, optimizer)
    for options in (
        {},
        {"num_prefetch": 0},
        {"num_prefetch": 2, "debug": True},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (dist.get_world_size(), 1)},
    ):
        _assert_close(train_sharded(_stack(), _batches(6), 2, optimizer, **options), expected)


@every_group
def test_weights_equal_one_process_after_three_steps(group):
    on_gpus(_compare, group)


class Wide(nn.Module):
    """Blocks large enough that a gather or a reduction lasts while the host goes on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))

    def forward(self, x):
        torch.cuda._sleep(50_000_000)  # cycles: the host queues the whole step meanwhile
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _train_wide(options):
    torch.manual_seed(0)
    model = Wide().cuda()
    batches = [torch.randn(64, 1024, device="cuda") for _ in range(8)]
    if options is not None:
        fully_shard(model, **options)
        batches = batches[dist.get_rank() :: dist.get_world_size()]
    num_micro = len(batches) // 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(4):
        for batch in batches[step * num_micro : (step + 1) * num_micro]:
            (model(batch).square().mean() / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    if options is None:
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    return full_parameters(model)


def _compare_wide():
    expected = _train_wide(None)
    for num_prefetch in (0, 1, 3):
        for cpu_offload in (False, True):  # the latter is gathered by one rank too
            options = {"num_prefetch": num_prefetch, "cpu_offload": cpu_offload}
            _assert_close(_train_wide(options), expected)


@every_group
def test_memory_freed_under_overlap_is_never_read(group):
    on_gpus(_compare_wide, group)


def _mixed():
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", output_dtype=torch.float32)
    options = {"mixed_precision": policy}
    plain = train_sharded(_stack(), _batches(6), 2, "adamw", **options)
    overlap = train_sharded(_stack(), _batches(6), 2, "adamw", num_prefetch=2, **options)
    offloaded = train_sharded(_stack(), _batches(6), 2, "adamw", cpu_offload=True, **options)
    _assert_close(overlap, plain)
    # Moments differ in the last bit on the CPU, and so may, now and then, a rounded weight.
    _assert_close(offloaded, plain, rtol=1e-2, atol=2e-3)
    assert all(value.dtype == torch.float32 for value in plain.values())
    in_fp32 = train_reference(_stack(), _batches(6), 2, "sgd")
    _assert_close(
        train_sharded(_stack(), _batches(6), 2, "sgd", **options), in_fp32, rtol=0.1, atol=5e-3
    )


@every_group
def test_bf16_policy_stays_near_fp32_and_is_the_same_however_it_overlaps(group):
    on_gpus(_mixed, group)


def _offload():
    world_size = dist.get_world_size()
    for options in (
        {"sharding_strategy": "FULL_SHARD"},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, world_size)},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (world_size, 1)},
    ):
        _offload_with(options)


def _offload_with(options):
    expected = train_sharded(_stack(), _batches(8), 4, "adamw", **options)
    model = fully_shard(_stack(), cpu_offload=True, **options)
    opt = OPTIMIZERS["adamw"](model.parameters())
    seen = []
    model.blocks[1].up.register_forward_hook(
        lambda module, *_: seen.append((module.weight.device.type, tuple(module.weight.shape)))
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = _batches(8)[rank::world_size]
    num_micro = 4 // world_size
    for start in range(0, len(mine), num_micro):
        for batch in mine[start : start + num_micro]:
            (mse_loss(model, batch) / num_micro).backward()
        for param in model.parameters():
            assert param.device.type == "cpu" and param.grad.device.type == "cpu"
            assert param.numel() == 0 or (param.is_pinned() and param.grad.is_pinned())
        opt.step()
        opt.zero_grad()
        states = [value for entry in opt.state.values() for value in entry.values()]
        assert {v.device.type for v in states if torch.is_tensor(v)} == {"cpu"}
    assert set(seen) == {("cuda", (13, 7))}
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    _assert_close(full_parameters(model), expected)


@every_group
def test_offloaded_run_keeps_everything_on_the_cpu_and_ends_as_the_other(group):
    on_gpus(_offload, group)


def _evaluate_before_stepping():
    expected = _stack()
    model = fully_shard(_stack(), cpu_offload=True)
    batch = _batches(1)[0]
    for each in (expected, model):
        optimizer = OPTIMIZERS["sgd"](each.parameters())
        mse_loss(each, batch).backward()
        with torch.no_grad():
            torch.cuda._sleep(200_000_000)  # the device is late, the host is not
            output = each(batch[0])
        optimizer.step()  # must not reach the weights that the forward above reads
        each.output = output
    torch.testing.assert_close(model.output, expected.output)


@every_group
def test_optimizer_does_not_change_shards_that_are_still_being_read(group):
    on_gpus(_evaluate_before_stepping, group)


def _norms():
    return [_norms_with(cpu_offload) for cpu_offload in (False, True)]


def _norms_with(cpu_offload):
    reference, model = _stack(), fully_shard(_stack(), cpu_offload=cpu_offload)
    batch = _batches(1)[0]
    for each in (reference, model):
        mse_loss(each, batch).backward()
    grads = [param.grad for param in reference.parameters()]
    root, found = get_root(model), []
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        norm = grad_norm(root, model.parameters(), norm_type)
        expected = torch.nn.utils.get_total_norm([g.double() for g in grads], norm_type)
        torch.testing.assert_close(norm, expected)
        found.append(norm.item())
    norm = clip_grad_norm_(root, model.parameters(), found[1] / 2)
    assert norm.item() == found[1]
    clipped = grad_norm(root, model.parameters())
    torch.testing.assert_close(clipped.item(), found[1] / 2, rtol=1e-4, atol=0)
    return found


@every_group
def test_gradient_norm_is_that_of_whole_gradients_on_every_rank(group):
    results = on_gpus(_norms, group)
    assert all(result == results[0] for result in results)


def _round_trip():
    for cpu_offload in (False, True):
        _round_trip_with(cpu_offload)


def _round_trip_with(cpu_offload):
    def make():
        model = fully_shard(_stack(), cpu_offload=cpu_offload)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer, batch):
        mse_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = _batches(2)
    model, optimizer = make()
    step(model, optimizer, batches[0])
    box = [(full_model_state(get_root(model)), full_optimizer_state(get_root(model), optimizer))]
    dist.broadcast_object_list(box)
    weights, moments = box[0]
    assert {value.device.type for value in weights.values()} == {"cpu"}
    step(model, optimizer, batches[1])
    resumed, new_optimizer = make()
    load_model_state(get_root(resumed), weights)
    load_optimizer_state(get_root(resumed), new_optimizer, moments)
    step(resumed, new_optimizer, batches[1])
    for name, value in full_parameters(model).items():
        assert torch.equal(full_parameters(resumed)[name], value), name


@every_group
def test_run_resumed_from_full_state_goes_on_as_the_other(group):
    on_gpus(_round_trip, group)


def _accumulate():
    batches = _batches(8)
    expected = train_reference(_stack(), batches, 4, "sgd")
    mine = batches[dist.get_rank() :: dist.get_world_size()]
    num_micro = len(mine) // 2
    for cpu_offload in (False, True):
        model = fully_shard(_stack(), cpu_offload=cpu_offload)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for start in (0, num_micro):
            with no_sync(model):
                for batch in mine[start : start + num_micro - 1]:
                    (mse_loss(model, batch) / num_micro).backward()
            (mse_loss(model, mine[start + num_micro - 1]) / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        _assert_close(full_parameters(model), expected)


@every_group
def test_no_sync_collects_what_one_reduction_would_bring(group):
    on_gpus(_accumulate, group)


def _peaks():
    peaks = {}
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        torch.manual_seed(0)
        model = fully_shard(Wide(), device="cuda", sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(2, 1024, device="cuda")
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        root = get_root(model)
        root.memory.reset_peak()
        model(x).square().mean().backward()
        optimizer.step()
        peaks[strategy] = torch.cuda.max_memory_allocated(), root.memory.peak_bytes
        del model, optimizer, root
    return peaks


def test_sharded_peak_is_below_the_replicated_one():
    for peaks in on_gpus(_peaks, ("gloo", 2)):
        weights = 12 * (1024 + 1) * 1024 * 4
        assert peaks["FULL_SHARD"][0] < peaks["NO_SHARD"][0] - weights
        for allocated, counted in peaks.values():  # of the core, without optimizer and activations
            assert allocated > counted


def _buffers():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    fully_shard(model, device="cuda")
    assert {buffer.device.type for buffer in model.buffers()} == {"cuda"}
    x = torch.randn(4, 5, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
    return {name: value.cpu() for name, value in full_parameters(model).items()}


@every_group
def test_model_built_on_the_cpu_moves_to_the_device_with_rank_0s_values(group):
    results = on_gpus(_buffers, group)
    for result in results:
        assert all(torch.equal(result[name], value) for name, value in results[0].items())
