"""Features of the Trainer with sharded weights, each against one process where bits can be equal.

Every training step gets one *global* batch of two micro-batches: one process takes both, each of
two ranks takes its own, so that the same numbers are added in the same order.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelPruning,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, get_root
from lightning_fsdp_toy.sharding.collectives import Transport
from tests.core_helpers import Stack, assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks
from tests.test_sharding_memory import live_bytes


def global_batches(num: int, size: int = 4) -> DataLoader:
    """`num` global batches, each of two micro-batches."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 2, size, 5, generator=generator)
    targets = torch.randn(num, 2, size, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=None)


class Shared(L.LightningModule):
    """Knows its part of a global batch."""

    def parts(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return list(zip(*batch, strict=True))[rank::world_size]

    def mean_loss(self, batch: tuple[Tensor, Tensor], net: nn.Module) -> Tensor:
        parts = self.parts(batch)
        return sum(F.mse_loss(net(x), y) for x, y in parts) / len(parts)  # type: ignore[return-value]


def fit(
    module: L.LightningModule,
    strategy: Any,
    directory: Path,
    data: DataLoader,
    **options: Any,
) -> dict[str, Tensor]:
    """Fit and return the whole weights."""
    trainer = make_trainer(strategy, directory, use_distributed_sampler=False, **options)
    trainer.fit(module, data)
    return whole(module)


def whole(module: L.LightningModule) -> dict[str, Tensor]:
    if "_fsdp_root" in module.__dict__:
        return full_parameters(module)
    return {name: param.detach().clone() for name, param in module.named_parameters()}


# -- several optimizers (C07) --------------------------------------------------------------------


class Alternating(Shared):
    """Two networks, one of which learns from each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Stack(num_blocks=2), Stack(num_blocks=3)
        self.counts: list[list[int]] = []  # Adam's steps of each network after each batch
        self.history: list[dict[str, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        self.toggle_optimizer(optimizer)
        for x, y in self.parts(batch):
            net = (self.first, self.second)[index % 2]
            self.manual_backward(F.mse_loss(net(x), y) / len(self.parts(batch)))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(p.requires_grad for p in self.parameters())
        self.history.append(whole(self))
        steps = [
            {int(entry["step"]) for entry in optimizer.state.values()} or {0}
            for optimizer in self.trainer.optimizers
        ]
        self.counts.append([step for each in steps for step in each])

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.first.parameters(), 1e-2),
            torch.optim.AdamW(self.second.parameters(), 1e-2),
        )


def _alternate(strategy: Any, directory: Path) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = Alternating()
    weights = fit(module, strategy, directory, global_batches(6))
    return weights, module.history, module.counts


@pytest.mark.parametrize("policy", ["auto", None])
def test_networks_that_alternate_equal_one_process_and_the_idle_one_rests(tmp_path, policy):  # C07
    expected, _, counts = run_ranks(_alternate, 1, "auto", tmp_path)[0]
    assert counts == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    for weights, history, ours in run_ranks(
        _alternate, 2, ToyFSDPStrategy(auto_wrap_policy=policy), tmp_path
    ):
        assert_equal(weights, expected)
        assert ours == counts
        for step in range(1, 6):
            for name, value in history[step].items():
                is_idle = name.startswith("second" if step % 2 == 0 else "first")
                assert torch.equal(value, history[step - 1][name]) == is_idle, (step, name)


class Generative(Shared):
    """The discriminator's loss reaches the generator, whose gradients are (not) dropped."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.drops = drops
        self.generator = nn.Sequential(nn.Linear(5, 7), *(nn.Linear(7, 7) for _ in range(2)))
        self.discriminator = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        parts = self.parts(batch)
        for x, y in parts:
            real = F.softplus(-self.discriminator(F.pad(y, (0, 4))))
            fake = F.softplus(self.discriminator(torch.tanh(self.generator(x))))
            self.manual_backward((real.mean() + fake.mean()) / len(parts))
        of_discriminator.step()
        of_discriminator.zero_grad()
        if self.drops:
            of_generator.zero_grad()
        for x, _ in parts:
            fake = F.softplus(-self.discriminator(torch.tanh(self.generator(x))))
            self.manual_backward(fake.mean() / len(parts))
        of_generator.step()
        of_generator.zero_grad()
        if self.drops:
            of_discriminator.zero_grad()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.generator.parameters(), 0.5, momentum=0.9),
            torch.optim.AdamW(self.discriminator.parameters(), 1e-2),
        )


