"""What `task=` runs: one module and one function a task, all with the same two arguments.

A task is `function(job, build) -> float | None` and runs on every rank. It gets the resolved
config as plain containers and reads no config file, no command line and no terminal. The value
is what a sweep minimizes.

Note: stages.
A task that needs launches of several sizes (one process, two ranks, four) is a class instead, a
`StagedTask`. The process that starts the ranks asks it for its stages, runs them one after the
other, each in fresh ranks, and has it report on what the ranks returned. Where the ranks are given
(torchrun, SLURM), only the stages for that many ranks run, in the same processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Build", "Job", "Stage", "StagedTask", "TaskFailedError"]

Build = Callable[..., Any]
"""`build(key, **extra)` makes the object that the job's config describes under `key`."""


@dataclass(frozen=True)
class Job:
    """One job, the same on all of its ranks."""

    config: dict[str, Any]  # resolved; the keys of conf/train.yaml
    choices: dict[str, str]  # chosen option of each config group, such as strategy -> toy_fsdp
    run_dir: str  # everything that the job writes goes here


@dataclass(frozen=True)
class Stage:
    """One launch of a task: how many ranks; subclasses say what they do."""

    num_ranks: int


class TaskFailedError(RuntimeError):
    """A task ran to its end and the answer is no; the message is the line for the user."""


class StagedTask(ABC):
    """A task of several launches (see Note: stages).

    Attributes:
        config_key: Key of the config that holds the task's own options.
    """

    config_key: str

    @abstractmethod
    def check_options(self, config: dict[str, Any]) -> None:
        """Refuse options of its own, before anything that follows from them is checked.

        Raises:
            ValueError: A line that names the key and the remedy.
        """

    @abstractmethod
    def check(self, job: Job, build: Build) -> None:
        """Refuse a job that cannot run; called before a rank starts.

        Raises:
            ValueError: A line that names the key and the remedy.
        """

    @abstractmethod
    def stages(self, job: Job, build: Build) -> Sequence[Stage]:
        """Return what to launch, in order; called where the run dir exists.

        Raises:
            ValueError: As `check`.
        """

    @abstractmethod
    def run_stage(self, job: Job, build: Build, stage: Any) -> Any:
        """Run one stage; called on each of its ranks. What it returns must be picklable."""

    @abstractmethod
    def report(
        self, job: Job, build: Build, results: Sequence[tuple[Any, list[Any] | None]]
    ) -> float | None:
        """Report in the end; called in one process.

        Args:
            job: The job.
            build: Makes what its config describes.
            results: For each stage, what its ranks returned, in rank order; None if it was not
                run because another number of ranks was given.

        Returns:
            What a sweep minimizes.

        Raises:
            TaskFailedError: The answer is no.
        """

    @abstractmethod
    def clean_up(self, job: Job) -> None:
        """Remove what only stages need; called in one process, whatever has happened."""
