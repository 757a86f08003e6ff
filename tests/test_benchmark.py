"""`task=benchmark` as a whole: all variants, given ranks, a worker that dies. Never a time."""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from lightning_fsdp_toy.models import Transformer
from lightning_fsdp_toy.tasks.benchmark.variants import VARIANTS
from tests.test_cli import finish, start
from tests.test_launch_jobs import compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = (
    "task=benchmark",
    "benchmark.quick=true",
    "benchmark.rounds=2",
    "benchmark.max_spread=1000000",
    "model.vocab_size=100",
    "devices=2",
)


def test_all_variants_are_measured_and_nothing_stays_behind(tmp_path: Path, mark: str) -> None:
    metric = launch(compose(tmp_path, *QUICK))
    content = json.loads((tmp_path / "benchmark.json").read_text())
    variants = content["variants"]
    assert list(variants) == list(VARIANTS)
    assert metric == statistics.median(variants["toy_fsdp"]["step_s"])
    assert set(content["ratios"]) == set(VARIANTS) - {"toy_fsdp"}
    assert all(len(each["step_s"]) == content["rounds"] == 2 for each in variants.values())
    assert (content["parameters"], content["world_size"]) == (73_220, 2)
    for name in ("toy_fsdp", "toy_fsdp_pairwise", "toy_fsdp_grad_op"):
        own = variants[name]
        assert own["peak_bytes"] <= 1.02 * own["planned_peak_bytes"]
        if name != "toy_fsdp":  # whose transport may keep memory that no tensor is in
            assert own["peak_bytes"] >= 0.98 * own["planned_peak_bytes"]
        # Headers, barriers, and what other tests send meanwhile.
        assert own["wire_bytes"] >= 0.99 * own["planned_wire_bytes"]
    assert variants["floor"]["peak_bytes"] < variants["ddp"]["peak_bytes"]
    assert variants["lightning"]["peak_bytes"] is None
    assert all(0 < each["pss_bytes"] < each["rss_bytes"] for each in variants.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("benchmark.json", "benchmark.png", "ranks", "tensorboard")
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["benchmark/picture"]
    scalars = set(events.Tags()["scalars"])
    assert {"benchmark/ddp/step_s", "benchmark/ddp/ratio", "benchmark/ddp/pss_mib"} < scalars
    assert_no_worker_stays(mark)


class DiesInFloor(Transformer):
    """Ends the process of the variant `floor` on rank 1 when it trains."""

    def forward(self, tokens: Any) -> Any:
        if multiprocessing.current_process().name == "floor-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)


def test_a_worker_that_dies_ends_the_job_and_is_named(tmp_path: Path, mark: str) -> None:
    target = "model._target_=tests.test_benchmark.DiesInFloor"
    with pytest.raises(JobError) as caught:
        launch(compose(tmp_path, *QUICK, "benchmark.variants=[floor]", target))
    message = str(caught.value)
    assert "the worker of `floor` on rank 1 died (being set up), exit code -9" in message
    assert f"see {tmp_path}/ranks/rank_1_floor.log" in message and "(rank 1, log: " in message
    assert_no_worker_stays(mark)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What is in the environment of all processes that a test starts."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("BENCHMARK_TEST", mark)
    return mark


def assert_no_worker_stays(mark: str) -> None:
    deadline = time.monotonic() + 20  # fork servers notice the end of their rank
    while left := fork_servers_and_workers(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def fork_servers_and_workers(mark: str) -> list[str]:
    """Living processes that ranks have started, and that those have."""
    found = []
    for process in psutil.process_iter():
        try:
            is_own = process.ppid() == os.getpid()  # the fork server of this test run
            is_marked = process.environ().get("BENCHMARK_TEST") == mark
            if is_marked and not is_own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets of fork servers go; their paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="b"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_given_ranks_are_used_for_scaling(tmp_path: Path, short_folder: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    tiny = ("data.batch_size=1", "data.seq_len=16", "model.d_model=16", "model.num_layers=2")
    given = ("accelerator=cpu", "benchmark.scaling=ranks", "hydra.run.dir=run", "~logger")
    process = start(
        tmp_path,
        *(*QUICK, *tiny, *given, "benchmark.variants=[ddp]"),
        program=(*torchrun, "--nproc-per-node=2"),
    )
    code, out, err = finish(process, timeout=200)
    assert code == 0, err
    content = json.loads((tmp_path / "run" / "scaling.json").read_text())
    [point] = content["points"]
    assert point["world_size"] == 2 and list(point["variants"]) == ["toy_fsdp", "ddp"]
    assert "not run: 8 rank(s): started with 2" in out
    assert not list(short_folder.glob("pymp-*"))  # torchrun leaves a folder of its own
