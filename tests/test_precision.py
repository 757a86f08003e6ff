"""Precisions, loss scaling and gradient clipping: C03, C05, C25, C33, C46, C52."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.conversion import convert
from lightning_fsdp_toy.precision import ToyFSDPMixedPrecision, to_toy_precision
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root
from lightning_fsdp_toy.sharding.fp32_vectors import give_fp32_vectors, take_back_fp32_vectors
from lightning_fsdp_toy.sharding.grad_scaler import ShardedGradScaler
from lightning_fsdp_toy.sharding.optim import clip_grad_norm_
from tests.core_helpers import Stack, assert_equal, full_parameters, make_batches, mse_loss
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import RankError, run_ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# -- which dtype is where -----------------------------------------------------------------------

#       shard, weight in forward, gradient shard, moments, file, batch
TABLE = {
    "32-true": (FP32, FP32, FP32, FP32, FP32, FP32),
    "bf16-mixed": (FP32, BF16, FP32, FP32, FP32, FP32),
    "bf16-true": (BF16, BF16, BF16, BF16, BF16, BF16),
    "16-true": (FP16, FP16, FP16, FP16, FP16, FP16),
    "64-true": (FP64, FP64, FP64, FP64, FP64, FP64),
}


class Watched(nn.Module):
    """Remembers in which dtype its weight and its input came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.register_buffer("rotation", torch.ones(3, dtype=torch.complex64) * 1j)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return F.linear(x, self.weight)


def _watched() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Watched(), nn.ReLU(), Watched(), nn.Linear(7, 3))


class LitWatched(LitStack):
    def __init__(self) -> None:
        super().__init__(_watched())
        self.mean = MeanMetric()
        self.batch_dtypes: list[torch.dtype] = []
        self.gradient_dtypes: set[torch.dtype] = set()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.batch_dtypes.append(batch[0].dtype)
        self.mean.update(batch[0].float().mean())
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, _: Any) -> None:
        self.gradient_dtypes |= {p.grad.dtype for p in self.parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)  # fp16 has no 1e-8


def _only(dtypes: Any) -> torch.dtype:
    (dtype,) = set(dtypes)
    return dtype


