"""One unit's flat parameter: shard, unshard, views, reshard, gradient shard.

Note: who holds memory when
    ::

        SHARDED      shard  [####]              buffer [ no memory ]
        UNSHARDED    shard  [####]              buffer [################]

    The shard is the master copy and lives as long as the model. The buffer is one tensor for good,
    whose storage is given memory by an unshard and loses it in a reshard. Every view ever made of
    it is valid again after the next unshard; in between it has no memory, and no operation may
    read it (torch checks that in most operations, not in all).

    Modules see one of two sets of ``nn.Parameter``, swapped in ``module._parameters``:

    * sharded parameters: for each original parameter the 1D piece of it in this rank's shard,
      possibly empty. These exist for the optimizer, which must be built after sharding.
    * unsharded parameters: views into the buffer with the original shape and stride. These are what
      forward and backward use; autograd leaves, so gradients arrive at them one by one.

Note: gradients
    A gradient that arrives is scaled, copied to its place in the reduce buffer (full-size, laid out
    like the flat parameter) and freed. When the unit is complete, the reduce buffer is reduced into
    the gradient shard, of which every sharded parameter's ``.grad`` is a view. Only those views
    hold the gradient shard: ``zero_grad(set_to_none=True)`` frees it.
"""

from __future__ import annotations

import enum
import weakref
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.collectives import Transport
from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.layout import ParamSlot, Piece, UnitLayout

__all__ = ["FlatParameter", "MemoryCounter", "ParamState"]


class ParamState(enum.Enum):
    """Which tensors of a flat parameter hold memory."""

    SHARDED = "only the shard"
    UNSHARDED = "the shard and the buffer"


@dataclass
class MemoryCounter:
    """Tensor bytes the core holds on this rank, now and at most since ``reset_peak``.

    Attributes:
        shards_bytes: master shards; constant after setup.
        unsharded_bytes: unsharded buffers (none where the shard is the whole).
        reduce_bytes: reduce buffers, and what a reduction receives into.
        gradients_bytes: gradient shards made by the last backward.
        unsharded_peak_bytes: largest ``unsharded_bytes``.
        peak_bytes: largest sum of the four.
    """

    shards_bytes: int = 0
    unsharded_bytes: int = 0
    reduce_bytes: int = 0
    gradients_bytes: int = 0
    unsharded_peak_bytes: int = 0
    peak_bytes: int = 0

    def add(self, kind: str, num_bytes: int) -> None:
        """Note that ``num_bytes`` more (or, negative, fewer) bytes of ``kind`` are held."""
        setattr(self, kind, getattr(self, kind) + num_bytes)
        self.unsharded_peak_bytes = max(self.unsharded_peak_bytes, self.unsharded_bytes)
        total = self.shards_bytes + self.unsharded_bytes + self.reduce_bytes + self.gradients_bytes
        self.peak_bytes = max(self.peak_bytes, total)

    def reset_peak(self) -> None:
        """Start measuring peaks anew from what is held now."""
        self.unsharded_peak_bytes = self.peak_bytes = 0
        self.add("unsharded_bytes", 0)


