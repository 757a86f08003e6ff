"""The weights of one run after every step, in one file that other runs compare theirs with.

Note: the file
    One row a step, row 0 being the initial weights; in a row all parameters lie end to end in the
    order of the model, each in its own memory order, so that a piece of a parameter is one slice::

        row 0   [ net.embed.weight ......... | net.blocks.0.norm.weight . | ... ]
        row 1   [ ...
                  ^ offset + start           ^ offset + stop: what a rank's shard has of it

    The file is mapped, not read: a rank touches the pages of its own pieces only. A second, small
    file says where parameters lie; it is written last, so whoever finds it finds everything.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Trajectory", "TrajectoryWriter", "check_disk", "in_memory_order"]

_ITEM_BYTES = 4  # float32


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as 1D, in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def check_disk(folder: Path, num_steps: int, num_parameters: int) -> None:
    """Refuse a trajectory that does not fit on the disk of `folder`, which need not exist."""
    needed = (num_steps + 1) * num_parameters * _ITEM_BYTES
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"`verify.steps={num_steps}`: the weights after every step take {needed / 1e9:.1f} GB,"
            f" and {existing} has {free / 1e9:.1f} GB left: lower `verify.steps`, or set"
            " `hydra.run.dir` to another disk"
        )


class TrajectoryWriter:
    """Writes a trajectory; rows in order.

    Args:
        path: Of the file; its folder must exist.
        parameters: Names and parameters in the order of the model, of whole weights in float32.
        num_steps: Optimizer steps.
    """

    def __init__(
        self, path: Path, parameters: Iterable[tuple[str, nn.Parameter]], num_steps: int
    ) -> None:
        self.path = path
        self.parameters = list(parameters)
        self.sizes = [(name, param.numel()) for name, param in self.parameters]
        self.numel = sum(numel for _, numel in self.sizes)
        total = (num_steps + 1) * self.numel
        self.rows = torch.from_file(str(path), shared=True, size=total, dtype=torch.float32)
        self.rows = self.rows.view(num_steps + 1, self.numel)

    def write(self, step: int) -> None:
        """Write the weights as they are now as those after `step` optimizer steps."""
        offset = 0
        for _, param in self.parameters:
            self.rows[step, offset : offset + param.numel()].copy_(in_memory_order(param))
            offset += param.numel()

    def finish(self, **facts: Any) -> None:
        """Let others read; `facts` are kept beside the names."""
        text = json.dumps({"sizes": self.sizes, "rows": len(self.rows), "facts": facts})
        partial = self.path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(_index_of(self.path))


class Trajectory:
    """Reads a trajectory.

    Args:
        path: Of the file.

    Attributes:
        numel: Elements of all parameters.
        facts: What the writer said in the end.
    """

    def __init__(self, path: Path) -> None:
        index = json.loads(_index_of(path).read_text(encoding="utf-8"))
        self.facts: dict[str, Any] = index["facts"]
        self._places: dict[str, tuple[int, int]] = {}
        self.numel = 0
        for name, numel in index["sizes"]:
            self._places[name] = (self.numel, numel)
            self.numel += numel
        total = index["rows"] * self.numel
        rows = torch.from_file(str(path), shared=True, size=total, dtype=torch.float32)
        self._rows = rows.view(index["rows"], self.numel)

    def piece(self, step: int, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of a parameter after `step` optimizer steps, 1D."""
        if name not in self._places:
            raise ValueError(f"`{name}` is no parameter of the plain model")
        offset, numel = self._places[name]
        assert 0 <= start <= stop <= numel, f"`{name}` has {numel} elements, not {stop}"
        return self._rows[step, offset + start : offset + stop]

    @staticmethod
    def wait_for(path: Path) -> None:
        """Return when another process has finished the trajectory.

        Polls: before the first run there is no process group to wait in. If the writer fails, the
        launcher ends this process, too.
        """
        while not _index_of(path).exists():
            time.sleep(0.05)

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether it is there, complete."""
        return _index_of(path).exists()

    @staticmethod
    def remove(path: Path) -> None:
        """Delete it; processes that still read it keep what they have mapped."""
        for each in (_index_of(path), path):
            if each.exists():
                os.unlink(each)


def _index_of(path: Path) -> Path:
    return path.with_suffix(".json")
