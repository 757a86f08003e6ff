"""Models and states that few have: refused by name, or right."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.checkpoint_paths import META_FILE, partial_path, put_in_place
from lightning_fsdp_toy.sharding import fully_shard, get_root
from lightning_fsdp_toy.sharding.sharded_checkpoint import (
    load_sharded_model,
    load_sharded_optimizer,
    save_sharded,
    sharded_model_state,
    sharded_optimizer_state,
)
from lightning_fsdp_toy.sharding.state_dict import load_model_state
from tests.core_helpers import Block, Stack, assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks
from tests.test_trainer_features import Shared, fit, global_batches


class SparseBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())


class SharedMemory(nn.Module):
    def __init__(self, is_overlapping):
        super().__init__()
        memory = torch.randn(8, 4)
        self.first = nn.Parameter(memory[:4])
        self.second = nn.Parameter(memory[3:7] if is_overlapping else memory[4:])

    def forward(self, x):
        return x @ self.first @ self.second


class Mirrored(nn.Module):
    """A buffer shows the memory of a parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shown", self.linear.weight.data[1:])


def _refused(make, text, options):
    with pytest.raises(ValueError, match=text):
        fully_shard(make(), **options)


def gives_options(module):
    return {"sharding_strategy": None} if isinstance(module, Block) else False


def overlapping():
    return SharedMemory(True)


class Aliased(nn.Module):
    """A weight and some buffers, of any memory."""

    def __init__(self, weight, *buffers):
        super().__init__()
        self.weight = nn.Parameter(weight)
        for name, buffer in zip(("shown", "next", "last"), buffers, strict=False):
            self.register_buffer(name, buffer)

    def forward(self, x):
        return x @ self.weight


def strided_alias():
    weight = torch.randn(4, 4)
    return Aliased(weight, weight[:, :2])


def expanded_alias():
    weight = torch.randn(1)
    return Aliased(weight, weight.expand(4))


def gapped_parameter():
    memory = torch.randn(4, 8)
    return Aliased(memory[:, :4], memory)


def hidden_alias():
    memory = torch.randn(100)  # others lie between the two in the order of addresses
    return Aliased(memory[50:66].view(4, 4), memory, memory[:10], memory[20:30])


def _columns():
    torch.manual_seed(dist.get_rank())
    memory = torch.randn(4, 8)
    lazy = torch.randn(4, dtype=torch.cfloat)
    model = Aliased(memory[:, ::2], memory[:, 1::2], lazy.conj(), lazy.conj().imag)
    model.register_buffer("spaced", torch.randn(8)[::2])
    model.register_buffer("diagonal", torch.randn(4, 4).diagonal())
    fully_shard(model)
    assert full_parameters(model)["weight"].shape == (4, 4)
    return [buffer.resolve_conj().tolist() for buffer in model.buffers()]


def test_tensors_between_each_other_are_none_of_others_and_any_buffer_is_kept_equal():
    first, second = run_ranks(_columns, 2)
    assert first == second


@pytest.mark.parametrize(
    "make, text, options",
    [
        (SparseBuffer, "buffer `adjacency` of layout torch.sparse_coo", {}),
        (overlapping, "`first` and the parameter `second` are two objects over the same", {}),
        (Mirrored, "parameter `linear.weight` and the buffer `shown` are two objects", {}),
        (strided_alias, "are two objects over the same memory", {}),
        (expanded_alias, "are two objects over the same memory", {}),
        (gapped_parameter, "are two objects over the same memory", {}),
        (hidden_alias, "buffer `shown` and the parameter `weight` are two objects", {}),
        (
            Stack,
            r"gives units options of their own is not supported, got \['sharding_strategy'\]",
            {"auto_wrap_policy": CustomPolicy(gives_options)},
        ),
    ],
)
def test_what_would_go_wrong_silently_is_refused_by_name(make, text, options):
    run_ranks(_refused, 2, make, text, options)


def _side_by_side():
    torch.manual_seed(0)
    model = SharedMemory(False)
    whole = copy.deepcopy(model)
    fully_shard(model)
    return full_parameters(model), dict(whole.named_parameters())


def test_parameters_side_by_side_in_one_memory_are_sharded():
    for actual, expected in run_ranks(_side_by_side, 2):
        assert_equal(actual, expected)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum() + self.nothing.sum()


def _save_and_load(directory):
    model = Empty()
    fully_shard(model)
    root, path = get_root(model), Path(directory)
    optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    expected = full_parameters(model)
    state = sharded_optimizer_state(root, optimizer)
    [small] = save_sharded(root, path, {"model": sharded_model_state(root)}, [state])
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    load_sharded_model(root, path)
    assert_equal(full_parameters(model), expected)
    load_sharded_optimizer(root, other, path, 0, small)
    for param, entry in optimizer.state.items():
        assert_equal(other.state[param], entry)


def test_a_parameter_without_elements_is_in_sharded_checkpoints(tmp_path):
    run_ranks(_save_and_load, 2, str(tmp_path))


