"""The data modules: text and its split, dealing over ranks, errors."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_fsdp_toy.data import (
    MicroBatchDataModule,
    MicroBatchLoader,
    SyntheticDataModule,
    TextDataModule,
    derive_seed,
)
from lightning_fsdp_toy.data.corpus import python_sources
from lightning_fsdp_toy.data.progress import align_progress

TEXT = b"".join(b"line %d of the text\n" % i for i in range(500))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def attach(
    data: MicroBatchDataModule, world_size: int = 1, rank: int = 0, accumulate: int = 1
) -> MicroBatchDataModule:
    """Let the data module see a Trainer of the given size."""
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        world_size=world_size, global_rank=rank, accumulate_grad_batches=accumulate, training=False
    )
    data.setup()
    return data


def batches_of_all_ranks(make, world_size: int, accumulate: int, epoch: int, stage: str) -> list:
    """Return the micro-batches of an epoch in global order, as nested lists of tokens."""
    per_rank = []
    for rank in range(world_size):
        data = attach(make(), world_size, rank, accumulate)
        loader = data.train_dataloader() if stage == "train" else data.val_dataloader()
        loader.sampler.set_epoch(epoch)
        per_rank.append([tokens.tolist() for tokens, _ in loader])
        assert len(per_rank[-1]) == len(loader)
    assert len({len(batches) for batches in per_rank}) == 1
    return [batch for turn in zip(*per_rank, strict=True) for batch in turn]


def test_default_text_is_the_standard_library_without_tests_and_packages() -> None:
    paths = python_sources()
    assert {"functools.py", "ast.py", "textwrap.py"} <= {path.name for path in paths}
    assert paths == sorted(paths)
    root = Path(os.__file__).parent
    folders = {part for path in paths for part in path.relative_to(root).parts[:-1]}
    assert folders & {"json", "asyncio"} and not folders & {"test", "tests", "site-packages"}
    data = TextDataModule(seq_len=64, val_fraction=0.01)
    data.setup()
    first = paths[0].read_bytes()
    num_train = len(first) - int(len(first) * 0.01)
    assert data.train_set.text.numpy().tobytes()[:num_train] == first[:num_train]
    assert len(data.train_set.text) + len(data.val_set.text) == 2**21  # the default `max_bytes`


def test_targets_are_the_next_bytes_and_windows_do_not_overlap(text_file) -> None:
    data = TextDataModule(str(text_file), batch_size=3, seq_len=7, val_fraction=0.5)
    data.setup()
    tokens, targets = data.train_set[4]
    assert bytes(tokens.tolist()) == TEXT[28:35]
    assert bytes(targets.tolist()) == TEXT[29:36]
    assert tokens.dtype == targets.dtype == torch.int64
    last, _ = data.train_set[len(data.train_set) - 1]
    assert last.shape == (7,)


def test_every_file_gives_its_end_to_validation(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 90 + b"A" * 10)
    (tmp_path / "b.txt").write_bytes(b"b" * 180 + b"B" * 20)
    data = TextDataModule(str(tmp_path / "*.txt"), seq_len=4, val_fraction=0.1)
    data.setup()
    assert data.train_set.text.numpy().tobytes() == b"a" * 90 + b"b" * 180
    assert data.val_set.text.numpy().tobytes() == b"A" * 10 + b"B" * 20


def test_max_bytes_caps_the_text(text_file) -> None:
    data = TextDataModule([str(text_file)], seq_len=4, val_fraction=0.1, max_bytes=1000)
    data.setup()
    assert (
        data.train_set.text.numpy().tobytes() + data.val_set.text.numpy().tobytes() == TEXT[:1000]
    )


def test_files_are_taken_once_in_the_order_given_and_globs_sorted(tmp_path, monkeypatch) -> None:
    for name in ("c.txt", "a.txt", "sub/b.txt", "sub/empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    monkeypatch.chdir(tmp_path)
    data = TextDataModule(["c.txt", "**/*.txt"])
    assert data.paths == [tmp_path / name for name in ("c.txt", "a.txt", "sub/b.txt")]


@pytest.mark.parametrize("stage", ["train", "val"])
@pytest.mark.parametrize("kind", ["text", "synthetic"])
def test_same_global_batch_means_same_data_at_any_world_size(kind, stage, text_file) -> None:
    def make() -> MicroBatchDataModule:
        if kind == "text":
            return TextDataModule(str(text_file), batch_size=3, seq_len=16, val_fraction=0.1)
        return SyntheticDataModule(vocab_size=99, batch_size=3, seq_len=4, num_batches=50)

    for epoch in (0, 1):
        one = batches_of_all_ranks(make, 1, 4, epoch, stage)
        assert len(one) > 4 and len(one) % 4 == 0
        for world_size, accumulate in ((2, 2), (4, 1)):
            assert batches_of_all_ranks(make, world_size, accumulate, epoch, stage) == one
    assert (
        batches_of_all_ranks(make, 3, 1, 1, "train")[:9]
        == batches_of_all_ranks(make, 1, 1, 1, "train")[:9]
    )


def test_each_epoch_has_every_sample_once_and_its_own_order() -> None:
    def make() -> MicroBatchDataModule:
        return SyntheticDataModule(vocab_size=1000, batch_size=1, seq_len=4, num_batches=41)

    first, second = (batches_of_all_ranks(make, 2, 2, epoch, "train") for epoch in (0, 1))
    assert first != second
    for epoch in (first, second):
        assert len({str(batch) for batch in epoch}) == len(epoch) == 40  # an odd one is left out
    assert len({str(batch) for batch in first + second}) == 41


def test_validation_has_16_micro_batches_or_a_multiple_of_the_ranks(text_file) -> None:
    def val(num_windows: int, world_size: int):
        fraction = (16 * num_windows + 1.5) / len(TEXT)
        data = TextDataModule(str(text_file), batch_size=4, seq_len=16, val_fraction=fraction)
        loader = attach(data, world_size).val_dataloader()
        assert len(data.val_set) == num_windows
        return len(loader) * world_size, loader.batch_size

    assert [val(200, w) for w in (1, 2, 4, 16)] == [(48, 4)] * 4
    assert val(200, 3) == (48, 4)
    assert [val(40, w) for w in (1, 2, 4)] == [(16, 2)] * 3
    assert val(5, 4) == (4, 1)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 8), (2, 8), (4, 8), (3, 6)])
def test_validation_takes_as_many_micro_batches_on_any_number_of_ranks(
    world_size: int, expected: int
) -> None:
    data = SyntheticDataModule(vocab_size=9, batch_size=2, seq_len=4, val_batches=8)
    assert len(attach(data, world_size).val_dataloader()) * world_size == expected


def test_fixed_batch_is_the_same_everywhere() -> None:
    def make() -> MicroBatchDataModule:
        return SyntheticDataModule(99, batch_size=2, seq_len=4, num_batches=8, fixed_batch=True)

    batches = [
        batch
        for stage in ("train", "val")
        for world_size in (1, 2)
        for batch in batches_of_all_ranks(make, world_size, 1, 1, stage)
    ]
    assert batches == [batches[0]] * len(batches)
    assert batches[0][0] != batches[0][1]


def test_synthetic_tokens_depend_on_the_seed_only() -> None:
    def first(seed: int) -> list:
        data = attach(SyntheticDataModule(50, batch_size=2, seq_len=64, num_batches=4, seed=seed))
        tokens, targets = data.train_set[3]
        assert torch.equal(tokens[1:], targets[:-1])
        assert 0 <= tokens.min() and tokens.max() < 50
        assert not torch.equal(tokens, data.val_set[3][0])
        return tokens.tolist()

    assert first(0) == first(0) != first(1)


def test_loader_with_workers_starts_with_the_epoch_set_after_its_iterator_was_made() -> None:
    data = attach(SyntheticDataModule(99, batch_size=2, seq_len=4, num_batches=8, num_workers=1))
    loader = data.train_dataloader()
    iterator = iter(loader)
    loader.sampler.set_epoch(3)
    seen = [tokens.tolist() for tokens, _ in iterator]
    other = attach(SyntheticDataModule(99, batch_size=2, seq_len=4, num_batches=8))
    expected = other.train_dataloader()
    expected.sampler.set_epoch(3)
    assert seen == [tokens.tolist() for tokens, _ in expected]


def test_loader_warns_when_a_run_resumes_on_other_data(caplog) -> None:
    def loader(batch_size: int) -> MicroBatchLoader:
        return attach(SyntheticDataModule(99, batch_size, 4, num_batches=8)).train_dataloader()

    loader(2).load_state_dict(loader(2).state_dict())
    assert not caplog.records
    loader(4).load_state_dict(loader(2).state_dict())
    assert "num_samples 16 -> 32, batch_size 2 -> 4" in caplog.text


def test_neighbouring_seeds_are_unrelated() -> None:
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert max(seeds) < 2**32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": "missing.txt"}, r"`data.files`: 'missing.txt' does not exist"),
        ({"files": ["*.none"]}, r"`data.files`: '\*.none' matches no non-empty file"),
        ({"files": "empty.txt"}, r"`data.files`: 'empty.txt' is empty"),
        ({"files": "empty*"}, r"`data.files`: 'empty\*' matches no non-empty file"),
        ({"files": "."}, r"`data.files`: '.' is a folder: add a glob"),
        ({"files": []}, r"`data.files` is an empty list"),
        ({"batch_size": 0}, r"`data.batch_size` must be at least 1, got 0"),
        ({"seq_len": -3}, r"`data.seq_len` must be at least 1, got -3"),
        ({"num_workers": -1}, r"`data.num_workers` must be at least 0, got -1"),
        ({"max_bytes": 0}, r"`data.max_bytes` must be at least 1, got 0"),
        ({"val_fraction": 1}, r"`data.val_fraction` must be between 0 and 1, got 1"),
    ],
)
def test_bad_text_arguments_are_named_in_one_line(
    arguments, message, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=message) as error:
        TextDataModule(**arguments)
    assert "\n" not in str(error.value)


def test_text_too_short_for_one_step_or_one_validation_names_the_remedy(tmp_path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    path = str(tmp_path / "short.txt")
    data = attach(TextDataModule(path, 4, seq_len=10), world_size=2, accumulate=2)
    with pytest.raises(ValueError, match=r"`data.files` .* are 9 samples .* takes 16 .*: give"):
        data.train_dataloader()
    with pytest.raises(ValueError, match=r"validation has 0 samples .*`data.val_fraction`"):
        data.val_dataloader()
    few = attach(SyntheticDataModule(num_batches=1), world_size=2)
    with pytest.raises(ValueError, match=r"`data.num_batches`=1 micro-batches are 4 .* takes 8"):
        few.train_dataloader()


def progress_of(epoch: tuple[int, ...], batch: tuple[int, ...], earlier: int, is_last: bool):
    """Build the part of a Lightning checkpoint that `align_progress` reads."""
    names = ("ready", "started", "processed", "completed")
    current = dict(zip(names, batch, strict=True))
    counts = dict(zip(names, epoch, strict=True))
    return {
        "epoch_progress": {"current": dict(counts), "total": dict(counts)},
        "epoch_loop.batch_progress": {
            "current": current,
            "total": {name: value + earlier for name, value in current.items()},
            "is_last_batch": is_last,
        },
        "epoch_loop.state_dict": {"_batches_that_stepped": 5},
    }


def align(state, saved, now, num_batches) -> dict:
    keys = ("saved_world_size", "saved_accumulate", "world_size", "accumulate")
    align_progress(state, **dict(zip(keys, (*saved, *now), strict=True)), num_batches=num_batches)
    return state


def test_progress_of_a_complete_step_is_left_alone() -> None:
    arguments = (1, 1, 0, 0), (6, 6, 6, 5), 0, False
    assert align(progress_of(*arguments), (2, 2), (2, 2), 20) == progress_of(*arguments)


def test_progress_is_counted_in_micro_batches_of_the_new_world_size() -> None:
    state = progress_of((2, 2, 1, 1), (6, 6, 6, 6), 20, False)  # 12 of 40 micro-batches
    align(state, (2, 2), (4, 1), 10)
    assert state == progress_of((2, 2, 1, 1), (3, 3, 3, 2), 10, False)


def test_progress_goes_back_to_a_whole_step_of_the_new_size(caplog) -> None:
    state = align(progress_of((1, 1, 0, 0), (4, 4, 4, 3), 0, False), (2, 2), (3, 1), 13)
    assert state["epoch_loop.batch_progress"]["current"]["ready"] == 2  # 8 -> 6 micro-batches
    assert "the last 2 micro-batches before the checkpoint are trained on again" in caplog.text


def test_progress_near_the_end_of_a_shorter_epoch_means_its_end() -> None:
    state = align(progress_of((1, 1, 0, 0), (10, 10, 10, 9), 0, False), (1, 1), (1, 4), 2)
    assert state["epoch_loop.batch_progress"]["is_last_batch"]
    assert state["epoch_loop.batch_progress"]["current"]["ready"] == 2
