"""Refuses a checkpoint that the run could not go on from, before a rank starts."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["check_checkpoint"]

_META = "meta.pt"  # of a sharded checkpoint: all that is not sharded
_NUM_NAMED = 3  # differences that a message names at most


def check_checkpoint(config: dict[str, Any], module: nn.Module) -> None:
    """Check that `ckpt_path` can be read, holds `module`'s weights and leaves steps to train.

    Reads no weights: files are mapped into memory, and `module` may be on the meta device.

    Raises:
        ValueError: Names `ckpt_path` and the remedy.
    """
    path = Path(config["ckpt_path"])
    if not path.exists():
        raise ValueError(f"`ckpt_path={path}` does not exist: check the path, or leave it out")
    is_sharded = path.is_dir()
    if is_sharded and not (path / _META).is_file():
        raise ValueError(
            f"`ckpt_path={path}` is a folder but no sharded checkpoint ({_META} is missing): name "
            "a checkpoint, such as checkpoints/last.ckpt of an earlier run"
        )
    checkpoint = _read(path, path / _META if is_sharded else path)
    needed = {"loops", "global_step"} | (set() if is_sharded else {"state_dict"})
    if not isinstance(checkpoint, dict) or not needed <= set(checkpoint):
        raise ValueError(
            f"`ckpt_path={path}` is no checkpoint of a Lightning run: name one, such as "
            "checkpoints/last.ckpt of an earlier run"
        )
    if not is_sharded:
        _check_weights(path, checkpoint["state_dict"], module.state_dict())
        if "optimizer_states" not in checkpoint:
            raise ValueError(
                f"`ckpt_path={path}` holds weights only and no optimizer state: go on from a "
                "checkpoint that was saved with `save_weights_only=false`"
            )
    step, max_steps = checkpoint["global_step"], config["trainer"].get("max_steps", -1)
    if 0 < max_steps <= step:
        raise ValueError(
            f"`ckpt_path={path}` is already at step {step} of `trainer.max_steps={max_steps}`: "
            f"raise it, for example `trainer.max_steps={2 * step}`"
        )


def _read(path: Path, file: Path) -> Any:
    """Read `file` as Lightning will, without its tensors' data."""
    reason = "it is cut off, or something else"
    if zipfile.is_zipfile(file):
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
    raise ValueError(f"`ckpt_path={path}` is no readable checkpoint: {reason}; name another one")


def _check_weights(path: Path, saved: Any, wanted: dict[str, Any]) -> None:
    """Compare names and shapes; values do not matter."""
    differences = [f"{name} is missing" for name in wanted if name not in saved]
    differences += [f"{name} is unknown" for name in saved if name not in wanted]
    differences += [
        f"{name} is {tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    if differences:
        named = ", ".join(differences[:_NUM_NAMED])
        more = len(differences) - _NUM_NAMED
        named += f" and {more} more" if more > 0 else ""
        raise ValueError(
            f"`ckpt_path={path}` holds other weights than `model`: {named}; use the `model` "
            "options of the run that saved it"
        )
