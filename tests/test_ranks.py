"""The many-rank helper itself: results, blame, time limits and left-over processes."""

import multiprocessing
import os
import signal
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def sum_of_ranks(scale: float) -> dict[str, Any]:
    """All-reduce `scale * rank` and report what the rank sees of its surroundings."""
    total = torch.full((3,), scale * dist.get_rank())
    dist.all_reduce(total)
    return {
        "total": total,
        "rank": int(os.environ["RANK"]),
        "threads": torch.get_num_threads(),
        "extra": os.environ.get("RANKS_TEST_EXTRA"),
    }


def fail_on_rank(rank: int, how: str) -> None:
    """Fail on one rank while the others are inside a collective."""
    if dist.get_rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "pytest":
            pytest.fail("planted failure")
        raise ValueError("planted failure")
    dist.all_reduce(torch.ones(1))


def sleep_on_rank_1() -> int:
    """Rank 1 hangs; return the process id on the others."""
    if dist.get_rank() == 1:
        time.sleep(60)
    return os.getpid()


def large_result() -> torch.Tensor:
    """More than a pipe holds."""
    return torch.full((1_000_000,), float(dist.get_rank()))


def rank_processes() -> list[psutil.Process]:
    """Living processes that the fork server of this process has started."""
    descendants = psutil.Process().children(recursive=True)
    direct = {child.pid for child in psutil.Process().children()}
    return [
        child
        for child in descendants
        if child.pid not in direct and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_TEST_EXTRA", f"extra-{world_size}")
    results = run_ranks(sum_of_ranks, world_size, 2.0)
    expected = 2.0 * sum(range(world_size))
    assert [result["rank"] for result in results] == list(range(world_size))
    for result in results:
        assert result["total"].tolist() == [expected] * 3
        assert result["threads"] == 1
        assert result["extra"] == f"extra-{world_size}"
    assert rank_processes() == []
    assert multiprocessing.active_children() == []


def test_results_larger_than_a_pipe_come_back() -> None:
    results = run_ranks(large_result, 2)
    assert [result.sum().item() for result in results] == [0.0, 1_000_000.0]


@pytest.mark.parametrize("how", ["raise", "pytest"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_fails_first_is_blamed(rank: int, how: str) -> None:
    with pytest.raises(RankError, match=rf"(?s)rank {rank} of 3 failed.*planted failure"):
        run_ranks(fail_on_rank, 3, rank, how)
    assert rank_processes() == []


def test_a_killed_rank_is_blamed() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed:\ndied without a traceback"):
        run_ranks(fail_on_rank, 2, 1, "kill")
    assert rank_processes() == []


def test_a_hanging_rank_is_named_and_killed() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still running after 3 s"):
        run_ranks(sleep_on_rank_1, 2, timeout=3)
    assert time.monotonic() - started < 6
    assert rank_processes() == []
