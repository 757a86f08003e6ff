"""One stage: what is started on each of its ranks, in which order."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_fsdp_toy import process_group
from lightning_fsdp_toy.handover import given_ranks
from lightning_fsdp_toy.models import count_parameters
from lightning_fsdp_toy.tasks import Build, Job, Stage
from lightning_fsdp_toy.tasks.benchmark.conductor import Conductor, share
from lightning_fsdp_toy.tasks.benchmark.crew import Crew
from lightning_fsdp_toy.tasks.benchmark.device import Device
from lightning_fsdp_toy.tasks.benchmark.fitting import fit_together
from lightning_fsdp_toy.tasks.benchmark.options import BenchmarkOptions
from lightning_fsdp_toy.tasks.benchmark.outcomes import RankResult
from lightning_fsdp_toy.tasks.benchmark.variants import OURS
from lightning_fsdp_toy.tasks.benchmark.worker import ALONE, WorkerSpec

__all__ = ["BenchmarkStage", "StageRun"]


@dataclass(frozen=True)
class BenchmarkStage(Stage):
    """One launch: all variants, on some number of ranks, with a model of some size."""

    sizes: tuple[tuple[str, int], ...] = ()  # arguments of the model that replace configured ones
    is_scaling: bool = False  # only seconds and bytes sent


class StageRun:
    """Runs one stage on one of its ranks.

    Args:
        job: The job.
        build: Makes what its config describes.
        stage: What to do.
    """

    def __init__(self, job: Job, build: Build, stage: BenchmarkStage) -> None:
        self.job = job
        self.build = build
        self.stage = stage
        self.options = BenchmarkOptions.of(job.config)
        given = given_ranks()
        self.rank, self.world_size, local_rank, self.host = 0, 1, 0, "127.0.0.1"
        if given is not None:
            self.rank, self.world_size = given.global_rank(), given.world_size()
            local_rank, self.host = given.local_rank(), given.main_address
            # Ranks wait for each other while rank 0 waits for its workers.
            limit = timedelta(seconds=2 * self.options.timeout + 60)
            process_group.connect(given, "gloo", torch.device("cpu"), limit)
        self.local_rank = local_rank
        self.device = Device(job.config["accelerator"], local_rank)
        with torch.device("meta"):
            self.num_parameters = count_parameters(build("model", **dict(stage.sizes))).total

    def run(self) -> RankResult:
        """Measure; called on every rank of the stage."""
        with _orderly_end():
            return self._run()

    def _run(self) -> RankResult:
        groups: list[list[str]] = [list(self.options.variants)]
        if self.stage.is_scaling:
            groups, reason = share(self._groups())
            if reason:
                self._say(f"skipped: {reason}")
                return RankResult("", self.num_parameters, skipped=reason)
        # Serves the workers of all variants; others connect to it.
        store = None
        if self.rank == 0:
            store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.port: int = share(0 if store is None else store.port)
        results = [self._measure(variants) for variants in groups]
        variants = {name: each for result in results for name, each in result.variants.items()}
        return replace(results[0], variants=variants)

    def _groups(self) -> tuple[list[list[str]], str]:
        """Return variants that fit into memory together, and why there are none, if so."""
        config, sizes = self.job.config, self.job.config["model"] | dict(self.stage.sizes)
        data = config["data"]
        num_local = self.world_size // config["num_nodes"] if self.device.kind == "cpu" else 1
        return fit_together(
            self.options.variants,
            num_parameters=self.num_parameters,
            num_shards=self.world_size,
            num_local=num_local,
            sizes=sizes,
            num_tokens=data["batch_size"] * data["seq_len"],
            free_bytes=self.device.free_bytes(),
        )

    def _measure(self, variants: list[str]) -> RankResult:
        with Crew(self.options.timeout) as crew:
            conductor = Conductor(crew, self.options, self.num_parameters)
            if not self.stage.is_scaling and self.device.kind == "cpu" and self.rank == 0:
                for strategy in self._strategies(variants):
                    self._say(f"activations under {strategy}, in one process")
                    found = crew.start(self._spec(f"{ALONE}{strategy}", crew))
                    conductor.result.activations[strategy] = found["activations"]
            for variant in variants:
                self._say(f"setting up {variant}")
                conductor.note_ready(variant, crew.start(self._spec(variant, crew)))
            self._say("warming up")
            conductor.warm_up()
            if not self.stage.is_scaling:
                self._say("memory")
                conductor.measure_memory()
            self._say("bytes on the wire")
            conductor.measure_wire()
            self._say(f"rounds of {conductor.result.num_steps} step(s) each")
            conductor.measure_time()
            return conductor.result

    @staticmethod
    def _strategies(variants: list[str]) -> list[str]:
        """Sharding strategies of the variants of this package."""
        forms = [OURS[name].sharding_strategy for name in variants if name in OURS]
        return list(dict.fromkeys(forms))

    def _spec(self, variant: str, crew: Crew) -> WorkerSpec:
        return WorkerSpec(
            variant=variant,
            job=self.job,
            build=self.build,
            sizes=dict(self.stage.sizes),
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            address=(self.host, self.port),
            environment=dict(os.environ),
            num_threads=torch.get_num_threads(),
            timeout_s=crew.peers_timeout_s,
            log=str(Path(self.job.run_dir, "ranks", f"rank_{self.rank}_{variant}.log")),
        )

    def _say(self, text: str) -> None:
        if self.rank == 0:
            what = f"{self.num_parameters / 1e6:.1f}M parameters, {self.world_size} rank(s)"
            print(f"benchmark: {what}: {text} ...", flush=True)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM unwind what has been started instead of ending this process at once."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
