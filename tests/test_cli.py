"""`train.py` as users start it: sweeps, torchrun, bad input, stops. Seconds each."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch.callbacks import Callback

REPO = Path(__file__).parents[1]
TINY = (
    "accelerator=cpu",
    "data.batch_size=2",
    "data.seq_len=16",
    "model.d_model=16",
    "model.num_layers=2",
    "data.val_batches=4",
    "trainer.val_check_interval=1000",
)  # small enough that starting takes longer than training


def start(cwd: Path, *args: str, program: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HYDRA_", "SLURM_"))}
    env["PYTHONPATH"] = str(REPO)  # for the callbacks below
    return subprocess.Popen(
        [*(program or (sys.executable,)), str(REPO / "train.py"), *args],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # the ranks stay in its session: leftovers can be found
    )


def finish(process: "subprocess.Popen[str]", timeout: float = 100) -> tuple[int, str, str]:
    """Wait for the end; nothing of the process's session may be left then."""
    try:
        out, err = process.communicate(timeout=timeout)
        deadline = time.monotonic() + 10
        while session(process.pid):
            assert time.monotonic() < deadline, f"left behind: {session(process.pid)}"
            time.sleep(0.1)
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
    return process.returncode, out, err


def session(leader: int) -> list[int]:
    """Processes of the session that `leader` leads or led."""
    members = []
    for pid in psutil.pids():
        try:
            is_member = os.getsid(pid) == leader
            if is_member and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_sweep_of_all_strategies_and_two_sizes(tmp_path: Path) -> None:  # C56
    sizes = [1, 2]
    names = ["toy_fsdp", "ddp", "fsdp", "fsdp2"]
    code, _, err = finish(
        start(
            tmp_path,
            *("-m", *TINY, "trainer.max_steps=5", "hydra.sweep.dir=sweep"),
            *(f"strategy={','.join(names)}", "devices=1,2"),
        )
    )
    assert (code, err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]
    jobs = sorted((tmp_path / "sweep").glob("[0-9]*"))
    runs = [(name, size) for name in names for size in sizes]
    assert [path.name for path in jobs] == [
        f"{number}_{name}_{size}" for number, (name, size) in enumerate(runs)
    ]
    assert len(list(tmp_path.rglob(".hydra"))) == 8
    assert len(list(tmp_path.rglob("events.out.tfevents*"))) == 2 * 8  # of fit, of hyper-parameters
    losses: dict[int, list[float]] = {1: [], 2: []}
    for job, (name, size) in zip(jobs, runs, strict=True):
        summary = json.loads((job / "summary.json").read_text())
        assert (summary["strategy"], summary["world_size"]) == (name, size)
        assert summary["steps"] == 5
        losses[size].append(summary["metrics"]["val/loss"])
        logs = [path.name for path in (job / "ranks").iterdir()]
        assert logs == [f"rank_{rank}.log" for rank in range(1, size)]
        assert size == 1 or "[rank 1]" in (job / "ranks" / "rank_1.log").read_text()
        assert (job / "checkpoints" / "last.ckpt").is_file()
    for size in sizes:
        assert losses[size] == pytest.approx([losses[size][0]] * 4, rel=1e-5)


