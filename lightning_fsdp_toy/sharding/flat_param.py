"""Parameters of a unit as one tensor: shard, unshard, views, reshard.

Note: who holds memory when
    ::

        SHARDED      shard  [####]              buffer [ no memory ]
        GATHERING    shard  [####]              buffer [####????????]   messages under way
        UNSHARDED    shard  [####]              buffer [################]

    The shard is the master copy and lives as long as the model. The buffer (``buffers.py``) has
    memory between an unshard and a reshard.

    Modules see one of two sets of ``nn.Parameter``, swapped in ``module._parameters``:

    * sharded parameters: for each original parameter the 1D piece of it in this rank's shard,
      possibly empty. These exist for the optimizer, which must be built after sharding.
    * unsharded parameters: views into the buffer with the original shape and stride. These are what
      forward and backward use; autograd leaves, so gradients arrive at them one by one.

Note: two precisions
    With mixed precision forward sees the *compute* buffer, gathered in the low dtype, and
    ``unsharded`` blocks see the *master* buffer, gathered in the parameters' own. Without, the two
    are one.

Note: one dtype, one fate
    All parameters of a flat parameter have one dtype and were all trainable or all frozen when the
    model was sharded: a unit has several flat parameters where its parameters differ. So weights of
    integers can be sharded beside floating-point ones, and frozen weights (the base of a LoRA
    adapter) never get a gradient buffer.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding.buffers import GatheredBuffer, num_bytes
from lightning_fsdp_toy.sharding.faces import OriginalParameter
from lightning_fsdp_toy.sharding.gradients import FlatGradient
from lightning_fsdp_toy.sharding.layout import UnitLayout
from lightning_fsdp_toy.sharding.memory import MemoryCounter
from lightning_fsdp_toy.sharding.mesh import RankMesh
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy

__all__ = ["FlatParameter", "ParamState", "are_all"]


class ParamState(enum.Enum):
    """Which tensors of a flat parameter hold memory."""

    SHARDED = "only the shard"
    GATHERING = "the shard and the buffer, which other ranks' shards are on their way to"
    UNSHARDED = "the shard and the buffer"


class FlatParameter:
    """Parameters of one unit as one tensor, cut over the shard group of ``mesh``.

    Building one is a collective: rank 0's values are broadcast.

    Args:
        params: for each original parameter its name, tensor and homes. Afterwards the modules hold
            the sharded parameters.
        name: for messages and the ledger: the unit's, and what sets this one apart.
        mesh: moves and counts; owns the memory of buffers.
        device: where buffers live.
        memory: where bytes are counted.
        precision: dtypes of gathered weights and reductions.
        is_offloaded: the shard lives in CPU memory (pinned), whatever ``device`` is.
    """

    def __init__(
        self,
        params: list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]],
        name: str,
        mesh: RankMesh,
        device: torch.device,
        memory: MemoryCounter,
        precision: MixedPrecisionPolicy,
        is_offloaded: bool = False,
    ) -> None:
        self.name = name
        self.mesh = mesh
        self.memory = memory
        num_shards, self.shard_rank = mesh.shards.world_size, mesh.shards.rank
        replicas = 1 if mesh.replicas is None else mesh.replicas.world_size
        described = [(fqn, tuple(p.shape), _dense_stride(p)) for fqn, p, _ in params]
        self.layout = UnitLayout(described, num_shards, pad_to=num_shards * replicas)
        self.dtype = params[0][1].dtype
        self.is_floating = self.dtype.is_floating_point
        self.compute_dtype = (
            (precision.param_dtype or self.dtype) if self.is_floating else (self.dtype)
        )
        self.state = ParamState.UNSHARDED
        self.is_hidden = False  # unsharded, but the modules show sharded parameters
        self._has_master = False  # an `unsharded` block holds the master buffer
        self._shows_master = False  # and the modules show it
        self._offsets = [slot.offset for slot in self.layout.slots]
        self.originals = [
            OriginalParameter(slot, self.layout.piece(slot, self.shard_rank), homes)
            for slot, (_, _, homes) in zip(self.layout.slots, params, strict=True)
        ]
        whole = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=device)
        for original, (_, param, _) in zip(self.originals, params, strict=True):
            original.view_of(whole).copy_(param.detach())
        mesh.world.broadcast_(whole, name)
        self._make_buffers(whole, device, is_offloaded)
        for original, (_, param, _) in zip(self.originals, params, strict=True):
            self._make_faces(original, param)
        reduce_dtype = (precision.reduce_dtype or self.dtype) if self.is_floating else self.dtype
        self.gradient = FlatGradient(
            *(self.originals, self.layout, self.shard, reduce_dtype, device, mesh, memory, name)
        )
        self.master.release()
        self.reshard()

    def _make_buffers(self, whole: Tensor, device: torch.device, is_offloaded: bool) -> None:
        """Cut the shard out of ``whole``; make the master and the compute buffer."""
        shards = self.mesh.shards
        own = whole.chunk(shards.world_size)[shards.rank]
        is_on_device = not is_offloaded or device.type == "cpu"
        self.is_whole = shards.world_size == 1 and is_on_device  # the shard is the master buffer
        self.shard = own if self.is_whole else own.clone()  # 1D, padded_numel / num_shards
        if not is_on_device:
            self.shard = own.cpu().pin_memory()
        self.memory.add("shards", num_bytes(self.shard))
        args = (shards, self.memory, self.name)
        self.master = GatheredBuffer(whole, *args, is_permanent=self.is_whole)
        self.compute = self.master
        self.is_mixed = self.compute_dtype != self.dtype  # forward sees another than the shards
        if self.is_mixed:
            low = whole.new_empty(whole.shape, dtype=self.compute_dtype)
            self.compute = GatheredBuffer(low, *args, is_permanent=False)
        self.master.on_replaced = self.compute.on_replaced = self._follow

    def _follow(self, old: Tensor, new: Tensor) -> None:
        """Let the faces that are views of ``old`` be views of ``new``."""
        for original in self.originals:
            face = original.unsharded
            if face.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
                face.data = original.view_of(new)

    # -- weights --------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether forward and backward may use the weights now."""
        return self.state is ParamState.UNSHARDED

    @property
    def is_readable(self) -> bool:
        """Whether the master buffer holds the whole weights now."""
        is_gathered = self.is_master_shown if self.is_mixed else self.is_unsharded
        return self.is_whole or is_gathered

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(original.sharded.requires_grad for original in self.originals)

    @torch.no_grad()
    def start_unshard(self) -> None:
        """Begin to gather the compute buffer; the modules see sharded parameters as before."""
        assert self.state is ParamState.SHARDED, f"unshard of unsharded `{self.name}`"
        for original in self.originals:  # all, before anything has changed
            original.check_sharded(self.shard, is_shown=not self.is_master_shown)
        self._versions = self._shard_versions()
        if self.compute.is_permanent:
            pass
        elif self.is_master_shown and not self.master.is_permanent:
            self.compute.allocate()  # inside an `unsharded` block, whose edits count
            self.compute.tensor.copy_(self.master.tensor)
        else:
            self.compute.start_gather(self.shard)
        self.state = ParamState.GATHERING

    def finish_unshard(self) -> None:
        """Wait for the gather and show the modules unsharded parameters."""
        assert self.state is ParamState.GATHERING, f"no gather of `{self.name}` is under way"
        self.compute.wait()
        if self._versions != self._shard_versions():
            raise RuntimeError(
                f"weights of `{self.name}` were changed while they were being gathered: an "
                f"optimizer stepped inside a forward. Step between forwards."
            )
        self.state = ParamState.UNSHARDED
        if not self.is_master_shown:  # else a forward call shows it, and it alone
            self.show_compute()

    def reshard(self) -> None:
        """Free the compute buffer and show the modules sharded parameters."""
        assert self.state is not ParamState.SHARDED, f"reshard of sharded `{self.name}`"
        if not self.is_mixed or not self.is_master_shown:
            for original in self.originals:
                original.show_sharded()
        self.compute.release()
        self.state = ParamState.SHARDED
        self.is_hidden = False

    def hide(self) -> None:
        """Show the modules sharded parameters, though the weights stay for backward."""
        assert self.state is ParamState.UNSHARDED, f"hide of sharded `{self.name}`"
        for original in self.originals:
            original.show_sharded()
        self.is_hidden = True

    def note_edited(self, originals: list[OriginalParameter]) -> None:
        """These were edited on purpose, in the shard."""
        for original in originals:
            torch.autograd.graph.increment_version(original.sharded)
        self._versions = self._shard_versions()

    def _shard_versions(self) -> list[int]:
        return [original.sharded._version for original in self.originals if original.piece.numel]

    # -- the master buffer, for `unsharded` blocks ----------------------------------------------

    @property
    def is_master_shown(self) -> bool:
        """Whether an ``unsharded`` block holds the weights in their own dtype."""
        return self.is_mixed and self._has_master

    @property
    def shows_master(self) -> bool:
        """Whether modules see them now: a forward call inside the block sees the compute dtype."""
        return self.is_master_shown and self._shows_master

    @torch.no_grad()
    def gather_master(self) -> None:
        """Gather the weights in their own dtype (mixed precision only) and show them."""
        assert self.is_mixed, f"`{self.name}` has one precision"
        if not self._has_master:
            self.master.start_gather(self.shard)
            self.master.wait()
            self._has_master = True
        self.show_master()

    def release_master(self, keeps_memory: bool = False) -> None:
        """Free the weights in their own dtype, or leave that to the unit's reshard."""
        self._has_master = False
        if not keeps_memory:
            self.master.release()
        if self.is_unsharded:
            self.show_compute()
        else:
            for original in self.originals:
                original.show_sharded()

    def show_master(self) -> None:
        """Let the modules see weights in their own dtype."""
        self._shows_master = True
        for original in self.originals:
            original.unsharded.data = original.view_of(self.master.tensor)
            original.show_unsharded()

    def show_compute(self) -> None:
        """Let the modules see weights in the compute dtype."""
        self._shows_master = False
        self.is_hidden = False
        for original in self.originals:
            if self.is_mixed:
                original.unsharded.data = original.view_of(self.compute.tensor)
            original.show_unsharded()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Bring edits of the master buffer to the compute buffer."""
        if self._has_master and self.is_unsharded:
            self.compute.tensor.copy_(self.master.tensor)

    def note_held(self) -> None:
        """An ``unsharded`` block holds it: from now on the buffer has what the shard has."""
        self._held_versions = self._shard_versions()

    @property
    def is_stepped(self) -> bool:
        """Whether the shard was changed (a step, a load) since a block holds the buffer."""
        return not self.is_whole and self._held_versions != self._shard_versions()

    @property
    def own_part(self) -> Tensor:
        """This rank's part of the master buffer, 1D."""
        low, high = self.layout.shard_bounds(self.shard_rank)
        return self.master.tensor[low:high]

    @property
    def is_edited(self) -> bool:
        """Whether this rank's part of the unsharded data is no longer what the shard holds."""
        own = self.own_part.to(self.shard.device)  # compared as bytes: NaN is equal to itself
        return not torch.equal(self.shard.view(torch.uint8), own.view(torch.uint8))

    @torch.no_grad()
    def write_back(self, is_edited: bool) -> None:
        """Copy this rank's part of the (edited) unsharded data into the shard."""
        assert self.master.has_memory, f"write-back of sharded `{self.name}`"
        if is_edited and not self.is_whole:
            self.shard.copy_(self.own_part)
            for original in self.originals:
                torch.autograd.graph.increment_version(original.sharded)
            self.note_held()

    @torch.no_grad()
    def take_in(self) -> None:
        """Bring values put into the faces another way (`p.data = x`) to the buffer."""
        for original in self.originals:
            original.remember_version()
            original.take_in(original.view_of(self.master.tensor))

    # -- originals ------------------------------------------------------------------------------

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

    def _make_faces(self, original: OriginalParameter, param: nn.Parameter) -> None:
        """Make the sharded and the unsharded face; attributes and hooks of the user move there."""
        piece = original.piece_of(self.shard)
        original.is_whole = self.is_whole and not self.is_mixed
        # Made empty, for a version counter of its own: the step of another parameter of the unit
        # does not change this one, nor does an all-gather into the buffer.
        original.sharded = nn.Parameter(piece.new_empty(0), param.requires_grad)
        original.sharded.data = piece
        if original.is_whole:  # one memory, one version
            same = original.sharded.detach().as_strided(original.slot.shape, original.slot.stride)
            original.unsharded = nn.Parameter(same, param.requires_grad)
        else:
            empty = self.compute.tensor.new_empty(0)
            original.unsharded = nn.Parameter(empty, param.requires_grad)
            original.unsharded.data = original.view_of(self.compute.tensor)
        original.take_over(param)


def are_all(flats: Iterable[FlatParameter], state: ParamState) -> bool:
    """Whether all are in one state; a loop, because it is asked so often that `all` shows."""
    for flat in flats:
        if flat.state is not state:
            return False
    return True


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's stride if it is dense and non-overlapping, else the row-major one."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
