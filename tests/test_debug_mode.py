"""Debug mode: what it shows at setup, and how it names ranks that go different ways (C55)."""

from __future__ import annotations

import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root, no_sync
from tests.core_helpers import Stack, assert_equal, make_batches, train_sharded
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks


class Lines(logging.Handler):
    """Keeps what a logger is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


# -- the table -----------------------------------------------------------------------------------


def _unit_table(under_trainer: bool, directory: Path) -> list[str]:
    handler, logger = Lines(), logging.getLogger("lightning_fsdp_toy")
    logger.addHandler(handler)
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", cast_forward_inputs=False)
    stack = Stack()
    stack.head.requires_grad_(False)
    if under_trainer:
        strategy = ToyFSDPStrategy(debug=True, mixed_precision=policy)
        trainer = make_trainer(strategy, directory, max_steps=0, max_epochs=None)
        trainer.fit(LitStack(stack), regression_data())
        root = strategy.root
    else:
        root = get_root(fully_shard(stack, debug=True, mixed_precision=policy))
    logger.removeHandler(handler)
    for flat in root.flats if handler.lines else ():
        (line,) = [each for each in handler.lines if each.startswith(f"{flat.name}  ")]
        numbers = (flat.layout.numel, flat.layout.padded_numel, 4 * flat.shard.numel())
        assert [str(number) in line.split() for number in numbers] == [True] * 3
        assert "float32 as bfloat16" in line
        assert line.endswith("frozen") == (not flat.is_trainable)
    return handler.lines


@pytest.mark.parametrize("under_trainer", [True, False])
def test_rank_0_shows_every_unit_at_setup(tmp_path, under_trainer):
    first, second = run_ranks(_unit_table, 2, under_trainer, tmp_path)
    assert second == []
    prefix = "net." if under_trainer else ""
    root_lines = ["<root>", "<root> (float32, frozen)"]
    names = [line.split("  ")[0] for line in first[2:]]
    assert sorted(names) == sorted([*root_lines, *(f"{prefix}blocks.{i}" for i in range(3))])


# -- ranks that go different ways ----------------------------------------------------------------


class Wayward(nn.Module):
    """Equal units, of which rank 1 swaps or skips some from a given forward on."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.how, self.at, self.num_calls = how, at, 0

    def forward(self, x: Tensor) -> Tensor:
        order = list(range(4))
        self.num_calls += 1
        if dist.get_rank() == 1 and self.num_calls >= self.at and self.how == "swapped":
            order[1], order[2] = order[2], order[1]
        if dist.get_rank() == 1 and self.num_calls == self.at and self.how == "skipped":
            order.remove(2)
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def _go_astray(how: str, at: int, options: dict[str, Any]) -> tuple[str, float, int]:
    torch.manual_seed(0)
    model = fully_shard(Wayward(how, at), debug=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = time.monotonic()
    try:
        for _ in range(4):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error), time.monotonic() - start, model.num_calls
    return "", time.monotonic() - start, model.num_calls


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_prefetch": 0},
    {"transport": "native"},
    {"transport": "pairwise"},
    {"sharding_strategy": "SHARD_GRAD_OP"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("how", ["swapped", "skipped"])
@pytest.mark.parametrize("at", [1, 3])
def test_every_rank_names_units_ranks_and_the_step_at_once(how, at, options):
    results = run_ranks(_go_astray, 3, how, at, options, timeout=60)
    message = results[0][0]
    for each, seconds, num_calls in results:
        assert each == message
        assert seconds < 15  # the process group waits for 40 s
        assert num_calls == at
    wrong = {"swapped": ("blocks.1", "blocks.2"), "skipped": ("blocks.2", "blocks.3")}[how]
    where = f"forward number {at}"
    if at == 3 and options.get("num_prefetch") != 0:
        # Gathers follow the order of the forward before: backward's differ first.
        where = f"backward number {at}"
        wrong = {"swapped": ("blocks.2", "blocks.1"), "skipped": ("blocks.2", "blocks.1")}[how]
    assert message.startswith(f"The ranks are about to do different things in {where}. ")
    assert re.search(rf"ranks 0, 2: [a-z-]+ of unit `{wrong[0]}` \(\d+ x torch.float32\)", message)
    assert re.search(rf"rank 1: [a-z-]+ of unit `{wrong[1]}` \(\d+ x torch.float32\)", message)


class Astray(LitStack):
    """Rank 1 skips a block in the second step."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x = self.net.inp(batch[0])
        for number, block in enumerate(self.net.blocks):
            if not (self.trainer.global_rank == 1 and index == 1 and number == 1):
                x = block(x)
        return self.net.head(x).square().mean()


def _fit_astray(directory: Path) -> str:
    trainer = make_trainer(ToyFSDPStrategy(debug=True), directory)
    with pytest.raises(RuntimeError) as info:
        trainer.fit(Astray(), regression_data())
    assert trainer.global_step == 1
    return str(info.value)


def test_a_skipped_unit_is_named_under_the_trainer(tmp_path):
    first, second = run_ranks(_fit_astray, 2, tmp_path)
    assert first == second
    assert "different things in backward number 2. rank 0: all-gather of unit `net.bl" in first
    assert "rank 0: all-gather of unit `net.blocks.1`" in first  # the one that was skipped
    assert "rank 1: all-gather of unit `net.blocks.0`" in first


# -- at setup ------------------------------------------------------------------------------------


def _other_shapes(what: str, is_debug: bool) -> str:
    model: nn.Module = Stack()
    if dist.get_rank() == 1 and what == "shape":
        model.blocks[1].up = nn.Linear(7, 14)
    if dist.get_rank() == 1 and what == "dtype":
        model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.double())
    if dist.get_rank() == 1 and what == "name":
        children = model.blocks[1]._modules
        model.blocks[1]._modules = {k.replace("up", "other"): m for k, m in children.items()}
    if dist.get_rank() == 1 and what == "frozen":
        model.blocks[1].up.weight.requires_grad_(False)
    with pytest.raises(ValueError) as info:
        fully_shard(model, debug=is_debug)
    return str(info.value)


@pytest.mark.parametrize("is_debug", [True, False])
@pytest.mark.parametrize("what", ["shape", "dtype", "name", "frozen"])
def test_ranks_that_build_different_parameters_are_refused_at_setup(what, is_debug):
    first, second = run_ranks(_other_shapes, 2, what, is_debug)
    assert "Rank 1" in second
    assert "`blocks.1" in second or "'blocks.1" in second
    assert "rank 0" in first
    expected = {"shape": "(14, 7)", "dtype": "torch.float64", "name": "other", "frozen": "False"}
    assert expected[what] in second


# -- gradients that never came -------------------------------------------------------------------


class PartlyUsed(nn.Module):
    """A unit whose output is thrown away, one with an unused layer, one that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.blocks[1].append(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        x = self.blocks[1][1](self.blocks[1][0](x))
        return self.blocks[2](x)


def _missing(is_debug: bool) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(PartlyUsed(), auto_wrap_policy=["Sequential"], debug=is_debug)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
    assert model.blocks[0][0].weight.grad is None
    return [str(each.message) for each in caught if "gradients" in str(each.message)]


def test_units_and_parameters_without_gradients_are_named_on_rank_0():
    first, second = run_ranks(_missing, 2, True)
    assert second == []
    for number, messages in ((1, first[:2]), (2, first[2:])):
        unit, part = sorted(messages, key=lambda text: "missing" in text)
        assert unit.startswith("`blocks.0` ran in forward")
        assert f"backward number {number} there were no gradients at all" in unit
        assert "blocks.0.0.weight, blocks.0.0.bias" in unit
        assert part.startswith("`blocks.1` ran in forward")
        assert "gradients missing" in part
        assert "blocks.1.2.weight, blocks.1.2.bias" in part
        assert "blocks.1.0" not in part
    assert run_ranks(_missing, 2, False) == [[], []]


def _skipped_by_all() -> tuple[list[str], list[bool]]:
    model = fully_shard(PartlyUsed(), auto_wrap_policy=["Sequential"], debug=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with no_sync(model):
            model.blocks[2](torch.ones(2, 5)).sum().backward()
        model.blocks[2](torch.ones(2, 5)).sum().backward()
    has_gradient = [block[0].weight.grad is not None for block in model.blocks]
    return [str(each.message) for each in caught if "gradients" in str(each.message)], has_gradient


def test_units_that_did_not_run_are_named_where_gradients_are_reduced():
    (messages, has_gradient), (others, _) = run_ranks(_skipped_by_all, 2)
    assert others == []
    assert has_gradient == [False, False, True]
    (message,) = messages
    assert message.startswith("`blocks.0`, `blocks.1` did not run in forward: backward number 2")


def _train(is_debug: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return train_sharded(Stack(), make_batches(8), 4, "adamw", debug=is_debug, **options)


@pytest.mark.parametrize(
    "options", [{}, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}], ids=str
)
def test_debug_mode_changes_no_bit(options):
    plain = run_ranks(_train, 4, False, options)
    for weights in run_ranks(_train, 4, True, options, timeout=60):
        assert_equal(weights, plain[0])
