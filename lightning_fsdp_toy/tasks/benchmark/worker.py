"""One variant on one rank, in a process of its own: what it measures is nobody else's.

It blocks until the rank that started it gives it a turn, and ends when that rank does.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_fsdp_toy.logs import set_up_logging
from lightning_fsdp_toy.messages import one_line
from lightning_fsdp_toy.monitors.counting import count_tensor_bytes
from lightning_fsdp_toy.planner import read_sizes
from lightning_fsdp_toy.sharding import get_root
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.benchmark.device import Device
from lightning_fsdp_toy.tasks.benchmark.lightning_job import fit_in_turns
from lightning_fsdp_toy.tasks.benchmark.peak import measure_activations
from lightning_fsdp_toy.tasks.benchmark.plain import PlainSteps, make_batches, make_model
from lightning_fsdp_toy.tasks.benchmark.turns import Points, Session
from lightning_fsdp_toy.tasks.benchmark.variants import LIGHTNING, OURS, OurForm, spread

__all__ = ["ALONE", "WorkerSpec", "work"]

ALONE = "alone_"  # before a sharding strategy: one process that measures activations
_NUM_MEASURED_FROM = 2  # steps before the one whose peak is measured


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know."""

    variant: str
    job: Job
    build: Build
    sizes: dict[str, int]  # arguments of the model that replace configured ones
    rank: int
    local_rank: int
    world_size: int
    address: tuple[str, int]  # of the store where the workers of all ranks meet
    environment: dict[str, str]  # of the rank
    num_threads: int
    timeout_s: float  # of waits for other ranks
    log: str  # file for its output


def work(spec: WorkerSpec, connection: Connection, run: Callable[..., None] | None = None) -> None:
    """The life of a worker; called in its process.

    Args:
        spec: What to do.
        connection: To the rank that started it.
        run: Called with both and a device instead of what the variant does; for tests.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides
    exit_code = 0
    try:
        _prepare(spec)
        (run or _run)(spec, connection, Device(spec.job.config["accelerator"], spec.local_rank))
    except (EOFError, BrokenPipeError):
        exit_code = 1  # the rank is gone
    except BaseException as error:
        exit_code = 1
        traceback.print_exc()
        _tell(connection, f"{type(error).__name__}: {one_line(error)}")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's end: what still runs in threads of a backend could hold it up.
    os._exit(exit_code)


def _tell(connection: Connection, text: str) -> None:
    """Say what went wrong."""
    try:
        connection.send(("error", text))
    except OSError:
        pass  # the rank is gone


def _end_with_parent() -> None:
    """End this process when the rank that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _prepare(spec: WorkerSpec) -> None:
    """Make this process what the rank is; the fork server's environment is another."""
    os.environ.clear()
    os.environ.update(spec.environment)
    Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    set_up_logging(spec.rank, None)
    torch.set_num_threads(spec.num_threads)


def _run(spec: WorkerSpec, connection: Connection, device: Device) -> None:
    """Set the variant up, then take turns until told to leave."""
    device.activate()
    session = Session(connection, device)
    if spec.variant.startswith(ALONE):
        connection.send(("done", _activations(spec, device)))
        return
    store = dist.TCPStore(
        *spec.address,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    own = dist.PrefixStore(spec.variant, store)
    device.join(own, spec.rank, spec.world_size, spec.timeout_s)
    if spec.variant == LIGHTNING:
        fit_in_turns(spec.job, spec.build, spec.sizes, session)
        return
    with device.watch_peak() as peak:
        points, steps = _make_steps(spec, device)
        for _ in range(_NUM_MEASURED_FROM):
            steps.step()
        peak.restart(steps.model)
        steps.step()
        facts = {"peak_bytes": peak.peak_bytes}
    session.ready(points, facts | _facts(spec, steps))
    while num_steps := session.begin():
        for _ in range(num_steps):
            steps.step(session.points.note)
        session.end()


def _make_steps(spec: WorkerSpec, device: Device) -> tuple[Points, PlainSteps]:
    net = make_model(spec.build, spec.job.config["seed"], spec.sizes).to(device.torch)
    points = Points(net)
    model = spread(spec.variant, net, device)
    optimizer = spec.build("optimizer")(model.parameters())
    batches = make_batches(spec.build, spec.rank, spec.world_size, device.torch)
    return points, PlainSteps(model, optimizer, batches)


def _facts(spec: WorkerSpec, steps: PlainSteps) -> dict[str, Any]:
    """What the formulas need to know."""
    if spec.variant not in OURS:
        return {}
    state = count_tensor_bytes(steps.model, [steps.optimizer]).optimizer
    return {"sizes": read_sizes(get_root(steps.model)), "optimizer_bytes": state}


def _activations(spec: WorkerSpec, device: Device) -> dict[str, Any]:
    """Measure activations under one sharding strategy, without other ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # this process is no rank
    form = OurForm(spec.variant.removeprefix(ALONE), "auto")

    def make() -> PlainSteps:
        model = form.shard(make_model(spec.build, spec.job.config["seed"], spec.sizes))
        optimizer = spec.build("optimizer")(model.parameters())
        batches = make_batches(spec.build, spec.rank, spec.world_size, device.torch)
        return PlainSteps(model, optimizer, batches)

    return {"activations": measure_activations(make)}