def _generate(strategy: Any, directory: Path, drops: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return fit(Generative(drops), strategy, directory, global_batches(5))


@pytest.mark.parametrize("drops", [True, False])
def test_a_gan_whose_losses_reach_both_networks_equals_one_process(tmp_path, drops):  # C07
    (expected,) = run_ranks(_generate, 1, "auto", tmp_path, drops)
    for sharding in ("FULL_SHARD", "SHARD_GRAD_OP"):
        strategy = ToyFSDPStrategy(sharding_strategy=sharding)
        for actual in run_ranks(_generate, 2, strategy, tmp_path, drops):
            assert_equal(actual, expected)


# -- weights in hooks (C14) ----------------------------------------------------------------------

HOOKS = ("on_fit_start", "on_train_batch_end", "on_validation_epoch_end", "on_fit_end")


class InHooks(LitStack):
    """Calls itself, a submodule and looks at a weight wherever Lightning lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in HOOKS}
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _look(self, hook: str) -> None:
        x = torch.linspace(-1, 1, 10).view(2, 5)
        with torch.no_grad():
            inner = self.net.blocks[0](self.net.inp(x))  # part by part
            for block in self.net.blocks[1:]:
                inner = block(inner)
            assert torch.equal(self(x), self.net.head(inner))
        self.outputs[hook].append(self(x).detach())
        with self.trainer.strategy.unsharded(self.net.inp):
            assert self.net.inp.weight.shape == (7, 5)
        self.shapes.add(tuple(self.net.inp.weight.shape))

    def on_fit_start(self) -> None:
        self._look("on_fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._look("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self._look("on_validation_epoch_end")

    def on_fit_end(self) -> None:
        self._look("on_fit_end")


def _fit_in_hooks(sharding: str, directory: Path) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module, data = InHooks(), regression_data(16)
    trainer = make_trainer(ToyFSDPStrategy(sharding_strategy=sharding), directory)
    trainer.fit(module, data, data)
    plain = Stack()
    weights = {k.removeprefix("net."): v for k, v in full_parameters(module).items()}
    plain.load_state_dict(weights)
    (last,) = module.outputs["on_fit_end"]
    assert torch.equal(last, plain(torch.linspace(-1, 1, 10).view(2, 5)))
    root = get_root(module)
    assert all(unit.is_sharded for unit in root.units) or sharding == "NO_SHARD"
    assert sharding == "NO_SHARD" or root.memory.held["unsharded"] == 0
    return module.outputs, module.shapes, module.losses


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_model_works_in_every_hook_and_weights_show_their_shape_unsharded(
    tmp_path, sharding
):  # C14
    results = run_ranks(_fit_in_hooks, 2, sharding, tmp_path)
    for outputs, shapes, _ in results:
        assert [len(outputs[name]) for name in HOOKS] == [1, 2, 2, 1]  # with the sanity check
        assert all(len(shape) == 1 for shape in shapes)
        for name in HOOKS:
            assert torch.equal(torch.stack(outputs[name]), torch.stack(results[0][0][name]))


class RawInHook(LitStack):
    """Uses a weight directly in a hook."""

    def __init__(self, hook: str, is_unsharded: bool) -> None:
        super().__init__()
        self.hook, self.is_unsharded = hook, is_unsharded
        self.products: list[Tensor] = []
        for name in HOOKS:
            setattr(self, name, lambda *_, name=name: self._use() if name == hook else None)

    def _use(self) -> None:
        if self.is_unsharded:
            with self.trainer.strategy.unsharded(self.net.inp):
                self.products.append(F.linear(torch.ones(1, 5), self.net.inp.weight).detach())
        else:
            F.linear(torch.ones(1, 5), self.net.inp.weight)


def _use_raw(hook: str, is_unsharded: bool, directory: Path) -> Any:
    module, data = RawInHook(hook, is_unsharded), regression_data(16)
    try:
        make_trainer("toy_fsdp", directory).fit(module, data, data)
    except RuntimeError as error:
        return str(error)
    return [tuple(product.shape) for product in module.products]


class Attending(LitStack):
    """Its layer uses the weight of a submodule without calling it, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(5, 1, batch_first=True))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x = batch[0].unsqueeze(1)
        return self.net(x, x, x)[0].sum()


def _attend(directory: Path) -> str:
    strategy = ToyFSDPStrategy(auto_wrap_policy=["Linear"])
    with pytest.raises(RuntimeError) as info:
        make_trainer(strategy, directory).fit(Attending(), regression_data(16))
    return str(info.value)


