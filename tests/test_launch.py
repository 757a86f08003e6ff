"""The ranks of a job: how they start, what they see, how they end."""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

import train
from lightning_fsdp_toy.handover import given_ranks
from lightning_fsdp_toy.processes import PRELOADED, RankError, run_ranks


def describe(*names: str) -> dict[str, Any]:
    """What a rank sees before and after it joins the process group."""
    seen = {name: os.environ.get(name) for name in names}
    had_group = dist.is_initialized()
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} speaks")
    size = dist.get_world_size()
    dist.destroy_process_group()
    return {
        "pid": os.getpid(),
        "size": size,
        "rank": os.environ["RANK"],
        "had_group": had_group,
        "is_elastic": TorchElasticEnvironment.detect(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "draw": torch.rand(2).tolist(),
        "env": seen,
    }


def test_ranks_form_one_group_and_nothing_stays_behind(tmp_path: Path) -> None:
    env, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    children = psutil.Process().children(recursive=True)
    ranks = run_ranks(describe, num_ranks=3, log_dir=str(tmp_path))
    assert [rank["rank"] for rank in ranks] == ["0", "1", "2"]
    assert [rank["size"] for rank in ranks] == [3, 3, 3]
    assert all(rank["is_elastic"] and not rank["had_group"] for rank in ranks)
    assert [rank["threads"] for rank in ranks] == [1, 1, 1]
    pids = {rank["pid"] for rank in ranks}
    assert len(pids | {os.getpid()}) == 4
    assert dict(os.environ) == env
    assert signal.getsignal(signal.SIGTERM) is handler
    left = psutil.Process().children(recursive=True)
    assert not pids & {process.pid for process in left}
    assert len(left) <= len(children) + 2  # the fork server and its resource tracker


def test_output_of_other_ranks_goes_to_their_files(tmp_path: Path, capfd: Any) -> None:
    run_ranks(describe, num_ranks=2, log_dir=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_1.log"]
    assert "rank 1 speaks" in (tmp_path / "rank_1.log").read_text()
    assert "rank 1 speaks" not in capfd.readouterr().out


def make_a_mess() -> None:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    os.environ["LEFT_BEHIND"] = "1"
    dist.init_process_group("gloo")


def test_job_after_a_messy_one_equals_the_job_alone(tmp_path: Path) -> None:  # C67
    [alone] = run_ranks(describe, "LEFT_BEHIND", num_ranks=1, log_dir=str(tmp_path))
    run_ranks(make_a_mess, num_ranks=1, log_dir=str(tmp_path))
    [after] = run_ranks(describe, "LEFT_BEHIND", num_ranks=1, log_dir=str(tmp_path))
    draws = alone.pop("draw"), after.pop("draw")
    assert {**alone, "pid": 0} == {**after, "pid": 0}
    assert all(len(draw) == 2 for draw in draws)


def test_each_job_gets_the_environment_of_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("SET_FOR_ONE_JOB", value)
        [rank] = run_ranks(describe, "SET_FOR_ONE_JOB", num_ranks=1, log_dir=str(tmp_path))
        assert rank["env"]["SET_FOR_ONE_JOB"] == value


def fail_on_rank_1(how: str) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("no such thing")
        if how == "exit":
            sys.exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        dist.barrier()
    if how == "kill":
        dist.all_reduce(torch.zeros(1))  # notices the loss at once, and must not be blamed
    if how == "raise":  # the worst case: hangs outside Python, deaf to SIGTERM
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))
        threading.Event().wait(60)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "KeyError: 'no such thing'"),
        ("exit", "RuntimeError: the rank called `sys.exit` before its job was done"),
        ("kill", r"the process ended with exit code -9 \(SIGKILL\)"),
    ],
)
def test_rank_that_fails_first_is_blamed_and_all_end_in_seconds(  # C64
    tmp_path: Path, how: str, message: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(fail_on_rank_1, how, num_ranks=2, log_dir=str(tmp_path), shutdown_timeout_s=2)
    assert time.monotonic() - start < 20
    assert caught.value.rank == 1
    if how != "kill":
        assert "fail_on_rank_1" in caught.value.trace
        assert caught.value.trace in (tmp_path / "rank_1.log").read_text()
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if any("fail_on_rank_1" in part for part in process.cmdline())
    ]


def leave_at_once() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)  # as a failing import would, before any group exists
    dist.init_process_group("gloo")


def test_rank_that_dies_before_the_rendezvous_ends_the_job(tmp_path: Path) -> None:  # C62
    start = time.monotonic()
    with pytest.raises(RankError, match="exit code 3") as caught:
        run_ranks(leave_at_once, num_ranks=2, log_dir=str(tmp_path))
    assert caught.value.rank == 1
    assert time.monotonic() - start < 20


def fail_once(marker: str) -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        Path(marker).touch()
        raise RuntimeError("the first time")
    return attempt


def test_restart_starts_all_ranks_again(tmp_path: Path) -> None:
    marker = tmp_path / "failed"
    results = run_ranks(fail_once, str(marker), num_ranks=2, log_dir=str(tmp_path), max_restarts=1)
    assert results == ["1", "1"] and marker.exists()


def wait_for_a_stop(marker: str) -> None:
    Path(marker, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def launch_and_wait(log_dir: str) -> None:
    run_ranks(wait_for_a_stop, log_dir, num_ranks=2, log_dir=log_dir, shutdown_timeout_s=2)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_ranks_end_with_their_launcher(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    launcher = multiprocessing.get_context("forkserver").Process(
        target=launch_and_wait, args=(str(tmp_path),)
    )
    launcher.start()
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).is_file() for rank in "01"):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)
        time.sleep(0.2)
        pids = [int((tmp_path / rank).read_text()) for rank in "01"]
        os.kill(launcher.pid, number)
        launcher.join(20)
        assert launcher.exitcode == (-9 if name == "SIGKILL" else 128 + number)
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < deadline, "ranks outlive their launcher"
            time.sleep(0.1)
    finally:
        launcher.kill()


def test_ranks_of_torchrun_and_slurm_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_ranks() is None
    monkeypatch.setenv("SLURM_PROCID", "1")  # C66
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert given_ranks() is None  # one task: train.py starts the ranks
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    given = given_ranks()
    assert isinstance(given, SLURMEnvironment)
    assert (given.global_rank(), given.world_size()) == (1, 2)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    given = given_ranks()
    assert isinstance(given, TorchElasticEnvironment)
    assert given.global_rank() == 3


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("devices=4 model=transformer", True),
        ("-m devices=1,2", True),
        ("trainer.max_step=3", False),
        ("model=null", False),
        ("devices=0", False),
        ("--help", False),
    ],
)
def test_fork_server_starts_for_runnable_configs_only(args: str, expected: bool) -> None:
    assert train.is_runnable(args.split()) == expected
    assert train.PRELOADED == PRELOADED


def test_errors_survive_json(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(raise_odd_text, num_ranks=1, log_dir=str(tmp_path))
    assert caught.value.message == "OSError: two lines \u00e9"
    assert json.dumps(caught.value.trace)


def raise_odd_text() -> None:
    random.seed(0)
    raise OSError("two\nlines \u00e9")
