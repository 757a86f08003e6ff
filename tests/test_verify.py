"""`task=verify`: every row holds, every row can fail, and planted faults are named."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from tests.test_launch_jobs import compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def verify(directory: Path, *overrides: str) -> dict[str, Any]:
    """Run a small verification; return `verify.json`."""
    launch(compose(directory, "task=verify", "verify.steps=3", *overrides))
    return read(directory)


def read(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "verify.json").read_text())
    return content


def test_all_rows_hold_on_two_ranks_and_are_published(tmp_path: Path, capfd: Any) -> None:
    result = verify(tmp_path, "devices=2")
    rows = result["rows"]
    assert all(row["equal"] and row["max_divergence"] == 0.0 for row in rows)
    counts = {letter: sum(row["row"] == letter for row in rows) for letter in "abcdef"}
    assert counts == {"a": 2, "b": 4, "c": 1, "d": 2, "e": 3, "f": 3}
    assert [row["world_size"] for row in rows if row["row"] == "e"] == [1, 2, 4]
    assert "clipped in 3 steps, dropout 0.1" in rows[-4]["claim"]
    assert {"claim", "world_size", "optimizer", "steps", "max_divergence", "equal"} < set(rows[0])
    half = result["replicated_bytes"] / 2
    assert half <= result["sharded_bytes"] <= half + 64 * 4 * 64  # padding
    assert result["replicated_bytes"] == 4 * result["parameters"]
    assert result["not_run"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("ranks", "tensorboard", "verify.json", "verify.png")
    ]
    output = capfd.readouterr().out
    assert f"{result['parameters'] / 1e6:.3f}M parameters" in output
    assert "divergence 0.00e+00" in output
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["verify/picture"]
    scalars = [f"verify/{row['name']}/{row['optimizer']}" for row in rows]
    assert len(set(scalars)) == len(rows) and set(scalars) < set(events.Tags()["scalars"])
    assert {event.value for tag in scalars for event in events.Scalars(tag)} == {0.0}
    assert [event.step for event in events.Scalars(scalars[0])] == [0, 1, 2, 3]
    sharded = events.Scalars("verify/sharded_mib")[0].value * 2**20
    assert sharded == pytest.approx(result["sharded_bytes"])
    height, width, _ = matplotlib.image.imread(tmp_path / "verify.png").shape
    assert width > height > 300


def test_row_d_alone_runs_what_it_is_about(tmp_path: Path) -> None:
    result = verify(tmp_path, "devices=2", "verify.rows=[d]", "~logger")
    assert {row["row"] for row in result["rows"]} == {"c", "d"}


# All rows with all four on 2, 3 and 4 ranks take minutes: README, "Does it agree?".
@pytest.mark.parametrize(
    ("devices", "rows", "names"),
    [
        (2, "ac", ["adamw_foreach", "adamw_fused", "sgd"]),
        (3, "abcd", ["adamw_fused"]),
        (4, "abcde", ["adamw_foreach"]),
    ],
)
def test_rows_hold_for_named_optimizers_and_more_ranks(
    tmp_path: Path, devices: int, rows: str, names: list[str]
) -> None:
    result = verify(
        tmp_path,
        f"devices={devices}",
        f"verify.optimizers=[{','.join(names)}]",
        f"verify.rows=[{','.join(rows)}]",
        "~logger",
    )
    assert all(row["equal"] for row in result["rows"])
    assert {(row["row"], row["optimizer"]) for row in result["rows"]} == {
        (row, name) for row in rows for name in names
    }


FAULTS = [
    ("shard", 2, "[a,c]", "weight of"),
    ("weight", 2, "[a]", "weight gathered for forward of"),
    ("order", 2, "[a,c,e]", "weight of"),
    ("order", 3, "[a,c]", "weight of"),
]


@pytest.mark.parametrize(("plant", "devices", "rows", "where"), FAULTS)
def test_planted_fault_is_named(
    tmp_path: Path, plant: str, devices: int, rows: str, where: str
) -> None:
    options = (f"verify.plant={plant}", f"devices={devices}", f"verify.rows={rows}", "~logger")
    with pytest.raises(JobError) as caught:
        verify(tmp_path, *options)
    assert caught.value.exit_code == 1
    message = str(caught.value)
    planted = read(tmp_path)["planted"]
    found = re.search(
        rf"{where} `(\S+)`, element (\d+), step (\d+), rank (\d+) of {devices}", message
    )
    assert found, message
    name, element, step, rank = found[1], *map(int, found.groups()[1:])
    assert (step, rank) == (planted["step"], planted["rank"]) == (1, 1)
    if plant == "order":  # a unit's reduction; the first of its weights that came out otherwise
        assert name.startswith(planted["parameter"])
        assert [row["row"] for row in read(tmp_path)["rows"] if not row["equal"]] == (
            ["e"] if devices == 2 else ["c"]
        )
    else:
        assert (name, element) == (planted["parameter"], planted["element"])


MUTANTS = {
    "DDPStrategy": ("d", "Lightning's stock DDP"),
    "OrderedDDPStrategy": ("d", "DDP, hook"),
    "batch on 1": ("e", "1 x 4"),
    "prefetch 0": ("f", "not overlapped"),
    "whole": ("b", "FULL_SHARD, the model"),
    "NO_SHARD": ("b", "NO_SHARD"),
    "SHARD_GRAD_OP": ("b", "SHARD_GRAD_OP"),
    "resumed": ("f", "saved on 2"),
}


def mutate(directory: Path, *wrong_in: str) -> set[tuple[str, str]]:
    """Return the rows that fail where training goes wrong in some runs."""
    with pytest.raises(JobError, match="bits differ in row"):
        verify(
            directory,
            "lit_module._target_=tests.verify_mutants.Mutant",
            f"+lit_module.wrong_in=[{','.join(wrong_in)}]",
            "~logger",
        )
    rows = read(directory)["rows"]
    return {(row["row"], row["claim"]) for row in rows if not row["equal"]}


def test_every_row_can_fail_and_no_other_does(tmp_path: Path) -> None:
    failed = mutate(tmp_path / "all", *MUTANTS)
    assert len(failed) == len(MUTANTS) + 1  # resumed from both forms
    for row, start in MUTANTS.values():
        assert any(each[0] == row and each[1].startswith(start) for each in failed)


def test_wrong_gradients_of_the_base_run_are_seen_by_all_rows_that_it_is_part_of(
    tmp_path: Path,
) -> None:
    failed = {row for row, _ in mutate(tmp_path, "prefetch 1")}
    assert {"b", "c", "d", "f"} <= failed  # d and f compare their run with this one
    assert "e" not in failed
