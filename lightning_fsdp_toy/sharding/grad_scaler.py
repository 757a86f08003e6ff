"""Loss scaling for fp16 where all ranks decide alike.

Note: why a scaler of its own
    A rank sees the gradients of its shards only. If each looked for infinities by itself, one rank
    would skip a step and halve its scale while the others went on (pytorch/pytorch#115710), and a
    rank whose shards are all empty would find nothing to look at. ``unscale_`` here takes the
    maximum over ranks of "found an infinity", 4 bytes, and everything after it (``step``,
    ``update``) is torch's own, working from that one answer.

    Optimizers that unscale inside their kernel (fused ones) would do so after the gradients were
    clipped. ``step`` therefore unscales first, as for every other optimizer; torch then gives the
    kernel no scale, only the common answer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients: all ranks skip a step, or none.

    Used like torch's own, on every rank in the same order. ``unscale_``, and ``step`` where it was
    not called before, are collectives of 4 bytes.

    Args:
        device: ``"cuda"`` or ``"cpu"``, where the loss is.
        init_scale: first scale.
        growth_factor: by which the scale is multiplied after ``growth_interval`` good steps.
        backoff_factor: by which it is multiplied after a step with infinities or NaN.
        growth_interval: number of good steps in a row until the scale grows.
        enabled: False: does nothing, the optimizer steps as without a scaler.
        process_group: the ranks that decide together: all that train the model. The default group
            at the time of the step if None; without one, this rank alone.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> ShardedGradScaler:
        """Return one with the settings and the current scale of another scaler."""
        if isinstance(scaler, cls):
            return scaler
        if not scaler.is_enabled():
            return cls(scaler._device, enabled=False)
        made = cls(
            scaler._device,
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        made.load_state_dict(scaler.state_dict())  # the scale, and how many steps were good
        return made

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``unscale_`` was called for ``optimizer`` since its last step."""
        return self._stage(optimizer) is OptState.UNSCALED

    def is_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``step`` was called for ``optimizer`` since the last ``update``."""
        return self._stage(optimizer) is OptState.STEPPED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that was done, then step unless some rank found an infinity."""
        if self._stage(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        if self.is_enabled() and self._is_offloaded(optimizer):
            # So that torch reads its answer before it steps, whatever the optimizer could do itself
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return super().step(optimizer, *args, **kwargs)

    def _is_offloaded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients are on the CPU while the loss and its scale are on a device."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return self._device != "cpu" and any(param.device.type == "cpu" for param in params)

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState | None:
        if not self.is_enabled():
            return None
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients; return for them what any rank found."""
        if self._is_offloaded(optimizer):
            # torch would copy both without waiting for the copies.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        any_found = found_inf.clone()  # zero
        for flag in flags.values():
            any_found = torch.maximum(any_found, flag.to(any_found.device))
        # A fresh entry even where this rank had no gradient: torch asks for at least one.
        return {any_found.device: self._agree(any_found)}

    def _agree(self, found: torch.Tensor) -> torch.Tensor:
        """Return the maximum of ``found`` over all ranks."""
        if not dist.is_available() or not dist.is_initialized():
            return found
        device = found.device
        if device.type == "cpu" and dist.get_backend(self.process_group) == dist.Backend.NCCL:
            found = found.cuda()  # NCCL moves no CPU memory
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.process_group)
        return found.to(device)
