"""The steps of a LightningModule, its backward and its optimizer step, around a sharded root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_fsdp_toy.sharding.hints import explain_sharded_use

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding import RootState

__all__ = ["ShardedSteps"]


class ShardedSteps(ParallelStrategy):
    """The members of a strategy that run a step."""

    root: RootState

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_root():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_root():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_root():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_root():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _whole_root(self) -> Iterator[None]:
        """A step of the LightningModule counts as a forward call of the root unit."""
        with self.root.forward_scope(self.root.root_unit):
            try:
                yield
            except Exception as error:
                explain_sharded_use(self.root, error)
                raise

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        self.root.refresh_open_root()
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.root.refresh_open_root()
        return result
