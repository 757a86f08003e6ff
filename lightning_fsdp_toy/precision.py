"""Lightning's precision plugins, made for sharded weights and gradients.

Note: what each precision is
    ================================  =======  =========  ========  =======  ===============
    precision                         shards   gathered,  reduced,  moments  checkpoint file
                                               forward    gradient
    ================================  =======  =========  ========  =======  ===============
    ``32-true``                       fp32     fp32       fp32      fp32     fp32
    ``bf16-mixed``, ``16-mixed``      fp32     low        fp32      fp32     fp32
    ``bf16-true``, ``16-true``        low      low        low       low      low
    ``64-true``                       fp64     fp64       fp64      fp64     fp64
    ================================  =======  =========  ========  =======  ===============

    Under the mixed ones forward runs under autocast; buffers (running statistics) stay fp32. Under
    the others the whole model is converted, buffers too: no better copy of a weight exists.
    ``conversion`` does both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_fsdp_toy.conversion import convert
from lightning_fsdp_toy.sharding.fp32_vectors import give_fp32_vectors, take_back_fp32_vectors
from lightning_fsdp_toy.sharding.grad_scaler import ShardedGradScaler
from lightning_fsdp_toy.sharding.optim import clip_grad_norm_
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding import RootState

__all__ = [
    "ToyFSDPDoublePrecision",
    "ToyFSDPHalfPrecision",
    "ToyFSDPMixedPrecision",
    "ToyFSDPPrecision",
    "to_toy_precision",
]

logger = logging.getLogger(__name__)


class _ShardedPrecision(Precision):
    """Clips by the norm over all ranks and logs it; Lightning would take each rank's own norm.

    ``train/grad_norm``, the norm before clipping, is logged at every optimizer step whose gradients
    were clipped by norm; no collective of its own. With several optimizers each has its own
    ``train/grad_norm_<index>``, counted as in ``configure_optimizers``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._root: RootState | None = None
        self._norms: dict[int, Tensor] = {}  # by id of the optimizer: clipped, but not stepped yet

    @property
    def root(self) -> RootState:
        """The sharded model; set by the strategy when there is one."""
        assert self._root is not None, "clipping before the strategy was set up"
        return self._root

    @root.setter
    def root(self, root: RootState) -> None:
        self._check_root(root)
        self._root = root

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy | None:
        """What the sharding core must do for this precision; None: nothing."""
        return None

    @override
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Past `MixedPrecision`, which refuses fused optimizers: here gradients are unscaled first.
        Precision.clip_gradients(self, _unwrap(optimizer), *args, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: int | float) -> None:
        norm = clip_grad_norm_(self.root, self.main_params(optimizer), float(clip_val))
        self._norms[id(optimizer)] = norm

    def _check_root(self, root: RootState) -> None:
        """Raise if this precision cannot train that model."""

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        norm = self._norms.pop(id(_unwrap(optimizer)), None)
        if norm is not None:
            _log_grad_norm(model, _unwrap(optimizer), norm)


class ToyFSDPPrecision(_ShardedPrecision):
    """32-true."""


class ToyFSDPHalfPrecision(_ShardedPrecision, HalfPrecision):
    """bf16-true and 16-true: everything is low precision, shards and optimizer state too."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return convert(module, self._desired_input_dtype)


class ToyFSDPDoublePrecision(_ShardedPrecision, DoublePrecision):
    """64-true."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return convert(module, torch.float64)


