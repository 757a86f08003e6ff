"""From a module to its units: who owns which parameter, meta-device init, checks at setup."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from lightning_fsdp_toy.sharding.aliases import refuse_aliases
from lightning_fsdp_toy.sharding.collectives import Transport
from lightning_fsdp_toy.sharding.names import clean_name
from lightning_fsdp_toy.sharding.policy import WrapPolicy, select_units

__all__ = [
    "Member",
    "UnitPlan",
    "broadcast_buffers",
    "build_units",
    "cast_buffers",
    "nesting_of",
    "shared_buffers",
]


class Member(NamedTuple):
    """One original parameter of a unit: its name and every ``(module, name)`` that holds it."""

    fqn: str
    homes: list[tuple[nn.Module, str]]

    @property
    def param(self) -> nn.Parameter:
        """The parameter as its first home holds it now."""
        module, name = self.homes[0]
        param = module._parameters[name]
        assert param is not None, f"parameter `{self.fqn}` vanished during setup"
        return param

    @property
    def is_trainable(self) -> bool:
        """Whether the parameter requires a gradient."""
        return self.param.requires_grad


class UnitPlan(NamedTuple):
    """A unit before it is sharded."""

    fqn: str
    module: nn.Module
    members: list[Member]

    def take_members(
        self, device: torch.device, transport: Transport
    ) -> list[tuple[str, list[Member]]]:
        """Return the unit's parameters with memory, just before they are sharded.

        Returns:
            One list for each flat parameter (see the note on one dtype, one fate), with its name:
            the unit's, and what sets it apart from the first.
        """
        _materialize(self, device, transport.rank == 0)
        groups: dict[tuple[torch.dtype, bool], list[Member]] = {}
        for member in self.members:
            groups.setdefault((member.param.dtype, member.is_trainable), []).append(member)
        unit = self.fqn or "<root>"
        named: list[tuple[str, list[Member]]] = []
        for (dtype, is_trainable), members in groups.items():
            fate = str(dtype).removeprefix("torch.") + ("" if is_trainable else ", frozen")
            named.append((unit if not named else f"{unit} ({fate})", members))
        return named


def build_units(
    root: nn.Module, policy: WrapPolicy, device: torch.device, transport: Transport
) -> tuple[list[UnitPlan], dict[nn.Module, int]]:
    """Plan the units of ``root``, check that all ranks have the same, and place its buffers.

    Returns:
        Units in module order, the root first; and for every module the index of its unit.

    Raises:
        ValueError: see ``plan_units``; or ranks built different models.
    """
    plans, unit_of = plan_units(root, policy)
    _check_ranks_agree(plans, transport)
    _place_buffers(root, device)
    return plans, unit_of


def plan_units(root: nn.Module, policy: WrapPolicy) -> tuple[list[UnitPlan], dict[nn.Module, int]]:
    """Divide the parameters of ``root`` among its units.

    A parameter belongs to the nearest enclosing unit. One that is tied across units belongs to the
    root, so that there is still one of it and its gradient is summed over its uses.

    Returns:
        Units in module order, the root first; and for every module the index of its unit.

    Raises:
        ValueError: a parameter cannot be sharded (no shape yet, or not a plain dense tensor), a
            module cannot (see ``_check_modules``), or the policy names a class the model does not
            contain.
    """
    _check_modules(root)
    chosen = select_units(root, policy)
    plans = [UnitPlan("", root, []), *(UnitPlan(fqn, module, []) for fqn, module in chosen)]
    unit_of = _enclosing_units(root, {plan.module: index for index, plan in enumerate(plans)})
    members: dict[nn.Parameter, Member] = {}
    owners: dict[nn.Parameter, set[int]] = {}
    for prefix, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                fqn = clean_name(f"{prefix}.{name}" if prefix else name)
                members.setdefault(param, Member(fqn, [])).homes.append((module, name))
                owners.setdefault(param, set()).add(unit_of[module])
    for param, member in members.items():
        indices = owners[param]
        plans[indices.pop() if len(indices) == 1 else 0].members.append(member)
    for plan in plans:
        _check_shapes(plan)
    refuse_aliases([(m.fqn, m.param) for m in members.values()], root)
    return plans, unit_of


def _enclosing_units(root: nn.Module, index_of: dict[nn.Module, int]) -> dict[nn.Module, int]:
    """Return the unit of every module; one inside several units belongs to the root."""
    found: dict[nn.Module, set[int]] = {}

    def visit(module: nn.Module, index: int) -> None:
        index = index_of.get(module, index)
        if index not in found.setdefault(module, set()):
            found[module].add(index)
            for child in module.children():
                visit(child, index)

    visit(root, 0)
    return {module: min(units) if len(units) == 1 else 0 for module, units in found.items()}


def _check_modules(root: nn.Module) -> None:
    """Refuse modules whose own code would not work on sharded weights.

    Raises:
        ValueError: an embedding changes its weights inside forward, or TorchScript holds them.
    """
    for name, module in root.named_modules():
        which = f"Module `{clean_name(name) or '<root>'}` ({type(module).__name__})"
        has_parameters = next(module.parameters(), None) is not None
        if isinstance(module, torch.jit.ScriptModule) and has_parameters:
            raise ValueError(
                f"{which} is compiled by TorchScript, which keeps parameters to itself: they "
                f"cannot be sharded. Use the module it was made from (`torch.compile` works) or, "
                f"if it is not trained, keep it out of the model's submodules, in a tuple."
            )
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is not torch.strided:
                raise ValueError(
                    f"{which} has a buffer `{key}` of layout {buffer.layout}: only dense buffers "
                    f"can be kept equal on all ranks. Make it dense, or keep it in a plain "
                    f"attribute that every rank computes for itself."
                )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{which} has `max_norm={module.max_norm}`, which changes its weights in place "
                f"inside forward, on one rank only. Leave `max_norm` out, and bound the rows that "
                f"are used after the lookup or all weights after a step."
            )


def _check_shapes(plan: UnitPlan) -> None:
    for member in plan.members:
        if isinstance(member.param, UninitializedParameter):
            raise ValueError(
                f"Parameter `{member.fqn}` of a lazy module has no shape yet. Run one forward "
                f"before sharding."
            )
        if member.param.layout is not torch.strided or type(member.param.data) is not Tensor:
            raise ValueError(
                f"Parameter `{member.fqn}` is a {type(member.param.data).__name__} of layout "
                f"{member.param.layout}: only plain dense tensors can be sharded. Register it as a "
                f"buffer, or make it dense."
            )


def _materialize(plan: UnitPlan, device: torch.device, is_source: bool) -> None:
    """Give memory to what the unit holds on the meta device; rank 0 initialises it.

    Only this unit's parameters and the buffers beside them exist afterwards: a model that was built
    on the meta device never exists whole on a rank.

    Raises:
        ValueError: a module holds meta tensors but has no ``reset_parameters``.
    """
    homes = {home: None for member in plan.members for home, _ in member.homes}
    empty = [module for module in homes if _has_meta(module)]
    for module in empty:
        module.to_empty(device=device, recurse=False)
    for module in reversed(empty):  # children first: a parent may set values of theirs
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if reset is None:
            modules = plan.module.named_modules(prefix=plan.fqn)
            name = next(name for name, sub in modules if sub is module)
            raise ValueError(
                f"Module `{name or '<root>'}` ({type(module).__name__}) is on the meta device and "
                f"has no `reset_parameters()` to initialise it with. Add one."
            )
        if is_source:
            reset()
    for member in plan.members:  # a tied parameter must be one again
        for module, name in member.homes[1:]:
            module._parameters[name] = member.param


def _has_meta(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


@torch.no_grad()
def _place_buffers(root: nn.Module, device: torch.device) -> None:
    """Move buffers to ``device``; initialise those still on the meta device.

    Raises:
        ValueError: a module without parameters holds meta buffers it cannot initialise.
    """
    for name, module in root.named_modules():
        if any(b is not None and b.is_meta for b in module._buffers.values()):
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"Module `{name}` holds buffers on the meta device and has no "
                    f"`reset_parameters()` to initialise them with. Add one."
                )
            module.to_empty(device=device, recurse=False)
            reset()
        for key, buffer in module._buffers.items():
            if buffer is not None and (buffer.device != device or 0 in buffer.stride()):
                # An expanded buffer (stride 0) cannot be written, and rank 0's are broadcast.
                module._buffers[key] = buffer.to(device).contiguous()


def cast_buffers(
    root: nn.Module, dtype: torch.dtype | None
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Give floating-point buffers another dtype; return which had which before."""
    before = {}
    for module in root.modules():
        for key, buffer in module._buffers.items():
            is_float = buffer is not None and buffer.is_floating_point()
            if dtype is not None and buffer is not None and is_float and buffer.dtype != dtype:
                before[module, key] = buffer.dtype
                module._buffers[key] = buffer.to(dtype)
    return before


