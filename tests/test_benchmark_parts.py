"""The parts of `task=benchmark`: arithmetic, options, workers that fail, the report."""

import mmap
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import HydraException

from lightning_fsdp_toy.jobs import make_job
from lightning_fsdp_toy.messages import describe_idle_group
from lightning_fsdp_toy.tasks import Job
from lightning_fsdp_toy.tasks.benchmark.counters import network_bytes, pss_bytes
from lightning_fsdp_toy.tasks.benchmark.crew import Crew
from lightning_fsdp_toy.tasks.benchmark.fitting import SIZES_OF_SCALING, fit_together
from lightning_fsdp_toy.tasks.benchmark.intervals import (
    Interval,
    median_interval,
    paired_ratios,
)
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import (
    Measured,
    RankResult,
    compare,
    describe_noise,
    merge,
)
from lightning_fsdp_toy.tasks.benchmark.scaling import scaling_stages
from lightning_fsdp_toy.tasks.benchmark.variants import VARIANTS
from lightning_fsdp_toy.tasks.benchmark.worker import WorkerSpec
from tests.test_launch_jobs import CONF, check_refused, compose

STEADY = {"toy_fsdp": [0.1] * 7, "ddp": [0.12] * 7, "floor": [0.09] * 7}
NOISY = STEADY | {"ddp": [0.12, 0.4, 0.1, 0.3, 0.1, 0.5, 0.2]}


# -- arithmetic ------------------------------------------------------------------------------


def test_ratios_are_paired_within_rounds() -> None:
    drifting = {"toy_fsdp": [1.0, 2.0, 4.0], "ddp": [2.0, 4.0, 8.0]}
    assert paired_ratios(drifting, "toy_fsdp") == {"ddp": [2.0, 2.0, 2.0]}
    assert median_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)


def test_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    draw, hits = random.Random(1), 0
    for _ in range(200):
        median, low, high = median_interval([draw.gauss(1.0, 0.1) for _ in range(15)])
        assert low <= median <= high
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.995


def test_intervals_narrow_with_more_rounds() -> None:
    draw = random.Random(2)
    few, many = ([draw.gauss(1.0, 0.1) for _ in range(count)] for count in (7, 100))
    assert median_interval(many).spread < median_interval(few).spread / 2


def test_each_form_of_ours_is_compared_with_the_others() -> None:
    times = STEADY | {"toy_fsdp_pairwise": [0.2] * 7}
    ratios = compare(times)
    assert set(ratios["toy_fsdp"]) == {"ddp", "floor", "toy_fsdp_pairwise"}
    assert set(ratios["toy_fsdp_pairwise"]) == {"ddp", "floor"}
    assert ratios["toy_fsdp"]["ddp"].median == pytest.approx(1.2)
    assert ratios["toy_fsdp_pairwise"]["ddp"].median == pytest.approx(0.6)


def test_noise_is_said_with_the_widest_ratio() -> None:
    assert describe_noise(compare(STEADY), 7, 0.1) == ""
    line = describe_noise(compare(NOISY), 7, 0.1)
    assert line.startswith("too noisy: after 7 rounds the time of `ddp` is still 1.00 to ")
    assert "times that of `toy_fsdp` (95 % interval" in line and "`benchmark.max_rounds`" in line
    assert describe_noise(compare(NOISY), 7, 100) == ""


def result(host: str, **measured: Any) -> RankResult:
    return RankResult(host, 1000, 1, {"ddp": Measured(step_s=[1.0], **measured)})


def test_memory_is_added_over_a_machine_and_wire_over_machines() -> None:
    ranks = [
        result("a", peak_bytes=10, rss_bytes=100, pss_bytes={"x": 50, "y": 60}, wire_bytes=4000),
        result("a", peak_bytes=12, rss_bytes=100, pss_bytes={"x": 70, "y": 10}, wire_bytes=4100),
        result("b", peak_bytes=11, rss_bytes=150, pss_bytes={"x": 80, "y": 10}, wire_bytes=2000),
    ]
    merged = merge(ranks)["ddp"]
    assert (merged.peak_bytes, merged.rss_bytes, merged.pss_bytes) == (12, 200, 120)
    assert merged.wire_bytes == (4000 + 2000) // 3
    assert merged.planned_wire_bytes == 2 * 4 * 1000 * 2 // 3
    unknown = [replace(ranks[0]), result("a")]
    assert merge(unknown)["ddp"].wire_bytes == 4000 // 2  # one of a machine is enough
    assert merge(unknown)["ddp"].rss_bytes is None
    assert merge([ranks[0], result("b")])["ddp"].wire_bytes is None


