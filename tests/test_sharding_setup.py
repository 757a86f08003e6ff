"""What sharding does at setup: which units, whose weights, what is refused."""

import copy

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.sharding import (
    MixedPrecisionPolicy,
    build_optimizer,
    fully_shard,
    get_root,
    unsharded,
)
from lightning_fsdp_toy.sharding.layout import ALIGNMENT, UnitLayout, boxes_of_range
from lightning_fsdp_toy.sharding.optim import check_optimizer
from lightning_fsdp_toy.sharding.policy import select_units
from tests.core_helpers import Block, Stack, assert_equal, full_parameters, mse_loss
from tests.ranks import run_ranks


class Noisy(Stack):
    """Has a random buffer, an integer buffer and dropout."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(3))
        self.register_buffer("count", torch.randint(100, ()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.dropout(x)) + self.noise


def _differently_seeded(on_meta):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    if on_meta:
        with torch.device("meta"):
            model = Stack()
        mine = None
    else:
        model = Noisy()
        mine = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    dropped = nn.functional.dropout(torch.ones(64), 0.5)
    return mine, full_parameters(model) | buffers, dropped


def test_ranks_seeded_differently_start_from_rank_0():  # C34
    (first, full_0, mask_0), (_, full_1, mask_1) = run_ranks(_differently_seeded, 2, False)
    assert_equal(full_0, first)
    assert_equal(full_1, first)
    assert not torch.equal(mask_0, mask_1)


def test_meta_device_models_are_initialised_once():  # C34
    (_, full_0, _), (_, full_1, _) = run_ranks(_differently_seeded, 2, True)
    assert_equal(full_1, full_0)
    assert full_0["blocks.0.up.weight"].std() > 0
    assert torch.equal(full_0["blocks.0.norm.weight"], torch.ones(7))


def _buffers_after_training():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    fully_shard(model)
    for _ in range(3):
        model(torch.randn(4, 5) + 10 * dist.get_rank()).sum().backward()
    model(torch.randn(4, 5))
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_rank_0s_at_every_training_forward():
    # They differ after a forward, by that forward's own batch, as under DDP.
    first, second = run_ranks(_buffers_after_training, 2)
    assert first["1.num_batches_tracked"] == second["1.num_batches_tracked"] == 4
    assert (first["1.running_mean"] - second["1.running_mean"]).abs().max() < 2


def test_auto_makes_units_of_repeated_blocks_only():
    assert [name for name, _ in select_units(Stack())] == ["blocks.0", "blocks.1", "blocks.2"]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.LayerNorm(2))
    assert select_units(mixed) == []
    nested = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    assert [name for name, _ in select_units(nested)] == ["0", "1"]


def test_policies_by_class_name_and_callable():
    assert len(select_units(Stack(), {Block})) == 3
    assert len(select_units(Stack(), ["Block"])) == 3
    assert [n for n, _ in select_units(Stack(), lambda m: isinstance(m, nn.LayerNorm))] == [
        f"blocks.{i}.norm" for i in range(3)
    ]
    assert select_units(Stack(), None) == []


@pytest.mark.parametrize("policy", [["Blok"], {nn.Conv2d}])
def test_a_policy_that_names_an_absent_class_is_refused(policy):
    with pytest.raises(ValueError, match=r"contains no such module.*Block, LayerNorm, Linear"):
        select_units(Stack(), policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_strategy": "ZERO3"}, "expected one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        (
            {"transport": "pigeon"},
            "`transport`: expected one of auto, native, pairwise, sh",
        ),
        ({"auto_wrap_policy": "Block"}, r"write \['Block'\]"),
        ({"auto_wrap_policy": 3}, "expected 'auto', None, classes"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fully_shard(Stack(), **options)


def test_a_model_is_sharded_once():
    model = fully_shard(Stack())
    with pytest.raises(RuntimeError, match="sharded already"):
        fully_shard(model)


def test_parameters_that_cannot_be_sharded_are_named():
    model = Stack()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"`table`.*only plain dense tensors can be sharded"):
        fully_shard(model)
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"`0.weight` of a lazy module has no shape yet"):
        fully_shard(model)


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_weights_inside_forward_are_named(cls):
    model = nn.Sequential(cls(9, 5, max_norm=0.5), nn.Linear(5, 3))
    message = rf"Module `0` \({cls.__name__}\) has `max_norm=0.5`.*Leave `max_norm` out"
    with pytest.raises(ValueError, match=message):
        fully_shard(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torchscript_are_named():
    for script in (torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 5))):
        model = nn.Sequential(nn.Linear(5, 5), script(nn.Linear(5, 3)))
        with pytest.raises(ValueError, match=r"Module `1` \(\w+\) is compiled by TorchScript"):
            fully_shard(model)
    model = nn.Sequential(nn.Linear(5, 5), torch.jit.script(nn.ReLU()))  # nothing to shard
    fully_shard(model)(torch.ones(1, 5)).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prefetch": -1}, "`num_prefetch`: expected a whole number of units"),
        ({"mixed_precision": "bf16"}, "`mixed_precision`: expected a MixedPrecisionPolicy"),
        ({"device_mesh": (1, 1)}, "`device_mesh` is for sharding_strategy='HYBRID_SHARD'"),
        (
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
            r"2 replicas x 2 shards are 4 ranks, but there are 1",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2,)},
            r"expected \(replicas, shards\).*got \(2,\)",
        ),
    ],
)
def test_new_options_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fully_shard(Stack(), **options)


def test_cpu_offload_on_the_cpu_warns():
    with pytest.warns(UserWarning, match="`cpu_offload=True` has no effect on the CPU"):
        fully_shard(Stack(), cpu_offload=True)


def test_a_policy_of_another_kind_of_dtype_is_refused():
    with pytest.raises(ValueError, match=r"`mixed_precision.param_dtype`.*got 'int8'"):
        MixedPrecisionPolicy(param_dtype="int8")


def _different_models():
    with pytest.raises(ValueError, match=r"built a different model than rank 0"):
        fully_shard(Stack(num_blocks=2 + dist.get_rank()))


def test_ranks_with_different_models_are_refused_on_every_rank():
    run_ranks(_different_models, 2)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_tensors_are_refused(name):
    model = fully_shard(nn.Linear(4, 4, bias=False))
    params = [nn.Parameter(torch.zeros(2, 2))] if name == "Muon" else model.parameters()
    optimizer = getattr(torch.optim, name)(params)
    with pytest.raises(ValueError, match=rf"`{name}` is not known.*allow_optimizers"):
        check_optimizer(get_root(model), optimizer)


def test_optimizers_built_before_sharding_are_refused():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Build optimizers after sharding"):
        check_optimizer(get_root(fully_shard(model)), optimizer)


def test_groups_by_ndim_and_initial_state_survive_sharding():
    def make(module):
        weights = [p for p in module.parameters() if p.ndim >= 2]
        others = [p for p in module.parameters() if p.ndim < 2]
        groups = [{"params": weights, "lr": 0.5}, {"params": others}]
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.25)

    model = Stack()
    expected = [[p.numel() for p in group["params"]] for group in make(model).param_groups]
    fully_shard(model)
    optimizer = build_optimizer(model, make)
    check_optimizer(get_root(model), optimizer)
    groups = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
    assert groups == expected
    mse_loss(model, (torch.randn(2, 5), torch.randn(2, 3))).backward()
    optimizer.step()
    assert all(e["sum"].shape == p.shape for p, e in optimizer.state.items())
    assert len(optimizer.state) == sum(len(group) for group in groups)


@pytest.mark.parametrize("change", ["half", "data"])
def test_converting_after_sharding_is_refused(change):
    model = fully_shard(Stack())
    if change == "half":
        model.half()
    else:
        model.head.weight.data = torch.zeros(21)
    with pytest.raises(RuntimeError, match=r"`(inp|head)\.\w+` was moved, converted or given"):
        model(torch.randn(2, 5))


def test_copying_a_sharded_module_is_refused():
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(fully_shard(Stack()))


def _kinds_of_parameters():
    torch.manual_seed(0)
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.turned = nn.Parameter(torch.randn(6, 5).t())
    model.embed = nn.Embedding(11, 5)
    model.head = nn.Linear(5, 11, bias=False)
    model.head.weight = model.embed.weight
    model.turned.is_special = True
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model)
    assert model.head.weight is model.embed.weight
    assert model.turned.is_special
    with unsharded(model):
        assert model.head.weight is model.embed.weight
        assert model.turned.stride() == (1, 5)
        assert model.scale.shape == ()
    assert_equal(full_parameters(model), before)
    with unsharded(model), torch.no_grad():
        model.scale.mul_(3)
    assert full_parameters(model)["scale"] == 6


@pytest.mark.parametrize("world_size", [1, 3])
def test_shapes_strides_ties_and_attributes_survive(world_size):
    run_ranks(_kinds_of_parameters, world_size)


def _survives_an_exception_inside_forward():
    model = Stack()
    fully_shard(model)
    root = get_root(model)

    def fail(*_):
        raise KeyError("inside")

    handle = model.blocks[1].up.register_forward_pre_hook(fail)
    batch = (torch.randn(2, 5), torch.randn(2, 3))
    with pytest.raises(KeyError, match="inside"):
        mse_loss(model, batch)
    handle.remove()
    mse_loss(model, batch).backward()
    assert root.memory.held["unsharded"] == 0
    with pytest.raises(ZeroDivisionError), unsharded(model):
        raise ZeroDivisionError
    assert root.memory.held["unsharded"] == 0


def test_training_goes_on_after_an_error_in_forward():
    run_ranks(_survives_an_exception_inside_forward, 2)


def _validation_under_inference_mode():
    torch.manual_seed(0)
    model = fully_shard(Stack())
    batch = (torch.randn(2, 5), torch.randn(2, 3))
    with torch.inference_mode():
        mse_loss(model, batch)
    mse_loss(model, batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return full_parameters(model)


def _without_validation():
    torch.manual_seed(0)
    model = fully_shard(Stack())
    mse_loss(model, (torch.randn(2, 5), torch.randn(2, 3))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return full_parameters(model)


def test_a_forward_under_inference_mode_leaves_nothing_behind():  # C02
    after = run_ranks(_validation_under_inference_mode, 2)[0]
    assert_equal(after, run_ranks(_without_validation, 2)[0])


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
def test_pieces_tile_every_parameter_once(num_shards):
    shapes = [("a", (5, 7)), ("b", (7,)), ("c", ()), ("d", (0,)), ("e", (3, 64))]
    layout = UnitLayout([(n, s, torch.empty(s).stride()) for n, s in shapes], num_shards)
    assert layout.padded_numel % (num_shards * ALIGNMENT) == 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        pieces = [layout.piece(slot, rank) for rank in range(num_shards)]
        covered = [i for piece in pieces for i in range(piece.start, piece.stop)]
        assert covered == list(range(slot.numel))
        for rank, piece in enumerate(pieces):
            low = layout.shard_bounds(rank)[0]
            assert piece.numel == 0 or low + piece.shard_offset == slot.offset + piece.start
            assert piece.start % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [(), (6,), (4, 3), (3, 1, 4), (2, 3, 2, 2)])
def test_boxes_cover_a_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            covered = []
            for box in boxes_of_range(shape, start, stop):
                block = whole
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    block = block.narrow(dim, offset, size)
                assert block.reshape(-1)[0] == box.start
                covered += block.reshape(-1).tolist()
            assert covered == list(range(start, stop))


def _process_bytes_of_setup():
    process, num_blocks, width = psutil.Process(), 24, 1024
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_blocks)))
    before = process.memory_info().rss
    fully_shard(model, device="cpu")
    grown = process.memory_info().rss - before
    return grown / (4 * num_blocks * width * width), get_root(model).memory.held["shards"]


def test_a_model_on_the_meta_device_takes_little_memory_of_the_process():
    for share, shards_bytes in run_ranks(_process_bytes_of_setup, 4):
        assert shards_bytes == 24 * 2**20
        assert share < 0.4  # a quarter and a unit or two; over a half while the heap kept units


def test_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2.*init_process_group"):
        fully_shard(nn.Linear(2, 2))
