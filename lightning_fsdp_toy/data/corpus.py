"""Where tokens come from: the bytes of files, or a random number generator."""

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fsdp_toy.data.dealing import derive_seed

Sample = tuple[Tensor, Tensor]  # tokens and targets, each int64 (seq_len,)

_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_sources() -> list[Path]:
    """List the source files of Python's standard library, sorted, without tests and packages."""
    root = sysconfig.get_path("stdlib")
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        paths.extend(Path(folder, name) for name in names if name.endswith(".py"))
    # `_sysconfigdata*` says how this machine's Python was built.
    return sorted(path for path in paths if not path.name.startswith("_sysconfigdata"))


def resolve_files(files: str | os.PathLike[str] | Sequence[str] | None) -> list[Path]:
    """Turn `data.files` into absolute paths of non-empty files, in a fixed order.

    Args:
        files: A path or glob (`**` matches folders), or several; None for `python_sources()`.

    Raises:
        ValueError: A path is missing, a folder or empty; a glob matches no non-empty file.
    """
    if files is None:
        paths = python_sources()
        if not paths:
            raise ValueError("`data.files` is null and Python's sources are not here: name files")
        return paths
    is_list = isinstance(files, Sequence) and not isinstance(files, str)
    patterns: list[Any] = list(files) if is_list else [files]  # type: ignore[arg-type]
    for each in patterns:
        if not isinstance(each, str | os.PathLike):
            raise ValueError(
                f"`data.files`: expected a path, a glob or a list of them, got {each!r}"
            )
    if not patterns:
        raise ValueError("`data.files` is an empty list: name a file, or use null for the default")
    paths = []
    for given in patterns:
        pattern = os.path.expanduser(os.fspath(given))
        path = Path(pattern)
        if path.is_file():
            if path.stat().st_size == 0:
                raise ValueError(f"`data.files`: {pattern!r} is empty: name a file with text")
            paths.append(path)
        elif path.is_dir():
            raise ValueError(f"`data.files`: {pattern!r} is a folder: add a glob such as '/**/*'")
        elif glob.escape(pattern) == pattern:
            raise ValueError(f"`data.files`: {pattern!r} does not exist: check the path")
        else:
            found = (Path(name) for name in sorted(glob.glob(pattern, recursive=True)))
            matches = [path for path in found if path.is_file() and path.stat().st_size]
            if not matches:
                raise ValueError(f"`data.files`: {pattern!r} matches no non-empty file")
            paths.extend(matches)
    return list(dict.fromkeys(path.absolute() for path in paths))


def read_bytes(paths: Sequence[Path], max_bytes: int, val_fraction: float) -> tuple[bytes, bytes]:
    """Read at most `max_bytes` bytes; the last `val_fraction` of each file is for validation."""
    train, val = bytearray(), bytearray()
    for path in paths:
        try:
            with path.open("rb") as file:
                data = file.read(max_bytes - len(train) - len(val))
        except OSError as error:
            raise ValueError(
                f"`data.files`: cannot read {str(path)!r}: {error.strerror}"
            ) from error
        split = len(data) - int(len(data) * val_fraction)
        train += data[:split]
        val += data[split:]
        if len(train) + len(val) >= max_bytes:
            break
    return bytes(train), bytes(val)


class ByteWindows(Dataset[Sample]):
    """Windows of `seq_len` bytes that do not overlap; a target is the byte after its token."""

    def __init__(self, text: bytes, seq_len: int) -> None:
        self.text = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self.seq_len
        window = self.text[start : start + self.seq_len + 1].long()
        return window[:-1], window[1:]


class RandomTokens(Dataset[Sample]):
    """Uniformly random tokens; a target is the token after, as in text.

    Sample `i` depends on `seed` and `i % period` only, and is made when it is asked for.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, num_samples: int, seed: int, period: int
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.num_samples = num_samples
        self.seed = seed
        self.period = period

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, index % self.period))
        window = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        return window[:-1], window[1:]
