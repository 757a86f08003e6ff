"""Run one function on several ranks of this machine, fast and without leaving a process.

Processes come from a fork server that has imported torch, Lightning and the package once, so a
test with a few ranks costs a fraction of a second. The ranks meet through a file, not a port. A
rank that fails reports its traceback before its sockets close, hence before the others can notice,
and so the right rank is blamed; the parent then kills the others by their own handles.
"""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_BLAME_GRACE_S = 0.3  # how long a silent death may lag behind the complaints it causes
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
    + ["lightning.pytorch", "torchmetrics.text", "pytest"]
    + ["lightning_fsdp_toy", "tests.lit_helpers", "tests.core_helpers"]
)


class RankError(RuntimeError):
    """A rank raised or died; the message holds its number and its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 30.0,
    gpu_backend: str | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return what each returned, in rank order.

    Inside `fn` a process group (gloo) exists (its own timeout is 2/3 of `timeout`), the variables
    that torchrun sets are set, one intra-op thread is used, and seeds are those of a new process.

    Args:
        fn: A module-level function of the test file.
        world_size: Number of ranks.
        *args: Arguments for every rank; they and the results must be picklable.
        timeout: Seconds after which ranks that still run are killed.
        gpu_backend: `nccl` or `gloo`: ranks get GPUs and a group bound to them. With fewer GPUs
            than ranks each rank is a machine of its own, whose one GPU is the first.

    Raises:
        RankError: With the traceback of the rank that failed first.
        TimeoutError: Names the ranks that were still running.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, socket.socket() as port_holder:
        port_holder.bind(("127.0.0.1", 0))
        env = dict(
            os.environ,
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            NODE_RANK="0",
            GROUP_RANK="0",
            OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port_holder.getsockname()[1]),
            TORCHELASTIC_RUN_ID="tests",
        )
        is_local = gpu_backend is None or torch.cuda.device_count() >= world_size
        # A server that forks after something looked for GPUs cannot serve ranks that use them.
        context = _context if gpu_backend is None else multiprocessing.get_context("spawn")
        port_holder.close()  # free for a rank that makes a new process group itself
        store_file = str(Path(directory) / "store")
        connections: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                rank_env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if not is_local:
                    rank_env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                    rank_env |= {"NODE_RANK": str(rank), "GROUP_RANK": str(rank)}
                call = pickle.dumps((fn, args))
                process = context.Process(
                    target=_run_rank,
                    args=(theirs, rank_env, store_file, timeout, call, gpu_backend),
                    name=f"rank-{rank}",
                )
                connections.append(ours)
                process.start()
                processes.append(process)
                theirs.close()
            results = _collect(connections, timeout)
            for connection in connections:
                connection.close()  # lets the ranks leave, now that all of them are done
            for process in processes:
                process.join(timeout=5)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    """Read one message per rank; raise for the first failure."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []  # (when, rank, traceback)
    pending = dict(enumerate(connections))
    while pending:
        ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(f"ranks {sorted(pending)} still running after {timeout:g} s")
        for rank in [rank for rank, connection in pending.items() if connection in ready]:
            try:
                is_ok, when, value = pickle.loads(pending.pop(rank).recv_bytes())
            except (EOFError, ConnectionResetError):
                is_ok, when, value = False, 0.0, "died without a traceback"
            if is_ok:
                results[rank] = value
            elif not failures:
                deadline = min(deadline, time.monotonic() + _BLAME_GRACE_S)
            if not is_ok:
                failures.append((when, rank, value))
        if failures and (not ready or not pending):
            break
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} of {len(connections)} failed:\n{text}")
    return [results[rank] for rank in range(len(connections))]


def _run_rank(
    connection: Connection,
    env: dict[str, str],
    store_file: str,
    timeout: float,
    call: bytes,
    gpu_backend: str | None,
) -> None:
    """The life of one rank: set up, call, report, wait for the others, leave."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(max(1.0, timeout - 1.0))  # a hang shows where it hangs
    try:
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        world_size, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
        device = None
        if gpu_backend is not None:
            device = torch.device("cuda", int(env["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(
            gpu_backend or "gloo",
            store=dist.FileStore(store_file, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout * 2 / 3),
            device_id=device,
        )
        fn, args = pickle.loads(call)
        message = pickle.dumps((True, time.monotonic(), fn(*args)))
    except BaseException:  # pytest's own outcomes are no `Exception`
        connection.send_bytes(pickle.dumps((False, time.monotonic(), traceback.format_exc())))
        os._exit(1)  # destroying the group here could wait for ranks that wait for this one
    connection.send_bytes(message)
    try:
        connection.recv_bytes()  # EOF when all ranks have reported
    except EOFError:
        pass
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    """End this rank when the test process is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