def test_frames_of_torch_are_not_taken_for_methods_to_register(tmp_path):  # C39
    for message in run_ranks(_attend, 2, tmp_path):
        assert "`net.out_proj`" in message
        assert "register_forward_method" not in message


def _log_graph(directory: Path) -> str:
    module = LitStack()
    module.example_input_array = torch.zeros(1, 5)
    logger = TensorBoardLogger(directory, log_graph=True)
    with pytest.raises(ValueError, match="rank 0 alone") as info:
        make_trainer("toy_fsdp", directory, logger=logger).fit(module, regression_data(16))
    return str(info.value)


def test_a_graph_for_tensorboard_is_refused_on_every_rank(tmp_path):
    assert all("Leave `log_graph` out" in text for text in run_ranks(_log_graph, 2, tmp_path))


def _prune(directory: Path) -> str:
    module = LitStack()
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    trainer = make_trainer("toy_fsdp", directory, callbacks=[pruning])
    with pytest.raises(ValueError, match="`ModelPruning` replaces parameters") as info:
        trainer.fit(module, regression_data(16))
    return str(info.value)


def test_pruning_is_refused_on_every_rank(tmp_path):
    assert all("Prune before training" in text for text in run_ranks(_prune, 2, tmp_path))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_weight_used_directly_in_a_hook_is_named_with_the_remedy(tmp_path, hook):  # C14
    for shapes in run_ranks(_use_raw, 2, hook, True, tmp_path):
        assert set(shapes) == {(1, 7)}
    for message in run_ranks(_use_raw, 2, hook, False, tmp_path):
        assert "strategy.unsharded(module)" in message
        assert message.count("strategy.unsharded") == 1


# -- gradients between steps -----------------------------------------------------------------------


class OpenWindow(Shared):
    """Manual optimization whose window of two batches is open when an epoch of three ends."""

    def __init__(self, cleared_at: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Stack()
        self.scale = nn.Parameter(torch.ones(3))
        self.cleared_at = cleared_at
        self.num_left: list[int] = []  # gradients that validation finds

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for x, y in self.parts(batch):
            loss = F.mse_loss(self.net(x) * self.scale, y) / len(self.parts(batch))
            self.manual_backward(loss)
        if index == self.cleared_at:
            self.zero_grad()
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_validation_start(self) -> None:  # Lightning has called `self.zero_grad()`
        held = [param for group in self.optimizers().param_groups for param in group["params"]]
        self.num_left.append(sum(param.grad is not None for param in held))

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.mean_loss(batch, self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit_with_open_windows(
    strategy: Any, cleared_at: int | None, directory: Path
) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    module = OpenWindow(cleared_at)
    trainer = make_trainer(strategy, directory, use_distributed_sampler=False, max_epochs=2)
    trainer.fit(module, global_batches(3), global_batches(1))
    return whole(module), module.num_left


@pytest.mark.parametrize("cleared_at", [None, 0])  # by validation; and by `training_step`
@pytest.mark.parametrize("policy", ["auto", None])
def test_clearing_reaches_every_gradient_of_a_manual_window(tmp_path, policy, cleared_at):
    expected, _ = run_ranks(_fit_with_open_windows, 1, "auto", cleared_at, tmp_path)[0]
    strategy = ToyFSDPStrategy(auto_wrap_policy=policy)
    for weights, num_left in run_ranks(_fit_with_open_windows, 2, strategy, cleared_at, tmp_path):
        assert set(num_left) == {0}
        assert_equal(weights, expected)


# -- optimizers that look at whole tensors (C47) -------------------------------------------------


class TrustRatio(torch.optim.Optimizer):
    """A step as long as the weight, in ten lines."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    ratio = param.norm() / param.grad.norm().clamp_min(1e-6)
                    param.sub_(param.grad * ratio * group["lr"])
        return loss


class WithOptimizer(LitStack):
    """Builds a given optimizer, Muon on the matrices only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.name == "Muon":
            return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], 1e-3)
        if self.name == "Adafactor":
            return torch.optim.Adafactor(self.parameters(), 1e-3)
        return TrustRatio(self.parameters())


def _whole_tensor_optimizer(name: str, directory: Path) -> str:
    trainer = make_trainer("toy_fsdp", directory)
    with pytest.raises(ValueError, match=name) as info:
        trainer.fit(WithOptimizer(name), regression_data())
    assert trainer.global_step == 0
    return str(info.value)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "TrustRatio"])