def nesting_of(root: nn.Module, units: list[nn.Module]) -> int:
    """Return how many units are inside each other at most."""
    chosen = {id(module) for module in units}

    def depth(module: nn.Module, seen: frozenset[int]) -> int:
        if id(module) in seen:
            return 0
        inner = [depth(child, seen | {id(module)}) for child in module.children()]
        return int(id(module) in chosen) + max(inner, default=0)

    return depth(root, frozenset())


def shared_buffers(root: nn.Module) -> list[Tensor]:
    """Return what ``broadcast_buffers`` is to overwrite between forwards, as modules hold it now.

    Statistics of batch norms come with versions of their own: a forward that waits for its backward
    has saved them, but batch norm itself changes them in the next without counting it as a change.
    """
    found: dict[int, Tensor] = {}
    for module in root.modules():
        for buffer in module._buffers.values():
            if buffer is not None:
                is_statistic = isinstance(module, _NormBase)
                found.setdefault(id(buffer), buffer.data if is_statistic else buffer)
    return list(found.values())


@torch.no_grad()
def broadcast_buffers(buffers: list[Tensor], transport: Transport) -> None:
    """Overwrite every rank's buffers with rank 0's, as one message of bytes."""
    if transport.world_size == 1 or not buffers:
        return
    parts = [_bytes_of(buffer) for buffer in buffers]
    message = torch.cat(parts)
    transport.broadcast_(message, "<buffers>")
    if transport.rank > 0:
        received = message.split([part.numel() for part in parts])
        for buffer, data in zip(buffers, received, strict=True):
            if not torch.equal(data, _bytes_of(buffer)):
                # Only then: a buffer may be saved for a backward that is still to come. A clone
                # starts at an aligned address, as the view to a wider dtype demands.
                buffer.copy_(data.clone().view(buffer.dtype).view(buffer.shape))


