"""Makes a resumed run go on with the right micro-batch, also on another world size.

Note: Progress
    Lightning counts training batches per rank and saves the counts in every checkpoint; the
    samplers of this package start a resumed epoch where the counts say. Left as they are, the
    counts are wrong in four cases (Lightning 2.6): the world size has changed; `max_steps` ended
    the run inside an epoch, which then counts as finished; a run with `max_steps` was saved after
    the end of an epoch, which is then counted twice; the run was saved between two micro-batches
    of one optimizer step, whose gradients are in no checkpoint.

    In these cases the counts are rewritten to those of a checkpoint that was saved right after
    the last micro-batch of the last complete optimizer step, which Lightning resumes exactly.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


def align_progress(
    fit_loop: dict[str, Any],
    *,
    saved_world_size: int,
    saved_accumulate: int,
    world_size: int,
    accumulate: int,
    num_batches: int,
) -> None:
    """Rewrite the counts of a checkpoint in place where Note: Progress says it is needed.

    Args:
        fit_loop: `checkpoint["loops"]["fit_loop"]`.
        saved_world_size: World size of the run that saved it.
        saved_accumulate: Micro-batches per rank and optimizer step in that run.
        world_size: World size now.
        accumulate: Micro-batches per rank and optimizer step now.
        num_batches: Micro-batches of this rank in an epoch now.
    """
    epoch, batch = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    num_started = epoch["current"]["started"]
    is_epoch_counted = epoch["current"]["processed"] == num_started
    is_step_complete = batch["is_last_batch"] or batch["current"]["ready"] % saved_accumulate == 0
    is_same_size = (saved_world_size, saved_accumulate) == (world_size, accumulate)
    if num_started == 0 or (is_same_size and is_step_complete and not is_epoch_counted):
        return

    saved = batch["current"]["ready"] * saved_world_size  # micro-batches of this epoch, all ranks
    step = world_size * accumulate
    position = saved // step * accumulate
    if batch["is_last_batch"] or position >= num_batches:
        batch["is_last_batch"] = True
        position = num_batches
    elif saved % step and is_step_complete:
        logger.warning(
            "resuming with %s micro-batches per optimizer step instead of %s: the last %s"
            " micro-batches before the checkpoint are trained on again",
            step,
            saved_world_size * saved_accumulate,
            saved % step,
        )

    earlier = (batch["total"]["ready"] - batch["current"]["ready"]) * saved_world_size // world_size
    for counts, count in ((batch["current"], position), (batch["total"], earlier + position)):
        counts.update(ready=count, started=count, processed=count, completed=count - 1)
    for counts in (epoch["current"], epoch["total"]):
        unfinished = counts["started"] - 1
        counts.update(ready=counts["started"], processed=unfinished, completed=unfinished)
    if is_epoch_counted or not is_step_complete:
        # Steps that were logged; Lightning adds the last one when it resumes.
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
