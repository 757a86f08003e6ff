"""Tasks with stages: launches of several sizes, one report."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from lightning_fsdp_toy.tasks import Build, Job, Stage, StagedTask, TaskFailedError
from tests.test_launch_jobs import compose


@dataclass(frozen=True)
class Named(Stage):
    name: str


class Recorder(StagedTask):
    """Says who ran what; `recorder.fail` says what goes wrong."""

    config_key = "recorder"

    def check_options(self, config):
        pass

    def check(self, job: Job, build: Build) -> None:
        if job.config["recorder"]["fail"] == "check":
            raise ValueError("`recorder.fail=check`: refused")

    def stages(self, job: Job, build: Build) -> list[Named]:
        if job.config["recorder"]["fail"] == "stages":
            raise ValueError("`recorder.fail=stages`: refused")
        self._note(job, "planned")
        return [Named(2, "first"), Named(1, "second"), Named(3, "third")]

    def run_stage(self, job: Job, build: Build, stage: Named) -> str:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if job.config["recorder"]["fail"] == stage.name and rank == "0":
            raise ValueError(f"`recorder.fail={stage.name}`: refused")
        return f"{stage.name} {rank}/{size}"

    def report(
        self, job: Job, build: Build, results: Sequence[tuple[Any, list[Any] | None]]
    ) -> float:
        self._note(job, f"reported {[ranks for _, ranks in results]}")
        if job.config["recorder"]["fail"] == "report":
            raise TaskFailedError("the answer is no")
        return 7.0

    def clean_up(self, job: Job) -> None:
        self._note(job, "cleaned up")

    @staticmethod
    def _note(job: Job, text: str) -> None:
        Path(job.run_dir).mkdir(exist_ok=True)
        with Path(job.run_dir, "notes.txt").open("a") as file:
            file.write(f"{text}\n")


def run(directory: Path, fail: str) -> tuple[float | None, list[str]]:
    cfg = compose(
        directory, "task._target_=tests.test_stages.Recorder", f"+recorder.fail={fail}", "devices=2"
    )
    metric = launch(cfg)
    return metric, (directory / "notes.txt").read_text().splitlines()


def test_stages_run_in_order_on_their_own_numbers_of_ranks(tmp_path: Path) -> None:
    metric, notes = run(tmp_path, "nothing")
    assert metric == 7.0
    ranks = [["first 0/2", "first 1/2"], ["second 0/1"], ["third 0/3", "third 1/3", "third 2/3"]]
    assert notes == ["cleaned up", "planned", f"reported {ranks}", "cleaned up"]


@pytest.mark.parametrize(
    ("fail", "message", "exit_code"),
    [
        ("check", "`recorder.fail=check`: refused", 2),
        ("stages", "`recorder.fail=stages`: refused", 1),
        ("second", "ValueError: `recorder.fail=second`: refused (rank 0, log: ", 1),
        ("report", "the answer is no", 1),
    ],
)
def test_failures_are_one_line_and_files_are_cleaned_up(
    tmp_path: Path, fail: str, message: str, exit_code: int
) -> None:
    directory = tmp_path / "run"
    with pytest.raises(JobError) as caught:
        run(directory, fail)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == exit_code
    if fail == "check":
        assert not directory.exists()
    else:
        assert (directory / "notes.txt").read_text().splitlines()[-1] == "cleaned up"
