"""Files of any age and place are read; a file in use may be replaced; a failed save leaves it."""

import pickle
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.checkpoint_files import StreamedCheckpointIO
from tests.core_helpers import assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks


def _trainer(directory, max_epochs=1, plugins=None, **options):
    strategy = ToyFSDPStrategy(**options)
    return make_trainer(strategy, directory, max_epochs=max_epochs, plugins=plugins)


def _module():
    torch.manual_seed(0)
    return LitStack()


def _save(directory):
    trainer = _trainer(directory)
    trainer.fit(_module(), regression_data())
    trainer.save_checkpoint(directory / "saved.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    run_ranks(_save, 2, directory)
    return directory / "saved.ckpt"


def _resume(path, directory, checkpoint_io=None):
    trainer = _trainer(directory, 2, checkpoint_io)
    module = _module()
    trainer.fit(module, regression_data(), ckpt_path=path)
    return full_parameters(module)


def test_files_are_those_of_lightnings_own_writer(saved, tmp_path):
    ours = StreamedCheckpointIO().load_checkpoint(saved, weights_only=False)
    TorchCheckpointIO().save_checkpoint(ours, tmp_path / "theirs.ckpt")
    assert (tmp_path / "theirs.ckpt").read_bytes() == saved.read_bytes()


def test_a_file_older_than_the_zip_format_is_read(saved, tmp_path):
    content = torch.load(saved, weights_only=False)
    torch.save(content, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(RuntimeError, match="mmap can only be used"):
        torch.load(tmp_path / "old.ckpt", mmap=True, weights_only=False)
    expected = run_ranks(_resume, 2, saved, tmp_path)[0]
    assert_equal(run_ranks(_resume, 2, tmp_path / "old.ckpt", tmp_path)[0], expected)


def test_a_checkpoint_io_of_the_users_is_used(saved, tmp_path):
    expected = run_ranks(_resume, 2, saved, tmp_path)[0]
    assert_equal(run_ranks(_resume, 2, saved, tmp_path, [TorchCheckpointIO()])[0], expected)
    strategy = ToyFSDPStrategy(checkpoint_io=TorchCheckpointIO())
    assert type(strategy.checkpoint_io) is TorchCheckpointIO


def _replace_while_running(path, directory):
    """Resume from a file and save over it; is it still mapped while training?"""
    trainer = _trainer(directory, 2)
    module = _module()
    mapped = []

    def on_train_start():
        mapped.append(path.name in Path("/proc/self/maps").read_text())

    module.on_train_start = on_train_start
    trainer.fit(module, regression_data(), ckpt_path=path)
    trainer.save_checkpoint(path)
    return mapped, full_parameters(module)


def test_a_resumed_run_lets_go_of_its_file_and_may_replace_it(saved, tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(saved.read_bytes())
    for mapped, weights in run_ranks(_replace_while_running, 2, path, tmp_path):
        assert mapped == [False]
        state = torch.load(path, weights_only=False)["state_dict"]
        assert_equal(weights, {name: state[name] for name in weights})
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []


def test_tensors_of_a_mapped_file_are_not_copied_into_memory_but_for_small_ones(tmp_path):
    path = tmp_path / "mapped.pt"
    large, small = torch.arange(2.0**20), torch.tensor(3.0)
    StreamedCheckpointIO().save_checkpoint(
        {"large": large, "entries": [{"small": small}, (small, large)]}, path
    )
    loaded = StreamedCheckpointIO().load_checkpoint(path)
    span = next(
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if path.name in line
    )

    def is_mapped(tensor):
        return span[0] <= tensor.data_ptr() < span[1]

    entry, pair = loaded["entries"]
    assert is_mapped(loaded["large"]) and is_mapped(pair[1])
    assert not is_mapped(entry["small"]) and not is_mapped(pair[0])
    assert torch.equal(loaded["large"], large) and torch.equal(pair[1], large)
    loaded["large"].zero_()  # private: the file does not change
    assert torch.equal(StreamedCheckpointIO().load_checkpoint(path)["large"], large)


def test_a_failed_save_leaves_the_older_file(tmp_path):
    path = tmp_path / "last.ckpt"
    StreamedCheckpointIO().save_checkpoint({"step": 1}, path)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        StreamedCheckpointIO().save_checkpoint({"step": 2, "bad": lambda: None}, path)
    assert StreamedCheckpointIO().load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def _remote(directory):
    """A file system of this process; so one rank."""
    trainer = _trainer(directory)
    module = _module()
    trainer.fit(module, regression_data())
    trainer.save_checkpoint("memory://bucket/a.ckpt")
    assert fsspec.filesystem("memory").exists("/bucket/a.ckpt")
    assert not list(directory.iterdir())
    expected = full_parameters(module)
    other = LitStack()
    _trainer(directory).validate(
        other, regression_data(), ckpt_path="memory://bucket/a.ckpt", verbose=False
    )
    assert_equal(full_parameters(other), expected)
    trainer.strategy.remove_checkpoint("memory://bucket/a.ckpt")
    assert not fsspec.filesystem("memory").exists("/bucket/a.ckpt")
    trainer.strategy.state_dict_type = "sharded"
    with pytest.raises(ValueError, match=r"directory that all ranks write, got memory://.*'full'"):
        trainer.save_checkpoint("memory://bucket/b.ckpt")


def test_remote_paths_are_used_as_given_and_refused_for_directories(tmp_path):
    run_ranks(_remote, 1, tmp_path)


def _save_in_the_background(form, directory):
    trainer = _trainer(directory, plugins=[AsyncCheckpointIO()], state_dict_type=form)
    module = _module()
    trainer.fit(module, regression_data())
    trainer.save_checkpoint(directory / form)
    expected = full_parameters(module)
    trainer.strategy.checkpoint_io.teardown()  # waits
    dist.barrier()
    other = LitStack()
    _trainer(directory).validate(
        other, regression_data(), ckpt_path=directory / form, verbose=False
    )
    assert_equal(full_parameters(other), expected)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints_may_be_written_in_the_background(tmp_path, form):
    run_ranks(_save_in_the_background, 2, form, tmp_path)