class ToyFSDPMixedPrecision(_ShardedPrecision, MixedPrecision):
    """bf16-mixed and 16-mixed: fp32 shards and optimizer state, low precision on the way.

    Under 16-mixed the loss is scaled, and gradients are unscaled before they are clipped, whatever
    the optimizer; all ranks skip a step together. A manual loop may clip and step several
    optimizers: the scale changes once, before the next backward.
    """

    scaler: ShardedGradScaler | None
    _is_update_due = False  # a manual step was made since the scale was last updated

    @override
    def _check_root(self, root: RootState) -> None:
        """Refuse to train where autocast would do nothing."""
        if root.device.type != self.device:
            raise ValueError(
                f"`ToyFSDPStrategy`: the precision plugin autocasts on {self.device!r}, but ranks "
                f"run on {root.device.type!r}. Use Trainer(precision={self.precision!r}) without "
                f"a plugin, or give the plugin device={root.device.type!r}."
            )

    @property
    @override
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        give_fp32_vectors(module)
        return super().convert_module(module)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        self._update_if_due()
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: torch.optim.Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self.scaler is None or isinstance(optimizer, torch.optim.LBFGS):  # which is refused
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # `training_step` skipped this batch
            self._after_closure(model, optimizer)
            return result
        self._unscale_if_needed(optimizer)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self._is_update_due = True
        if model.automatic_optimization:
            self._update_if_due()
        return output

    @override
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._unscale_if_needed(_unwrap(optimizer))
        super().clip_gradients(optimizer, *args, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._update_if_due()
        return super().state_dict()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the scaler also under the name by which other strategies look for it."""
        state = self.state_dict()
        if state:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the scaler that another strategy saved."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint.get(MixedPrecision.__qualname__) or {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # empty: saved by a run without a scaler
            super().load_state_dict(state_dict)

    @override
    def teardown(self) -> None:
        """Give modules their own ``forward`` back."""
        if self._root is not None:
            take_back_fp32_vectors(self._root.module)
        super().teardown()

    def _unscale_if_needed(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None or not self.scaler.is_enabled():
            return
        if self.scaler.is_stepped(optimizer):
            self._update_if_due()
        if not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)

    def _update_if_due(self) -> None:
        if self._is_update_due:
            self._is_update_due = False
            assert self.scaler is not None
            self.scaler.update()


def to_toy_precision(plugin: Precision) -> Precision:
    """Return the plugin that does under this strategy what ``plugin`` does elsewhere.

    A plugin of this module is returned as it is. Loss scalers become ``ShardedGradScaler`` with the
    same settings. Note that Lightning's Trainer itself turns ``precision="16-mixed"`` into
    ``"bf16-mixed"`` on CPU, with a warning, before a strategy sees it.

    Raises:
        ValueError: the strategy does not support its precision, or not on its device.
    """
    if isinstance(plugin, _ShardedPrecision):
        return plugin
    kind, precision = type(plugin), str(plugin.precision)
    if kind in (MixedPrecision, FSDPPrecision) and precision.endswith("-mixed"):
        # Lightning's FSDP plugin has no device: it always autocasts on CUDA.
        device, scaler = getattr(plugin, "device", "cuda"), getattr(plugin, "scaler", None)
        if precision == "16-mixed" and device == "cpu":
            raise ValueError(
                "`ToyFSDPStrategy` does not support `precision='16-mixed'` on CPU: "
                "use precision='bf16-mixed' or '32-true' there."
            )
        scaler = None if scaler is None else ShardedGradScaler.like(scaler)
        return ToyFSDPMixedPrecision(precision, device, scaler)
    if kind in (HalfPrecision, FSDPPrecision) and precision in ("bf16-true", "16-true"):
        return ToyFSDPHalfPrecision(precision)
    if kind is DoublePrecision:
        return ToyFSDPDoublePrecision()
    if kind in (Precision, FSDPPrecision) and precision == "32-true":
        return ToyFSDPPrecision()
    raise ValueError(
        f"`ToyFSDPStrategy` does not support the precision plugin `{kind.__name__}`. Use one of "
        f"precision='32-true', 'bf16-mixed', '16-mixed' (on GPUs), 'bf16-true', '16-true' or "
        f"'64-true' without a plugin."
    )


def _unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside what ``self.optimizers()`` gives."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _log_grad_norm(module: LightningModule, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    trainer = module.trainer
    if trainer.barebones:
        return
    name = "train/grad_norm"
    if len(trainer.optimizers) > 1:
        name += f"_{[id(each) for each in trainer.optimizers].index(id(optimizer))}"
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # Lightning keeps metrics in it: low under bf16-true
    try:
        module.log(name, norm, on_step=True, on_epoch=False, batch_size=1)
    except MisconfigurationException as error:
        # A manual step in a hook that cannot log; or the user logs this name in another way.
        logger.debug("`%s` is not logged: %s", name, error)
    finally:
        torch.set_default_dtype(dtype)
