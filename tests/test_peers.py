"""The strategies this package is compared with: FSDP1 and FSDP2 under Lightning, on CPU too."""

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp_toy.peers import (
    CPUFSDPStrategy,
    apply_fsdp2,
    make_fsdp2_strategy,
    make_fsdp_strategy,
)
from tests.ranks import RankError, run_ranks

VOCAB, WIDTH, STEPS_PER_EPOCH = 11, 7, 4


class Block(nn.Module):
    """Two odd-sized linear layers and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)
        self.product_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.product_dtype = hidden.dtype
        return x + self.down(F.gelu(hidden))


class Net(nn.Module):
    """Blocks between a tied embedding and head, a constant buffer and one that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_calls += 1
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LitNet(L.LightningModule):
    """Next-token loss; keeps the losses of this rank in a list."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = Net()
        self.optimizer = optimizer
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            apply_fsdp2(self.net, self.device_mesh["data_parallel"])

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def make_loader() -> DataLoader[Any]:
    """Four batches per rank at any world size, the same data every time."""
    num_samples = 2 * STEPS_PER_EPOCH * dist.get_world_size()
    tokens = torch.randint(VOCAB, (num_samples, 6), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)


def make_module(optimizer: str) -> LitNet:
    """A module whose weights differ between ranks before the strategy makes them equal."""
    torch.manual_seed(100 + dist.get_rank())
    return LitNet(optimizer)


def make_trainer(strategy: str, max_epochs: int, **kwargs: Any) -> L.Trainer:
    """A quiet Trainer on the ranks of this process group."""
    world_size = dist.get_world_size()
    precision = kwargs.pop("precision", "32-true")
    makers = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: make_fsdp_strategy("cpu", **kwargs),
        "fsdp2": lambda: make_fsdp2_strategy(world_size, **kwargs),
    }
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=makers[strategy](),
        precision=precision,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit_evaluate_save(
    strategy: str, optimizer: str, path: Path, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Fit an epoch and save, evaluate with the same Trainer, fit again with another one."""
    module = make_module(optimizer)
    trainer = make_trainer(strategy, 1, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    trainer.save_checkpoint(path)
    results: dict[str, Any] = {
        "val": trainer.validate(module, make_loader(), verbose=False)[0]["val/loss"],
        "test": trainer.test(module, make_loader(), verbose=False)[0]["test/loss"],
        "logits": torch.cat(trainer.predict(module, make_loader())),
    }
    trainer = make_trainer(strategy, 1, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    return results | {"losses": torch.tensor(module.losses)}


def resume(strategy: str, optimizer: str, path: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Evaluate a checkpoint in a Trainer that never fitted, then train another epoch from it."""
    module = make_module(optimizer)
    trainer = make_trainer(strategy, 1, **kwargs)
    validated = trainer.validate(module, make_loader(), ckpt_path=path, verbose=False)
    module = make_module(optimizer)
    trainer = make_trainer(strategy, 2, **kwargs)
    trainer.fit(module, make_loader(), make_loader(), ckpt_path=path)
    return {"val": validated[0]["val/loss"], "losses": torch.tensor(module.losses)}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run DDP once per world size and optimizer: results, results after resuming, file."""

    @cache
    def run(world_size: int, optimizer: str) -> tuple[Any, Any, Path]:
        path = tmp_path_factory.mktemp("ddp") / "ddp.ckpt"
        results = run_ranks(fit_evaluate_save, world_size, "ddp", optimizer, path, {})
        return results, run_ranks(resume, world_size, "ddp", optimizer, path, {}), path

    return run


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_evaluation_and_resume_match_ddp(
    strategy: str, world_size: int, ddp: Any, tmp_path: Path
) -> None:
    """All ranks start from rank 0's weights, or the losses would differ from the first step."""
    results, resumed, ddp_path = ddp(world_size, "sgd")
    path = tmp_path / "peer.ckpt"
    assert_close(run_ranks(fit_evaluate_save, world_size, strategy, "sgd", path, {}), results)
    assert_checkpoints_match(path, ddp_path)
    assert_close(run_ranks(resume, world_size, strategy, "sgd", path, {}), resumed)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_checkpoints_with_adam_moments_cross_between_ddp_and_peer(
    strategy: str, ddp: Any, tmp_path: Path
) -> None:
    results, resumed, ddp_path = ddp(2, "adamw")
    path = tmp_path / "peer.ckpt"
    assert_close(run_ranks(fit_evaluate_save, 2, strategy, "adamw", path, {}), results)
    assert_checkpoints_match(path, ddp_path)
    assert_close(run_ranks(resume, 2, strategy, "adamw", ddp_path, {}), resumed)
    assert_close(run_ranks(resume, 2, "ddp", "adamw", path, {}), resumed)


def assert_checkpoints_match(path: Path, reference_path: Path) -> None:
    """Same keys, shapes, dtypes and values of weights and optimizer state, plain tensors."""
    checkpoint = torch.load(path, weights_only=True)
    reference = torch.load(reference_path, weights_only=True)
    for weights in (checkpoint["state_dict"], reference["state_dict"]):
        assert {type(value) for value in weights.values()} == {torch.Tensor}
    assert_close(dict(checkpoint["state_dict"]), dict(reference["state_dict"]))
    (optimizer,), (reference_optimizer,) = (
        checkpoint["optimizer_states"],
        reference["optimizer_states"],
    )
    assert optimizer["param_groups"] == reference_optimizer["param_groups"]
    assert_close(optimizer["state"], reference_optimizer["state"])
    sizes = [path.stat().st_size, reference_path.stat().st_size]
    assert sizes[0] < 1.2 * sizes[1], f"unused storage was saved: {sizes}"


def test_fsdp_sharded_checkpoint_resumes(ddp: Any, tmp_path: Path) -> None:
    results, resumed, _ = ddp(2, "adamw")
    path = tmp_path / "sharded"
    kwargs = {"state_dict_type": "sharded"}
    assert_close(run_ranks(fit_evaluate_save, 2, "fsdp", "adamw", path, kwargs), results)
    assert sorted(file.name for file in path.iterdir())[-2:] == ["__1_0.distcp", "meta.pt"]
    assert_close(run_ranks(resume, 2, "fsdp", "adamw", path, kwargs), resumed)


def test_fsdp_hybrid_shard_matches_ddp(ddp: Any, tmp_path: Path) -> None:
    results, *_ = ddp(4, "sgd")
    kwargs = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    path = tmp_path / "hybrid.ckpt"
    assert_close(run_ranks(fit_evaluate_save, 4, "fsdp", "sgd", path, kwargs), results)


def fit_with_cpu_offload() -> tuple[torch.Tensor, list[str]]:
    """Fit with an option that means nothing on CPU."""
    module = make_module("sgd")
    with warnings.catch_warnings(record=True) as caught:
        make_trainer("fsdp", 1, cpu_offload=True).fit(module, make_loader(), make_loader())
    return torch.tensor(module.losses), [str(warning.message) for warning in caught]


def test_fsdp_on_cpu_warns_that_cpu_offload_has_no_effect(ddp: Any) -> None:
    results, *_ = ddp(2, "sgd")
    losses, messages = run_ranks(fit_with_cpu_offload, 2)[0]
    assert_close(losses, results[0]["losses"][:STEPS_PER_EPOCH])
    assert any("`strategy.cpu_offload` has no effect on CPU" in text for text in messages)


def changed_after_training_on() -> tuple[int, list[Any]]:
    """Gather the full state under FSDP1, train on, and name the gathered tensors that changed."""
    module = make_module("adamw")
    trainer = make_trainer("fsdp", 1)
    trainer.fit(module, make_loader(), make_loader())
    weights = trainer.strategy.lightning_module_state_dict()
    moments = trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state", {})
    gathered = dict(weights) | {
        f"{index}.{name}": value
        for index, state in moments.items()
        for name, value in state.items()
    }
    before = copy.deepcopy(gathered)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(), make_loader())
    return len(gathered), [key for key in gathered if not gathered[key].equal(before[key])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_tensors_do_not_change_when_training_goes_on(world_size: int) -> None:
    """C04: rank 0 gets 13 weights and buffers and 10 x 3 optimizer tensors, others nothing."""
    (num_gathered, changed), *others = run_ranks(changed_after_training_on, world_size)
    assert (num_gathered, changed) == (13 + 10 * 3, [])
    assert others == [(0, [])] * (world_size - 1)


class HandWrappedLitNet(LitNet):
    """Wraps its network itself, as `configure_model` may under `FSDPStrategy`."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FullyShardedDataParallel):
            self.net = wrap(self.net)


def fit_hand_wrapped() -> tuple[torch.Tensor, list[str], torch.Tensor]:
    """Train equal models with and without wrapping by hand."""
    losses = []
    for cls in (HandWrappedLitNet, LitNet):
        torch.manual_seed(3)
        module = cls()
        trainer = make_trainer("fsdp", 1)
        trainer.fit(module, make_loader(), make_loader())
        losses.append(torch.tensor(module.losses))
        if cls is HandWrappedLitNet:
            keys = list(trainer.strategy.lightning_module_state_dict())
    return losses[0], keys, losses[1]


def test_fsdp_takes_modules_wrapped_by_hand() -> None:
    losses, keys, expected = run_ranks(fit_hand_wrapped, 2)[0]
    assert_close(losses, expected)
    assert keys == list(LitNet().state_dict())


def shards_and_dtypes(strategy: str, precision: str) -> dict[str, Any]:
    """Fit, and describe what this rank holds."""
    module = make_module("sgd")
    trainer = make_trainer(strategy, 1, precision=precision)
    trainer.fit(module, make_loader())  # FSDP2 keeps its root unsharded after a validation
    parameters = list(module.parameters())
    state = trainer.strategy.lightning_module_state_dict()
    return {
        "numel": sum(
            p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters
        ),
        "dtypes": {p.dtype for p in parameters},
        "saved_dtypes": {value.dtype for value in state.values() if value.is_floating_point()},
        "product_dtypes": [block.product_dtype for block in module.net.layers],
        "num_fsdp1_units": sum(isinstance(m, FullyShardedDataParallel) for m in module.modules()),
        "loss": module.losses[-1],
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_fp32_shards_and_the_compute_dtype_of_the_precision(strategy: str, precision: str) -> None:
    """C03: `bf16-mixed` computes in bfloat16 on the CPU; masters and files stay fp32."""
    ranks = run_ranks(shards_and_dtypes, 2, strategy, precision)
    num_parameters = sum(p.numel() for p in Net().parameters())
    assert num_parameters <= sum(rank["numel"] for rank in ranks) < num_parameters + 16
    for rank in ranks:
        assert rank["numel"] < 0.6 * num_parameters
        assert rank["dtypes"] == {torch.float32}
        assert rank["num_fsdp1_units"] == (3 if strategy == "fsdp" else 0)  # the root is outside
        compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        assert rank["product_dtypes"] == [compute_dtype] * 3
    assert ranks[0]["saved_dtypes"] == {torch.float32}


def fit_with(strategy: str, precision: str, is_meta: bool) -> None:
    """Fit with a setting that should be refused."""
    with torch.device("meta" if is_meta else "cpu"):
        module = LitNet()
    make_trainer(strategy, 1, precision=precision).fit(module, make_loader(), make_loader())


def test_fsdp_on_cpu_refuses_16_mixed() -> None:
    with pytest.raises(RankError, match=r"ValueError: `precision='16-mixed'` needs a GPU"):
        run_ranks(fit_with, 1, "fsdp", "16-mixed", False)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_model_without_weights_is_refused(strategy: str) -> None:
    with pytest.raises(RankError, match=r"ValueError: `.*` is on the meta device"):
        run_ranks(fit_with, 1, strategy, "32-true", True)


def test_the_accelerator_decides_on_the_class_of_fsdp() -> None:
    assert type(make_fsdp_strategy("cpu")) is CPUFSDPStrategy
    assert type(make_fsdp_strategy("cuda")) is FSDPStrategy
    assert make_fsdp_strategy("cuda").kwargs["sync_module_states"] is True
    assert "auto_wrap_policy" not in make_fsdp_strategy("cpu", auto_wrap_policy=None).kwargs
    assert type(make_fsdp2_strategy(2)) is ModelParallelStrategy
    with pytest.raises(ValueError, match=r"`accelerator` cpu, cuda, gpu or auto, got `tpu`"):
        make_fsdp_strategy("tpu")


def test_a_wrap_policy_names_a_class_that_the_model_lacks() -> None:
    policy = make_fsdp_strategy("cpu", auto_wrap_policy=["Missing"]).kwargs["auto_wrap_policy"]
    with pytest.raises(ValueError, match="names 'Missing'"):
        policy._run_policy(LitNet(), set(), {})
