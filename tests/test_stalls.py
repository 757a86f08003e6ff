"""Waits that can never end are ended with a message; waits that may end are left alone."""

import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding.stall_notes import Note, ranks_in_vain, tell_places
from lightning_fsdp_toy.sharding.stalls import StallDetector, StallError, stall_detector
from tests.ranks import run_ranks

AFTER_S = 0.4


def _detector():
    detector = stall_detector()
    assert detector is not None
    detector.after_s = AFTER_S
    return detector


def _caught(operation, unit, block, group=None):
    """Run a wait; return the seconds it took and the text of its `StallError`, if any."""
    start = time.monotonic()
    try:
        with _detector().waiting(operation, unit, group):
            block()
    except StallError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, None


BLOCKS = {
    "recv": lambda: dist.irecv(torch.zeros(3), src=(dist.get_rank() + 1) % dist.get_world_size()),
    "send": lambda: dist.isend(torch.zeros(10**7), (dist.get_rank() + 1) % dist.get_world_size()),
    "barrier": lambda: dist.barrier(async_op=True),
    "all_reduce": lambda: dist.all_reduce(torch.zeros(3), async_op=True),
    "objects": lambda: dist.broadcast_object_list([1], 0),
    "gather": lambda: dist.all_gather([torch.zeros(1)] * dist.get_world_size(), torch.zeros(1)),
}


def _wait(kind):
    work = BLOCKS[kind]()
    if work is not None:
        work.wait()


def _different_places(kinds):
    rank = dist.get_rank()
    kind = kinds[min(rank, len(kinds) - 1)]
    detector = _detector()
    detector.describe = lambda: f"{rank} batches begun"
    return _caught(kind, f"unit{min(rank, 1)}", lambda: _wait(kind))


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [(2, ["recv", "barrier"]), (2, ["all_reduce", "send"]), (3, ["recv", "gather"])],
)
def test_ranks_in_different_places_raise_the_same_that_names_them_all(world_size, kinds):
    results = run_ranks(_different_places, world_size, kinds)
    texts = [text for _, text in results]
    reasons = {text.partition(": ")[2].partition("cannot end: ")[2] for text in texts}
    assert len(reasons) == 1
    for rank, (seconds, text) in enumerate(results):
        assert AFTER_S < seconds < 8
        assert text.startswith(f"rank {rank} of {world_size}: {kinds[min(rank, 1)]} number 1 of")
        assert f"rank 0 waits in {kinds[0]} number 1 of unit `unit0`, 0 batches begun" in text
        assert f"waits in {kinds[1]} number 1 of unit `unit1`, 1 batches begun" in text
        assert "unequal numbers of batches" in text


def _slow_rank(sleep_s):
    if dist.get_rank() == 1:
        time.sleep(sleep_s)
    waited, text = _caught("barrier", "", dist.barrier)
    detector = _detector()
    looked = bool(detector._written)
    time.sleep(2)  # the note is withdrawn at the next look
    return waited, text, looked, detector._written


def test_a_slow_rank_is_waited_for():
    (waited, text, looked, after), (_, other, _, _) = run_ranks(_slow_rank, 2, 3.0)
    assert waited > 2.5 and looked  # it was looked into, and found to be no stall
    assert text is other is None
    assert after == ""


def _posted_ahead():
    """Rank 0 has sent its part of A and waits in B; rank 1 waits in A for rank 2, which is slow."""
    rank = dist.get_rank()

    def a():
        if rank == 0:
            dist.isend(torch.ones(1), 1).wait()
        if rank == 1:
            for source in (0, 2):
                dist.irecv(torch.ones(1), source).wait()
        if rank == 2:
            time.sleep(4)
            dist.isend(torch.ones(1), 1).wait()

    if rank == 2:  # computes: it enters the wait late
        time.sleep(4)
        first = _caught("all-gather", "A", lambda: dist.isend(torch.ones(1), 1).wait())
    else:
        first = _caught("all-gather", "A", a)
    return first, _caught("all-gather", "B", dist.barrier)


