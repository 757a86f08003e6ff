"""Which variants of a large model fit into memory at the same time."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fsdp_toy.tasks.benchmark.variants import OURS

__all__ = ["SIZES_OF_SCALING", "fit_together"]

# `d_model` and `num_layers`: 1M, 3M, 10M, 35M, 100M, 300M parameters at 10,000 different tokens.
SIZES_OF_SCALING = ((48, 2), (128, 4), (256, 6), (512, 8), (768, 12), (1024, 22))
_PART = 0.8  # of the free memory that may be used
_GB = 1e9


def fit_together(
    variants: Sequence[str],
    *,
    num_parameters: int,
    num_shards: int,
    num_local: int,
    sizes: Mapping[str, Any],
    num_tokens: int,
    free_bytes: int,
) -> tuple[list[list[str]], str]:
    """Divide variants into groups that fit into memory one after the other.

    Args:
        variants: In order.
        num_parameters: Of the model, float32, trained by an optimizer with two states.
        num_shards: Ranks.
        num_local: Ranks that share the memory.
        sizes: Arguments of the model.
        num_tokens: Of a micro-batch.
        free_bytes: Of the memory.

    Returns:
        The groups; and a line if a variant does not fit even alone, then there are no groups.
    """
    width, layers = sizes.get("d_model", 0), sizes.get("num_layers", 0)
    # About 20 activations of the model's width are kept in a layer; logits three times.
    activations = 4 * num_tokens * (20 * width * layers + 3 * sizes.get("vocab_size", 0))
    budget = int(_PART * free_bytes)
    groups: list[list[str]] = []
    left = 0
    for variant in variants:
        needed = num_local * (_model_bytes(variant, num_parameters, num_shards) + activations)
        if needed > budget:
            return [], (
                f"{num_parameters / 1e6:.1f}M parameters: `{variant}` takes about "
                f"{needed / _GB:.1f} GB, {free_bytes / _GB:.1f} GB are free"
            )
        if needed > left:
            groups.append([])
            left = budget
        groups[-1].append(variant)
        left -= needed
    return groups, ""


def _model_bytes(variant: str, num_parameters: int, num_shards: int) -> int:
    """Weights, gradients, two optimizer states, and what comes to them; of a rank."""
    if variant in OURS:  # the whole model exists once, before it is cut
        return 4 * num_parameters + 16 * num_parameters // num_shards
    return (20 if variant == "ddp" else 16) * num_parameters  # DDP: buckets
