"""``trainer.fit(torch.compile(module))``: compiled LightningModules under this strategy.

Lightning refuses a compiled module under every strategy that is not its own DDP or FSDP. It hands
the module to the strategy first, which takes the mark off that the refusal looks for; the compiled
methods stay. ``self.log`` stays out of compiled code, because torch 2.13 raises where it compiles
that. All is undone at teardown, so ``to_uncompiled`` finds what it looks for.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy

__all__ = ["CompiledModules"]


class CompiledModules(ParallelStrategy):
    """The members of a strategy that let it run a compiled LightningModule."""

    _module: pl.LightningModule | None = None
    _compiler_ctx: dict[str, Any] | None = None

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        self._end_compiled_run()
        self._module = module
        if module is not None and module._compiler_ctx is not None:
            self._compiler_ctx, module._compiler_ctx = module._compiler_ctx, None
            module.__dict__["log"] = torch.compiler.disable(module.log)

    def _end_compiled_run(self) -> None:
        if self._module is not None and self._compiler_ctx is not None:
            self._module._compiler_ctx, self._compiler_ctx = self._compiler_ctx, None
            del self._module.__dict__["log"]
