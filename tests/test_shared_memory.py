"""The shared-memory transport: bits, bytes, memory of the segment, and what happens without it."""

import copy
import ctypes
import errno
import logging
import mmap
import os
import resource
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.planner import read_sizes
from lightning_fsdp_toy.sharding import (
    MixedPrecisionPolicy,
    full_state_dict,
    fully_shard,
    get_root,
    no_sync,
    unsharded,
)
from lightning_fsdp_toy.sharding.transports import segment
from lightning_fsdp_toy.sharding.transports.page_map import PageMap
from lightning_fsdp_toy.sharding.transports.shared_memory import share_memory, stop_sharing
from tests.ranks import RankError, run_ranks

VOCABULARY, LENGTH = 33, 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def make_model(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "nhead": 2, "num_layers": 4, "max_seq_len": LENGTH, "dropout": 0.0}
    return fully_shard(GPT(vocab_size=VOCABULARY, **sizes), **options)


def train(model, steps=3, micro_batches=2, syncs_last=False):
    """Train on batches of this rank's own; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        for number in range(micro_batches):
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
            if syncs_last and number + 1 < micro_batches:
                with no_sync(model):
                    losses.append(step(model, tokens))
            else:
                losses.append(step(model, tokens))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def step(model, tokens):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.item()


def kept_bytes(root):
    """Bytes of the segment that have memory now, by the kernel's own count."""
    pool = root.mesh.shards.pool
    return os.fstat(pool.segment._fd).st_blocks * 512


def assert_at_rest(root):
    """Nothing but the pool has memory, and the pool is as large as the formula says."""
    plan, held = root.mesh.shards.pool.plan, root.memory.held
    dist.barrier()
    assert kept_bytes(root) <= plan.num_kept_bytes
    assert held["unsharded"] == held["reduce"] == 0
    assert held["pool"] == plan.num_pool_bytes == read_sizes(root).pool_bytes
    # Whole pages are kept: less than one more for each place, and what ranks tell each other.
    num_places = len(plan.places) + sum(map(len, (*plan.rings, *plan.reduce_homes)))
    ranks = root.mesh.shards.world_size
    assert plan.num_kept_bytes <= ranks * plan.num_pool_bytes + 4096 * num_places + 8192
    dist.barrier()


