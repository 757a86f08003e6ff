"""`toy_fsdp_notebook` in a kernel as Jupyter starts it."""

from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.test_start_methods import expected_weights

REPO = Path(__file__).parents[1]
SETUP = f"""
import sys
sys.path.insert(0, {str(REPO)!r})
import lightning as L
import torch
import lightning_fsdp_toy
from tests.lit_helpers import LitStack, regression_data

torch.set_num_threads(1)
torch.manual_seed(0)
module = LitStack()


def make_trainer(strategy):
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
"""
FIT = """
trainer = make_trainer("toy_fsdp_notebook")
trainer.fit(module, regression_data())
torch.save(module.state_dict(), "weights.pt")
trainer.callback_metrics["train/loss"].item() > 0
"""
AGAIN = """
[result] = make_trainer("toy_fsdp_notebook").validate(module, regression_data(), verbose=False)
sorted(result)
"""


def _execute(directory, *cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=90, kernel_name="python3", resources=resources).execute()
    return [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]


@pytest.mark.slow
def test_notebook_trains_and_validates_with_the_weights_of_one_process(tmp_path):
    assert _execute(tmp_path, SETUP, FIT, AGAIN) == ["True", "['val/loss']"]
    weights, expected = torch.load(tmp_path / "weights.pt"), expected_weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_rank_that_raises_shows_its_error_in_the_notebook(tmp_path):
    fail = """
def fail(batch, batch_idx):
    if batch_idx == 2 and module.global_rank == 1:
        raise KeyError("planted in a notebook")
    return LitStack.training_step(module, batch, batch_idx)

module.training_step = fail
make_trainer("toy_fsdp_notebook").fit(module, regression_data())
"""
    with pytest.raises(CellExecutionError, match="planted in a notebook"):
        _execute(tmp_path, SETUP, fail)


@pytest.mark.slow
def test_a_strategy_that_cannot_run_in_a_notebook_is_refused(tmp_path):
    with pytest.raises(CellExecutionError, match=r"strategy='toy_fsdp'\)` is not compatible"):
        _execute(tmp_path, SETUP, "make_trainer('toy_fsdp')")
