"""Models and optimizers that Fabric sets up, and methods of them."""

import gc

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_fsdp_toy.sharding import get_root
from tests.core_helpers import (
    OPTIMIZERS,
    Stack,
    assert_equal,
    make_batches,
    mse_loss,
    train_reference,
)
from tests.fabric_helpers import make_fabric, train, whole
from tests.ranks import RankError, run_ranks


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def _by_ndim(model, lr=1e-2):
    """Groups that would be wrong if they were chosen on 1D shards."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5, "lr": lr / 2},
        ],
        lr=lr,
    )


def _adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


def _already_stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    mse_loss(model, make_batches(1, seed=7)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _built_before(make_optimizer, batches):
    fabric = make_fabric()
    model = _stack()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    half = len(batches) // 2
    train(fabric, model, optimizer, batches[:half], 2)
    scheduler.step()
    train(fabric, model, optimizer, batches[half:], 2)
    return whole(fabric, model)


@pytest.mark.parametrize("make_optimizer", [_by_ndim, _adagrad, _already_stepped])
def test_an_optimizer_built_before_setup_keeps_groups_and_state(make_optimizer):
    batches = make_batches(8)
    model = _stack()
    optimizer = make_optimizer(model)
    for start in range(0, 8, 2):
        if start == 4:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        for batch in batches[start : start + 2]:
            (mse_loss(model, batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for actual in run_ranks(_built_before, 2, make_optimizer, batches):
        assert_equal(actual, {name: p.detach() for name, p in model.named_parameters()})


def _on_meta(batches):
    fabric = make_fabric()
    with fabric.init_module(empty_init=True):
        model = Stack()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    model, optimizer = fabric.setup(model, OPTIMIZERS["adamw"](model.parameters()))
    start = whole(fabric, model)
    train(fabric, model, optimizer, batches, 2)
    with fabric.init_module(empty_init=True):
        other = Stack()
    with pytest.raises(ValueError, match="`Adagrad` has made state for parameters on the meta"):
        fabric.setup(other, _adagrad(other))
    return start, whole(fabric, model)


def test_a_model_and_optimizer_built_on_the_meta_device():
    batches = make_batches(8)
    results = run_ranks(_on_meta, 2, batches)
    reference = Stack()
    reference.load_state_dict(results[0][0])
    expected = train_reference(reference, batches, 2, "adamw")
    for _, actual in results:
        assert_equal(actual, expected)


def _refused_optimizers():
    fabric = make_fabric()
    model = _stack()
    early = OPTIMIZERS["sgd"](model.parameters())
    model = fabric.setup_module(model)
    with pytest.raises(ValueError, match=r"holds no parameter of a model that was set up"):
        fabric.setup_optimizers(early)
    with pytest.raises(ValueError, match=r"`Adafactor` is not known to update elements"):
        fabric.setup_optimizers(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(RuntimeError, match=r"sharded already"):
        fabric.setup_module(model.module)
    late = fabric.setup_optimizers(OPTIMIZERS["sgd"](model.parameters()))
    train(fabric, model, late, make_batches(2), 2)


def test_optimizers_that_would_go_wrong_are_refused():
    run_ranks(_refused_optimizers, 2)


class Coding(Stack):
    """Methods other than forward; `direct` reads a weight of the root itself."""

    def encode(self, x):
        return self.inp(x)

    def direct(self, x):
        return nn.functional.linear(self.encode(x), self.head.weight)

    def deep(self, x):
        return nn.functional.linear(self.encode(x), self.blocks[0].up.weight)


def _methods():
    torch.manual_seed(0)
    fabric, module = make_fabric(), Coding()
    x = make_batches(1)[0][0]
    expected = module.direct(x)
    expected.sum().backward()
    grad = module.head.weight.grad.clone()
    module.zero_grad(set_to_none=True)
    model = fabric.setup(module)
    with pytest.raises(RuntimeError, match=r"mark_forward_method\('direct'\)"):
        model.direct(x)
    model.mark_forward_method("direct")
    output = model.direct(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    model.mark_forward_method("deep")
    with pytest.raises(RuntimeError, match=r"Use them inside `with strategy\.unsharded"):
        model.deep(x)
    shown = whole(fabric, model)["head.weight"]
    with fabric.strategy.unsharded(module.head):
        assert torch.equal(module.head.weight, shown)
    with pytest.raises(TypeError, match=r"Linear is no model that `fabric\.setup` has sharded"):
        fabric.strategy.unsharded(nn.Linear(2, 2))
    piece = module.head.weight.grad  # of this rank
    gathered = [None] * fabric.world_size
    dist.all_gather_object(gathered, piece)
    return torch.cat(gathered), grad.reshape(-1)


def test_methods_other_than_forward_work_when_marked_and_explain_themselves_when_not():
    for actual, expected in run_ranks(_methods, 2):
        assert torch.equal(actual, expected)


def _collectives():
    fabric = make_fabric()
    rank = fabric.global_rank
    fabric.barrier()
    gathered = fabric.all_gather(torch.tensor([rank]))
    sampler = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(6))).sampler
    return (
        fabric.all_reduce(torch.tensor(float(rank))).item(),
        fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item(),
        fabric.broadcast({"rank": rank}, src=2)["rank"],
        gathered.flatten().tolist(),
        list(sampler),
        fabric.strategy.reduce_boolean_decision(rank == 0, all=False),
    )


def test_collectives_and_samplers_know_all_ranks():
    results = run_ranks(_collectives, 3)
    assert [result[:4] for result in results] == [(1.0, 3.0, 2, [0, 1, 2])] * 3
    assert sorted(item for result in results for item in result[4]) == list(range(6))
    assert [result[5] for result in results] == [True] * 3


def _lightning_module():
    from tests.lit_helpers import LitStack

    torch.manual_seed(0)
    fabric = make_fabric(precision="bf16-mixed")
    module = LitStack()
    module.log = lambda *args, **kwargs: None
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    loss = model.training_step(make_batches(1)[0], 0)
    assert torch.is_autocast_enabled("cpu") is False
    fabric.backward(loss)
    optimizer.step()
    return loss.item()


def test_the_steps_of_a_lightning_module_run_in_the_chosen_precision():
    torch.manual_seed(0)
    full = mse_loss(Stack(), make_batches(1)[0]).item()
    low, _ = run_ranks(_lightning_module, 2)
    assert low != full and low == pytest.approx(full, rel=0.05)


def _freed():
    """A model that is dropped leaves no state in the strategy."""
    fabric = make_fabric()
    model = fabric.setup(_stack())
    root = get_root(model.module)
    assert fabric.strategy._live_roots() == [root]
    del model, root
    gc.collect()
    return len(fabric.strategy._live_roots())


def test_the_strategy_keeps_no_model_alive():
    assert run_ranks(_freed, 1) == [0]


def _launch_on_two_nodes():
    Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="toy_fsdp").launch()


def test_ranks_that_are_not_those_of_fabric_are_refused():
    with pytest.raises(RankError, match=r"does not match the world size \(2\)"):
        run_ranks(_launch_on_two_nodes, 2)
