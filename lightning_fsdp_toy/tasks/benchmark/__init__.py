"""`task=benchmark`: one training step of `toy_fsdp`, DDP, FSDP, FSDP2 and of no communication.

Note: isolation
    Every variant lives on every rank in a process of its own, a worker, so that its memory, its
    allocator's habits and its threads are nobody else's. All of them are alive at once, blocked
    but for the one variant whose turn it is::

        train.py --+-- rank 0 --+-- worker toy_fsdp --.    meet in a process group of their own,
                   |            +-- worker ddp -----. |    whose barrier frames what is timed
                   |            +-- worker floor -. | |
                   |                              | | |
                   `-- rank 1 --+-- worker floor -' | |
                                +-- worker ddp -----' |    "take 3 steps" ->
                                `-- worker toy_fsdp --'    <- "0.21 s each"

    A worker is started from a fork server of its rank, ends with its rank, and every wait for one
    has a time-out that names it.

Same in all: initial weights (from the same seed), micro-batches, optimizer class and arguments,
threads, float32.

Read `plain.py` (a step), `variants.py`, `worker.py`, `conductor.py` (rounds); then the rest.
"""

from lightning_fsdp_toy.tasks.benchmark.task import Benchmark

__all__ = ["Benchmark"]
