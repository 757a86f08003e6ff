"""What one step costs, in counts that no machine changes: collectives, operations, Python calls.

Time is measured by `task=benchmark`; these bounds say at once what made a step dearer. They are
what a step needs now: lower them when it needs less, raise them only for something worth it.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp_toy import sharding
from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.sharding import fully_shard, get_root
from tests.ranks import run_ranks

NUM_BLOCKS, NUM_UNITS, NUM_RANKS = 4, 5, 2
NUM_PARAMETERS = 17  # 4 of a block, and the embedding, whose weight is the head's
SHARDING = str(Path(sharding.__file__).parent)
# How often these call something depends on who waits for whom.
WAITING = ("stalls.py", "pool.py", "segment.py", "gathering.py", "reducing.py")


class OperationCounter(TorchDispatchMode):
    """Counts operations on tensors by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class CallCounter:
    """Counts calls of functions of `sharding`."""

    def __init__(self):
        self.counts = Counter()

    def _note(self, frame, event, arg):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SHARDING):
            return
        while frame is not None:
            if frame.f_code.co_filename.endswith(WAITING):
                return
            frame = frame.f_back
        self.counts[f"{Path(code.co_filename).name}: {code.co_name}"] += 1

    def __enter__(self):
        sys.setprofile(self._note)

    def __exit__(self, *_):
        sys.setprofile(None)


def count_step(shard, counter):
    """Train some steps and count in the last; return the model and the counts."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "nhead": 2, "num_layers": NUM_BLOCKS, "max_seq_len": 16}
    model = shard(GPT(vocab_size=33, dropout=0.0, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(32).view(2, 16)

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if hasattr(model, "_fsdp_root"):
        get_root(model).ledger.reset()
        get_root(model).memory.reset_peak()
    with counter:
        step()
    return model, counter.counts


def _check(transport, operations, most_calls):
    def shard(model):
        return fully_shard(model, transport=transport)

    plain = count_step(lambda model: model, OperationCounter())[1]
    model, ours = count_step(shard, OperationCounter())
    root = get_root(model)
    totals = Counter()
    for (operation, _), total in root.ledger.totals().items():
        totals[operation] += total.calls
    # The root unit and the last block stay unsharded between forward and backward.
    expected = {"all_gather": 2 * NUM_UNITS - 2, "reduce_scatter": NUM_UNITS, "control": 1}
    assert totals == expected
    largest = max(flat.layout.padded_numel for unit in root.units[1:] for flat in unit.flats)
    whole = root.units[0].flats[0].layout.padded_numel
    assert root.memory.unsharded_peak_bytes == 4 * (2 * largest + whole)
    more = {name: ours[name] - plain[name] for name in operations}
    assert more == operations
    calls = count_step(shard, CallCounter())[1]
    assert calls.total() <= most_calls, (calls.total(), calls.most_common(20))


OPERATIONS = {
    # The embedding gets a gradient as input and as head: the second is added to the first.
    "mul": NUM_PARAMETERS,
    "clone": 0,
    "zero_": 1,  # padding
}
SENT = OPERATIONS | {"send": 2 * NUM_UNITS + 3, "copy_": 8, "add": 5}
SHARED = OPERATIONS | {"send": 0, "copy_": 8, "add": 5}


@pytest.mark.parametrize(
    ("transport", "operations", "most_calls"),
    [("pairwise", SENT, 3016), ("shared_memory", SHARED, 2767)],
)
def test_a_step_costs_no_more_than_it_did(transport, operations, most_calls):
    run_ranks(_check, NUM_RANKS, transport, operations, most_calls)
