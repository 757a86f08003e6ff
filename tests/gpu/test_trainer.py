"""`ToyFSDPStrategy` on GPUs under the ordinary Trainer."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import get_root
from tests.core_helpers import Stack, full_parameters
from tests.gpu.groups import every_group, on_gpus
from tests.lit_helpers import LitStack, make_trainer, regression_data

SCALE = 2.0**7  # of the loss under 16-mixed, small enough for these gradients


class Watching(LitStack):
    """Notes where things are; its loss can be made to overflow on one rank."""

    def __init__(self, overflow_at=-1, is_fused=False):
        torch.manual_seed(0)
        super().__init__()
        self.overflow_at = overflow_at
        self.is_fused = is_fused
        self.places = set()
        self.scales = []
        self.batches = []
        self.net.blocks[0].up.register_forward_hook(self.watch)

    def watch(self, module, args, _):
        places = (self.device.type, args[0].device.type, module.weight.device.type)
        self.places.add((*places, tuple(module.weight.shape)))

    def training_step(self, batch, index):
        self.batches.append([each.cpu() for each in batch])
        self.log("train/number", 1.0, sync_dist=True)
        loss = super().training_step(batch, index)
        return loss * 1e30 if index == self.overflow_at and self.global_rank == 0 else loss

    def on_train_batch_end(self, *_):
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(None if scaler is None else scaler.get_scale())

    def configure_optimizers(self):
        return _adamw(self.parameters(), fused=self.is_fused)


def _adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, **options)


def _trainer(directory, strategy, precision="32-true", **options):
    is_machine_each = torch.cuda.device_count() < dist.get_world_size()
    if is_machine_each:
        options |= {"devices": 1, "num_nodes": dist.get_world_size()}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cuda", init_scale=SCALE)
        options["plugins"] = MixedPrecision("16-mixed", "cuda", scaler)
    else:
        options["precision"] = precision
    return make_trainer(strategy, directory, accelerator="cuda", **options)


def _fit(directory, module, cpu_offload=False, **options):
    trainer = _trainer(directory, ToyFSDPStrategy(cpu_offload=cpu_offload), **options)
    trainer.fit(module, regression_data(), regression_data())
    assert module.places == {("cuda", "cuda", "cuda", (13, 7))}
    kind = "cpu" if cpu_offload else "cuda"
    assert {param.device.type for param in module.parameters()} == {kind}
    entries = trainer.optimizers[0].state.values()
    assert {entry["exp_avg"].device.type for entry in entries} == {kind}
    return {name: value.cpu() for name, value in full_parameters(module).items()}


def _one_process(batches_of_ranks):
    """The same training without Lightning, on the CPU."""
    torch.manual_seed(0)
    net = Stack()
    optimizer = _adamw(net.parameters())
    for batches in zip(*batches_of_ranks, strict=True):
        for inputs, targets in batches:
            (F.mse_loss(net(inputs), targets) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"net.{name}": param.detach() for name, param in net.named_parameters()}


def _fit_both_ways(directory):
    found = []
    for cpu_offload in (False, True):
        module = Watching()
        found.append((_fit(directory, module, cpu_offload), module.batches))
    return found


@every_group
def test_fit_ends_with_the_weights_of_one_process(group, tmp_path):
    for ranks in zip(*on_gpus(_fit_both_ways, group, tmp_path), strict=True):
        expected = _one_process([batches for _, batches in ranks])
        for weights, _ in ranks:
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _fit_low(directory):
    losses = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        for cpu_offload in (False, True):
            module = Watching()
            options = {"precision": precision, "gradient_clip_val": 0.5}
            weights = _fit(directory, module, cpu_offload, **options)
            assert all(value.isfinite().all() for value in weights.values())
            is_low = precision in ("bf16-true", "16-true")
            assert all((value.dtype != torch.float32) is is_low for value in weights.values())
            losses[precision, cpu_offload] = module.losses
    return losses


@every_group
def test_low_precision_trains_clips_and_offloads(group, tmp_path):
    for losses in on_gpus(_fit_low, group, tmp_path):
        for found in losses.values():
            assert found == pytest.approx(losses["32-true", False], rel=0.1, abs=0.05)


def _overflow(directory):
    for cpu_offload, is_fused in ((False, False), (True, False), (False, True), (True, True)):
        module = Watching(overflow_at=1, is_fused=is_fused)
        options = {"precision": "16-mixed", "gradient_clip_val": 0.5}
        weights = _fit(directory, module, cpu_offload, **options)
        assert module.scales[0] == SCALE and set(module.scales[1:]) == {SCALE / 2}
        assert all(value.isfinite().all() for value in weights.values())


@every_group
def test_overflow_on_one_rank_skips_the_step_and_halves_the_scale_of_all(group, tmp_path):
    on_gpus(_overflow, group, tmp_path)


def _resume(directory):
    for state_dict_type in ("full", "sharded"):
        for cpu_offload in (False, True):
            _resume_with(
                directory, {"state_dict_type": state_dict_type, "cpu_offload": cpu_offload}
            )


def _resume_with(directory, arguments):
    def fit(max_epochs, ckpt_path=None):
        module = Watching()
        trainer = _trainer(directory, ToyFSDPStrategy(**arguments), max_epochs=max_epochs)
        trainer.fit(module, regression_data(), ckpt_path=ckpt_path)
        return trainer, module

    path = directory / "_".join(str(value) for value in arguments.values())
    first, _ = fit(1)
    first.save_checkpoint(path)
    _, whole = fit(2)
    trainer, resumed = fit(2, path)
    assert 0 < len(resumed.losses) < len(whole.losses)
    assert whole.losses[-len(resumed.losses) :] == resumed.losses
    expected = full_parameters(whole)
    for name, value in full_parameters(resumed).items():
        assert torch.equal(value, expected[name]), name
    trainer.validate(resumed, regression_data(), verbose=False)
    assert trainer.callback_metrics["val/loss"].isfinite()


@every_group
def test_resumed_run_ends_as_the_uninterrupted_one(group, tmp_path):
    on_gpus(_resume, group, tmp_path)


class Late(LitStack):
    """Builds its layers when the strategy asks for them."""

    def __init__(self):
        super().__init__(torch.nn.Identity())

    def configure_model(self):
        if not isinstance(self.net, Stack):
            self.net = Stack()


def _build(directory):
    late = Late()
    _trainer(directory, "toy_fsdp").fit(late, regression_data())
    trainer = _trainer(directory, "toy_fsdp")
    with trainer.init_module(empty_init=True):
        empty = LitStack()
    assert next(empty.parameters()).is_meta
    trainer.fit(empty, regression_data())
    for module in (late, empty):
        assert get_root(module).device.type == "cuda"
        assert {param.device.type for param in module.parameters()} == {"cuda"}
        assert all(value.isfinite().all() for value in full_parameters(module).values())


@every_group
def test_models_built_in_hooks_or_on_the_meta_device_train(group, tmp_path):
    on_gpus(_build, group, tmp_path)


def test_registered_name_offloads():
    trainer = L.Trainer(
        strategy="toy_fsdp_cpu_offload", accelerator="cuda", devices=1, logger=False
    )
    assert trainer.strategy.cpu_offload