def test_whole_tensor_optimizers_are_refused_by_name_on_every_rank(tmp_path, name):  # C47
    first, second = run_ranks(_whole_tensor_optimizer, 2, name, tmp_path)
    assert first == second
    assert f"Optimizer `{name}` is not known to update elements independently" in first
    assert f"pass `allow_optimizers=({name},)`" in first


def _allowed_optimizer(directory: Path) -> int:
    strategy = ToyFSDPStrategy(allow_optimizers=(TrustRatio,))
    trainer = make_trainer(strategy, directory)
    trainer.fit(WithOptimizer("TrustRatio"), regression_data())
    return trainer.global_step


def test_an_optimizer_that_the_user_vouches_for_is_taken(tmp_path):  # C47
    assert run_ranks(_allowed_optimizer, 2, tmp_path) == [4, 4]


# -- accumulation (C49) --------------------------------------------------------------------------


class Sum(nn.Module):
    """Units side by side, with gradients that do not depend on weights: whole numbers stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x * (i + 1)) for i, layer in enumerate(self.layers))  # type: ignore


class Accumulating(LitStack):
    """Counts reductions of each optimizer step."""

    def __init__(self, is_exact: bool) -> None:
        super().__init__(Sum() if is_exact else Stack())
        self.is_exact = is_exact
        self.reduces: list[int] = []
        self.num_steps: list[int] = []  # after each epoch

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        if self.is_exact:
            return self.net(batch[0].mul(8).round()).sum()
        return F.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, _: Any) -> None:
        if isinstance(self.trainer.strategy, ToyFSDPStrategy):
            ledger = self.trainer.strategy.ledger
            self.reduces.append(ledger.calls_by_operation().get("reduce_scatter", 0))
            ledger.reset()

    def on_train_epoch_end(self) -> None:
        self.num_steps.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.125, momentum=0.5)


SCHEDULE = {0: 2, 1: 4}


def _accumulate(strategy: Any, directory: Path, is_exact: bool, is_scheduled: bool) -> Any:
    """10 batches a rank on 2 ranks, two epochs; on one process the same 20 in twice the window."""
    torch.manual_seed(0)
    module, world_size = Accumulating(is_exact), dist.get_world_size()
    factor = 2 // world_size
    if is_scheduled:
        schedule = {epoch: window * factor for epoch, window in SCHEDULE.items()}
        options: dict[str, Any] = {"callbacks": [GradientAccumulationScheduler(schedule)]}
    else:
        options = {"accumulate_grad_batches": 4 * factor}
    fit(module, strategy, directory, _ordered(world_size), max_epochs=2, **options)
    return whole(module), module.reduces, module.num_steps


def _ordered(world_size: int) -> DataLoader:
    """20 micro-batches in global order, micro-batch m on rank m % world_size; not shuffled."""
    data = regression_data(80)
    rank, tensors = dist.get_rank(), data.dataset.tensors
    mine = [t.view(20, 4, -1)[rank::world_size].flatten(0, 1) for t in tensors]
    return DataLoader(TensorDataset(*mine), batch_size=4)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_short_windows_train_as_on_one_process_in_both_modes(
    tmp_path, is_exact, is_scheduled
):  # C49
    case = (tmp_path, is_exact, is_scheduled)
    expected, _, steps = run_ranks(_accumulate, 1, "auto", *case)[0]
    assert steps == ([5, 8] if is_scheduled else [3, 6])
    windows = [2] * 5 + [4, 4, 2] if is_scheduled else [4, 4, 2] * 2
    num_units = 5 if is_exact else 4
    for mode in ("every_micro_batch", "last_micro_batch"):
        strategy = ToyFSDPStrategy(gradient_sync=mode)
        for weights, reduces, our_steps in run_ranks(_accumulate, 2, strategy, *case):
            assert our_steps == steps
            used = num_units - 1 if is_exact else num_units  # a root without parameters
            is_last = mode == "last_micro_batch"
            assert reduces == [used * (1 if is_last else window) for window in windows]
            if mode == "every_micro_batch" or is_exact:
                assert_equal(weights, expected)
            for name, value in expected.items():  # 2e-6: 16 ulps, for sums in another order
                torch.testing.assert_close(weights[name], value, rtol=2e-6, atol=1e-6)


def _peaks(mode: str, sharding: str, directory: Path) -> tuple[int, int, int]:
    torch.manual_seed(0)
    module = LitStack(nn.Sequential(nn.Linear(5, 64), *_wide(), nn.Linear(64, 3)))
    strategy = ToyFSDPStrategy(gradient_sync=mode, sharding_strategy=sharding, transport="pairwise")
    trainer = make_trainer(strategy, directory, accumulate_grad_batches=4)
    trainer.fit(module, regression_data())
    root = get_root(module)
    padded = sum(flat.layout.padded_numel for flat in root.flats)
    largest = max(sum(f.layout.padded_numel for f in u.flats) for u in root.units)
    return root.memory.peak_bytes, 4 * padded, 4 * largest


def _wide() -> list[nn.Module]:
    return [nn.Linear(64, 64) for _ in range(8)]


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_waiting_for_the_last_micro_batch_costs_whole_gradients_for_shards_of_them(
    tmp_path, sharding
):  # C49
    every, model, unit = run_ranks(_peaks, 2, "every_micro_batch", sharding, tmp_path)[0]
    last, _, _ = run_ranks(_peaks, 2, "last_micro_batch", sharding, tmp_path)[0]
    # P b_r instead of P b_G / N and (1 + m) U b_r with what is received: N = 2, m = 1.
    assert model / 2 - 2.5 * unit <= last - every <= model / 2


# -- buffers of BatchNorm (C52) ------------------------------------------------------------------


class Normed(Shared):
    """BatchNorm over different data on each rank."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.mean_loss(batch, self.net)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = F.mse_loss(self.net(batch[0][0]), batch[1][0])  # the same data on all ranks
        self.log(f"loss_{self.trainer.global_rank}", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def _fit_normed(strategy: Any, directory: Path, max_epochs: int, ckpt_path: Path | None) -> Any:
    torch.manual_seed(dist.get_rank())
    module = Normed()
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": max_epochs}
    trainer = make_trainer(strategy, directory, **options)
    data = global_batches(5)
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    loss = trainer.callback_metrics[f"loss_{dist.get_rank()}"].item()
    path = directory / f"{max_epochs}.ckpt"
    trainer.save_checkpoint(path)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return whole(module), buffers, loss, path


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_running_statistics_stay_rank_0s_through_a_resume_as_under_ddp(
    tmp_path, state_dict_type
):  # C52
    strategy = ToyFSDPStrategy(state_dict_type=state_dict_type)
    unbroken = run_ranks(_fit_normed, 2, "ddp", tmp_path, 2, None)
    first = run_ranks(_fit_normed, 2, strategy, tmp_path, 1, None)
    second = run_ranks(_fit_normed, 2, strategy, tmp_path, 2, first[0][3])
    for weights, buffers, loss, _ in second:
        assert loss == second[0][2] == unbroken[0][2]
        assert_equal(buffers, unbroken[0][1])
        for name, value in unbroken[0][0].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)


