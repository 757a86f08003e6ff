"""Refuses a checkpoint that the run could not go on from, before a rank starts."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["check_checkpoint"]

_META = "meta.pt"  # of a sharded checkpoint: all that is not sharded
# What reading data of any kind, or of none, was seen to raise.
_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, pickle.UnpicklingError),
)
_NUM_NAMED = 3  # differences that a message names at most


def check_checkpoint(config: dict[str, Any], module: nn.Module) -> None:
    """Check that `ckpt_path` can be read, holds `module`'s weights and leaves steps to train.

    Reads no weights: files are mapped into memory, and `module` may be on the meta device.

    Raises:
        ValueError: Names `ckpt_path` and the remedy.
    """
    path = Path(config["ckpt_path"])
    try:
        _check(path, config, module)
    except _DAMAGE as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and text.startswith("`ckpt_path="):
            raise
        raise ValueError(
            f"`ckpt_path={path}` is a damaged checkpoint ({type(error).__name__}: {text[:200]}); "
            "name another one"
        ) from error


def _check(path: Path, config: dict[str, Any], module: nn.Module) -> None:
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
    is_run = isinstance(checkpoint, dict) and needed <= set(checkpoint)
    if not is_run or "fit_loop" not in checkpoint["loops"]:
        raise ValueError(
            f"`ckpt_path={path}` is no checkpoint of a Lightning run: name one, such as "
            "checkpoints/last.ckpt of an earlier run"
        )
    shapes = _shapes(module.state_dict())
    if is_sharded:
        _check_strategy(path, config)
        saved_shapes = _sharded_shapes(path)
        if _is_ours(config["strategy"]):
            _check_weights(path, saved_shapes, shapes)
    else:
        _check_weights(path, _shapes(checkpoint["state_dict"]), shapes)
        if "optimizer_states" not in checkpoint:
            raise ValueError(
                f"`ckpt_path={path}` holds weights only and no optimizer state: go on from a "
                "checkpoint that was saved with `save_weights_only=false`"
            )
    _check_optimizer(path, checkpoint.get("optimizer_states") or [], module)
    step, max_steps = checkpoint["global_step"], config["trainer"].get("max_steps", -1)
    if 0 < max_steps <= step:
        raise ValueError(
            f"`ckpt_path={path}` is already at step {step} of `trainer.max_steps={max_steps}`: "
            f"raise it, for example `trainer.max_steps={2 * step}`"
        )


def _shapes(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors; a module's extra state may be anything."""
    return {
        name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)
    }


def _read(path: Path, file: Path) -> Any:
    """Read `file` as Lightning will, without its tensors' data."""
    reason = "it is cut off, or something else"
    if zipfile.is_zipfile(file):
        try:
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
    raise ValueError(f"`ckpt_path={path}` is no readable checkpoint: {reason}; name another one")


def _check_strategy(path: Path, config: dict[str, Any]) -> None:
    """Refuse a sharded checkpoint for a strategy that reads files only."""
    strategy = config["strategy"]
    name = strategy if isinstance(strategy, str) else str(strategy["_target_"])
    if strategy == "auto" or name.endswith(("DDPStrategy", "SingleDeviceStrategy")):
        raise ValueError(
            f"`ckpt_path={path}` is a sharded checkpoint, which this `strategy` cannot read: "
            "resume it with `strategy=toy_fsdp strategy.state_dict_type=full` for a step, and go "
            "on from what that saves"
        )


def _is_ours(strategy: Any) -> bool:
    target = strategy.get("_target_") if isinstance(strategy, dict) else None
    return str(target).endswith(".ToyFSDPStrategy")


def _sharded_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a sharded checkpoint whose files are all there."""
    try:
        metadata = FileSystemReader(path).read_metadata()
        for part in (metadata.storage_data or {}).values():
            size, end = (path / part.relative_path).stat().st_size, part.offset + part.length
            if size < end:
                raise EOFError(f"{part.relative_path} has {size} bytes of at least {end}")
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        raise ValueError(
            f"`ckpt_path={path}` is a damaged sharded checkpoint: {error}; name another one"
        ) from error
    return {
        key.removeprefix("model."): tuple(saved.size)
        for key, saved in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(saved, TensorStorageMetadata)
    }


def _check_optimizer(path: Path, states: list[Any], module: nn.Module) -> None:
    """Refuse the state of another kind of optimizer: its options would be missing."""
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise TypeError("`optimizer_states` is no list of dicts")
    make_optimizer = getattr(module, "make_optimizer", None)
    if make_optimizer is None or len(states) != 1 or not states[0].get("param_groups"):
        return
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))])
    group = {**states[0]["param_groups"][0], "params": [0]}
    optimizer.load_state_dict({"state": {}, "param_groups": [group]})  # knows older forms
    missing = sorted(set(optimizer.defaults) - set(optimizer.param_groups[0]))
    if missing:
        raise ValueError(
            f"`ckpt_path={path}` was saved with another `optimizer` than "
            f"{type(optimizer).__name__}: its state has no {', '.join(missing)}; use the "
            "`optimizer` of the run that saved it"
        )


def _check_weights(
    path: Path, saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes; values do not matter."""
    differences = [f"{name} is missing" for name in wanted if name not in saved]
    differences += [f"{name} is unknown" for name in saved if name not in wanted]
    differences += [
        f"{name} is {saved[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    if differences:
        named = ", ".join(differences[:_NUM_NAMED])
        more = len(differences) - _NUM_NAMED
        named += f" and {more} more" if more > 0 else ""
        raise ValueError(
            f"`ckpt_path={path}` holds other weights than `model`: {named}; use the `model` "
            "options of the run that saved it"
        )
