"""`task=verify`: sharded training equals replicated training, bit for bit.

Note: what is compared
    Every run is a real `Trainer.fit` and compares its weights, after every optimizer step, with
    those that one plain process had after the same step (`reference.py`: a loop over
    micro-batches, nothing of sharding). Runs that all equal it are equal to each other::

        family `plain`, one micro-batch a rank and step, N ranks
            a  shards            = a replica on each rank, fed the same averaged gradient
               gathered weights  = the same replica, at every unshard
            b  FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, one unit or many
            c  one process that accumulates N micro-batches
            d  DDP
            f  without overlap
        family `batch`, 4 micro-batches a step on 1, 2 and 4 ranks, with clipping and dropout
            e  each number of ranks
            f  saved on 2 ranks, resumed on 4

    Row a does not use the plain run: its replica is fed by the shards' own gradients, so it finds
    faults of weights and optimizer, and names the rank and the parameter at once. Wrong gradients
    are found by the others.

Read `runs.py` (what trains), `reference.py`, `replica.py`, `comparison.py`; then the rest.
"""

from lightning_fsdp_toy.tasks.verify.task import Verify

__all__ = ["Verify"]