def _where_is_which_dtype(precision: str, directory: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = LitWatched()
    trainer = make_trainer("toy_fsdp", directory, precision=precision)
    trainer.fit(module, regression_data(16, 4))
    trainer.save_checkpoint(directory / "last.ckpt")
    assert module.net[1].rotation.dtype == torch.complex64
    assert torch.equal(module.net[1].rotation, torch.ones(3) * 1j)
    assert module.net[1].count.dtype == torch.int64
    assert _only(v.dtype for v in module.mean.metric_state.values()) == FP32
    state = trainer.optimizers[0].state.values()
    saved = torch.load(directory / "last.ckpt", weights_only=False)["state_dict"]
    return (
        _only(p.dtype for p in module.parameters()),
        _only(module.net[1].seen + module.net[3].seen),
        _only(module.gradient_dtypes),
        _only(e[key].dtype for e in state for key in ("exp_avg", "exp_avg_sq")),
        _only(v.dtype for k, v in saved.items() if "rotation" not in k and "count" not in k),
        _only(module.batch_dtypes),
        full_parameters(module),
        module.dtype,
    )


@pytest.mark.parametrize("precision", TABLE)
def test_dtypes_of_shards_weights_gradients_moments_and_file(tmp_path, precision):  # C25
    for *dtypes, weights, module_dtype in run_ranks(_where_is_which_dtype, 2, precision, tmp_path):
        assert tuple(dtypes) == TABLE[precision]
        assert module_dtype == TABLE[precision][0]
        assert all(weight.isfinite().all() for weight in weights.values())


class LitMeta(LitStack):
    """Built on the meta device in `configure_model`, so converted there."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(nn.Identity())
        self.expected = dtype

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(5, 7, dtype=FP32), nn.Linear(7, 3, dtype=FP32))

    def on_fit_start(self) -> None:
        assert {p.dtype for p in self.parameters()} == {self.expected}
        assert {p.device.type for p in self.parameters()} == {"cpu"}


def _fit_meta(precision: str, dtype: torch.dtype, directory: Any) -> None:
    module = LitMeta(dtype)
    make_trainer("toy_fsdp", directory, precision=precision).fit(module, regression_data(16, 4))
    assert all(torch.isfinite(torch.tensor(loss)) for loss in module.losses)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", BF16), ("64-true", FP64)])
def test_models_on_the_meta_device_are_converted(tmp_path, precision, dtype):
    run_ranks(_fit_meta, 2, precision, dtype, tmp_path)


def _one_model_two_precisions(directory: Any) -> None:
    torch.manual_seed(0)
    module, data = LitStack(), regression_data(16, 4)
    make_trainer("toy_fsdp", directory).fit(module, data)
    whole = {name: value.bfloat16() for name, value in full_parameters(module).items()}
    trainer = make_trainer(
        "toy_fsdp", directory, precision="bf16-true", max_epochs=None, max_steps=0
    )
    trainer.fit(module, data)
    assert_equal(full_parameters(module), whole)
    make_trainer("toy_fsdp", directory, precision="bf16-true").fit(module, data)
    assert {p.dtype for p in module.parameters()} == {BF16}
    make_trainer("toy_fsdp", directory, precision="bf16-mixed").fit(module, data)


def test_a_sharded_model_may_be_trained_on_in_another_precision(tmp_path):
    run_ranks(_one_model_two_precisions, 2, tmp_path)


def test_double_precision_is_more_precise_than_single(tmp_path):
    by_flag = {
        flag: run_ranks(_where_is_which_dtype, 2, flag, tmp_path)[0][-2]
        for flag in ("32-true", "64-true")
    }
    for name, value in by_flag["64-true"].items():
        assert not torch.equal(value, value.float().double())
        torch.testing.assert_close(by_flag["32-true"][name], value.float(), rtol=1e-3, atol=1e-4)


# -- translation and refusals -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "precision", "policy"),
    [
        (Precision(), "32-true", None),
        (HalfPrecision("bf16-true"), "bf16-true", None),
        (HalfPrecision("16-true"), "16-true", None),
        (DoublePrecision(), "64-true", None),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", BF16),
        (FSDPPrecision("bf16-mixed"), "bf16-mixed", BF16),
        (FSDPPrecision("bf16-true"), "bf16-true", None),
        (FSDPPrecision("32-true"), "32-true", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Precision) else str(value),
)
def test_precision_plugins_are_translated(plugin, precision, policy):
    translated = to_toy_precision(plugin)
    assert translated.precision == precision
    assert to_toy_precision(translated) is translated
    expected = policy and MixedPrecisionPolicy(param_dtype=policy, cast_forward_inputs=False)
    assert translated.mixed_precision_policy == expected
    if policy is not None:
        assert translated.device == getattr(plugin, "device", "cuda")
        assert translated.scaler is None


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA")
def test_16_mixed_brings_a_scaler_that_agrees():
    plugin = to_toy_precision(MixedPrecision("16-mixed", "cuda"))
    assert plugin.mixed_precision_policy.param_dtype == FP16
    assert type(plugin.scaler) is ShardedGradScaler
    assert plugin.scaler.is_enabled() == torch.cuda.is_available()


def test_the_settings_of_a_given_scaler_are_kept():
    given = torch.amp.GradScaler("cpu", 2.0**9, 3.0, 0.25, 7)
    given.load_state_dict(given.state_dict() | {"scale": 96.0, "_growth_tracker": 5})
    taken = ShardedGradScaler.like(given)
    assert taken.state_dict() == given.state_dict()
    assert taken.get_scale() == 96.0
    assert ShardedGradScaler.like(taken) is taken
    assert not ShardedGradScaler.like(torch.amp.GradScaler("cpu", enabled=False)).is_enabled()
    plugin = to_toy_precision(MixedPrecision("16-mixed", "cuda", given))
    assert type(plugin.scaler) is ShardedGradScaler
    assert plugin.scaler.state_dict() == given.state_dict()


class Rounded(HalfPrecision):
    """A user's own."""


def test_16_mixed_on_cpu_is_refused_with_the_remedy():
    message = r"does not support `precision='16-mixed'` on CPU: use precision='bf16-mixed' or '32"
    plugin = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ValueError, match=message):
        L.Trainer(strategy="toy_fsdp", accelerator="cpu", devices=1, plugins=plugin)


@pytest.mark.parametrize(
    "kind", [TransformerEnginePrecision, BitsandbytesPrecision, DeepSpeedPrecision, Rounded]
)
def test_a_plugin_that_cannot_be_translated_is_refused_by_name(kind):
    message = rf"precision plugin `{kind.__name__}`. Use one of precision='32-true', 'bf16-mixed'"
    with pytest.raises(ValueError, match=message):
        to_toy_precision(kind.__new__(kind))  # the packages they need are not installed


