"""What `task=benchmark` reports of given times: files, tables, and what it refuses to claim."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from lightning_fsdp_toy.jobs import make_build
from lightning_fsdp_toy.planner import FlatSize, ShardingSizes
from lightning_fsdp_toy.tasks import TaskFailedError
from lightning_fsdp_toy.tasks.benchmark import Benchmark
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import Measured, RankResult
from lightning_fsdp_toy.tasks.benchmark.scaling import scaling_stages
from lightning_fsdp_toy.tasks.benchmark.stage import BenchmarkStage
from tests.test_benchmark_parts import NOISY, STEADY, benchmark_job


def sizes_of(world_size: int) -> ShardingSizes:
    flat = FlatSize("", 0, 1024, 512, 4, 4, 4, True)
    return ShardingSizes((flat,), "FULL_SHARD", world_size, 1, 1)


def ranks_of(times: dict[str, list[float]]) -> list[RankResult]:
    """What 2 ranks could have measured."""
    ranks = []
    for _ in range(2):
        variants = {
            name: Measured(list(seconds), 2**20, 3 * 2**20, {"after forward": 2**20}, 2**16)
            for name, seconds in times.items()
        }
        variants["toy_fsdp"].sizes = sizes_of(2)
        rank = RankResult("here", 1024, 3, variants)
        rank.activations["FULL_SHARD"] = {("forward", 1): 2**18}
        ranks.append(rank)
    return ranks


def report(directory: Path, times: dict[str, list[float]], *overrides: str) -> Any:
    job = benchmark_job(directory, "~logger", *overrides)
    directory.mkdir()
    return Benchmark().report(job, make_build(job.config), [(BenchmarkStage(2), ranks_of(times))])


def test_report_has_the_keys_of_the_design_and_a_picture(tmp_path: Path, capfd: Any) -> None:
    metric = report(tmp_path / "run", STEADY)
    content = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert metric == statistics.median(STEADY["toy_fsdp"])
    assert (content["workload"], content["rounds"]) == ("balanced", 7)
    assert list(content["variants"]) == list(STEADY)
    toy = content["variants"]["toy_fsdp"]
    assert toy["step_s"] == STEADY["toy_fsdp"]
    assert (toy["peak_bytes"], toy["pss_bytes"], toy["wire_bytes"]) == (2**20, 2**21, 2**15)
    assert toy["rss_bytes"] == 6 * 2**20
    assert toy["planned_wire_bytes"] == sum(sizes_of(2).sent_bytes().values()) > 0
    assert toy["planned_peak_bytes"] == sizes_of(2).peak_bytes(0, {("forward", 1): 2**18})
    assert content["ratios"]["ddp"] == pytest.approx([1.2, 1.2, 1.2])
    assert content["best_ratios"]["floor"] == pytest.approx(0.9)
    assert content["too_noisy"] is None
    pixels = imread(tmp_path / "run" / "benchmark.png")
    assert pixels[..., :3].std() > 0.05
    out = capfd.readouterr().out
    assert "1.20 [1.20, 1.20]" in out and "closed form" in out


def test_nothing_is_claimed_on_a_noisy_machine(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(TaskFailedError, match="too noisy: after 7 rounds the time of `ddp`"):
        report(tmp_path / "run", NOISY)
    content = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert content["ratios"] == content["best_ratios"] == {}
    assert content["too_noisy"].startswith("too noisy")
    assert content["variants"]["ddp"]["step_s"] == NOISY["ddp"]
    assert "best x" not in capfd.readouterr().out
    report(tmp_path / "other", NOISY, "benchmark.max_spread=100")


def test_scaling_is_drawn_and_says_what_was_left_out(tmp_path: Path, capfd: Any) -> None:
    job = benchmark_job(tmp_path / "run", "benchmark.scaling=sizes", "~logger")
    (tmp_path / "run").mkdir()
    grown = ranks_of({name: [4 * each for each in seconds] for name, seconds in STEADY.items()})
    for rank in grown:
        rank.num_parameters = 4096
    stages = scaling_stages(job, BenchmarkOptions.of(job.config))
    skipped = [RankResult("", 10**8, skipped="100.0M parameters: too large")]
    results = [(stages[0], ranks_of(STEADY)), (stages[1], grown), (stages[2], skipped)]
    metric = Benchmark().report(job, make_build(job.config), results)
    assert metric == pytest.approx(0.4)
    content = json.loads((tmp_path / "run" / "scaling.json").read_text())
    assert [point["parameters"] for point in content["points"]] == [1024, 4096]
    assert content["points"][0]["variants"]["ddp"]["step_s"] == STEADY["ddp"]
    assert content["skipped"] == ["100.0M parameters: too large"]
    assert imread(tmp_path / "run" / "scaling.png")[..., :3].std() > 0.05
    assert "not run: 100.0M parameters: too large" in capfd.readouterr().out
    with pytest.raises(TaskFailedError, match=r"nothing was measured: 100.0M"):
        Benchmark().report(job, make_build(job.config), [(stages[2], skipped)])