def _train_in(transport, options, syncs_last):
    model = make_model(transport=transport, **options)
    root = get_root(model)
    losses = train(model, syncs_last=syncs_last)
    with unsharded(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    losses += train(model, syncs_last=syncs_last)
    ledger = root.ledger.totals()
    sent = {key: (t.calls, t.payload_bytes, t.sent_bytes) for key, t in ledger.items()}
    collectives = ("all_gather", "reduce_scatter")
    wire = sum(total.wire_bytes for (name, _), total in ledger.items() if name in collectives)
    unsharded_peak = root.memory.unsharded_peak_bytes
    if transport != "pairwise" and root.mesh.shards.world_size > 1:
        assert_at_rest(root)
    return losses, full_state_dict(model), sent, wire, unsharded_peak


OPTIONS = {
    "full": {},
    "serial": {"num_prefetch": 0},
    "two ahead": {"num_prefetch": 2},
    "grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "whole": {"auto_wrap_policy": None},
    "bf16": {"mixed_precision": BF16},
    "bf16 reduced": {
        "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    },
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_bits_and_counts_are_those_of_messages_and_nothing_is_sent(options, world_size):
    for syncs_last in (False, True):
        args = OPTIONS[options], syncs_last
        expected = run_ranks(_train_in, world_size, "pairwise", *args, timeout=60)
        found = run_ranks(_train_in, world_size, "shared_memory", *args, timeout=60)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == theirs[0]
            assert {k: v.tolist() for k, v in ours[1].items()} == {
                k: v.tolist() for k, v in theirs[1].items()
            }
            # A bf16 unit is gathered in fp32 by messages inside `unsharded`, as ever.
            assert ours[2] == theirs[2]
            assert ours[4] == theirs[4]
            if "bf16" not in options:
                assert ours[3] == 0 < theirs[3]


def _hybrid(transport):
    model = make_model(transport=transport, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    losses = train(model)
    root = get_root(model)
    shares = getattr(root.mesh.shards, "pool", None) is not None
    wire = {
        name: sum(t.wire_bytes for (op, _), t in root.ledger.totals().items() if op == name)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    return losses, full_state_dict(model), shares, wire


def test_hybrid_shares_inside_a_group_and_sends_across():
    expected = run_ranks(_hybrid, 4, "pairwise", timeout=60)
    for ours, theirs in zip(run_ranks(_hybrid, 4, "auto", timeout=60), expected, strict=True):
        assert ours[0] == theirs[0]
        assert all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())
        assert (ours[2], theirs[2]) == (True, False)
        assert ours[3]["all_gather"] == ours[3]["reduce_scatter"] == 0
        assert ours[3]["all_reduce"] == theirs[3]["all_reduce"] > 0


def _look_at_memory(options, syncs_last):
    model = make_model(transport="shared_memory", **options)
    root, pool = get_root(model), get_root(model).mesh.shards.pool
    assert_at_rest(root)
    train(model, syncs_last=syncs_last)
    assert_at_rest(root)
    with unsharded(model):  # all units at once, in memory of their own
        assert root.memory.held["pool"] == pool.plan.num_pool_bytes
    train(model, steps=1)
    assert_at_rest(root)
    with torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.long))
    dist.barrier()
    status = os.fstat(pool.segment._fd)
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
    stop_sharing(root)
    assert root.memory.held["pool"] == 0
    assert root.memory.total_bytes == root.memory.held["shards"]
    train(model, steps=1)  # by messages
    assert root.memory.held["pool"] == 0
    share_memory(root)
    train(model, steps=1)
    assert_at_rest(root)


@pytest.mark.parametrize("options", [{}, {"num_prefetch": 0}, OPTIONS["grad op"]], ids=str)
def test_only_the_pool_has_memory_at_rest(options):
    before = set(os.listdir("/dev/shm"))
    run_ranks(_look_at_memory, 2, options, False, timeout=60)
    run_ranks(_look_at_memory, 2, options, True, timeout=60)
    assert set(os.listdir("/dev/shm")) <= before | {n for n in os.listdir("/dev/shm") if "sem" in n}


def _count_peak(options):
    model = make_model(**{"transport": "shared_memory", **options})
    root = get_root(model)
    train(model, steps=2)
    root.memory.reset_peak()
    train(model, steps=1, micro_batches=1)
    return root.memory.peak_bytes, read_sizes(root).peak_bytes()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_peak_is_that_of_the_closed_form(options, world_size):
    for peak, planned in run_ranks(_count_peak, world_size, OPTIONS[options], timeout=60):
        assert peak == planned


class TwoLayers(nn.Module):
    """A unit that runs in two parts."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, part):
        return x + torch.tanh(self.parts[part](x))


class Crossed(nn.Module):
    """Units whose gradients all begin to arrive before those of any are complete."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoLayers() for _ in range(4))

    def forward(self, x):
        for part in range(2):
            for block in self.blocks:
                x = block(x, part)
        return x


def _cross(transport):
    torch.manual_seed(0)
    model = fully_shard(Crossed(), transport=transport, auto_wrap_policy=[TwoLayers])
    homes, shards = set(), get_root(model).mesh.shards
    if transport != "pairwise":  # which of them have memory, towards the end of backward
        model.blocks[0].parts[0].register_full_backward_hook(
            lambda *_: homes.update(shards._buffers._homes)
        )
    for _ in range(3):
        model(torch.randn(3, 8)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return grads, dict(get_root(model).memory.held), homes


def test_more_reduce_buffers_at_once_than_are_kept():
    expected = run_ranks(_cross, 2, "pairwise")
    for ours, theirs in zip(run_ranks(_cross, 2, "shared_memory"), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
        assert ours[1]["reduce"] == ours[1]["unsharded"] == 0
        assert len(ours[2]) >= 2  # two of the four are kept


def _edit_on_one_rank():
    """An edit that is not written back stays on the rank that makes it, and is gone after it."""
    model = make_model(transport="shared_memory")
    rank = dist.get_rank()
    before = full_state_dict(model)
    with unsharded(model, writeback=False), torch.no_grad():
        weight = next(model.parameters())
        value = weight.clone()
        dist.barrier()
        if rank == 0:
            weight.add_(1)
        dist.barrier()
        assert torch.equal(weight, value + 1 if rank == 0 else value)
        dist.barrier()
    after = full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_edits_stay_on_their_rank():
    run_ranks(_edit_on_one_rank, 2)


def test_pages_that_were_only_read_stay_and_those_written_to_are_dropped():
    size = 1024 * mmap.PAGESIZE  # the kernel may fault in 16 at once
    shared = segment.Segment(mmap.PAGESIZE + size, num_cells=1, num_ranks=1)
    source = shared.shared(mmap.PAGESIZE, size // 4, torch.float32).fill_(1.0)

    def view():
        return torch.empty(0).set_(shared.private(mmap.PAGESIZE, size))

    assert view().sum() == view().sum() == source.numel()
    source.fill_(2.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert view().sum() == 2 * source.numel()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 32
    view()[5000] = 7.0
    assert source[5000] == 2.0
    assert view()[5000] == 2.0


def _make_pair():
    """A sharded model and one that is not."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    return fully_shard(copy.deepcopy(net), transport="shared_memory"), net


def _check_forwards(net, reference, change=None):
    """All four are right; in the second a hook changes what it finds."""
    x = torch.ones(2, 64, device="cpu")
    for number in range(4):
        handle = net[1].register_forward_pre_hook(change) if change and number == 1 else None
        with torch.no_grad():
            assert torch.equal(net(x), reference(x)), f"forward {number}"
        if handle is not None:
            handle.remove()


def _lock_memory():
    """Pages of locked memory cannot be dropped."""
    assert ctypes.CDLL(None).mlockall(2) == 0  # what is mapped from now on
    _check_forwards(*_make_pair())


def _move_in_forward():
    """Torch swaps the memory of a weight for that of a file with a name."""
    torch.multiprocessing.set_sharing_strategy("file_system")

    def move(module, _):
        module[0].weight.detach().share_memory_()

    _check_forwards(*_make_pair(), move)


def _gather_where_meta_is_the_default():
    pair = _make_pair()
    with torch.device("meta"):
        _check_forwards(*pair)


_may_lock = pytest.mark.skipif(os.geteuid() != 0, reason="only root may lock all memory")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(_lock_memory, marks=_may_lock),
        _move_in_forward,
        _gather_where_meta_is_the_default,
    ],
)
def test_weights_are_right_where_pages_are_locked_moved_or_devices_others(check):
    run_ranks(check, 2)


def test_a_child_does_not_trust_the_page_map_of_its_parent():
    page_map = PageMap()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert not page_map.may_have_copies(address, mmap.PAGESIZE)  # nothing is there yet
    child = os.fork()
    if child == 0:
        os._exit(int(page_map.may_have_copies(address, mmap.PAGESIZE)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    memory[0] = 1
    assert page_map.may_have_copies(address, mmap.PAGESIZE)


def test_who_is_sent_gathered_weights_is_told_and_gets_no_zeros():
    shared = segment.Segment(2 * mmap.PAGESIZE, num_cells=1, num_ranks=1)
    storage = shared.private(mmap.PAGESIZE, mmap.PAGESIZE)
    with pytest.raises(RuntimeError, match=r"resize|mmap"):  # what a receiver does
        torch.UntypedStorage._new_shared_fd_cpu(*storage._share_fd_cpu_())


def _share_weights(transport, precision):
    """A weight moved to shared memory inside `unsharded` keeps its values, and training goes on."""
    model = make_model(transport=transport, mixed_precision=precision)
    kept = []
    for _ in range(3):
        with unsharded(model):
            for param in model.parameters():
                kept.append((param.detach().share_memory_(), param.detach().clone()))
        train(model, steps=1)
    assert all(torch.equal(a, b) for a, b in kept)


@pytest.mark.parametrize("precision", [None, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("transport", ["pairwise", "shared_memory"])
def test_weights_moved_to_shared_memory_inside_unsharded_keep_their_values(transport, precision):
    run_ranks(_share_weights, 2, transport, precision)


def _keep_arrays():
    model = make_model(transport="shared_memory")
    arrays, copies = [], []
    for _ in range(3):
        with unsharded(model):
            for param in model.parameters():
                arrays.append(param.detach().numpy())
                copies.append(arrays[-1].copy())
        train(model, steps=1)
    assert all((a == b).all() for a, b in zip(arrays, copies, strict=True))


def test_arrays_taken_inside_unsharded_keep_their_values():
    run_ranks(_keep_arrays, 2)


def _keep_arrays_of_forward():
    model = make_model(transport="shared_memory")
    arrays, copies = [], []

    def keep(module, _):
        arrays.append(next(module.parameters()).detach().numpy())
        copies.append(arrays[-1].copy())

    for layer in model.layers:
        layer.register_forward_pre_hook(keep)
    losses = train(model)
    assert all((a == b).all() for a, b in zip(arrays, copies, strict=True))
    return losses


def test_arrays_taken_inside_forward_keep_their_values():
    assert run_ranks(_keep_arrays_of_forward, 2) == [each for each, _ in run_ranks(_train_alone, 2)]


def _keep_the_last_view(as_array):
    model = make_model(transport="shared_memory")
    stash = {}

    def keep(module, _):
        view = next(module.parameters()).detach()
        stash["last"] = view.numpy() if as_array else view

    model.layers[1].register_forward_pre_hook(keep)
    counts = []
    for _ in range(2):
        train(model, steps=5)
        with open("/proc/self/maps") as maps:
            counts.append((len(os.listdir("/proc/self/fd")), len(maps.readlines())))
    assert counts[1][0] <= counts[0][0]
    assert counts[1][1] <= counts[0][1] + 5
    return stash["last"] is not None


@pytest.mark.parametrize("as_array", [False, True])
def test_what_is_kept_and_replaced_in_every_step_does_not_pile_up(as_array):
    assert all(run_ranks(_keep_the_last_view, 2, as_array))


def _lack_room():
    """The pool fits into /dev/shm, a place more for every gradient does not."""
    model = make_model(transport="shared_memory")
    assert get_root(model).mesh.shards.pool is not None

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse
    return train(model, syncs_last=True)


def test_gradients_that_are_kept_need_no_room_in_the_segment():
    run_ranks(_lack_room, 2)


# -- without it ---------------------------------------------------------------------------------


class Caught(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _without(reason, transport):
    caught = Caught()
    logging.getLogger("lightning_fsdp_toy").addHandler(caught)
    if reason == "missing":
        segment._DIRECTORY = "/no/such/folder"
    elif reason == "full":

        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = refuse
    elif reason == "tight":
        real_status = os.statvfs
        os.statvfs = lambda path: os.statvfs_result([*real_status(path)[:4], 1, *[0] * 5])
    elif dist.get_rank() == 1:  # another machine: there is nothing under that path, or another file
        real = os.open
        os.open = lambda path, *a, **k: real("/dev/null" if "/fd/" in str(path) else path, *a, **k)
    model = make_model(transport=transport)
    losses = train(model)
    return caught.lines, losses, get_root(model).mesh.shards.pool is None


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("missing", "/dev/shm|/no/such/folder: No such file or directory"),
        ("full", "MiB in /dev/shm: No space left on device"),
        ("tight", "to map a unit, where 0.0 MiB are free"),
        ("elsewhere", "the ranks are not on one machine"),
    ],
)
def test_without_it_messages_are_used_and_one_line_says_why(reason, text):
    expected = [losses for losses, *_ in run_ranks(_train_alone, 2)]
    for transport in ("shared_memory", "auto"):
        results = run_ranks(_without, 2, reason, transport)
        is_silent = reason == "elsewhere" and transport == "auto"
        lines = results[0][0]
        assert len(lines) == (0 if is_silent else 1)
        assert all("messages instead" in line for line in lines)
        assert is_silent or text.split("|")[-1] in lines[0]
        assert results[1][0] == []
        assert [losses for _, losses, _ in results] == expected
        assert all(is_off for *_, is_off in results)


def _train_alone():
    return train(make_model(transport="pairwise")), None


# -- ranks that do not come ---------------------------------------------------------------------


def _lose(how):
    model = make_model(transport="shared_memory")
    train(model, steps=1)
    if dist.get_rank() == 1:
        if how == "die":
            os._exit(3)
        time.sleep(20)  # longer than the others wait
    model(torch.zeros(1, LENGTH, dtype=torch.long))


def test_a_rank_that_dies_is_named_with_the_unit():
    with pytest.raises(RankError, match=r"[Rr]ank 1"):
        run_ranks(_lose, 2, "die")


def _wait_in_vain():
    model = make_model(transport="shared_memory")
    train(model, steps=1)
    pool = get_root(model).mesh.shards.pool
    pool._timeout_s = 0.5
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(1, LENGTH, dtype=torch.long))
    dist.barrier()
    return str(caught.value)


def test_a_wait_that_is_too_long_names_rank_and_unit():
    message = run_ranks(_wait_in_vain, 2)[0]
    assert (
        "rank 0 of 2: all-gather of unit `<root>` failed: timed out after 0.5 s waiting" in message
    )
    assert "waiting for rank 1" in message


def _count_looks():
    model = make_model(transport="shared_memory")
    train(model, steps=1)
    pool = get_root(model).mesh.shards.pool
    looks = 0
    behind = pool.behind

    def counted(*args):
        nonlocal looks
        looks += 1
        return behind(*args)

    pool.behind = counted
    if dist.get_rank() == 0:
        time.sleep(1.0)
    model(torch.zeros(1, LENGTH, dtype=torch.long))
    return looks


def test_a_long_wait_sleeps_in_the_kernel():
    # 1 s of sleep in slices of 50 ms, and at most 200 looks before them, at each of six units.
    assert run_ranks(_count_looks, 2)[1] < 6 * (2 * 200) + 200
