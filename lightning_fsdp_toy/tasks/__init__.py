"""What `task=` runs: one module and one function a task, all with the same two arguments.

A task is `function(job, build) -> float | None` and runs on every rank. It gets the resolved
config as plain containers and reads no config file, no command line and no terminal. The value
is what a sweep minimizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Job", "Build"]

Build = Callable[..., Any]
"""`build(key, **extra)` makes the object that the job's config describes under `key`."""


@dataclass(frozen=True)
class Job:
    """One job, the same on all of its ranks."""

    config: dict[str, Any]  # resolved; the keys of conf/train.yaml
    choices: dict[str, str]  # chosen option of each config group, such as strategy -> toy_fsdp
    run_dir: str  # everything that the job writes goes here
