"""Starts a user's script whose ranks write their process ids, and waits for them."""

import os
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).parents[1]


def start_script(directory: Path, text: str, *args: str) -> "subprocess.Popen[str]":
    """Run `text` as a script in `directory`; end it with `tests.test_cli.finish`."""
    (directory / "script.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "script.py", *args],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_ranks(
    directory: Path, process: "subprocess.Popen[str]", num_ranks: int, timeout: float = 90
) -> list[int]:
    """Return the process ids of the ranks once each has written its own to `pid<rank>`."""
    deadline = time.monotonic() + timeout
    files = [directory / f"pid{rank}" for rank in range(num_ranks)]
    while not all(file.is_file() and file.read_text() for file in files):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    return [int(file.read_text()) for file in files]
