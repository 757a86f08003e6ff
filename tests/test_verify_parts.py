"""The parts of `task=verify`: comparison to the bit, the file of weights, refusals."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from lightning_fsdp_toy.tasks.verify import trajectory as trajectory_module
from lightning_fsdp_toy.tasks.verify.comparison import Divergence
from lightning_fsdp_toy.tasks.verify.outcomes import Claim, Outcome, merge
from lightning_fsdp_toy.tasks.verify.picture import draw
from lightning_fsdp_toy.tasks.verify.report import describe_failure
from lightning_fsdp_toy.tasks.verify.trajectory import Trajectory, TrajectoryWriter, check_disk
from tests.test_launch_jobs import check_refused, compose

CLAIM = Claim("c_one_process", "one process", 2, "adamw", (0, 1))


def compared(rank: int, *differences: tuple[int, float]) -> Divergence:
    """A divergence over steps 0 and 1, 4 elements each, with these differences at element 2."""
    divergence = Divergence(rank)
    for step in (0, 1):
        actual = torch.ones(4)
        for at, size in differences:
            if at == step:
                actual[2] += size
        divergence.compare(step, "w", 10, actual, torch.ones(4), "weight")
    return divergence


@pytest.mark.parametrize(
    ("actual", "expected", "is_equal", "size"),
    [
        (float("nan"), float("nan"), True, 0.0),
        (float("inf"), float("inf"), True, 0.0),
        (0.0, -0.0, False, 0.0),
        (1.0, 1.0 + 2**-23, False, 2**-23),
        (float("nan"), 1.0, False, float("inf")),
        (float("inf"), -float("inf"), False, float("inf")),
    ],
)
def test_bits_are_compared(actual: float, expected: float, is_equal: bool, size: float) -> None:
    divergence = Divergence(1)
    pair = torch.tensor([2.0, actual]), torch.tensor([2.0, expected])
    divergence.compare(5, "net.w", 64, *pair, "weight")
    assert divergence.largest == {5: size}
    assert (divergence.first is None) == is_equal
    if divergence.first is not None:
        first = divergence.first
        assert (first.step, first.rank, first.parameter, first.element) == (5, 1, "net.w", 65)


def test_the_first_difference_is_kept_and_the_largest() -> None:
    divergence = compared(0, (0, 1e-6), (1, 0.5))
    assert divergence.first is not None
    assert (divergence.first.step, divergence.first.element) == (0, 12)
    assert divergence.largest[1] == 0.5


def test_ranks_are_merged_and_the_earliest_step_comes_first() -> None:
    verdict = merge(
        [
            Outcome(CLAIM, compared(0, (1, 0.25)), numel=8, needed=8),
            Outcome(CLAIM, compared(1, (0, 0.125)), numel=8, needed=8),
        ]
    )
    assert verdict.first is not None and (verdict.first.step, verdict.first.rank) == (0, 1)
    assert verdict.largest == {0: 0.125, 1: 0.25}
    assert not verdict.is_equal and verdict.max_divergence == 0.25
    line = describe_failure([verdict], None)
    assert "weight of `w`, element 12, step 0, rank 1 of 2" in line and "\n" not in line


@pytest.mark.parametrize("needed", [8, 9])
def test_a_row_in_which_too_little_was_compared_fails(needed: int) -> None:
    verdict = merge([Outcome(CLAIM, compared(rank), 8, needed) for rank in range(2)])
    assert verdict.is_equal == (needed == 8)
    if needed == 9:
        assert "only 8 of 9 weights were compared in step 0" in describe_failure([verdict], None)


def test_a_step_that_was_not_compared_fails() -> None:
    late = Claim("c_one_process", "one process", 2, "adamw", (0, 2))
    verdict = merge([Outcome(late, compared(rank), 8, 8) for rank in range(2)])
    assert verdict.gap == "only 0 of 8 weights were compared in step 2"


def test_nothing_compared_and_unnoticed_faults_are_failures() -> None:
    equal = merge([Outcome(CLAIM, compared(rank), 8, 8) for rank in range(2)])
    assert describe_failure([equal], None) == ""
    assert "the fault was not noticed" in describe_failure([equal], "shard")
    assert "nothing was compared" in describe_failure([], None)


def test_trajectory_gives_pieces_in_memory_order(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    layer.weight.data = torch.arange(6.0).view(3, 2).t()  # not row-major
    writer = TrajectoryWriter(tmp_path / "x.bin", layer.named_parameters(), num_steps=2)
    writer.write(0)
    with torch.no_grad():
        layer.weight.add_(10)
    writer.write(2)
    assert not Trajectory.exists(tmp_path / "x.bin")
    writer.finish(note=1)
    read = Trajectory(tmp_path / "x.bin")
    assert (read.numel, read.facts) == (8, {"note": 1})
    assert read.piece(0, "weight", 1, 4).tolist() == [1, 2, 3]
    assert read.piece(2, "weight", 0, 6).tolist() == [10, 11, 12, 13, 14, 15]
    assert torch.equal(read.piece(2, "bias", 0, 2), layer.bias)
    with pytest.raises(ValueError, match="`other` is no parameter"):
        read.piece(0, "other", 0, 1)
    assert (tmp_path / "x.bin").stat().st_size == 3 * 8 * 4


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        trajectory_module.shutil, "disk_usage", lambda _: usage(2**40, 0, 101 * 4 * 1000)
    )
    check_disk(tmp_path / "not" / "there", 100, 1000)
    with pytest.raises(ValueError, match=r"`verify.steps=100`: .* lower `verify.steps`"):
        check_disk(tmp_path, 100, 1001)


def test_picture_shows_equal_and_differing_runs(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "parameters": 8,
        "sharded_bytes": 16,
        "replicated_bytes": 32,
        "optimizer_bytes": None,
        "replicated_optimizer_bytes": None,
    }
    pictures = []
    for differences in ((), ((1, 0.5),)):
        verdict = merge([Outcome(CLAIM, compared(0, *differences), 4, 4)])
        pixels = draw(sizes, [verdict], 2, tmp_path / "x.png")
        assert pixels.shape[2] == 3 and pixels.dtype.name == "uint8"
        pictures.append(pixels)
    assert (pictures[0] != pictures[1]).any()
    draw(sizes, [], 2, tmp_path / "empty.png")


BAD_INPUT = {
    "verify.steps=1": "`verify.steps=1`: expected a whole number of at least 2",
    "verify.rows=[a,g]": "`verify.rows`: 'g' is none of a, b, c, d, e, f",
    "verify.rows=[]": "`verify.rows=[]`: expected a list of a, b, c, d, e, f",
    "verify.optimizers=[adam]": "`verify.optimizers`: 'adam' is none of adamw, adamw_foreach",
    "verify.plant=foo": "`verify.plant=foo`: expected null or shard or order or weight",
    "verify.plant=order verify.rows=[a]": "`verify.plant=order` needs row e in `verify.rows`",
    "verify.plant=weight verify.rows=[b]": "`verify.plant=weight` needs row a in `verify.rows`",
    "verify.plant=order strategy.transport=native": "needs a transport that adds in rank order",
    "+verify.foo=1": "`verify`: expected the keys steps, rows, optimizers, plant",
    "strategy=ddp": "compares `toy_fsdp` with the others; use `strategy=toy_fsdp`",
    "precision=bf16-mixed": "`precision=bf16-mixed`: `task=verify` compares with a plain loop",
    "trainer.max_steps=7": "`trainer.max_steps=7` has no effect with `task=verify`: use `verify.st",
    "trainer.gradient_clip_val=1": "`trainer.gradient_clip_val=1` has no effect with `task=verify`",
    "strategy.sharding_strategy=HYBRID_SHARD": "equals the others within rounding only",
    "strategy.gradient_sync=last_micro_batch": "equals the others within rounding only",
    "verify.steps=0": "`verify.steps=0`: expected a whole number of at least 2",
}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, overrides: str) -> None:
    check_refused(tmp_path / "run", BAD_INPUT[overrides], "task=verify", *overrides.split())


def test_verify_is_no_key_of_another_task(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="unknown key `verify`"):
        launch(compose(tmp_path / "run", "+verify.steps=3"))


def test_verify_uses_synthetic_data_unless_told_otherwise(tmp_path: Path) -> None:
    assert compose(tmp_path, "task=verify", "model.vocab_size=65").data.vocab_size == 65
    assert "files" in compose(tmp_path, "task=verify", "data=text").data