class FlatParameter:
    """The parameters of one unit as one tensor, cut over the ranks of ``transport``.

    Building one is a collective: rank 0's values are broadcast.

    Args:
        params: for each original parameter its name, tensor and homes. Afterwards the modules hold
            the sharded parameters.
        fqn: name of the unit, for messages.
        transport: moves and counts; owns the memory of the buffer.
        device: where shards and buffers live.
        memory: where bytes are counted.
        replicate: keep the whole flat parameter on every rank (NO_SHARD) and reduce over all.
    """

    def __init__(
        self,
        params: list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]],
        fqn: str,
        transport: Transport,
        device: torch.device,
        memory: MemoryCounter,
        replicate: bool = False,
    ) -> None:
        self.fqn = fqn
        self.transport = transport
        self.memory = memory
        self.replicate = replicate
        num_shards = 1 if replicate else transport.world_size
        self.shard_rank = 0 if replicate else transport.rank
        described = [(name, tuple(p.shape), _dense_stride(p)) for name, p, _ in params]
        self.layout = UnitLayout(described, num_shards, pad_to=transport.world_size)
        self.dtype = params[0][1].dtype if params else torch.get_default_dtype()
        # 1D, padded_numel. For one shard the buffer is the shard and never loses its memory.
        self.buffer = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=device)
        self.is_whole = num_shards == 1 or not params
        self.state = ParamState.UNSHARDED
        self._offsets = [slot.offset for slot in self.layout.slots]
        self.originals = [
            OriginalParameter(slot, self.layout.piece(slot, self.shard_rank), homes)
            for slot, (_, _, homes) in zip(self.layout.slots, params, strict=True)
        ]
        for original, (_, param, _) in zip(self.originals, params, strict=True):
            self._view(self.buffer, original.slot).copy_(param.detach())
        transport.broadcast_(self.buffer, fqn)
        own = self.buffer.chunk(num_shards)[self.shard_rank]
        self.shard = own if self.is_whole else own.clone()  # 1D, padded_numel / num_shards
        for original, (_, param, _) in zip(self.originals, params, strict=True):
            self._make_faces(original, param)
        self.reduce_buffer: Tensor | None = None  # 1D, padded_numel, while gradients arrive
        self._reduced: Tensor | None = None  # the gradient shard, until it is published
        self._gradient_shard: weakref.ref[Tensor] | None = None
        self.memory.add("shards_bytes", _num_bytes(self.shard))
        if not self.is_whole:
            self.memory.unsharded_bytes += _num_bytes(self.buffer)
        self.reshard()

    # -- weights --------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules see unsharded parameters now."""
        return self.state is ParamState.UNSHARDED

    @property
    def buffer_ptr(self) -> int:
        """Address of the buffer's memory."""
        return self.buffer.untyped_storage().data_ptr()

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the whole flat parameter and show the modules unsharded parameters."""
        assert self.state is ParamState.SHARDED, f"unshard of unsharded unit `{self.fqn}`"
        for original in self.originals:  # all, before anything has changed
            original.check_sharded(self.shard)
        if not self.is_whole:
            self.transport.allocate_(self.buffer)
            self.memory.add("unsharded_bytes", _num_bytes(self.buffer))
            self.transport.all_gather_(self.buffer, self.shard, self.fqn)
        for original in self.originals:
            original.show_unsharded()
        self.state = ParamState.UNSHARDED

    def reshard(self) -> None:
        """Free the unsharded data and show the modules sharded parameters."""
        assert self.state is ParamState.UNSHARDED, f"reshard of sharded unit `{self.fqn}`"
        for original in self.originals:
            original.show_sharded()
        if not self.is_whole:
            self.transport.release_(self.buffer)
            self.memory.add("unsharded_bytes", -_num_bytes(self.buffer))
        self.state = ParamState.SHARDED

    @property
    def is_edited(self) -> bool:
        """Whether this rank's part of the unsharded data is no longer what the shard holds."""
        low, high = self.layout.shard_bounds(self.shard_rank)
        own = self.buffer[low:high]  # compared as bytes: NaN is equal to itself
        return not torch.equal(self.shard.view(torch.uint8), own.view(torch.uint8))

    @torch.no_grad()
    def write_back(self, is_edited: bool) -> None:
        """Copy this rank's part of the (edited) unsharded data into the shard."""
        assert self.state is ParamState.UNSHARDED, f"write-back of sharded unit `{self.fqn}`"
        if is_edited and not self.is_whole:
            low, high = self.layout.shard_bounds(self.shard_rank)
            self.shard.copy_(self.buffer[low:high])
            for original in self.originals:
                torch.autograd.graph.increment_version(original.sharded)

    @torch.no_grad()
    def take_in(self) -> None:
        """Bring values put into the faces another way (`p.data = x`) to the buffer."""
        for original in self.originals:
            original.remember_version()
            original.take_in(self._view(self.buffer, original.slot))

    def original_of(self, param: nn.Parameter) -> OriginalParameter | None:
        """Return the original parameter that ``param`` is a face of."""
        faces = (o for o in self.originals if param is o.sharded or param is o.unsharded)
        return next(faces, None)

    def sync_requires_grad(self) -> None:
        """Freeze or unfreeze both faces of every parameter as the user did with one."""
        for original in self.originals:
            original.sync_requires_grad()

    def original_at(self, offset: int) -> OriginalParameter:
        """Return the original parameter that holds an element of the buffer."""
        return self.originals[bisect_right(self._offsets, offset) - 1]

    # -- gradients ------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradient(self, original: OriginalParameter, scale: float) -> None:
        """Move the gradient autograd left on an unsharded parameter into the reduce buffer."""
        grad = original.unsharded.grad
        assert grad is not None, f"no gradient on `{original.slot.fqn}`"
        original.unsharded.grad = None
        grad = grad.to_dense() if grad.is_sparse else grad
        if self.reduce_buffer is None:
            self.reduce_buffer = self.shard.new_empty(self.layout.padded_numel)
            self.memory.add("reduce_bytes", _num_bytes(self.reduce_buffer))
        place = self._view(self.reduce_buffer, original.slot)
        if original.has_gradient:
            place.add_(grad, alpha=scale)
        else:
            torch.mul(grad, scale, out=place)
        original.has_gradient = True

    @torch.no_grad()
    def reduce_gradients(self) -> list[bool]:
        """Reduce what was collected into the gradient shard; a collective on every rank.

        Returns:
            For each original parameter, whether this rank had a gradient for it.
        """
        buffer = self.reduce_buffer
        if buffer is None:  # other ranks may have gradients: this one counts as zero
            buffer = self.shard.new_zeros(self.layout.padded_numel)
        else:
            self._zero_missing(buffer)
        used = [original.has_gradient for original in self.originals]
        out, accumulate = self._open_gradient_shard()
        extra = self.transport.scratch_bytes(
            out.chunk(self.transport.world_size)[0] if self.replicate else out
        )
        extra += 0 if self.reduce_buffer is not None else _num_bytes(buffer)
        self.memory.add("reduce_bytes", extra)
        if self.replicate:
            self.transport.all_reduce(buffer, out, accumulate, self.fqn)
        else:
            self.transport.reduce_scatter(buffer, out, accumulate, self.fqn)
        self.memory.add("reduce_bytes", -extra)
        self.drop_reduce_buffer()
        self._reduced = out
        return used

    def publish_gradients(self, used: list[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank used."""
        out, self._reduced = self._reduced, None
        assert out is not None, f"unit `{self.fqn}` has no reduced gradients"
        self._gradient_shard = weakref.ref(out)
        for original, is_used in zip(self.originals, used, strict=True):
            if is_used and original.sharded.requires_grad:
                original.sharded.grad = self._piece(out, original.piece)

    def drop_reduce_buffer(self) -> None:
        """Free the reduce buffer and forget which gradients arrived."""
        if self.reduce_buffer is not None:
            self.memory.add("reduce_bytes", -_num_bytes(self.reduce_buffer))
        self.reduce_buffer = None
        for original in self.originals:
            original.has_gradient = False
            original.unsharded.grad = None

    @property
    def is_reducing(self) -> bool:
        """Whether gradients have arrived or been reduced that nobody was given yet."""
        return self.reduce_buffer is not None or self._reduced is not None

    def abandon_gradients(self) -> None:
        """Forget what an aborted backward left."""
        self.drop_reduce_buffer()
        self._reduced = None

    def _open_gradient_shard(self) -> tuple[Tensor, bool]:
        """Return the tensor to reduce into and whether it holds earlier micro-batches."""
        if self._reduced is not None:
            return self._reduced, True
        grads = [original.sharded.grad for original in self.originals]
        out = self._gradient_shard() if self._gradient_shard is not None else None
        if out is None:
            out = torch.empty_like(self.shard)
            num_bytes = _num_bytes(out)
            self.memory.add("gradients_bytes", num_bytes)
            weakref.finalize(out, self.memory.add, "gradients_bytes", -num_bytes)
            if any(grad is not None for grad in grads):
                out.zero_()  # every gradient was replaced by a tensor of the user's
        if all(grad is None for grad in grads):
            return out, False
        for original, grad in zip(self.originals, grads, strict=True):
            place = self._piece(out, original.piece)
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        return out, True

    def _zero_missing(self, buffer: Tensor) -> None:
        for start, stop in self.layout.gaps():
            buffer[start:stop].zero_()
        for original in self.originals:
            if not original.has_gradient:
                self._view(buffer, original.slot).zero_()

    # -- views ----------------------------------------------------------------------------------

    @staticmethod
    def _view(flat: Tensor, slot: ParamSlot) -> Tensor:
        return flat.as_strided(slot.shape, slot.stride, slot.offset)

    @staticmethod
    def _piece(shard: Tensor, piece: Piece) -> Tensor:
        return shard[piece.shard_offset : piece.shard_offset + piece.numel]

    def _make_faces(self, original: OriginalParameter, param: nn.Parameter) -> None:
        """Make the sharded and the unsharded face; attributes and hooks of the user move there."""
        piece, view = (
            self._piece(self.shard, original.piece),
            self._view(self.buffer, original.slot),
        )
        original.is_whole = self.is_whole
        # Made empty, for a version counter of its own: the step of another parameter of the unit
        # does not change this one, nor does an all-gather into the buffer.
        original.sharded = nn.Parameter(piece.new_empty(0), param.requires_grad)
        original.sharded.data = piece
        if self.is_whole:  # one memory, one version
            same = original.sharded.detach().as_strided(original.slot.shape, original.slot.stride)
            original.unsharded = nn.Parameter(same, param.requires_grad)
        else:
            original.unsharded = nn.Parameter(piece.new_empty(0), param.requires_grad)
            original.unsharded.data = view
        original.take_over(param)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's stride if it is dense and non-overlapping, else the row-major one."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
