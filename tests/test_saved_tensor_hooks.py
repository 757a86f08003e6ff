"""What is saved for backward: hooks of the user are asked, and nothing is held for good."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_fsdp_toy.sharding import fully_shard, get_root
from tests.core_helpers import Block, Stack, full_gradients
from tests.ranks import run_ranks


class _HooksInside(Stack):
    """Its blocks run under saved-tensor hooks of its own, and return what gets no output hook."""

    def __init__(self):
        super().__init__()
        self.seen = []
        for block in self.blocks:
            block.register_forward_hook(lambda _module, _args, out: Hidden(out))

    def forward(self, x):
        x = self.inp(x)
        hooks = saved_tensors_hooks(lambda t: self.seen.append(t.shape) or t.numpy(), _to_tensor)
        for block in self.blocks:
            with hooks:
                x = block(x).value
        return self.head(x)


class Hidden:
    def __init__(self, value):
        self.value = value


def _to_tensor(array):
    return torch.from_numpy(array)


def _hooks_inside(options):
    torch.manual_seed(0)
    model, plain = _HooksInside(), Stack()
    plain.load_state_dict(model.state_dict())
    root = get_root(fully_shard(model, **options))
    for seed in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
        model(x).sum().backward()
        plain(x).sum().backward()
        assert root.memory.held["unsharded"] == 0
    for fqn, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(fqn).grad)
    weights = {shape for p in plain.parameters() for shape in (p.shape, p.t().shape)}
    assert model.seen and not weights & set(model.seen)


@pytest.mark.parametrize(
    "options", [{}, {"num_prefetch": 0}, {"auto_wrap_policy": [Block]}], ids=str
)
def test_saved_tensor_hooks_around_units_see_all_but_weights(options):
    run_ranks(_hooks_inside, 2, options)


def _graph_without_backward():
    class Saving(Stack):
        def forward(self, x):
            hidden = torch.sigmoid(self.inp(x).exp())  # each saves its output
            self.hidden = weakref.ref(hidden)
            return self.head(hidden)

    model = fully_shard(Saving())
    output = model(torch.ones(2, 5))
    del output
    assert model.hidden() is None
    x = torch.ones(2, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.inp.register_forward_hook(lambda _module, _args, out: out.exp_().add_(1))
        model(x).sum().backward()


def test_activations_go_with_a_graph_that_sees_no_backward():
    run_ranks(_graph_without_backward, 2)


def _under_hooks(name):
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model)
    root = get_root(model)
    x, seen, calls = torch.ones(2, 5), [], []
    model.inp.register_forward_hook(lambda *_: calls.append(1))

    def around(module):
        if name == "checkpoint":
            return checkpoint(module, x, use_reentrant=False)
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or t.numpy(), torch.from_numpy):
            return module(x)

    for _ in range(2):
        seen.clear()
        model.zero_grad()
        reference.zero_grad()
        around(model).sum().backward()
        num_here = len(seen)
        reference(x).sum().backward()
        for fqn, grad in full_gradients(model).items():
            assert torch.equal(grad, reference.get_parameter(fqn).grad), fqn
        assert root.memory.held["unsharded"] == 0
    if name == "checkpoint":
        assert len(calls) == 4  # in two steps
        return
    seen.clear()
    around(reference)
    if dist.get_world_size() > 1:  # else the whole weights are there anyway
        weights = {shape for p in reference.parameters() for shape in (p.shape, p.t().shape)}
        seen = [shape for shape in seen if shape not in weights]
    assert num_here == len(seen) > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_saved_tensor_hooks_around_the_model_see_all_but_weights(world_size):
    run_ranks(_under_hooks, world_size, "numpy")


def test_a_checkpoint_around_the_whole_model_runs_it_again():
    run_ranks(_under_hooks, 2, "checkpoint")