def _fit_with_plugin(plugin: Any, directory: Any) -> None:
    trainer = make_trainer("toy_fsdp", directory, plugins=plugin)
    trainer.fit(LitStack(), regression_data(8, 4))


def test_autocast_on_another_device_than_the_ranks_is_refused(tmp_path):
    message = r"autocasts on 'cuda', but ranks run on 'cpu'. Use Trainer\(precision='bf16-mixed'\)"
    with pytest.raises(RankError, match=message):
        run_ranks(_fit_with_plugin, 1, MixedPrecision("bf16-mixed", "cuda"), tmp_path)
    run_ranks(_fit_with_plugin, 1, MixedPrecision("bf16-mixed", "cpu"), tmp_path)


# -- norms under autocast, buffers --------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.BatchNorm1d(8)],
    ids=["layer", "group", "batch"],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norms_with_low_precision_weights_work_under_autocast(make, dtype):
    norm = make()
    norm.weight.data.uniform_(0.5, 1.5)
    model = nn.Sequential(norm)
    x = torch.randn(4, 8, dtype=dtype)
    with torch.autocast("cpu", BF16):
        expected = model(x)
    for param in norm.parameters():
        param.data = param.data.bfloat16()
    give_fp32_vectors(model)
    with torch.autocast("cpu", BF16):
        out = model(x)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert {p.grad.dtype for p in norm.parameters()} == {BF16}
    assert all(isinstance(p, nn.Parameter) for p in norm._parameters.values())
    assert all(buffer.dtype == FP32 for buffer in norm.buffers() if buffer.is_floating_point())
    take_back_fp32_vectors(model)
    assert "forward" not in norm.__dict__


def test_conversion_keeps_identity_metrics_and_other_kinds_of_tensors():
    model = nn.Sequential(Watched(), MeanMetric())
    weight = model[0].weight
    convert(model, BF16)
    assert model[0].weight is weight
    assert weight.dtype == BF16
    assert model[0].rotation.dtype == torch.complex64
    assert model[1].metric_state["mean_value"].dtype == FP32