def _bytes_of(buffer: Tensor) -> Tensor:
    """Its elements in row-major order, as 1D bytes; of a lazy conjugate those it stands for."""
    whole = buffer.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _check_ranks_agree(plans: list[UnitPlan], transport: Transport) -> None:
    """Compare units, names, shapes, dtypes and frozenness with rank 0's; buffers too.

    Raises:
        ValueError: on every rank, where any rank's model differs; names the first difference.
    """
    if transport.world_size == 1:
        return
    mine = [
        (plan.fqn or "<root>", m.fqn, tuple(m.param.shape), str(m.param.dtype), m.is_trainable)
        for plan in plans
        for m in plan.members
    ]
    buffers = plans[0].module.named_buffers()
    mine += [("<buffers>", name, tuple(b.shape), str(b.dtype), False) for name, b in buffers]
    theirs = transport.gather_objects(mine, "<setup>")[0]
    differs = mine != theirs
    if not transport.any_rank([differs], "<setup>")[0]:
        return
    if not differs:
        raise ValueError("Another rank built a different model than rank 0; see its error.")
    pairs = zip([*mine, None], [*theirs, None], strict=False)
    own, reference = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"Rank {transport.rank} built a different model than rank 0: (unit, name, shape, dtype, "
        f"trainable) is {own} here and {reference} on rank 0. Every rank must build the same model."
    )
