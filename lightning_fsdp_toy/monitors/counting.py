"""Counts the bytes that live tensors hold on this rank: no formula, no estimate."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if sys.platform != "win32":
    import resource

__all__ = [
    "ProcessPeak",
    "TensorBytes",
    "count_tensor_bytes",
    "process_bytes",
    "process_peak_bytes",
]


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of the memory behind a model's tensors on this rank, each memory counted once."""

    parameters: int
    gradients: int
    optimizer: int


def count_tensor_bytes(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> TensorBytes:
    """Count what this rank holds for parameters, gradients and optimizer state now.

    Counts whole storages, padding included, and each storage once however many tensors view it:
    tied parameters, or the parts of one flat parameter. Of sharded tensors, this rank's part.
    Parameters are those of `module` and those the optimizers update. Makes no copy and no
    communication; may be called on any subset of the ranks.

    >>> count_tensor_bytes(nn.Linear(3, 2, bias=False)).parameters
    24
    """
    optimizers = list(optimizers)
    parameters: list[torch.Tensor] = list(module.parameters())
    for optimizer in optimizers:
        parameters += [each for group in optimizer.param_groups for each in group["params"]]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return TensorBytes(
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(gradients),
        optimizer=_storage_bytes(state),
    )


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            continue  # nothing is allocated
        storage = local.untyped_storage()
        sizes[local.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def process_bytes() -> int | None:
    """Resident memory of this process now; `None` where the system cannot tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return None


class ProcessPeak:
    """The largest resident memory of this process since the last `restart`.

    The Linux kernel keeps the peak and can begin anew (`/proc/self/clear_refs`, proc(5)), so
    memory that comes and goes between two looks is seen. Elsewhere it is the peak of its life.
    """

    _before_restart = 0  # largest of all, since the kernel forgets with the restart

    def restart(self) -> None:
        """Begin anew from what is held now."""
        cls = type(self)
        cls._before_restart = max(cls._before_restart, self.bytes() or 0)
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        except OSError:  # not Linux, or not allowed
            pass

    @staticmethod
    def bytes() -> int | None:
        """Peak since the last `restart`; `None` where the system cannot tell."""
        try:
            with open("/proc/self/status", encoding="ascii") as file:
                for line in file:
                    if line.startswith("VmHWM:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass
        return _largest_of_life()

    @classmethod
    def of_life(cls) -> int | None:
        """Peak of the process's life, restarts or not; `None` where the system cannot tell."""
        peak = _largest_of_life()
        return None if peak is None else max(peak, cls._before_restart)


def process_peak_bytes() -> int | None:
    """Largest resident memory of this process so far; `None` where the system cannot tell."""
    return ProcessPeak.of_life()


def _largest_of_life() -> int | None:
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
