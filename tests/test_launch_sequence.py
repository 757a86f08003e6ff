"""Several jobs after another from one process, each with fit and test (case C57)."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fsdp_toy  # noqa: F401 (registers the strategy)
from lightning_fsdp_toy.processes import run_ranks
from tests.lit_helpers import LitStack, regression_data


def _fit_and_test(run_dir, lr):
    torch.manual_seed(0)
    module, data = LitStack(lr=lr), regression_data()
    trainer = L.Trainer(
        strategy="toy_fsdp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=run_dir, filename="end", save_last=False)],
    )
    trainer.fit(module, data)
    (result,) = trainer.test(module, data, verbose=False)
    return result["test/loss"], torch.distributed.get_world_size()


def test_three_jobs_in_a_row_fit_test_and_save(tmp_path):  # C57
    results = {}
    for lr in (0.0, 0.01, 0.1):
        run_dir = tmp_path / str(lr)
        results[lr] = run_ranks(
            _fit_and_test, run_dir, lr, num_ranks=2, log_dir=str(run_dir / "ranks")
        )
        assert (run_dir / "end.ckpt").is_file()
    for on_rank_0, on_rank_1 in results.values():
        assert on_rank_0 == on_rank_1
        assert on_rank_0[1] == 2
    losses = [ranks[0][0] for ranks in results.values()]
    assert len(set(losses)) == 3
    assert losses[1] < losses[0]