def test_kernel_counts_this_process_and_the_network() -> None:
    before = pss_bytes()
    block = mmap.mmap(-1, 32 << 20)  # not of the heap, which may have it already
    block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
    after = pss_bytes()
    assert before is not None and after is not None
    assert 0.9 * len(block) < after - before < 1.5 * len(block)
    sent = network_bytes()
    assert sent is not None and sent >= 0


# -- options ---------------------------------------------------------------------------------


BAD_INPUT = {
    "benchmark.rounds=1": "`benchmark.rounds=1`: expected a whole number of at least 2",
    "benchmark.rounds=x": "`benchmark.rounds=x`: expected a whole number of at least 2",
    "benchmark.warm_up=0": "`benchmark.warm_up=0`: expected a whole number of at least 1",
    "benchmark.steps=0": "`benchmark.steps=0`: expected a whole number of at least 1",
    "benchmark.max_rounds=3": "`benchmark.max_rounds=3`: expected a whole number of at least 7",
    "benchmark.max_spread=0": "`benchmark.max_spread=0`: expected a number above 0",
    "benchmark.timeout=no": "`benchmark.timeout=no`: expected a number above 0",
    "benchmark.quick=1": "`benchmark.quick=1`: expected true or false",
    "benchmark.scaling=nodes": "`benchmark.scaling=nodes`: expected null, sizes or ranks",
    "benchmark.variants=[ddp,fsdp3]": "`benchmark.variants`: 'fsdp3' is none of toy_fsdp, toy_",
    "benchmark.variants=[]": "`benchmark.variants=[]`: expected null or a list of toy_fsdp",
    "+benchmark.foo=1": "`benchmark`: expected the keys workload, variants, rounds, steps",
    "strategy=ddp": "compares `toy_fsdp` with the others; use `strategy=toy_fsdp`",
    "strategy.transport=native": "`strategy.transport=native` has no effect with `task=benchmark`",
    "strategy.num_prefetch=0": "`strategy.num_prefetch=0` has no effect with `task=benchmark`",
    "precision=bf16-mixed": "`precision=bf16-mixed`: `task=benchmark` compares in float32",
    "trainer.max_steps=7": "`trainer.max_steps=7` has no effect with `task=benchmark`; leave it",
    "trainer.gradient_clip_val=1": "`trainer.gradient_clip_val=1` has no effect with",
    "+trace=true": "`trace` has no effect with `task=benchmark`; leave it out",
}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, overrides: str) -> None:
    check_refused(tmp_path / "run", BAD_INPUT[overrides], "task=benchmark", *overrides.split())


def test_a_workload_without_the_task_is_refused_with_the_task() -> None:
    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        with pytest.raises(HydraException) as caught:
            hydra.compose("train", ["benchmark=balanced"])
    line = describe_idle_group(caught.value, Path(CONF))
    assert (
        line == "`benchmark` is a group of another task: choose `task=benchmark`, or leave it out"
    )
    assert describe_idle_group(ValueError("something else"), Path(CONF)) == ""


def benchmark_job(directory: Path, *overrides: str) -> Job:
    return make_job(compose(directory, "task=benchmark", *overrides))


def test_workloads_are_a_group_whose_sizes_can_be_changed(tmp_path: Path) -> None:
    cfg = compose(tmp_path, "task=benchmark", "benchmark=communication_bound")
    assert (cfg.benchmark.workload, cfg.model.vocab_size) == ("communication_bound", 1000)
    assert cfg.model.d_model == 16  # the command line's
    assert compose(tmp_path, "task=benchmark").benchmark.workload == "balanced"
    gpt = make_job(compose(tmp_path, "task=benchmark", "model=gpt"))
    assert "max_seq_len" in gpt.config["model"]


def test_what_others_are_compared_with_is_always_there(tmp_path: Path) -> None:
    job = benchmark_job(tmp_path, "benchmark.variants=[ddp]")
    assert BenchmarkOptions.of(job.config).variants == ("toy_fsdp", "ddp")
    assert BenchmarkOptions.of(benchmark_job(tmp_path).config).variants == VARIANTS


# -- scaling ---------------------------------------------------------------------------------


def test_scaling_grows_models_or_ranks(tmp_path: Path) -> None:
    job = benchmark_job(tmp_path, "benchmark.scaling=sizes", "benchmark.quick=true")
    options = BenchmarkOptions.of(job.config)
    assert options.variants == ("toy_fsdp", "toy_fsdp_pairwise", "ddp", "floor")
    stages = scaling_stages(job, options)
    assert [dict(stage.sizes)["d_model"] for stage in stages] == [w for w, _ in SIZES_OF_SCALING]
    assert all(dict(s.sizes)["dim_feedforward"] == 4 * dict(s.sizes)["d_model"] for s in stages)
    job = benchmark_job(tmp_path, "benchmark.scaling=ranks")
    ranks = scaling_stages(job, BenchmarkOptions.of(job.config))
    assert [stage.num_ranks for stage in ranks] == [1, 2, 4, 8]


