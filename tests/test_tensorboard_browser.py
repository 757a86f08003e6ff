"""What a user sees of a sweep: TensorBoard in a real browser, headless.

Needs Debian's `chromium`; the screenshots are in pytest's temporary folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

REPO = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
JOBS = ["strategy=toy_fsdp,ddp", "devices=1,2"]
TINY = [
    *("data.batch_size=2", "data.seq_len=16", "data.val_batches=4", "accelerator=cpu"),
    *("model.d_model=16", "model.num_layers=2", "trainer.max_steps=6"),
]
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--window-size=1600,1200", "--virtual-time-budget=30000"),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of four jobs."""
    folder = tmp_path_factory.mktemp("sweep")
    subprocess.run(
        [sys.executable, "train.py", "-m", *TINY, *JOBS, f"hydra.sweep.dir={folder}"],
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=200,
    )
    return folder


@pytest.fixture(scope="module")
def address(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where TensorBoard serves the sweep, once it has read all four jobs."""
    log = tmp_path_factory.mktemp("tensorboard") / "log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(sweep), "--port", "0"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            yield wait_for(server, log)
        finally:
            server.terminate()
            server.wait(timeout=20)


def wait_for(server: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        found = re.search(r" at (http://\S+?)/ ", log.read_text())
        if found and len(get(found[1], "runs")) == 4:
            return found[1]
        time.sleep(0.5)
    raise TimeoutError(log.read_text())


def get(address: str, path: str) -> dict | list:
    with urllib.request.urlopen(f"{address}/data/{path}", timeout=20) as answer:
        return json.load(answer)


@pytest.mark.parametrize("tab", ["scalars", "hparams", "images", "custom_scalars"])
def test_the_tab_shows_something(address: str, tmp_path: Path, tab: str) -> None:
    picture = tmp_path / f"{tab}.png"
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    assert CHROMIUM is not None
    command = [CHROMIUM, *flags, f"{address}/#{tab}"]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    pixels = (255 * matplotlib.image.imread(picture)[..., :3]).astype(np.uint8)
    assert pixels.shape[:2] == (1200, 1600)
    content = pixels[100:, 340:]  # beside the menus
    shades = np.unique(content.reshape(-1, 3), axis=0)
    assert len(shades) > 50  # text and lines, smoothed; an empty page has a few
    background = np.all(content >= 240, axis=-1)
    assert 0.005 < 1 - background.mean() < 0.9


def test_all_jobs_can_be_compared(address: str) -> None:
    tags = get(address, "plugin/scalars/tags")
    runs = set(get(address, "runs"))
    assert len(runs) == 4
    assert {run.split("/")[0] for run in runs} == {
        *("0_toy_fsdp_1", "1_toy_fsdp_2", "2_ddp_1", "3_ddp_2")
    }
    ours = {run for run in runs if "toy_fsdp" in run}
    speed = ("throughput/step_s", "throughput/run_tokens_per_s")
    for tag in ("train/loss", "memory/shards_mib", "memory/run_process_peak_mib", *speed):
        assert {run for run, names in tags.items() if tag in names} == runs, tag
    for tag in ("memory/run_peak_mib", "plan/shards_mib"):
        assert {run for run, names in tags.items() if tag in names} == ours, tag
    images = get(address, "plugin/images/tags")
    assert {run for run, names in images.items() if names} == ours


def test_planned_and_measured_are_alone_in_their_charts(address: str) -> None:
    layout = get(address, "plugin/custom_scalars/layout")
    [run] = [run for run in get(address, "runs") if run.startswith("1_toy_fsdp_2")]
    shown = set()
    for chart in (chart for category in layout["category"] for chart in category["chart"]):
        for tag in chart["multiline"]["tag"]:
            query = urllib.parse.urlencode({"run": run, "tag": tag})
            found = get(address, f"plugin/custom_scalars/scalars?{query}")["tag_to_events"]
            assert set(found) <= {tag.strip("^$")}
            shown |= set(found)
    for tag in ("shards", "unsharded", "reduce", "gradients", "optimizer"):
        assert {f"memory/{tag}_mib", f"plan/{tag}_mib"} <= shown