def test_a_rank_that_is_ahead_is_not_taken_for_one_that_went_elsewhere():
    results = run_ranks(_posted_ahead, 3)
    assert [(a[1], b[1]) for a, b in results] == [(None, None)] * 3
    assert results[0][1][0] > 3  # rank 0 waited in B all the while that rank 1 waited in A
    assert results[1][0][0] > 3


def _groups(is_circle):
    """Rank 0 waits for 1, 1 for 2; 2 computes, or waits for 0."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]

    def barrier(index):
        work = dist.barrier(group=groups[index], async_op=True)
        return _caught("all-reduce", "A", work.wait, groups[index])[1]

    if is_circle:
        return [barrier(rank)]
    if rank == 2:
        time.sleep(4)
    order = {0: [0, 2], 1: [1, 0], 2: [1, 2]}[rank]
    return [barrier(index) for index in order]


def test_waiting_for_another_group_is_no_stall():
    assert run_ranks(_groups, 3, False) == [[None, None]] * 3


def test_a_circle_through_groups_is_a_stall():
    for rank, [text] in enumerate(run_ranks(_groups, 3, True)):
        assert text.startswith(f"rank {rank} of 3: all-reduce number 1 of unit `A` cannot end")


def _raise_on_rank_1(is_late):
    detector = _detector()
    if dist.get_rank() == 1:
        if is_late:
            time.sleep(3)
        detector.leave(ValueError("planted\nfailure"))
        time.sleep(4)  # lives on: its connections stay open
        return None
    if not is_late:
        time.sleep(1)
    return _caught("all-gather", "A", lambda: _wait("barrier"))


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_stop_waiting_for_one_that_has_left(is_late):
    seconds, text = run_ranks(_raise_on_rank_1, 2, is_late)[0]
    assert seconds < 6
    assert text == (
        "rank 0 of 2: all-gather number 1 of unit `A` cannot end: rank 1 has left: "
        "ValueError: planted failure; rank 0 waits in all-gather number 1 of unit `A`"
    )


def _next_run():
    detector = _detector()
    detector.leave(ValueError("all ranks raised and were caught"))
    detector.begin_run()
    if dist.get_rank() == 1:
        time.sleep(3)
        detector.begin_run()  # as late as this
    else:
        detector.begin_run()
    return _caught("barrier", "", dist.barrier)


def test_the_end_of_an_earlier_run_is_void():
    assert [text for _, text in run_ranks(_next_run, 2)] == [None, None]


def _handling():
    def in_handler():
        try:
            raise KeyError("the first error")
        except KeyError:
            return _caught("save", "", lambda: _wait("barrier"))

    if dist.get_rank() == 1:
        return in_handler()
    return _caught("all-gather", "A", lambda: _wait("recv"))


def test_the_exception_a_rank_is_handling_is_named_on_all():
    for _, text in run_ranks(_handling, 2):
        assert "rank 1 waits in save number 1, while handling KeyError: 'the first error'" in text


def _other_errors():
    detector = _detector()
    for error in (ValueError("of the user"), RuntimeError("of the user"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, detector.waiting("all-gather", "A"):
            raise error
        assert caught.value is error
    assert detector.current is None


def test_errors_that_are_no_stall_pass_unchanged():
    run_ranks(_other_errors, 2)


class _CountingStore(dist.HashStore):
    def clone(self):
        return self


def test_ordinary_waits_do_not_use_the_store(monkeypatch):
    store = _CountingStore()
    detector = StallDetector(store, 0, 2)
    before = store.num_keys()

    class Gone:
        def __getattr__(self, name):
            raise AssertionError(f"the store was asked: {name}")

    monkeypatch.setattr(detector, "_store", Gone())
    looks = []
    monkeypatch.setattr(detector, "_look", lambda look=detector._look: looks.append(look()))
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        with detector.waiting("all-gather", "A"):
            time.sleep(0.01)
    assert len(looks) >= 2  # the thread has looked, and lives
    assert detector._thread.is_alive()
    assert store.num_keys() == before
    detector.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stalls"]


def test_one_rank_has_no_thread():
    detector = StallDetector(dist.HashStore(), 0, 1)
    with detector.waiting("all-gather", "A"):
        assert not [thread for thread in threading.enumerate() if thread.name == "stalls"]
    detector.leave("no reason")
    detector.close()


def test_without_a_process_group_there_is_no_detector():
    assert stall_detector() is None


def _forked():
    detector = _detector()
    child = os.fork()
    if child == 0:  # as a worker of a DataLoader
        detector.leave("the worker")
        detector.close()
        os._exit(0 if detector.find_reason() is None else 1)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return status, _caught("barrier", "", dist.barrier)[1], detector.find_reason()


def test_a_forked_process_does_not_speak_for_its_rank():
    assert run_ranks(_forked, 2) == [(0, None, None)] * 2


def _second_group(path):
    first = _different_places(["recv", "barrier"])[1]
    old = _detector()
    dist.destroy_process_group()
    assert stall_detector() is None
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, 2), rank=int(os.environ["RANK"]), world_size=2
    )
    assert _detector() is not old
    return first, _caught("barrier", "", dist.barrier)[1]


def test_a_new_process_group_starts_afresh(tmp_path):
    for first, second in run_ranks(_second_group, 2, str(tmp_path / "store")):
        assert "cannot end" in first
        assert second is None


def test_a_store_that_outlives_a_group_keeps_no_verdict_for_the_next():
    store = _CountingStore()
    first = StallDetector(store, 0, 2)
    first._store.set("verdict", "a circle")
    second = StallDetector(store, 0, 2)
    assert (first.find_reason(), second.find_reason()) == ("a circle", None)
    first.close()
    second.close()


# -- the proof, without processes -----------------------------------------------------------------


def _note(program, members, position):
    """What a rank writes that is in the wait at ``position`` of its own waits."""
    waits = [(name, ranks) for name, ranks in program if members in ranks][: position + 1]
    entered = {}
    for name, ranks in waits:
        key = f"{name}||{ranks}"
        entered[key] = entered.get(key, 0) + 1
    name, ranks = waits[-1]
    return Note(0, name, "", entered[f"{name}||{ranks}"], list(ranks), entered, "", "", "")


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_one_program_are_never_in_vain(seed):
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4, 8])
    groups = [list(range(world))]
    groups += [sorted(draw.sample(range(world), draw.randint(2, world))) for _ in range(3)]
    program = [(draw.choice("ABC"), draw.choice(groups)) for _ in range(30)]
    for _ in range(200):
        stuck = {}
        for rank in range(world):
            num_waits = sum(rank in ranks for _, ranks in program)
            if num_waits and draw.random() < 0.8:  # the others compute
                stuck[rank] = _note(program, rank, draw.randrange(num_waits))
        slowest = [rank for rank in range(world) if rank not in stuck]
        assert ranks_in_vain(stuck, set()) == set()
        if slowest and stuck:
            doomed = ranks_in_vain(stuck, {slowest[0]})
            assert all(rank in stuck for rank in doomed)


def test_a_rank_that_left_dooms_those_that_wait_for_it_through_others():
    program = [("A", [0, 1]), ("B", [1, 2]), ("C", [3, 4])]
    stuck = {0: _note(program, 0, 0), 1: _note(program[1:], 1, 0), 3: _note(program, 3, 0)}
    assert ranks_in_vain(stuck, set()) == set()
    assert ranks_in_vain(stuck, {2}) == {0, 1}


def test_many_ranks_are_told_in_one_line():
    program = [("all-gather", list(range(1024)))], [("barrier", list(range(1024)))]
    stuck = {rank: _note(program[rank == 7], rank, 0) for rank in range(1000)}
    assert ranks_in_vain(stuck, set()) == set(range(1000))
    text = tell_places(stuck, {}, set(range(1000, 1024)))
    assert "each of ranks 0, 1, 2, 3, 4, 5, 6, 8 and 991 more waits in all-gather number 1" in text
    assert "; rank 7 waits in barrier number 1;" in text
    assert "1006, 1007 and 16 more does not wait" in text
    assert len(text) < 500