def _sync_batchnorm(directory: Path) -> str:
    trainer = make_trainer("toy_fsdp", directory, sync_batchnorm=True)
    with pytest.raises(ValueError, match="`sync_batchnorm=True`") as info:
        trainer.fit(Normed(), global_batches(2))
    return str(info.value)


def test_sync_batchnorm_on_the_cpu_is_refused_with_the_reason(tmp_path):  # C52
    first, second = run_ranks(_sync_batchnorm, 2, tmp_path)
    assert first == second
    assert "torch's SyncBatchNorm runs on CUDA only" in first


# -- hybrid sharding -----------------------------------------------------------------------------


def _fit_stack(
    strategy: Any, directory: Path, max_epochs: int, ckpt_path: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    module = LitStack()
    trainer = make_trainer(
        strategy, directory, max_epochs=max_epochs, use_distributed_sampler=False, **options
    )
    trainer.fit(module, _dealt(), ckpt_path=ckpt_path)
    is_full = getattr(trainer.strategy, "state_dict_type", "full") == "full"
    moments = trainer.strategy.optimizer_state(trainer.optimizers[0]) if is_full else {}
    path = directory / f"{trainer.strategy.__class__.__name__}-{max_epochs}"
    trainer.save_checkpoint(path)
    return whole(module), path, moments, trainer.global_step


def _dealt() -> DataLoader:
    """12 micro-batches in global order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = regression_data(48).dataset.tensors
    mine = [t.view(12, 4, -1)[rank::world_size].flatten(0, 1) for t in tensors]
    return DataLoader(TensorDataset(*mine), batch_size=4)


def _fit_accumulated(strategy: Any, directory: Path, max_epochs: int, ckpt_path: Any = None) -> Any:
    """One optimizer step for 4 micro-batches, whatever the number of ranks."""
    window = 4 // dist.get_world_size()
    return _fit_stack(strategy, directory, max_epochs, ckpt_path, accumulate_grad_batches=window)


@pytest.mark.parametrize("saved_as", ["full", "sharded"])
def test_hybrid_sharding_trains_saves_and_resumes_fully_sharded_on_two_ranks(tmp_path, saved_as):
    expected, _, moments, _ = run_ranks(_fit_accumulated, 1, "auto", tmp_path, 2)[0]
    hybrid = ToyFSDPStrategy(
        sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), state_dict_type=saved_as
    )
    results = run_ranks(_fit_accumulated, 4, hybrid, tmp_path, 1)
    for weights, *_ in results:
        assert_equal(weights, results[0][0])
    path = results[0][1]
    assert path.is_dir() == (saved_as == "sharded")
    for actual, _, our_moments, step in run_ranks(
        _fit_accumulated, 2, ToyFSDPStrategy(), tmp_path, 2, path
    ):
        assert step == 6
        for name, value in expected.items():  # a group adds up before the other: rounding
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)
        for index, entry in (our_moments or {"state": {}})["state"].items():
            for key, value in moments["state"][index].items():
                torch.testing.assert_close(entry[key], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("saved_as", ["full", "sharded"])
def test_a_fully_sharded_checkpoint_resumes_in_hybrid_sharding(tmp_path, saved_as):
    expected = run_ranks(_fit_accumulated, 1, "auto", tmp_path, 2)[0][0]
    strategy = ToyFSDPStrategy(state_dict_type=saved_as)
    path = run_ranks(_fit_accumulated, 2, strategy, tmp_path, 1)[0][1]
    hybrid = ToyFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    for actual, _, _, step in run_ranks(_fit_accumulated, 4, hybrid, tmp_path, 2, path):
        assert step == 6
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"num_prefetch": 0},
        {"num_prefetch": 2},
        {"num_prefetch": 2, "sharding_strategy": "SHARD_GRAD_OP"},
        {"num_prefetch": 0, "auto_wrap_policy": ["Linear", "LayerNorm"]},
        {"transport": "native", "auto_wrap_policy": None},
    ],
    ids=str,
)
def test_options_of_the_strategy_do_not_change_a_bit(tmp_path, options):
    expected = run_ranks(_fit_accumulated, 1, "auto", tmp_path, 2)[0][0]
    for actual, *_ in run_ranks(_fit_accumulated, 2, ToyFSDPStrategy(**options), tmp_path, 2):
        if options.get("transport") != "native":
            assert_equal(actual, expected)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_last_micro_batch_with_shard_grad_op_matches_one_process_within_rounding(tmp_path):
    expected = run_ranks(_fit_accumulated, 1, "auto", tmp_path, 2)[0][0]
    strategy = ToyFSDPStrategy(sharding_strategy="SHARD_GRAD_OP", gradient_sync="last_micro_batch")
    results = run_ranks(_fit_accumulated, 2, strategy, tmp_path, 2)
    for actual, *_ in results:
        assert_equal(actual, results[0][0])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# -- a mixed-precision policy without a precision flag -------------------------------------------


class Ordinary(L.LightningModule):
    """Embedding, LayerNorm, BatchNorm, a loss of its own: an ordinary model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11)
        self.register_buffer("table", torch.arange(11.0))
        self.losses: list[float] = []
        self.seen: set[torch.dtype] = set()
        for module in (self.embedding, self.blocks[1].linear1, self.head):
            module.register_forward_hook(lambda m, *_: self.seen.add(m.weight.dtype))

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