def test_variants_that_do_not_fit_together_run_one_after_the_other() -> None:
    sizes = {"d_model": 1, "num_layers": 1, "vocab_size": 1}
    names = ("toy_fsdp", "ddp", "floor")  # 12, 20 and 16 bytes a parameter on 2 ranks

    def fit(free_gb: float) -> tuple[list[list[str]], str]:
        return fit_together(
            names,
            num_parameters=10**8,
            num_shards=2,
            num_local=2,
            sizes=sizes,
            num_tokens=1,
            free_bytes=int(free_gb * 1e9 / 0.8),
        )

    assert fit(9.7) == ([["toy_fsdp", "ddp", "floor"]], "")
    assert fit(6.5) == ([["toy_fsdp", "ddp"], ["floor"]], "")
    assert fit(4.1) == ([["toy_fsdp"], ["ddp"], ["floor"]], "")
    groups, line = fit(3.9)
    assert groups == []
    assert line == "100.0M parameters: `ddp` takes about 4.0 GB, 4.9 GB are free"


# -- workers ---------------------------------------------------------------------------------


def ready_then(action: str, connection: Any) -> None:
    connection.send(("done", {"pid": os.getpid()}))
    connection.recv()
    if action == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hangs":
        time.sleep(600)
    raise ValueError("what a pity")


def behave(spec: WorkerSpec, connection: Any, device: Any) -> None:
    ready_then(spec.variant, connection)


def spec_of(variant: str, directory: Path) -> WorkerSpec:
    job = Job({"accelerator": "cpu"}, {}, str(directory))
    log = str(directory / "ranks" / "log.txt")
    environment = dict(os.environ)
    return WorkerSpec(variant, job, dict, {}, 1, 1, 2, ("", 0), environment, 1, 1.0, log)


FAILURES = {
    "dies": r"died \(2 step\(s\), time\), exit code -9; see .*log.txt",
    "hangs": r"has not answered for 1 s \(2 step\(s\), time\); .*benchmark.timeout",
    "raises": r"failed \(2 step\(s\), time\): ValueError: what a pity; see ",
}


@pytest.mark.parametrize("action", FAILURES)
def test_a_worker_that_fails_is_named_and_all_end(tmp_path: Path, action: str) -> None:
    pids = []
    line = f"the worker of `{action}` on rank 1 {FAILURES[action]}"
    with pytest.raises(RuntimeError, match=line):
        with Crew(30.0, run=behave) as crew:
            for name in ("waits", action):
                pids.append(crew.start(spec_of(name, tmp_path))["pid"])
            crew.timeout_s = 1.0
            crew.ask(action, "time", 2)
    assert not any(is_alive(pid) for pid in pids)


def rank_that_is_killed(connection: Any, directory: Path) -> None:
    """A rank whose end nobody tells its worker of."""
    with Crew(60.0, run=behave) as crew:
        connection.send(crew.start(spec_of("waits", directory))["pid"])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_with_its_rank_however_that_goes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    rank = context.Process(target=rank_that_is_killed, args=(theirs, tmp_path))
    rank.start()
    assert ours.poll(60)
    pid = ours.recv()
    rank.join()
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


COMPLAINTS = {
    "RuntimeError: Connection closed by peer [127.0.0.1]:1": 2.0,  # the other rank is gone
    "RuntimeError: Timed out waiting 900ms for recv operation": 32.0,  # it will be found in 30 s
    "ValueError: what a pity": 0.0,
}


def complain(spec: WorkerSpec, connection: Any, device: Any) -> None:
    connection.send(("error", spec.variant))


@pytest.mark.parametrize("text", COMPLAINTS)
def test_a_rank_whose_worker_lost_another_lets_that_one_speak_first(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = [0.0]
    monkeypatch.setattr("lightning_fsdp_toy.tasks.benchmark.crew.time.sleep", slept.append)
    with pytest.raises(RuntimeError, match=r"on rank 1 failed \(being set up\): ") as caught:
        with Crew(30.0, run=complain) as crew:
            crew.start(spec_of(text, tmp_path))
    assert text in str(caught.value)
    assert COMPLAINTS[text] - 20 < max(slept) <= COMPLAINTS[text]
    assert (max(slept) > 0) == (COMPLAINTS[text] > 0)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
