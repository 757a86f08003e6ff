"""Gradients of one flat parameter: collected, reduced, handed to the optimizer.

Note: gradients
    A gradient that arrives is scaled, copied to its place in the reduce buffer (full-size, laid out
    like the flat parameter, in the reduce dtype) and freed. When the unit is complete, the reduce
    buffer is reduced into the gradient shard (in the dtype of the shard), of which every sharded
    parameter's ``.grad`` is a view. Only those views hold the gradient shard:
    ``zero_grad(set_to_none=True)`` frees it.

    Under ``no_sync`` the reduce buffer stays instead, and the next micro-batch adds to it.

    Of an offloaded shard the gradient is summed on the device like any other and then copied to
    pinned CPU memory, while backward goes on; ``publish`` waits for the copies.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.buffers import num_bytes
from lightning_fsdp_toy.sharding.collectives import Work
from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.layout import UnitLayout
from lightning_fsdp_toy.sharding.memory import MemoryCounter
from lightning_fsdp_toy.sharding.mesh import RankMesh

__all__ = ["FlatGradient"]


class FlatGradient:
    """The gradient of one flat parameter on its way from autograd to the optimizer.

    Args:
        originals: the original parameters, in the order of the layout.
        layout: where they lie.
        shard: the master shard; the gradient shard is made like it.
        dtype: of the reduce buffer.
        device: of the reduce buffer.
        mesh: over which ranks gradients are summed.
        memory: where bytes are counted.
        name: for the ledger and messages.
    """

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        layout: UnitLayout,
        shard: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        mesh: RankMesh,
        memory: MemoryCounter,
        name: str,
    ) -> None:
        self.originals = originals
        self.layout = layout
        self.shard = shard
        self.dtype = dtype
        self.device = device
        self.is_offloaded = shard.device.type != device.type
        self.mesh = mesh
        self.memory = memory
        self.name = name
        self.buffer: Tensor | None = None  # 1D, padded_numel, while gradients arrive
        self.is_kept = False  # the buffer holds earlier micro-batches, complete (`no_sync`)
        self._is_open = False  # and gradients of a backward that has not ended
        self._reduced: Tensor | None = None  # the gradient shard, until it is published
        self._published: weakref.ref[Tensor] | None = None
        self._given: list[bool] = []  # which gradients are views of the published gradient shard

    @torch.no_grad()
    def collect(self, original: OriginalParameter, scale: float, is_kept: bool = False) -> None:
        """Move the gradient autograd left on an unsharded parameter into the reduce buffer.

        Args:
            original: the parameter.
            scale: the gradient is multiplied by it.
            is_kept: it will not be reduced in this backward (``no_sync``).
        """
        grad = original.unsharded.grad
        assert grad is not None, f"no gradient on `{original.slot.fqn}`"
        original.unsharded.grad = None
        grad = grad.to_dense() if grad.is_sparse else grad
        if self.buffer is None:
            self.buffer = self._open_buffer(is_kept)
        place = original.view_of(self.buffer)
        if original.has_gradient:
            place.add_(grad, alpha=scale)
        elif grad.dtype == place.dtype:
            torch.mul(grad, scale, out=place)
        else:  # scaled after widening: a product in half precision would round
            place.copy_(grad)
            place.mul_(scale)
        original.has_gradient = True
        self._is_open = True

    def keep(self) -> list[bool]:
        """End a micro-batch without a reduction; the next one adds to what is there.

        Returns:
            For each original parameter, whether this rank has a gradient for it.
        """
        self.is_kept, self._is_open = True, False
        return [original.has_gradient for original in self.originals]

    @torch.no_grad()
    def start_reduce(self) -> tuple[list[bool], Work]:
        """Begin to reduce what was collected into the gradient shard; on every rank.

        Returns:
            For each original parameter, whether this rank had a gradient for it; and the work,
            which must be waited for before ``publish``.
        """
        used = [original.has_gradient for original in self.originals]
        buffer = self.buffer
        if buffer is None:  # other ranks may have gradients: this one counts as zero
            buffer = self._open_buffer().zero_()
        else:
            self._zero_missing(buffer)
        out, accumulate = self._open_shard()
        self._forget_buffer()
        self._reduced = out
        finish = self._start(buffer, out, accumulate)
        held = [buffer]

        def free() -> None:
            finish()
            self._close_buffer(held.pop())

        del buffer
        return used, Work(free)

    def _start(self, buffer: Tensor, out: Tensor, accumulate: bool) -> Callable[[], None]:
        """Start to reduce into ``out``, wherever that is; return what waits for it."""
        if not self.is_offloaded:
            return self._start_on_device(buffer, out, accumulate)
        total = torch.empty_like(out, device=self.device)
        self.memory.add("reduce", num_bytes(total))
        if accumulate:
            total.copy_(out, non_blocking=True)
        finish = self._start_on_device(buffer, total, accumulate)

        def move() -> None:
            finish()
            out.copy_(total, non_blocking=True)
            self.memory.add("reduce", -num_bytes(total))

        return move

    def _start_on_device(self, buffer: Tensor, out: Tensor, accumulate: bool) -> Callable[[], None]:
        """Start the first collective; return what waits for it and does the others."""
        shards, replicas = self.mesh.shards, self.mesh.replicas
        if replicas is None:
            scratch = shards.scratch_bytes(buffer, out, accumulate)
            work = shards.start_reduce_scatter(buffer, out, accumulate, self.name)
        elif shards.world_size == 1:
            scratch = replicas.scratch_bytes(
                buffer, out.chunk(replicas.world_size)[replicas.rank], accumulate
            )
            work = replicas.start_all_reduce(buffer, out, accumulate, self.name)
        else:
            part = buffer.new_empty(out.numel())  # this shard group's sum
            scratch = shards.scratch_bytes(buffer, part, False) + num_bytes(part)
            first = shards.start_reduce_scatter(buffer, part, False, self.name)

            def across() -> None:
                first.wait()
                replicas.start_all_reduce(part, out, accumulate, self.name).wait()

            work = Work(across)
        self.memory.add("reduce", scratch)

        def finish() -> None:
            work.wait()
            self.memory.add("reduce", -scratch)

        return finish

    def publish(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank used."""
        out, self._reduced = self._reduced, None
        assert out is not None, f"`{self.name}` has no reduced gradients"
        self._published = weakref.ref(out)
        if self.is_offloaded:
            torch.cuda.synchronize(self.device)  # the optimizer reads it on the CPU
        for original, is_used in zip(self.originals, used, strict=True):
            if is_used or original.sharded.grad is not None:  # the latter may lie elsewhere now
                original.sharded.grad = original.piece_of(out)
        self._given = [original.sharded.grad is not None for original in self.originals]

    @property
    def is_pending(self) -> bool:
        """Whether gradients of an unfinished backward are here."""
        return self._is_open or self._reduced is not None

    def abandon(self) -> None:
        """Forget what an aborted backward left; complete micro-batches of ``no_sync`` stay."""
        self._reduced = None
        for original in self.originals:
            original.unsharded.grad = None
        if self._is_open and self.buffer is not None:
            if self.is_kept:
                warnings.warn(
                    f"A backward failed in the middle: gradients of `{self.name}` from earlier "
                    f"micro-batches, kept by no_sync, are lost with its own.",
                    stacklevel=2,
                )
            self.drop()

    def drop(self) -> None:
        """Forget what has been collected and not been reduced."""
        if self.buffer is not None:
            self._close_buffer(self.buffer)
        self._forget_buffer()  # a rank without gradients keeps as well

    def _forget_buffer(self) -> None:
        self.buffer = None
        self.is_kept = self._is_open = False
        for original in self.originals:
            original.has_gradient = False
            original.unsharded.grad = None

    def _open_buffer(self, is_kept: bool = False) -> Tensor:
        numel = self.layout.padded_numel
        args = self.name, numel, self.dtype, self.device
        buffer = self.mesh.shards.open_reduce_buffer(*args, is_kept=is_kept)
        pooled = self.mesh.shards.pooled_bytes(buffer)
        self.memory.move("pool", "reduce", pooled, num_bytes(buffer))
        return buffer

    def _close_buffer(self, buffer: Tensor) -> None:
        pooled = self.mesh.shards.pooled_bytes(buffer)
        self.mesh.shards.close_reduce_buffer(buffer)
        self.memory.move("pool", "reduce", -pooled, -num_bytes(buffer))

    def _open_shard(self) -> tuple[Tensor, bool]:
        """Return the tensor to reduce into and whether it holds earlier micro-batches."""
        if self._reduced is not None:
            return self._reduced, True
        grads = [original.sharded.grad for original in self.originals]
        out = self._published() if self._published is not None else None
        if out is None or self._is_dropped(out):
            out = torch.empty_like(self.shard, pin_memory=self.shard.is_pinned())
            size = num_bytes(out)
            self.memory.add("gradients", size)
            weakref.finalize(out, self.memory.add, "gradients", -size)
            if any(grad is not None for grad in grads):
                out.zero_()  # every gradient was replaced by a tensor of the user's
        if all(grad is None for grad in grads):
            return out, False
        for original, grad in zip(self.originals, grads, strict=True):
            place = original.piece_of(out)
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        return out, True

    def _is_dropped(self, out: Tensor) -> bool:
        """Whether the user took a gradient away, who may still hold the view of ``out``."""
        return any(
            is_given
            and original.piece.numel > 0
            and (
                original.sharded.grad is None
                or original.sharded.grad.data_ptr() != original.piece_of(out).data_ptr()
            )
            for original, is_given in zip(self.originals, self._given, strict=False)
        )

    def _zero_missing(self, buffer: Tensor) -> None:
        for start, stop in self.layout.gaps():
            buffer[start:stop].zero_()
        for original in self.originals:
            if not original.has_gradient:
                original.view_of(buffer).zero_()