def _fit_ordinary(policy: MixedPrecisionPolicy | None, directory: Path) -> Any:
    torch.manual_seed(0)
    module = Ordinary()
    tokens = torch.arange(24).view(-1, 1).add(torch.arange(7)) % 11
    strategy = ToyFSDPStrategy(mixed_precision=policy)
    trainer = make_trainer(strategy, directory, max_epochs=4)
    trainer.fit(module, DataLoader(tokens, batch_size=4))
    path = directory / "ordinary.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    dtypes = {name: value.dtype for name, value in saved["state_dict"].items()}
    entries = saved["optimizer_states"][0]["state"].values()
    moments = {value.dtype for entry in entries for value in entry.values()}
    return module.losses, module.seen, dtypes, moments, module.table.dtype


@pytest.mark.parametrize("buffer_dtype", [None, "bfloat16"])
def test_a_policy_alone_trains_an_ordinary_model_and_saves_its_own_dtypes(tmp_path, buffer_dtype):
    plain = run_ranks(_fit_ordinary, 2, None, tmp_path)
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", buffer_dtype=buffer_dtype)
    results = run_ranks(_fit_ordinary, 2, policy, tmp_path)
    for (losses, _, dtypes, _, _), ours in zip(plain, results, strict=True):
        our_losses, seen, our_dtypes, moments, table = ours
        assert seen == {torch.bfloat16}
        assert our_dtypes == dtypes
        assert moments == {torch.float32}
        assert table == (torch.float32 if buffer_dtype is None else torch.bfloat16)
        assert our_losses[-1] < 0.6 * our_losses[0]
        assert our_losses == pytest.approx(losses, rel=0.02)  # bf16 has 8 bits


