"""Where every original parameter of a unit lies in its flat parameter: integers only.

Note: the flat parameter
    The original parameters of one unit are laid end to end. Each starts at a multiple of
    ``ALIGNMENT`` elements, and the whole is padded so that every shard has the same length, again a
    multiple of ``ALIGNMENT``. Two shards, two parameters (``.`` is padding)::

        flat parameter   [ wwwwwwwwwwwwwwwwwwwwwwwww... | bbbbb...................... ]
                           weight, offset 0               bias, offset k * ALIGNMENT
        rank 0's shard   [ wwwwwwwwwwwwwwww ]
        rank 1's shard                    [ wwwwwwwww... | bbbbb...................... ]

    A cut inside a parameter therefore falls a multiple of ``ALIGNMENT`` elements after the
    parameter's start, at every world size. Vectorised kernels that treat the last few elements of a
    tensor differently (fused optimizers do) then meet the same last few elements whether the
    parameter is whole or cut, which is what makes 1, 2 and 4 ranks give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

__all__ = ["ALIGNMENT", "Box", "ParamSlot", "Piece", "UnitLayout", "boxes_of_range", "round_up"]

ALIGNMENT = 64  # elements: a multiple of every SIMD width (and of two of them, as torch unrolls)


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """One original parameter's place in the flat parameter.

    Attributes:
        fqn: fully qualified name in the root module.
        shape: original shape.
        stride: original stride in elements; parameters are flattened in memory order.
        offset: first element in the flat parameter, a multiple of ``ALIGNMENT``.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements of the original parameter."""
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether memory order is row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Piece:
    """The part of one original parameter inside one shard: elements ``start`` to ``stop``.

    ``shard_offset`` is where the piece begins in the shard. An empty piece has ``start == stop``.
    """

    start: int
    stop: int
    shard_offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start


class UnitLayout:
    """Layout of one unit's flat parameter over ``num_shards`` ranks.

    Args:
        params: ``(fqn, shape, stride)`` of each original parameter, in order.
        num_shards: number of pieces the flat parameter is cut into (1: replicated).
        pad_to: number of ranks that reduce together; the padded numel is a multiple of
            ``pad_to * ALIGNMENT``. Defaults to ``num_shards``.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
        num_shards: int,
        pad_to: int | None = None,
    ) -> None:
        slots, offset = [], 0
        for fqn, shape, stride in params:
            slots.append(ParamSlot(fqn, tuple(shape), tuple(stride), offset))
            offset = round_up(offset + prod(shape), ALIGNMENT)
        self.slots: tuple[ParamSlot, ...] = tuple(slots)
        self.num_shards = num_shards
        self.numel = sum(slot.numel for slot in slots)
        self.padded_numel = round_up(offset, ALIGNMENT * (pad_to or num_shards))
        self.shard_numel = self.padded_numel // num_shards

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """Return the first and one past the last element of ``rank``'s shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def piece(self, slot: ParamSlot, rank: int) -> Piece:
        """Return the part of ``slot`` that lies in ``rank``'s shard, possibly empty."""
        low, high = self.shard_bounds(rank)
        start = min(max(low - slot.offset, 0), slot.numel)
        stop = min(max(high - slot.offset, 0), slot.numel)
        if start == stop:
            return Piece(0, 0, 0)
        return Piece(start, stop, slot.offset + start - low)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, stop)`` of every stretch of padding in the flat parameter."""
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                yield end, slot.offset
            end = slot.offset + slot.numel
        if self.padded_numel > end:
            yield end, self.padded_numel


@dataclass(frozen=True)
class Box:
    """A rectangular block of an N-dimensional tensor: ``sizes`` elements from ``offsets`` on.

    ``start`` is the block's first element in row-major order: boxes hold contiguous elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major elements ``start`` to ``stop`` of a tensor into rectangular blocks.

    A shard cuts a parameter at any element, but checkpoint formats name rectangular blocks. At most
    ``2 * ndim - 1`` blocks cover a range: the rest of a started row, whole rows, a begun row,
    and so on inwards.

    >>> [(b.offsets, b.sizes) for b in boxes_of_range((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows are first .. last - 1
    if first > last:  # inside one row
        row = start // inner
        return _in_row(shape, row, start, stop)
    boxes = []
    if start < first * inner:
        boxes += _in_row(shape, first - 1, start, first * inner)
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        boxes.append(Box(offsets, (last - first, *shape[1:]), first * inner))
    if last * inner < stop:
        boxes += _in_row(shape, last, last * inner, stop)
    return boxes


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    base = row * prod(shape[1:])
    return [
        Box((row, *box.offsets), (1, *box.sizes), base + box.start)
        for box in boxes_of_range(shape[1:], start - base, stop - base)
    ]
