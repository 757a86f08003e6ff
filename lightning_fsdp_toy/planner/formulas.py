"""Closed forms of what a rank holds and sends in an optimizer step: integers only.

Note: the formulas
    N ranks in a shard group, R groups, f_n = (n - 1) / n, P padded parameters, A micro-batches of a
    rank and A_r reductions in an optimizer step, K parameters kept unsharded between forward and
    backward (root and last unit), k gathers ahead, m = 1 reduction under way beside the next (0 for
    k = 0). Bytes per element: b_m master, b_c gathered, b_r reduced, b_G gradient shard.

    Sent by a rank in an optimizer step (it receives the same):

    ==============  ================================================================
    all-gather      f_N [ A (2 P - K) b_c ], SHARD_GRAD_OP f_N A P b_c
    reduce-scatter  f_N A_r P b_r
    all-reduce      f_R A_r P/N (b_r + b_G), of NO_SHARD with N = 1, R = all ranks
    ==============  ================================================================

    Held by a rank: shards P b_m / N; gradients P b_G / N from backward to ``zero_grad``; unsharded
    at most the root and 1 + k units that follow each other (SHARD_GRAD_OP: all); reduce buffers at
    most the root's, one that fills and m under way, which receive f_N of their bytes from peers.
    With shared memory nothing is received, and a rank keeps a pool for all these: the root's, and
    of the largest unit 1 + k (SHARD_GRAD_OP: 0) unsharded and 1 + m reduce buffers
    (frozen parameters apart, which need none).

    Sources: ZeRO (arXiv 1910.02054) for what is divided, PyTorch FSDP (arXiv 2304.11277) for the
    second all-gather; the rest follows from this package's order of work, which ``residency.py``
    and ``backward.py`` describe. What is left out: forwards that visit units twice or in another
    order, units inside units, and agreements of a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["FlatSize", "Phase", "ShardingSizes"]


@dataclass(frozen=True)
class FlatSize:
    """One flat parameter.

    Attributes:
        name: the unit's, and what sets it apart from others of the unit.
        unit: number of its unit, 0 the root, the others in the order of forward.
        padded_numel: elements, padding included.
        own_numel: elements of parameters in this rank's shard, padding left out.
        master_bytes: b_m, of an element of the shard (and of its gradient).
        compute_bytes: b_c, of an element that forward sees.
        reduce_bytes: b_r, of an element of the reduce buffer.
        is_trainable: whether it gets gradients.
        is_reserved: whether a pool of memory has reduce buffers for it: it was trainable when the
            pool was made.
    """

    name: str
    unit: int
    padded_numel: int
    own_numel: int
    master_bytes: int
    compute_bytes: int
    reduce_bytes: int
    is_trainable: bool
    is_reserved: bool = True


class Phase(NamedTuple):
    """A part of a step in which what lives does not grow but for activations; bytes.

    Attributes:
        direction: ``forward``, ``backward`` (until the first gradient has arrived), ``collect``,
            ``reduce`` (where nothing else happens meanwhile) or ``step``.
        place: 0 for the root's operations before its first unit, then the number of a unit, then
            one more for the root's operations after its last unit.
        unsharded: largest sum of unsharded buffers.
        reduce: of reduce buffers and what reductions receive.
        gradients: of gradient shards.
        received: of ``reduce``, what lies beside the buffers.
        pool: memory kept for buffers that nothing is in (shared memory).
    """

    direction: str
    place: int
    unsharded: int
    reduce: int
    gradients: int
    received: int = 0
    pool: int = 0

    @property
    def held(self) -> int:
        """Everything."""
        return self.unsharded + self.reduce + self.gradients + self.pool


@dataclass(frozen=True)
class ShardingSizes:
    """What the formulas need to know of a sharded model.

    Attributes:
        flats: every flat parameter, unit by unit.
        strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD`` or ``HYBRID_SHARD``.
        num_shards: N, ranks of a shard group.
        num_replicas: R, shard groups.
        num_prefetch: k.
        transport: ``pairwise`` (a reduction receives what peers send beside its buffer),
            ``native`` or ``shared_memory`` (nothing is received, buffers are kept).
    """

    flats: tuple[FlatSize, ...]
    strategy: str
    num_shards: int
    num_replicas: int
    num_prefetch: int
    transport: str = "pairwise"

    # -- communication --------------------------------------------------------------------------

    def sent_bytes(self, micro_batches: int = 1, reductions: int = 1) -> dict[str, int]:
        """Return the bytes a rank sends in an optimizer step, by operation.

        From the second step on: the first does not know yet which unit is the last.

        Args:
            micro_batches: A, of one rank.
            reductions: A_r: A, or 1 with ``gradient_sync="last_micro_batch"``.
        """
        trained = [flat for flat in self.flats if flat.is_trainable]
        gathered = sum(self._num_gathers(flat) * self._gathered(flat) for flat in self.flats)
        reduced = sum(flat.padded_numel * flat.reduce_bytes for flat in trained)
        across = sum(self._shard_numel(f) * (f.reduce_bytes + f.master_bytes) for f in trained)
        return {
            "all_gather": micro_batches * _sent(gathered, self.num_shards),
            "reduce_scatter": reductions * _sent(reduced, self.num_shards),
            "all_reduce": reductions * _sent(across, self.num_replicas),
        }

    def _num_gathers(self, flat: FlatSize) -> int:
        is_kept = not self._reshards or flat.unit in (0, self._last_unit)
        return 1 if is_kept or not self._is_in_backward(flat) else 2

    def _is_in_backward(self, flat: FlatSize) -> bool:
        """Whether backward comes past its unit: something at or before it in forward is trained."""
        first = min((each.unit for each in self.flats if each.is_trainable), default=None)
        return first is not None and first <= flat.unit

    @property
    def _reshards(self) -> bool:
        return self.strategy in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def _last_unit(self) -> int:
        return max((flat.unit for flat in self.flats), default=0)

    # -- memory ---------------------------------------------------------------------------------

    @property
    def shards_bytes(self) -> int:
        """Master shards of a rank."""
        return sum(self._shard_numel(flat) * flat.master_bytes for flat in self.flats)

    @property
    def gradients_bytes(self) -> int:
        """Gradient shards of a rank, from the end of backward on."""
        return sum(self._gradient(flat) for flat in self.flats)

    def optimizer_bytes(self, states: int, scalars: int = 0) -> int:
        """Optimizer state of a rank.

        Args:
            states: tensors like the parameters that the optimizer keeps: 0 for SGD, 1 with
                momentum, 2 for Adam and AdamW.
            scalars: bytes of what it keeps of each parameter beside (its step count, say).
        """
        trained = [flat for flat in self.flats if flat.is_trainable]
        return states * sum(flat.own_numel * flat.master_bytes for flat in trained) + scalars

    @property
    def pool_bytes(self) -> int:
        """What a rank keeps for buffers between steps: with shared memory only."""
        if self.transport != "shared_memory" or self.num_shards == 1:
            return 0
        total = sum(self._gathered(f) + self._reserved(f) for f in self._of(0))
        units = [self._of(unit) for unit in self._units]
        num_slots = 1 + self.num_prefetch if self._reshards else 0
        num_buffers = 2 if self.num_prefetch else 1
        for kind in range(max(map(len, units), default=0)):  # units reuse those of their kind
            alike = [unit[kind] for unit in units if len(unit) > kind]
            reserved = [self._reserved(flat) for flat in alike if flat.is_reserved]
            total += min(num_slots, len(alike)) * max(map(self._gathered, alike))
            total += min(num_buffers, len(reserved)) * max(reserved, default=0)
        return total

    @property
    def unsharded_peak_bytes(self) -> int:
        """Largest sum of unsharded buffers."""
        return max(phase.unsharded for phase in self.phases())

    @property
    def reduce_peak_bytes(self) -> int:
        """Largest sum of reduce buffers and of what reductions receive."""
        return self.reduce_peak()

    def reduce_peak(self, accumulates: bool = False) -> int:
        """``reduce_peak_bytes``, with ``accumulates`` as in ``phases``."""
        return max(phase.reduce for phase in self.phases(accumulates=accumulates))

    def peak_bytes(
        self,
        optimizer_bytes: int = 0,
        activations: Mapping[tuple[str, int], int] | None = None,
        keeps_gradients: bool = False,
        accumulates: bool = False,
    ) -> int:
        """Return the largest sum of all tensors in an optimizer step.

        That is the maximum over phases of what lives then, not the sum of maxima.

        Args:
            optimizer_bytes: state the optimizer keeps.
            activations: largest bytes of activations in each phase, by its pass and place; those
                of the phase ``("step", 0)`` are what the optimizer step takes.
            keeps_gradients: see ``phases``.
            accumulates: see ``phases``.
        """
        more = activations or {}
        rest = self.shards_bytes + optimizer_bytes
        return max(
            rest + phase.held + more.get((phase.direction, phase.place), 0)
            for phase in self.phases(keeps_gradients, accumulates)
        )

    def phases(self, keeps_gradients: bool = False, accumulates: bool = False) -> list[Phase]:
        """Return what lives beside shards and optimizer state, phase by phase.

        Args:
            keeps_gradients: those of the last step live until backward begins, as under the
                Trainer, which clears them between forward and backward.
            accumulates: of a micro-batch that is not the first of its step, where the gradients of
                those before it live from beginning to end (reduced after every micro-batch).
        """
        old = self.gradients_bytes if keeps_gradients or accumulates else 0
        root, sizes = self._unsharded(0), [self._unsharded(unit) for unit in self._units]
        last, k = len(sizes), self.num_prefetch
        forward = [Phase("forward", 0, root + sum(sizes[:k]), 0, old)]
        for at in range(last):
            low = at if self._reshards else 0
            forward.append(Phase("forward", at + 1, root + sum(sizes[low : at + 1 + k]), 0, old))
        kept = sum(sizes[-1:]) if self._reshards else sum(sizes)
        forward.append(Phase("forward", last + 1, root + kept, 0, old))
        step = Phase("step", 0, 0, 0, self.gradients_bytes)
        phases = [*forward, *self._backward(accumulates), step]
        return [phase._replace(pool=self._idle(phase)) for phase in phases]

    def _idle(self, phase: Phase) -> int:
        """Bytes of the pool that nothing is in."""
        root = min(self._unsharded(0), phase.unsharded)
        gathered = phase.unsharded if self._reshards else root
        return max(0, self.pool_bytes - gathered - (phase.reduce - phase.received))

    def _backward(self, accumulates: bool) -> Iterator[Phase]:
        """From the root's last operations through the units to its first."""
        root, sizes = self._unsharded(0), [self._unsharded(unit) for unit in self._units]
        last, k = len(sizes), self.num_prefetch
        ahead = sizes[max(0, last - 1 - k) :] if self._reshards else sizes
        root_reduce, travelling, received = self._reduce(0), 0, 0
        published = self.gradients_bytes if accumulates else 0
        yield Phase("backward", last + 1, root + sum(ahead), 0, published)
        yield Phase("collect", last + 1, root + sum(ahead), root_reduce, published)
        for at, unit in reversed(list(enumerate(self._units))):
            low = max(0, at - k) if self._reshards else 0
            unsharded = root + sum(sizes[low : at + 1])
            others, own = root_reduce + travelling, self._reduce(unit)
            yield Phase("backward", at + 1, unsharded, others, published, received)
            yield Phase("collect", at + 1, unsharded, others + own, published, received)
            published += 0 if accumulates else self._gradients(unit)
            received = self._received(unit, accumulates)
            own += received
            if not k:  # without overlap it is over before the next unit computes
                kept = unsharded - sizes[at]
                yield Phase("reduce", at + 1, kept, others + own, published, received)
            travelling, received = (own, received) if k else (0, 0)
        yield Phase("backward", 0, root, root_reduce + travelling, published, received)
        received = self._received(0, accumulates)
        yield Phase("reduce", 0, 0, root_reduce + received, self.gradients_bytes, received)

    @property
    def _units(self) -> list[int]:
        return sorted({flat.unit for flat in self.flats} - {0})

    def _of(self, unit: int) -> list[FlatSize]:
        return [flat for flat in self.flats if flat.unit == unit]

    def _unsharded(self, unit: int) -> int:
        return sum(self._gathered(flat) for flat in self._of(unit) if self._has_buffer(flat))

    def _has_buffer(self, flat: FlatSize) -> bool:
        """Whether forward sees a buffer, not the shard itself."""
        return self.num_shards > 1 or flat.compute_bytes != flat.master_bytes

    def _reduce(self, unit: int) -> int:
        return sum(f.padded_numel * f.reduce_bytes for f in self._of(unit) if f.is_trainable)

    def _received(self, unit: int, accumulates: bool) -> int:
        """What reducing a unit holds beside its buffer."""
        return sum(self._scratch(f, accumulates) for f in self._of(unit) if f.is_trainable)

    def _scratch(self, flat: FlatSize, accumulates: bool) -> int:
        buffer = flat.padded_numel * flat.reduce_bytes
        shards, replicas = self.num_shards, self.num_replicas
        if self.transport == "native":  # the sum arrives apart to be converted, or to be added
            is_direct = flat.reduce_bytes == flat.master_bytes and not accumulates
            is_hybrid = shards > 1 and replicas > 1  # the shard group's sum is always apart
            if is_hybrid:
                return buffer // shards
            return 0 if is_direct else buffer // max(shards, replicas)
        if shards == 1:
            return _sent(buffer, replicas)
        arriving = 0 if self.transport == "shared_memory" else _sent(buffer, shards)
        return arriving + (buffer // shards if replicas > 1 else 0)

    def _gradients(self, unit: int) -> int:
        return sum(self._gradient(flat) for flat in self._of(unit))

    def _gradient(self, flat: FlatSize) -> int:
        return self._shard_numel(flat) * flat.master_bytes * flat.is_trainable

    def _gathered(self, flat: FlatSize) -> int:
        return flat.padded_numel * flat.compute_bytes

    def _reserved(self, flat: FlatSize) -> int:
        return flat.padded_numel * flat.reduce_bytes * flat.is_reserved

    def _shard_numel(self, flat: FlatSize) -> int:
        return flat.padded_numel // self.num_shards


def _sent(num_bytes: int, num_ranks: int) -> int:
    """Bytes of all parts but one of a tensor that is cut over ``num_ranks``."""
    return num_bytes // num_ranks * (num_ranks - 1)