class FailOnRank1(Callback):
    """Rank 1 raises in step 1."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1:
            raise LookupError("rank one is out of luck")


@pytest.mark.slow
def test_sweep_goes_on_after_a_rank_raised_and_fails_in_the_end(tmp_path: Path) -> None:  # C58, C64
    (tmp_path / "text.txt").write_text("a text, relative to where the sweep was started. " * 99)
    code, _, err = finish(
        start(
            tmp_path,
            *("-m", *TINY, "trainer.max_steps=2", "hydra.job.chdir=true", "data.files=text.txt"),
            *("hydra.sweep.dir=${now:%Y}/of_${data.seq_len}", "devices=2,1", "strategy=ddp"),
            "hydra.sweep.subdir=job_${hydra:job.num}",
            "+callbacks.fail._target_=tests.test_cli.FailOnRank1",
        )
    )
    assert code == 1
    [line] = error_lines(err)
    assert line.startswith("error: LookupError: rank one is out of luck (rank 1, log: ")
    assert 'raise LookupError("rank one is out of luck")' in err  # that rank's traceback
    [sweep] = tmp_path.glob("2*/of_16")
    assert sorted(path.name for path in tmp_path.iterdir()) == [sweep.parent.name, "text.txt"]
    log = sweep / "job_0" / "ranks" / "rank_1.log"
    assert f"log: {log})" in line
    assert "LookupError" in log.read_text()
    assert "LookupError" in (sweep / "job_0" / "train.log").read_text()
    assert not (sweep / "job_0" / "summary.json").exists()
    assert json.loads((sweep / "job_1" / "summary.json").read_text())["world_size"] == 1
    assert len(list(tmp_path.rglob(".hydra"))) == 2


@pytest.mark.slow
def test_torchrun_ranks_are_used_and_share_one_run_dir(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    code, out, err = finish(
        start(
            tmp_path,
            *(*TINY, "trainer.max_steps=2", "hydra.run.dir=run/${now:%H-%M-%S-%f}", "devices=7"),
            program=(*torchrun, "--nproc-per-node=2"),
        )
    )
    assert code == 0, err
    [run] = (tmp_path / "run").iterdir()
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    assert [path.name for path in (run / "ranks").iterdir()] == ["rank_1.log"]
    assert out.count("tensorboard --logdir") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("task=prove", "`task=prove`: no such option; `task` can be benchmark, fit, verify"),
        ("trainer.max_step=3", "unknown key `trainer.max_step`: did you mean `trainer.max_steps`?"),
        ("devices=0", "`devices=0`: expected a whole number of at least 1"),
        ("logger=null", "`logger` can be csv, tensorboard; for none write `~logger`"),
        ("-m devices=1 data.batch_size=2,0", "job 1 of the sweep: `data.batch_size` must be at"),
        ("hydra.run.dir=/proc/x", "cannot use '/proc/x': No such file or directory; check `hydra"),
    ],
)
def test_bad_input_is_one_line_on_the_terminal(tmp_path: Path, args: str, message: str) -> None:
    code, out, err = finish(start(tmp_path, *args.split()))
    assert code == 2
    assert out == ""
    assert err.strip().splitlines() == error_lines(err)
    assert message in err and len(error_lines(err)) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl_c", "terminate", "kill_a_rank"])
def test_stopped_run_leaves_no_process_and_no_success(tmp_path: Path, how: str) -> None:  # C64
    process = start(tmp_path, *TINY, "trainer.max_steps=99999", "hydra.run.dir=run", "strategy=ddp")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("run/checkpoints/last.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    if how == "ctrl_c":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    elif how == "terminate":
        process.send_signal(signal.SIGTERM)
    else:
        ranks = [pid for pid in session(process.pid) if is_rank(pid)]
        os.kill(max(ranks), signal.SIGKILL)
    code, _, err = finish(process, timeout=30)
    assert code == {"ctrl_c": 130, "terminate": 143, "kill_a_rank": 1}[how], err
    if how == "kill_a_rank":
        assert "SIGKILL" in error_lines(err)[0]


def is_rank(pid: int) -> bool:
    """Whether a process of a job is one of its ranks: a child of the fork server."""
    parent = psutil.Process(pid).parent()
    return parent is not None and any("forkserver" in part for part in parent.cmdline())


VERIFY = ("task=verify", "verify.rows=[a,c]", "verify.steps=3", *TINY[:5])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["train.py", "torchrun"])
def test_verify_ends_with_1_where_one_bit_differs(tmp_path: Path, launcher: str) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = torchrun if launcher == "torchrun" else ()
    run = (*VERIFY, "devices=2", "hydra.run.dir=run")
    code, out, err = finish(start(tmp_path, *run, "verify.plant=shard", program=program))
    assert code == 1
    lines = error_lines(err)
    assert len(lines) == 1, err
    [line] = lines
    assert "bits differ in row(s) a, c" in line and "step 1, rank 1 of 2" in line
    code, out, err = finish(start(tmp_path, *run, program=program))
    assert code == 0 and not error_lines(err)
    assert "divergence 0.00e+00" in out
    assert not (tmp_path / "run" / "scratch").exists()


@pytest.mark.slow
def test_stopped_verification_leaves_no_files(tmp_path: Path) -> None:
    process = start(tmp_path, *VERIFY, "verify.steps=100000", "hydra.run.dir=run")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("run/scratch/*.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, _, _ = finish(process)
    assert code == 143
    assert not (tmp_path / "run" / "scratch").exists()
