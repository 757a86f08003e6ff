"""The steps of a LightningModule, its backward and its optimizer step, around a sharded root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.sharding.hints import explain_sharded_use
from lightning_fsdp_toy.sharding.policy import MixedPrecisionPolicy

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding import RootState

__all__ = ["ShardedSteps"]

_BACKWARD_ARGUMENTS = ("gradient", "retain_graph", "create_graph", "inputs")  # of torch


class ShardedSteps(ParallelStrategy):
    """The members of a strategy that run a step.

    A step is the forward of the root, so a ``MixedPrecisionPolicy`` acts on it as torch's FSDP acts
    on the forward of its root: with ``cast_forward_inputs`` the floating-point tensors of the batch
    come in ``param_dtype`` (targets too), and what the step returns leaves in ``output_dtype``: the
    loss before backward, predictions before callbacks see them. Where the policy comes from a mixed
    precision flag nothing is cast: autocast does it operation by operation.
    """

    root: RootState
    mixed_precision: MixedPrecisionPolicy | None = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast_inputs(args, kwargs)
        with self._whole_root():
            return self._cast_outputs(super().training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast_inputs(args, kwargs)
        with self._whole_root():
            return self._cast_outputs(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast_inputs(args, kwargs)
        with self._whole_root():
            return self._cast_outputs(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast_inputs(args, kwargs)
        with self._whole_root():
            return self._cast_outputs(super().predict_step(*args, **kwargs))

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy | None:
        """The policy in force: the strategy's argument, else what the precision asks for."""
        plugin = getattr(self.precision_plugin, "mixed_precision_policy", None)
        return self.mixed_precision or plugin

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.mixed_precision_policy
        if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)

    def _cast_outputs(self, outputs: Any) -> Any:
        policy = self.mixed_precision_policy
        if policy is None or policy.output_dtype is None:
            return outputs
        return _cast(outputs, policy.output_dtype)

    @contextmanager
    def _whole_root(self) -> Iterator[None]:
        """A step of the LightningModule counts as a forward call of the root unit."""
        with self.root.forward_scope(self.root.root_unit, is_step=True):
            try:
                yield
            except Exception as error:
                explain_sharded_use(self.root, error)
                raise

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Explain what a hook did with sharded weights; Lightning raises the error afterwards."""
        module = self.lightning_module
        is_sharded = module is not None and "_fsdp_root" in module.__dict__
        if is_sharded and isinstance(exception, Exception):
            explain_sharded_use(self.root, exception)
        super().on_exception(exception)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.root.show_gathered()  # recomputation may come first and read weights directly
        if len(args) > len(_BACKWARD_ARGUMENTS):  # the optimizer, and `inputs` by its place
            kwargs |= dict(zip(_BACKWARD_ARGUMENTS, args[1:], strict=False))
            args = args[:1]
        if kwargs.get("inputs") is not None:  # of autograd: those that forward used
            faces = {id(o.sharded): o.unsharded for o in self.root.originals()}
            inputs = kwargs["inputs"]
            inputs = [inputs] if isinstance(inputs, Tensor) else inputs
            kwargs["inputs"] = [faces.get(id(tensor), tensor) for tensor in inputs]
        return super().backward(closure_loss, *args, **kwargs)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Return ``data`` with its floating-point tensors, in any collection, in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, Tensor, cast)