class CopiesWhenLoaded(nn.Module):
    def __init__(self, through_data):
        super().__init__()
        self.through_data = through_data
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.other = nn.Parameter(torch.ones(4))

    def _load_from_state_dict(self, state_dict, prefix, *_):
        with torch.no_grad():
            target = self.weight.data if self.through_data else self.weight
            target.copy_(state_dict[prefix + "weight"])


def _load_by_copy(through_data):
    model = nn.Sequential(CopiesWhenLoaded(through_data), nn.Linear(4, 4))
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    fully_shard(model)
    load_model_state(get_root(model), state)
    return full_parameters(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_module_that_copies_when_it_is_loaded_is_loaded(world_size, through_data):
    for weights in run_ranks(_load_by_copy, world_size, through_data):
        assert weights["0.weight"].eq(3).all() and weights["1.weight"].eq(3).all()
        assert weights["0.other"].eq(1).all()  # which it does not load


class GrowsWhenLoaded(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0 * rows).view(rows, 8))

    def _load_from_state_dict(self, state_dict, prefix, *_):
        saved = state_dict[prefix + "weight"]
        with torch.no_grad():
            self.weight[: len(saved)].lerp_(saved, 0.5)


def _load_into_a_part():
    state = {"weight": torch.ones(20, 8)}
    whole = GrowsWhenLoaded(30)
    whole.load_state_dict(state)
    model = GrowsWhenLoaded(30)
    fully_shard(model)
    load_model_state(get_root(model), state)
    assert_equal(full_parameters(model), dict(whole.named_parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_that_loads_into_a_part_of_its_weight_keeps_the_rest(world_size):
    run_ranks(_load_into_a_part, world_size)


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.weight.data.copy_(state_dict[prefix + "weight"])


class HalfTied(nn.Module):
    """One weight in two modules, of which the second loads nothing."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.output = CopiesNothing()
        self.output.weight = self.embedding.weight


class CopiesNothing(nn.Module):
    def _load_from_state_dict(self, *_):
        pass


def _load_odd():
    integers, tied = Integers(), HalfTied()
    fully_shard(integers)
    fully_shard(tied)
    loaded = torch.arange(200, dtype=torch.int8)
    load_model_state(get_root(integers), {"weight": loaded, "scale": torch.ones(1)})
    state = {"embedding.weight": torch.full((40, 8), 3.0), "output.weight": torch.zeros(40, 8)}
    load_model_state(get_root(tied), state)
    assert torch.equal(full_parameters(integers)["weight"], loaded)
    assert full_parameters(tied)["embedding.weight"].eq(3).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_integers_and_half_tied_weights_are_loaded(world_size):
    run_ranks(_load_odd, world_size)


def _new_head(directory):
    torch.manual_seed(0)
    module = LitStack()
    make_trainer(ToyFSDPStrategy(), directory, max_steps=2).fit(module, regression_data())
    module.net.head = nn.Linear(7, 3)
    before = module.net.head.weight.detach().clone()
    make_trainer(ToyFSDPStrategy(), directory, max_steps=2).fit(module, regression_data())
    after = full_parameters(module)["net.head.weight"]
    return not torch.equal(before, after), after


def test_a_head_put_on_between_two_runs_is_trained(tmp_path):
    (is_trained, first), (_, second) = run_ranks(_new_head, 2, str(tmp_path))
    assert is_trained
    assert torch.equal(first, second)


class Chosen(Shared):
    """Asks autograd for the gradients of all parameters by name."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = Stack()

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.mean_loss(batch, self.net)
        self.manual_backward(loss, inputs=list(self.net.parameters()))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit_chosen(strategy, directory):
    torch.manual_seed(0)
    return fit(Chosen(), strategy, directory, global_batches(3))


def test_gradients_of_given_inputs_arrive(tmp_path):
    [expected] = run_ranks(_fit_chosen, 1, "auto", tmp_path)
    for actual in run_ranks(_fit_chosen, 2, "toy_fsdp", tmp_path):
        assert_equal(actual, expected)


def test_a_link_to_a_sharded_checkpoint_is_replaced_and_what_it_names_stays(tmp_path):
    sharded = tmp_path / "step=1"
    sharded.mkdir()
    (sharded / META_FILE).write_text("small")
    link = tmp_path / "last.ckpt"
    link.symlink_to(sharded, target_is_directory=True)
    partial_path(link).write_text("new")
    put_in_place(link)
    assert link.read_text() == "new" and not link.is_symlink()
    assert (sharded / META_FILE).read_text() == "small"
    link.unlink()
    for target in (tmp_path / "empty", tmp_path / "gone"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        link.symlink_to(target, target_is_directory=True)
        partial_path(link).mkdir()
        put_in_place(link)
        assert link.is_dir() and not link.is_symlink()
        link.rmdir()


def test_no_backward_prefetch_is_asked_for_by_its_name_here():
    with pytest.raises(ValueError, match=r"`backward_prefetch=None` .* use `num_prefetch`"):
        ToyFSDPStrategy(backward_prefetch=None)
