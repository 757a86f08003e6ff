"""Fixtures for all tests: whatever a test changes in the process is put back."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def restore_process_state() -> Iterator[None]:
    """Run each test with one thread and restore threads, dtype, RNG, environment and group."""
    env = dict(os.environ)
    cwd = os.getcwd()
    num_threads = torch.get_num_threads()
    default_dtype = torch.get_default_dtype()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    rng_state = torch.get_rng_state()
    is_grad_enabled = torch.is_grad_enabled()
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_grad_enabled(is_grad_enabled)
    torch.set_rng_state(rng_state)
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:  # the call imports a lot
        torch.use_deterministic_algorithms(is_deterministic)
    torch.set_default_dtype(default_dtype)
    torch.set_num_threads(num_threads)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
