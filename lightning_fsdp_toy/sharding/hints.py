"""Explains errors that come from using weights where they are sharded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["explain_sharded_use"]

_SHAPE_ERROR = re.compile(r"shape|size|dim|matrix|1-?D|2-?D", re.IGNORECASE)


def explain_sharded_use(root: RootState, error: Exception) -> None:
    """Add to a shape error which method used sharded weights and what to do about it.

    A weight that is used outside its unit's forward is this rank's 1D piece, so torch complains
    about shapes. Call this while the failed step's state is still there. Other errors, and those
    raised where everything was unsharded, stay as they are.
    """
    if not _SHAPE_ERROR.search(str(error)) or not isinstance(error, RuntimeError | IndexError):
        return
    if "unsharded(module)" in str(error):  # explained already
        return
    sharded = [unit.fqn for unit in root.units if not unit.is_shown]
    if not sharded:
        return
    names = ", ".join(f"`{fqn}`" for fqn in sharded[:4])
    text = (
        f"If weights of {names} were used directly: they are sharded outside their unit's forward. "
        f"Use them inside `with strategy.unsharded(module):`."
    )
    traceback = error.__traceback__
    while traceback is not None:
        method, module = traceback.tb_frame.f_code.co_name, traceback.tb_frame.f_locals.get("self")
        unit = root.unit_of(module) if isinstance(module, nn.Module) else None
        # Of the user's: torch's own frames around `forward` have a `self` too.
        is_method = hasattr(type(module), method) and not hasattr(nn.Module, method)
        is_method = is_method and not method.endswith("_step")
        if unit is not None and is_method and not unit.is_shown:
            text = (
                f"`{type(module).__name__}.{method}` uses weights of unit `{unit.fqn}`, which "
                f"are sharded outside forward. Call `strategy.register_forward_method(module, "
                f"{method!r})` once if it reads them, or use `with strategy.unsharded(module):` "
                f"(also to edit them)."
            )
        traceback = traceback.tb_next
    error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])
