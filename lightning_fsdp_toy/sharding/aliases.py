"""Parameters that share memory with others: sharding would make two of what is one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.names import clean_name

__all__ = ["refuse_aliases"]


class _Range(NamedTuple):
    """Where the elements of a tensor lie."""

    start: int  # address of the first byte
    stop: int  # one past the last
    kind: str
    name: str
    tensor: Tensor


def refuse_aliases(parameters: list[tuple[str, Tensor]], root: nn.Module) -> None:
    """Refuse parameters that share memory with others, or with a buffer, without being one.

    Args:
        parameters: all of the model, with their names; each once.
        root: has the buffers.

    Raises:
        ValueError: names the two.
    """
    tensors = [("parameter", name, param) for name, param in parameters]
    tensors += [("buffer", clean_name(name), buffer) for name, buffer in root.named_buffers()]
    ranges = []
    for kind, name, tensor in tensors:
        if not tensor.is_meta and tensor.numel():
            start = tensor.data_ptr()
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            extent = sum((size - 1) * stride for size, stride in strides) + 1
            stop = start + extent * tensor.element_size()
            ranges.append(_Range(start, stop, kind, name, tensor))
    open_ranges: list[_Range] = []  # that begin before the next and do not end before it
    for each in sorted(ranges, key=lambda one: (one.start, one.stop)):
        open_ranges = [other for other in open_ranges if other.stop > each.start]
        for other in open_ranges:
            if "parameter" in (each.kind, other.kind) and _share_elements(each, other):
                raise ValueError(
                    f"The {other.kind} `{other.name}` and the {each.kind} `{each.name}` are two "
                    f"objects over the same memory, of which sharding would make two. Use one "
                    f"parameter in both places (a tied weight), or give each its own memory "
                    f"(`clone()`)."
                )
        open_ranges.append(each)


def _share_elements(one: _Range, other: _Range) -> bool:
    """Whether any byte belongs to both: elements of one may lie between those of the other."""
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    bytes_of_one = torch.zeros(stop - start, dtype=torch.bool)
    _view(bytes_of_one, one, start).fill_(True)
    return bool(_view(bytes_of_one, other, start).any())


def _view(memory: Tensor, which: _Range, start: int) -> Tensor:
    """The bytes of a tensor's elements in a copy of the memory from ``start`` on."""
    tensor, size = which.tensor, which.tensor.element_size()
    # Expanded dimensions (stride 0) once: what is written must not overlap itself.
    shape = [n if step else 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [step * size for step in tensor.stride()]
    return memory.as_strided((*shape, size), (*strides, 1), which.start - start)