class Normed(LitStack):
    """BatchNorm, and a LayerNorm that meets fp32 input under autocast."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        super().__init__(net)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log(f"val/loss_{self.global_rank}", loss)  # both see the same data


def _fit_normed(precision: str, directory: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = Normed()
    validation = regression_data(8, 4)
    trainer = make_trainer(
        "toy_fsdp", directory, precision=precision, use_distributed_sampler=False
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(20, 5, generator=generator), torch.randn(20, 3))
    trainer.fit(module, DataLoader(data, 4), validation)
    assert trainer.global_step == 5
    path = directory / "last.ckpt"
    trainer.save_checkpoint(path)
    (result,) = trainer.validate(module, validation, verbose=False)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    saved = torch.load(path, weights_only=False)["state_dict"]
    resumed = Normed()
    trainer = make_trainer(
        "toy_fsdp", directory, precision=precision, use_distributed_sampler=False
    )
    (again,) = trainer.validate(resumed, validation, ckpt_path=path, verbose=False)
    assert again.popitem()[1] == pytest.approx(result[f"val/loss_{dist.get_rank()}"], abs=0)
    return buffers, {name: saved[name] for name in buffers}, result.popitem()[1]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_running_statistics_are_fp32_and_rank_0s_everywhere(tmp_path, precision):  # C52
    first, *others = run_ranks(_fit_normed, 2, precision, tmp_path)
    buffers, saved, loss = first
    assert_equal(saved, buffers)
    assert buffers["net.2.running_mean"].dtype == buffers["net.2.running_var"].dtype == FP32
    assert buffers["net.2.running_mean"].abs().max() > 0
    for other_buffers, _, other_loss in others:
        assert_equal(other_buffers, buffers)
        assert other_loss == loss


# -- clipping -----------------------------------------------------------------------------------

CLIP = 0.05  # a fifth of the norms that occur


class Clipped(LitStack):
    """Trains with `mode` of clipping; keeps the logged norms and, unsharded, the true ones."""

    def __init__(self, mode: str, fused: bool = False) -> None:
        super().__init__()
        self.mode, self.fused = mode, fused
        self.automatic_optimization = mode != "manual"
        self.true_norms: list[float] = []
        self.logged: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / 2)
        if index % 2 == 1:
            self._note_true_norm()
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.automatic_optimization:
            self._note_true_norm()

    def _note_true_norm(self) -> None:
        grads = [p.grad for p in self.trainer.optimizers[0].param_groups[0]["params"]]
        self.true_norms.append(torch.nn.utils.get_total_norm(grads).item())

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        if self.mode == "hook":
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            self.log("train/grad_norm", 0.0, prog_bar=True, logger=False)  # must not clash
        else:
            super().configure_gradient_clipping(optimizer, **options)

    def on_train_batch_end(self, _: Any, __: Any, index: int) -> None:
        if index % 2 == 1 and "train/grad_norm" in self.trainer.callback_metrics:
            self.logged.append(self.trainer.callback_metrics["train/grad_norm"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, fused=self.fused)


def _fit_clipped(strategy: str, mode: str, directory: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = Clipped(mode)
    options: dict[str, Any] = {} if mode == "manual" else {"accumulate_grad_batches": 2}
    if mode in ("norm", "value"):
        options |= {"gradient_clip_val": CLIP, "gradient_clip_algorithm": mode}
    data = regression_data(80, 8 // dist.get_world_size())
    sampler = torch.utils.data.DistributedSampler(data.dataset, shuffle=False)
    loader = DataLoader(data.dataset, data.batch_size, sampler=sampler)
    trainer = make_trainer(strategy, directory, **options)
    trainer.fit(module, loader)
    assert trainer.global_step == 5
    if strategy == "auto":
        return dict(module.named_parameters()), module.true_norms, module.logged
    return full_parameters(module), module.true_norms, module.logged


@functools.cache
def _clipped_on_one_process(mode: str, directory: Any) -> tuple[Any, ...]:
    return run_ranks(_fit_clipped, 1, "auto", mode, directory)[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("clipping")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", ["norm", "value", "hook", "manual"])
def test_clipping_equals_one_process(directory, mode, world_size):  # C05, C33
    expected, norms, _ = _clipped_on_one_process(mode, directory)
    unclipped, _, _ = _clipped_on_one_process("none", directory)
    assert min(norms) > 2 * CLIP
    assert not torch.allclose(expected["net.inp.weight"], unclipped["net.inp.weight"])
    results = run_ranks(_fit_clipped, world_size, "toy_fsdp", mode, directory)
    for weights, _, logged in results:
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=2e-7)
        assert logged == results[0][2]
        if mode != "value":
            assert logged == pytest.approx(norms, rel=1e-6)
        else:
            assert logged == []


class TwoOptimizers(LitStack):
    """Clips both gradients first and then makes both steps; also a step where none can log."""

    def __init__(self, with_early_step: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.with_early_step = with_early_step
        self.logged: list[dict[str, float]] = []

    def on_train_start(self) -> None:
        if self.with_early_step:
            optimizer: Any = self.optimizers()[0]
            self.manual_backward(self.net(torch.ones(2, 5)).mean())
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
            for each in self.optimizers():
                each.zero_grad()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("train/first", 1.0)
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, CLIP, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.log("train/loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.logged.append({name: value.item() for name, value in metrics.items()})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = self.net.blocks.parameters(), (*self.net.inp.parameters(),)
        return [torch.optim.SGD(half, 0.1) for half in halves]


def _fit_two_optimizers(directory: Any, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = TwoOptimizers(**options)
    make_trainer("toy_fsdp", directory).fit(module, regression_data(16, 4))
    return module.logged, full_parameters(module)


def test_each_of_several_optimizers_logs_its_own_norm(tmp_path):
    first, second = run_ranks(_fit_two_optimizers, 2, tmp_path)
    assert [list(names) for names in first[0]] == [
        ["train/first", "train/grad_norm_0", "train/grad_norm_1", "train/loss"]
    ] * 2
    for mine, theirs in zip(first[0], second[0], strict=True):
        for name in ("train/grad_norm_0", "train/grad_norm_1"):
            assert mine[name] == theirs[name] > 0
        assert mine["train/grad_norm_0"] != mine["train/grad_norm_1"]


def _with_early_step(directory: Any) -> int:
    return len(_fit_two_optimizers(directory, with_early_step=True)[0])


def test_a_step_in_a_hook_that_cannot_log_is_still_made(tmp_path):
    assert run_ranks(_with_early_step, 2, tmp_path) == [2, 2]


def _collectives_of_clipping(directory: Any, clip: float | None) -> dict[str, int]:
    module = Clipped("norm" if clip else "none")
    strategy = ToyFSDPStrategy()
    trainer = make_trainer(strategy, directory, gradient_clip_val=clip)
    trainer.fit(module, regression_data(16, 4))
    return strategy.ledger.calls_by_operation()


def test_the_logged_norm_costs_no_collective_of_its_own(tmp_path):
    without = run_ranks(_collectives_of_clipping, 2, tmp_path, None)[0]
    clipped = run_ranks(_collectives_of_clipping, 2, tmp_path, CLIP)[0]
    without["control"] = without.get("control", 0) + 4  # the norms of two steps, in two parts
    assert clipped == without


def _norm_under_low_default_dtype(directory: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    module = TwoOptimizers()
    trainer = make_trainer("toy_fsdp", directory, precision="bf16-true")
    trainer.fit(module, regression_data(8, 4))
    norm = trainer.callback_metrics["train/grad_norm_0"]
    return norm.item(), norm.bfloat16().item()


def test_the_logged_norm_is_not_rounded_under_bf16_true(tmp_path):
    ((norm, rounded),) = run_ranks(_norm_under_low_default_dtype, 1, tmp_path)
    assert norm != rounded


# -- loss scaling -------------------------------------------------------------------------------

KINDS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _scaled_steps(
    kind: str, make: Any, is_sharded: bool, clip: float | None = None, dtype: Any = None
) -> tuple[Any, ...]:
    """Three steps, an infinity in the second; on rank 1 only, if there are ranks."""
    torch.manual_seed(0)
    model = make()
    scaler_class = ShardedGradScaler if is_sharded else torch.amp.GradScaler
    scaler = scaler_class("cpu", init_scale=2.0**10, growth_interval=2)
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **KINDS[kind])
    world_size, rank = dist.get_world_size(), dist.get_rank()
    batches, scales, norms = make_batches(12), [], []
    for step in range(3):
        mine = batches[4 * step + rank : 4 * step + 4 : world_size]
        for batch in mine:
            scaler.scale(mse_loss(model, batch) / len(mine)).backward()
        if step == 1 and (rank == 1 or world_size == 1):
            grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel() > 0]
            grads[0].view(-1)[0] = float("inf")
        if clip is not None:
            scaler.unscale_(optimizer)
            if is_sharded:
                norm = clip_grad_norm_(get_root(model), model.parameters(), clip)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    weights = full_parameters(model) if is_sharded else dict(model.named_parameters())
    steps = {int(entry["step"]) for entry in optimizer.state.values()}
    return weights, scales, steps, norms


def _tiny() -> nn.Module:
    return nn.Linear(5, 3)  # 64 padded elements for each parameter: later ranks hold nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "world_size"), [(Stack, 2), (Stack, 4), (_tiny, 2), (_tiny, 4)])
def test_all_ranks_skip_together_and_keep_one_scale(kind, make, world_size):  # C46
    expected, scales, steps, _ = run_ranks(_scaled_steps, 1, "single", make, False)[0]
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert steps == {2}
    for weights, rank_scales, rank_steps, _ in run_ranks(
        _scaled_steps, world_size, kind, make, True
    ):
        assert rank_scales == scales
        assert rank_steps <= {2}
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_after_unscaling_is_right_for_every_kind_of_optimizer(kind):  # C46
    expected, scales, _, norms = run_ranks(_scaled_steps, 1, "single", Stack, False, 0.05)[0]
    for weights, rank_scales, _, rank_norms in run_ranks(_scaled_steps, 2, kind, Stack, True, 0.05):
        assert rank_scales == scales
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_disabled_scaler_changes_nothing():
    model = nn.Linear(2, 2)
    scaler = ShardedGradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(2)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = model.bias.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.bias.detach(), before - 0.1)


def test_an_optimizer_without_any_gradient_counts_as_finite():
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


class Overflowing(Clipped):
    """An infinity on the last rank in the second step."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__("norm", fused)
        self.scales: list[float] = []

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and not self.scales[1:]:
            if dist.get_rank() == dist.get_world_size() - 1:
                next(p for p in self.parameters() if p.numel() > 0).grad[0] = float("inf")

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _fit_16_mixed(fused: bool, directory: Any, resume: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = Overflowing(fused)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    plugin = ToyFSDPMixedPrecision("16-mixed", "cpu", scaler)
    options = {"plugins": plugin, "gradient_clip_val": CLIP, "max_epochs": 2 if resume else 1}
    trainer = make_trainer("toy_fsdp", directory, **options)
    path = directory / "scaled.ckpt"
    trainer.fit(module, regression_data(32, 4), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert saved == plugin.scaler.state_dict()
    return module.scales, full_parameters(module), module.logged


def test_16_mixed_skips_on_all_ranks_and_clips_fused_optimizers(tmp_path):  # C46
    results = run_ranks(_fit_16_mixed, 2, False, tmp_path)
    fused = run_ranks(_fit_16_mixed, 2, True, tmp_path)
    for scales, weights, logged in [*results, *fused]:
        assert scales == [2.0**8, 2.0**7, 2.0**7, 2.0**8]
        assert logged[0] == float("inf")
        torch.testing.assert_close(weights, results[0][1], rtol=1e-5, atol=1e-6)
    for scales, _, _ in run_ranks(_fit_16_mixed, 2, False, tmp_path, True):  # C25: resumed
        assert scales[0] == 2.0**8
        assert scales[1] == 2.0**9


def _fit_two_scaled_optimizers(init_scale: float, directory: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    scaler = ShardedGradScaler("cpu", init_scale=init_scale, growth_interval=1)
    plugin = ToyFSDPMixedPrecision("16-mixed", "cpu", scaler)
    module = TwoOptimizers()
    trainer = make_trainer("toy_fsdp", directory, plugins=plugin)
    trainer.fit(module, regression_data(32, 4))
    assert plugin.state_dict()["scale"] == init_scale * 2.0**4  # once a batch, not once a step
    return full_parameters(module)


def test_clipping_two_optimizers_before_both_step_unscales_each_once(tmp_path):
    small = run_ranks(_fit_two_scaled_optimizers, 2, 2.0**4, tmp_path)
    large = run_ranks(_fit_two_scaled_optimizers, 2, 2.0**7, tmp_path)
    torch.testing.assert_close(small[0], large[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(small[0], small[1], rtol=0, atol=0)


# -- a policy of the user's own -----------------------------------------------------------------


class Casting(LitStack):
    """Gets a nested batch; keeps the dtypes of what it was given and of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _loss(self, batch: Any) -> Tensor:
        self.seen.append([value.dtype for value in (batch["x"][0], batch["y"], batch["index"])])
        x = batch["x"][0].to(self.net.head.weight.dtype)
        return F.mse_loss(self.net(x), batch["y"].to(x.dtype))

    def training_step(self, batch: Any, _: int) -> Any:
        return {"loss": self._loss(batch), "index": batch["index"]}

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(loss.dtype)

    def validation_step(self, batch: Any, _: int) -> None:
        self._loss(batch)

    def test_step(self, batch: Any, _: int) -> None:
        self._loss(batch)

    def predict_step(self, batch: Any, _: int) -> Any:
        return self._loss(batch), batch["index"]


def _run_casting(policy: MixedPrecisionPolicy | None, precision: str, directory: Any) -> Any:
    items = [
        {"x": [torch.ones(5)], "y": torch.ones(3), "index": torch.tensor(index)}
        for index in range(2)
    ]
    data = DataLoader(items, 1)
    strategy, module = ToyFSDPStrategy(), Casting()
    strategy.mixed_precision = policy
    trainer = make_trainer(strategy, directory, precision=precision, num_sanity_val_steps=0)
    trainer.fit(module, data, data)
    trainer.test(module, data, verbose=False)
    ((prediction, index),) = trainer.predict(module, data)
    return module.seen, prediction.dtype, index.dtype


def test_a_policy_casts_the_batch_and_what_a_step_returns(tmp_path):
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", output_dtype="float64")
    seen, prediction, index = run_ranks(_run_casting, 2, policy, "32-true", tmp_path)[0]
    batch = [BF16, BF16, torch.int64]
    assert seen == [batch, FP64, batch, batch, batch]  # train, loss, validation, test, predict
    assert (prediction, index) == (FP64, torch.int64)


@pytest.mark.parametrize(
    "policy", [None, MixedPrecisionPolicy("bfloat16", None, None, None, False)]
)
def test_without_a_policy_or_without_casting_a_batch_stays_as_it_is(tmp_path, policy):
    for precision in ("32-true", "bf16-mixed"):
        seen, _, _ = run_ranks(_run_casting, 2, policy, precision, tmp_path)[0]
        assert [each for each in seen if isinstance(each, list)] == [[FP32, FP32, torch.int64]] * 4