# -- models on the meta device -------------------------------------------------------------------


class Live:
    """Largest number of bytes that live tensors held, looked at around every collective."""

    def __init__(self) -> None:
        self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, live_bytes(1024))


WIDE, NUM_WIDE = 96, 8
WIDE_BYTES = 4 * WIDE * WIDE


class Watched(nn.Linear):
    """Looks at what lives right after it got its values."""

    live = Live()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        Watched.live.look()


def _wide_stack() -> nn.Module:
    blocks = [nn.Sequential(Watched(WIDE, WIDE, bias=False), nn.ReLU()) for _ in range(NUM_WIDE)]
    return nn.Sequential(*blocks)


class LitWide(L.LightningModule):
    def __init__(self, configures: bool) -> None:
        super().__init__()
        self.configures = configures
        if not configures:
            self.net = _wide_stack()

    def configure_model(self) -> None:
        if self.configures and not hasattr(self, "net"):
            self.net = _wide_stack()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class MetaWide(LitWide):
    """Builds its network on the meta device in `configure_model`."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()


def _fit_wide(how: str, directory: Path) -> tuple[Any, ...]:
    torch.manual_seed(dist.get_rank())
    gc.collect()
    gc.freeze()
    trainer = make_trainer("toy_fsdp", directory, max_steps=1, max_epochs=None)
    if how == "init_module":
        with trainer.init_module(empty_init=True):
            module = LitWide(configures=False)
        assert all(param.is_meta for param in module.parameters())
    else:
        module = (MetaWide if how == "configure_model" else LitWide)(configures=True)
    Watched.live = Live()
    broadcast = Transport.broadcast_

    def watched(self: Transport, tensor: Tensor, unit: str) -> None:
        Watched.live.look()
        broadcast(self, tensor, unit)
        Watched.live.look()

    Transport.broadcast_ = watched  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, WIDE)), batch_size=2))
    first = next(iter(whole(module).values()))
    return Watched.live.peak, first.std().item(), len(get_root(module).units)


@pytest.mark.parametrize("how", ["init_module", "configure_model"])
def test_a_model_built_on_the_meta_device_never_exists_whole(tmp_path, how):
    stds = set()
    for rank, (peak, std, num_units) in enumerate(run_ranks(_fit_wide, 4, how, tmp_path)):
        assert num_units == 1 + NUM_WIDE
        shards = NUM_WIDE * WIDE_BYTES // 4
        # The parameter just made, the buffer it is copied to, and the shards of all before it.
        assert 2 * WIDE_BYTES <= peak <= shards + 2 * WIDE_BYTES + 1024, rank
        assert peak < NUM_WIDE * WIDE_BYTES
        stds.add(std)
    assert len(stds) == 1 and stds.pop() > 0
    # The same model built with memory exists whole: the measure can tell.
    built = run_ranks(_fit_wide, 4, "with memory", tmp_path)
    assert all(peak >= NUM_WIDE * WIDE_BYTES for peak, _, _ in built)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))


class LitNoReset(LitStack):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = NoReset()


def _fit_without_reset(directory: Path) -> str:
    trainer = make_trainer("toy_fsdp", directory)
    with trainer.init_module(empty_init=True):
        module = LitNoReset()
    with pytest.raises(ValueError) as info:
        trainer.fit(module, regression_data())
    return str(info.value)


def test_a_meta_module_without_reset_parameters_is_refused_by_name(tmp_path):
    for message in run_ranks(_fit_without_reset, 2, tmp_path):
        assert "NoReset" in message
        assert "`scaling`" in message
        assert "has no `reset_parameters()`" in message


# -- freezing, hooks and monitors ----------------------------------------------------------------


class Unfreezing(BaseFinetuning):
    """The input layer and the first block learn from epoch 2 on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze([pl_module.net.inp, pl_module.net.blocks[0]])

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch >= 2:
            modules = [pl_module.net.inp, pl_module.net.blocks[0]]
            self.unfreeze_and_add_param_group(modules, optimizer, lr=0.02)


