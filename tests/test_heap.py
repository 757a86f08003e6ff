"""Memory that a step frees is there for the next one; counted in page faults."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from torch import nn
from lightning_fsdp_toy.sharding import fully_shard
torch.set_num_threads(1)
model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4096)), device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(512, 16)  # outputs of 8 MiB
def step():
    model(x).relu().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""
NUM_PAGES = 2048  # of one output


def faults_of_a_step(**env):
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {key: value for key, value in os.environ.items() if key not in names}
    args = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(args, env=clean | env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_a_step_uses_the_memory_of_the_one_before():
    assert faults_of_a_step() < NUM_PAGES / 10


@pytest.mark.slow
def test_who_has_told_the_c_library_otherwise_is_obeyed():
    assert faults_of_a_step(MALLOC_TRIM_THRESHOLD_="131072") > NUM_PAGES
