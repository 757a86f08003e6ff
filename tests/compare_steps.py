"""Times a training step of this strategy, its peers and no communication at all, interleaved.

Run it on an otherwise idle machine::

    python -m tests.compare_steps --ranks 2 --rounds 9

Every variant lives in the same processes and takes its turn in every round, in alternating order;
what counts is the ratio within a round, because machines drift. One thread per rank.
"""

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import lightning_fsdp_toy.sharding as ours
from lightning_fsdp_toy.models import Transformer
from tests.ranks import run_ranks

BATCH, LENGTH, VOCAB, STEPS = 4, 128, 10_000, 2


def make_model(variant: str) -> nn.Module:
    """The handbook's transformer as `variant` trains it."""
    torch.manual_seed(0)
    model = Transformer(vocab_size=VOCAB)
    block = type(model.layers[0])
    if variant.startswith("toy_fsdp"):
        strategy = "SHARD_GRAD_OP" if variant.endswith("grad_op") else "FULL_SHARD"
        return ours.fully_shard(model, sharding_strategy=strategy)
    if variant == "fsdp":
        policy, device = ModuleWrapPolicy({block}), torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=device, use_orig_params=True
        )
    if variant == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if variant == "ddp" else model


def time_rounds(variants: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each variant in each round, on this rank."""
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=generator)
    steps = {name: make_step(make_model(name), tokens, targets) for name in variants}
    for step in steps.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(num_rounds):
        for name in variants if number % 2 == 0 else variants[::-1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / STEPS)
    return times


def make_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(tokens).view(-1, VOCAB), targets.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return functools.partial(step, model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    variants = ["toy_fsdp", "toy_fsdp_grad_op", "fsdp", "fsdp2", "ddp", "floor"]
    times = run_ranks(time_rounds, options.ranks, variants, options.rounds, timeout=900)[0]
    print(f"{'variant':18}{'best ms':>9}{'median ms':>11}   toy_fsdp / variant: median [range]")
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(times["toy_fsdp"], seconds, strict=True))
        middle = statistics.median(ratios)
        print(
            f"{name:18}{1e3 * min(seconds):9.0f}{1e3 * statistics.median(seconds):11.0f}"
            f"   {middle:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        )


if __name__ == "__main__":
    main()