class Tuned(Shared):
    """Only what is trainable goes to the optimizer, as `BaseFinetuning` asks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = self.mean_loss(batch, self.net)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _finetune(strategy: Any, directory: Path, max_epochs: int, ckpt_path: Any = None) -> Any:
    torch.manual_seed(0)
    module = Tuned()
    monitor = LearningRateMonitor(logging_interval="epoch")
    logger = CSVLogger(directory, name=f"{dist.get_world_size()}-{max_epochs}")
    trainer = make_trainer(
        strategy,
        directory,
        max_epochs=max_epochs,
        callbacks=[Unfreezing(), monitor],
        logger=logger,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, global_batches(3), ckpt_path=ckpt_path)
    rates = {key: [float(rate) for rate in rates] for key, rates in monitor.lrs.items()}
    trainer.save_checkpoint(directory / f"{max_epochs}.ckpt")
    trainable = sum(p.requires_grad for p in module.parameters())
    groups = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
    return whole(module), rates, trainable, groups


@pytest.mark.parametrize("policy", ["auto", None])
def test_weights_unfrozen_at_epoch_2_train_and_resume_as_on_one_process(tmp_path, policy):
    frozen = run_ranks(_finetune, 1, "auto", tmp_path, 2)[0]
    expected = run_ranks(_finetune, 1, "auto", tmp_path, 4)[0]
    strategy = ToyFSDPStrategy(auto_wrap_policy=policy)
    torch.manual_seed(0)
    start = dict(Tuned().named_parameters())
    for ours, rates, trainable, groups in run_ranks(_finetune, 2, strategy, tmp_path, 2):
        assert torch.equal(ours["net.inp.weight"], start["net.inp.weight"])
        assert_equal(ours, frozen[0])
        assert (rates, trainable, groups) == frozen[1:]
    for ours, rates, trainable, groups in run_ranks(_finetune, 2, strategy, tmp_path, 4):
        assert not torch.equal(ours["net.inp.weight"], start["net.inp.weight"])
        assert_equal(ours, expected[0])
        assert (rates, trainable, groups) == expected[1:]
    resumed = run_ranks(_finetune, 2, strategy, tmp_path, 6, tmp_path / "4.ckpt")
    expected = run_ranks(_finetune, 1, "auto", tmp_path, 6, tmp_path / "4.ckpt")[0]
    for ours, _, trainable, groups in resumed:
        assert_equal(ours, expected[0])
        assert (trainable, groups) == expected[2:]


class GradientHooks(Shared):
    """Reads and edits `param.grad` in every hook that Lightning has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.squares: list[float] = []
        self.order: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.mean_loss(batch, self.net)

    def on_before_zero_grad(self, _: Any) -> None:
        self.order.append("before zero_grad")

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        self.order.append("zero_grad")
        optimizer.zero_grad(set_to_none=index % 2 == 1)

    def on_after_backward(self) -> None:
        self.order.append("after backward")
        assert all(p.grad is not None and p.grad.shape == p.shape for p in self.parameters())
        for param in self.parameters():
            param.grad.mul_(0.5)

    def on_before_optimizer_step(self, _: Any) -> None:
        self.order.append("before step")
        square = sum(p.grad.double().square().sum() for p in self.parameters())
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        self.squares.append(square.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def _fit_with_hooks(strategy: Any, directory: Path) -> Any:
    torch.manual_seed(0)
    module = GradientHooks()
    weights = fit(module, strategy, directory, global_batches(4))
    return weights, module.squares, module.order


def test_hooks_see_and_change_reduced_gradients_piece_by_piece(tmp_path):
    expected, squares, order = run_ranks(_fit_with_hooks, 1, "auto", tmp_path)[0]
    assert {"before zero_grad", "zero_grad", "after backward", "before step"} == set(order)
    for weights, our_squares, our_order in run_ranks(_fit_with_hooks, 2, "toy_fsdp", tmp_path):
        assert our_order == order
        assert our_squares == pytest.approx(squares, rel=1e-12)
        assert_equal(weights, expected)
