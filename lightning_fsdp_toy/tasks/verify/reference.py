"""The plain run: one process, a loop over micro-batches, whole weights, nothing of sharding.

Everything else is compared with it, so it is written to be checked by reading: PyTorch and the
data, in the order of the formula. For every optimizer step with micro-batches 1 to G

    gradient = g1 * (1 / G) + g2 * (1 / G) + ... + gG * (1 / G)        from left to right
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from lightning_fsdp_toy.data import MicroBatchDataModule, derive_seed
from lightning_fsdp_toy.lit_module import Batch, LitLanguageModel, token_loss
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.verify.families import VerifyStage, make_module
from lightning_fsdp_toy.tasks.verify.options import VerifyOptions
from lightning_fsdp_toy.tasks.verify.trajectory import Trajectory, TrajectoryWriter, check_disk

__all__ = ["train_plainly"]


def train_plainly(job: Job, build: Build, stage: VerifyStage) -> None:
    """Train and write the weights after every step; called in one process."""
    num_steps, family = VerifyOptions.of(job.config).steps, stage.family
    module = make_module(job, build, stage).to(_device(job)).train()
    params = list(module.parameters())
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    scheduler = configured["lr_scheduler"]["scheduler"]  # type: ignore[index]
    path = stage.path(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    for earlier in path.parent.glob("*.bin"):  # of a family whose stages have ended
        Trajectory.remove(earlier)
    check_disk(path.parent, num_steps, sum(param.numel() for param in params))
    writer = TrajectoryWriter(path, module.named_parameters(), num_steps)
    writer.write(0)
    batches = _micro_batches(build("data"), family.num_micro_batches, module.seed)
    num_clipped = 0
    for step in range(1, num_steps + 1):
        sums: list[Tensor | None] = [None] * len(params)
        for _ in range(family.num_micro_batches):
            _add_gradients(module, params, sums, *next(batches), 1.0 / family.num_micro_batches)
        for param, total in zip(params, sums, strict=True):
            param.grad = total
        if family.clip is not None:
            num_clipped += _clip(params, family.clip)
        optimizer.step()
        scheduler.step()
        writer.write(step)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    writer.finish(
        parameter_bytes=sum(param.numel() * param.element_size() for param in params),
        optimizer_bytes=sum(value.numel() * value.element_size() for value in state),
        num_clipped=num_clipped,
    )


def _device(job: Job) -> torch.device:
    return torch.device(job.config["accelerator"])


def _micro_batches(
    data: MicroBatchDataModule, num_a_step: int, seed: int
) -> Iterator[tuple[Batch, int]]:
    """Yield micro-batches in global order, without end, each with the seed of its dropout."""
    data.trainer = SimpleNamespace(  # type: ignore[assignment]  # what the loaders ask it for
        world_size=1, global_rank=0, accumulate_grad_batches=num_a_step, training=False
    )
    data.prepare_data()
    data.setup("fit")
    loader, epoch = data.train_dataloader(), 0
    while True:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for index, batch in enumerate(loader):
            yield batch, derive_seed(seed, epoch, index)
        epoch += 1


def _add_gradients(
    module: LitLanguageModel,
    params: list[nn.Parameter],
    sums: list[Tensor | None],
    batch: Batch,
    seed: int,
    scale: float,
) -> None:
    """Add one micro-batch's gradients times `scale` to `sums`, in place."""
    tokens, targets = (each.to(params[0].device) for each in batch)
    torch.manual_seed(seed)
    for param in params:
        param.grad = None
    token_loss(module.net(tokens), targets).backward()
    for index, param in enumerate(params):
        if param.grad is None:
            continue
        scaled, total = param.grad * scale, sums[index]
        sums[index] = scaled if total is None else total.add_(scaled)


def _clip(params: list[nn.Parameter], max_norm: float) -> bool:
    """Scale gradients as `clip_grad_norm_`; the norm is summed in float64, then rounded once."""
    squares = [param.grad.double().square().sum() for param in params if param.grad is not None]
    norm = torch.stack(squares).sum().sqrt().float()
    clip_grads_with_norm_(params, max_norm, norm)
    return bool(norm > max_norm)
