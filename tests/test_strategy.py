"""`ToyFSDPStrategy` under the ordinary Trainer (cases C01, C02, C03, C12, C17 and equality)."""

import warnings

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_fsdp_toy  # noqa: F401 (registers the strategy)
from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.sharding import get_root
from lightning_fsdp_toy.sharding.whole import restore
from tests.core_helpers import assert_equal, full_parameters
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import RankError, run_ranks


class Recording(L.LightningModule):
    """Logs the rank and records the items it sees."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, _):
        self.seen += batch.flatten().tolist()
        self.log("rank", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _items_seen(directory):
    module = Recording()
    trainer = make_trainer("toy_fsdp", directory)
    trainer.fit(module, DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=1))
    return module.seen, trainer.callback_metrics["rank"].item()


def test_ranks_see_disjoint_halves_and_share_metrics(tmp_path):  # C01
    (first, mean_0), (second, mean_1) = run_ranks(_items_seen, 2, tmp_path)
    assert len(first) == len(second) == 4
    assert sorted(first + second) == list(range(8))
    assert mean_0 == mean_1 == 0.5


def _fit_on_other_numbers(strategy, directory, options):
    make_trainer(strategy, directory, **options).fit(LitStack(), regression_data())


@pytest.mark.parametrize("options", [{"devices": 1}, {"num_nodes": 2}])
def test_ranks_that_are_not_those_of_the_trainer_are_refused_as_under_ddp(tmp_path, options):
    for strategy in ("toy_fsdp", "ddp"):
        with pytest.raises(RankError, match=r"does not match the world size \(2\)"):
            run_ranks(_fit_on_other_numbers, 2, strategy, tmp_path, options)


def _train(strategy, directory, options, **arguments):
    torch.manual_seed(0)
    module = LitStack()
    if arguments:
        strategy = ToyFSDPStrategy(**arguments)
    trainer = make_trainer(strategy, directory, max_epochs=3, **options)
    trainer.fit(module, regression_data(), regression_data())
    validated = trainer.callback_metrics["val/loss"].item()
    is_sharded = not isinstance(strategy, str) or "toy" in strategy
    weights = full_parameters(module) if is_sharded else dict(module.named_parameters())
    return module.losses, validated, {name: w.detach().clone() for name, w in weights.items()}


def test_losses_and_weights_equal_ddps(tmp_path):
    ours = run_ranks(_train, 2, "toy_fsdp", tmp_path, {})
    ddp = run_ranks(_train, 2, "ddp", tmp_path, {})
    for mine, theirs in zip(ours, ddp, strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == theirs[1]
        assert_equal(mine[2], theirs[2])


class Drawing(LitStack):
    """Draws a layer in `configure_model` and masks in every step."""

    def configure_model(self):
        self.net = nn.Sequential(nn.Dropout(), nn.Linear(5, 3))


def _train_drawing(strategy, directory):
    L.seed_everything(7, verbose=False)
    module = Drawing(nn.Identity())
    torch.rand(dist.get_rank() + 1)  # what a rank has drawn before does not matter
    make_trainer(strategy, directory).fit(module, regression_data())
    return module.losses


def test_random_numbers_after_seed_everything_are_ddps(tmp_path):
    ours = run_ranks(_train_drawing, 2, "toy_fsdp", tmp_path)
    assert ours == run_ranks(_train_drawing, 2, "ddp", tmp_path)


def test_accumulation_matches_ddp_within_rounding(tmp_path):
    # DDP adds a rank's micro-batches before those of other ranks; here they add in global order.
    options = {"accumulate_grad_batches": 2}
    ours = run_ranks(_train, 2, "toy_fsdp", tmp_path, options)
    ddp = run_ranks(_train, 2, "ddp", tmp_path, options)
    assert ours[0][0] == pytest.approx(ddp[0][0], rel=1e-5)


def _train_synced_last(strategy, directory, options):
    return _train(strategy, directory, options, gradient_sync="last_micro_batch")


def test_accumulation_synced_once_equals_ddp(tmp_path):  # and so does a short last window
    options = {"accumulate_grad_batches": 3}
    ours = run_ranks(_train_synced_last, 2, "toy_fsdp", tmp_path, options)
    ddp = run_ranks(_train, 2, "ddp", tmp_path, options)
    for mine, theirs in zip(ours, ddp, strict=True):
        assert mine[0] == theirs[0]
        assert_equal(mine[2], theirs[2])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_over_all_ranks(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    ours = run_ranks(_train, 2, "toy_fsdp", tmp_path, options)
    ddp = run_ranks(_train, 2, "ddp", tmp_path, options)
    for name, value in ddp[0][2].items():
        torch.testing.assert_close(ours[0][2][name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[1][2][name], ours[0][2][name], rtol=0, atol=0)


def _one_trainer_many_runs(strategy, directory):
    torch.manual_seed(0)
    module, data, results = LitStack(), regression_data(), []
    trainer = make_trainer(strategy, directory)
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    results += trainer.validate(module, data, verbose=False)
    results += trainer.test(module, data, verbose=False)
    trainer.save_checkpoint(f"{directory}/{strategy}.ckpt")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data, data)
    results.append(torch.cat(trainer.predict(module, data)))
    second = make_trainer(strategy, directory, max_epochs=2)
    second.fit(module, data)
    results += second.test(module, data, verbose=False)
    hooks = sum(len(m._forward_pre_hooks) for m in module.modules())
    return module.losses, results, hooks


def test_several_runs_in_a_row_equal_ddps(tmp_path):  # C12
    ours = run_ranks(_one_trainer_many_runs, 2, "toy_fsdp", tmp_path)
    ddp = run_ranks(_one_trainer_many_runs, 2, "ddp", tmp_path)
    for (losses, results, hooks), (ddp_losses, ddp_results, _) in zip(ours, ddp, strict=True):
        assert losses == ddp_losses
        assert len(results) == len(ddp_results)
        for mine, theirs in zip(results, ddp_results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert hooks == 15  # 4 units and 11 modules inside that own parameters, each once


def _second_trainer_with_other_settings(directory):
    torch.manual_seed(0)
    module, data = LitStack(), regression_data()
    make_trainer("toy_fsdp", directory).fit(module, data)
    before = full_parameters(module)
    other = ToyFSDPStrategy(auto_wrap_policy=None, sharding_strategy="SHARD_GRAD_OP")
    trainer = make_trainer(other, directory, max_steps=0, max_epochs=None)
    trainer.fit(module, data)
    assert_equal(full_parameters(module), before)
    assert len(other.root.units) == 1
    make_trainer("toy_fsdp", directory).fit(module, data)


def test_a_second_trainer_may_shard_differently(tmp_path):  # C12
    run_ranks(_second_trainer_with_other_settings, 2, tmp_path)


def _all_stages(strategy, directory, precision):
    torch.manual_seed(0)
    module, data = LitStack(), regression_data()
    seen = []
    module.net.blocks[0].up.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    trainer = make_trainer(
        ToyFSDPStrategy(state_dict_type=strategy), directory, precision=precision, max_epochs=2
    )
    trainer.fit(module, data, data)
    trainer.save_checkpoint(f"{directory}/saved")
    expected = trainer.test(module, data, verbose=False)
    steps = trainer.global_step

    module = LitStack()
    other = ToyFSDPStrategy(state_dict_type={"full": "sharded", "sharded": "full"}[strategy])
    trainer = make_trainer(other, directory, precision=precision, max_epochs=3)
    assert trainer.test(module, data, ckpt_path=f"{directory}/saved", verbose=False) == expected
    trainer.predict(module, data, ckpt_path=f"{directory}/saved")
    trainer.fit(module, data, data, ckpt_path=f"{directory}/saved")
    assert trainer.global_step == steps * 3 // 2
    dtypes = {p.dtype for p in module.parameters()} | {
        v.dtype for e in trainer.optimizers[0].state.values() for v in e.values()
    }
    return set(seen), dtypes, full_parameters(module)


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_every_stage_on_cpu_with_save_and_resume(tmp_path, state_dict_type):  # C03
    results = run_ranks(_all_stages, 2, state_dict_type, tmp_path, "32-true", timeout=60)
    expected = run_ranks(_train, 2, "toy_fsdp", tmp_path, {})  # unbroken
    for seen, dtypes, weights in results:
        assert seen == dtypes == {torch.float32}
        assert_equal(weights, expected[0][2])


def test_bf16_mixed_autocasts_on_cpu(tmp_path):  # C03
    for seen, dtypes, _ in run_ranks(_all_stages, 2, "full", tmp_path, "bf16-mixed", timeout=60):
        assert seen == {torch.bfloat16}
        assert dtypes == {torch.float32}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed.weight[: len(x)] + x.mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :3]


def _summaries(strategy, directory):
    module = LitStack(Tied())
    summaries = []

    class Spy(ModelSummary):
        @staticmethod
        def summarize(data, total, trainable, size, modes, **_):
            summaries.append((data, total, trainable, size))

    class RichSpy(RichModelSummary):
        @staticmethod
        def summarize(data, total, trainable, size, modes, **_):
            summaries.append((data, total, trainable, size))

    trainer = make_trainer(strategy, directory, callbacks=[Spy(max_depth=2)])
    trainer.fit(module, regression_data(8, 4))
    trainer = make_trainer(strategy, directory, callbacks=[RichSpy(max_depth=2)])
    trainer.fit(module, regression_data(8, 4))
    return summaries


@pytest.mark.parametrize("world_size", [2, 4])
def test_model_summaries_count_whole_parameters(tmp_path, world_size):  # C17
    expected = run_ranks(_summaries, 1, "ddp", tmp_path)[0]
    assert len(expected) == 2
    assert expected[0][1:3] == (17 * 8 + 2 * 72, 17 * 8 + 72)
    assert run_ranks(_summaries, world_size, "toy_fsdp", tmp_path)[0] == expected


def _fit_after_validation_in_inference_mode(directory, validate_first):
    torch.manual_seed(0)
    module, data = LitStack(), regression_data()
    trainer = make_trainer("toy_fsdp", directory)
    if validate_first:
        trainer.validate(module, data, verbose=False)
        assert not trainer.validate_loop.inference_mode
        with torch.inference_mode():
            module.net(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    trainer.fit(module, data)
    return full_parameters(module)


def test_validation_before_training_changes_nothing(tmp_path):  # C02
    with_it = run_ranks(_fit_after_validation_in_inference_mode, 2, tmp_path, True)
    without = run_ranks(_fit_after_validation_in_inference_mode, 2, tmp_path, False)
    assert_equal(with_it[0], without[0])


class Manual(LitStack):
    """Two backward passes and steps inside one `training_step`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def _manual(strategy, directory):
    torch.manual_seed(0)
    module = Manual()
    make_trainer(strategy, directory).fit(module, regression_data())
    return module.losses


def test_manual_optimization_sees_updated_weights(tmp_path):  # C06
    assert run_ranks(_manual, 2, "toy_fsdp", tmp_path) == run_ranks(_manual, 2, "ddp", tmp_path)


def _unknown_group(directory):
    del directory
    assert dist.get_world_size() == 1
    strategy = ToyFSDPStrategy()
    assert strategy.is_distributed
    with pytest.raises(ValueError, match="expected one of full, sharded"):
        ToyFSDPStrategy(state_dict_type="local")
    with pytest.raises(ValueError, match="expected one of popen, spawn, fork, forkserver"):
        ToyFSDPStrategy(start_method="thread")


def test_arguments_are_checked_where_they_are_given(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(_unknown_group, 1, tmp_path)


class Coding(nn.Module):
    """Methods other than forward; `direct` reads a weight itself."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.out = nn.Linear(7, 3)

    def encode(self, x):
        return self.inp(x)

    def decode(self, x):
        return self.out(x)

    def direct(self, x):
        return nn.functional.linear(x, self.out.weight)


class LitCoding(LitStack):
    def __init__(self, method):
        super().__init__(Coding())
        self.method = method

    def training_step(self, batch, _):
        decode = getattr(self.net, self.method)
        loss = nn.functional.mse_loss(decode(self.net.encode(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        generated = self.net.decode(self.net.encode(batch[0])).argmax(-1)
        weight = self.net.out.weight if self.method == "decode" else torch.ones(())
        self.log("val/loss", generated.float().mean() + weight.sum(), sync_dist=True)


def _fit_coding(strategy, method, directory, register):
    torch.manual_seed(0)
    module, data = LitCoding(method), regression_data()
    trainer = make_trainer(strategy, directory, num_sanity_val_steps=0)
    if register:
        trainer.validate(module, data, verbose=False)  # shards the model
        strategy.register_forward_method(module.net, method)
    trainer.fit(module, data, data)
    return module.losses, trainer.callback_metrics["val/loss"].item()


def _warnings_of_idle_options(directory):
    strategy = ToyFSDPStrategy(
        gradient_sync="last_micro_batch", activation_checkpointing_reentrant=True
    )
    with pytest.warns(UserWarning) as caught:
        make_trainer(strategy, directory, max_steps=1).fit(LitStack(), regression_data())
    return [str(each.message) for each in caught]


def test_options_without_effect_warn(tmp_path):
    (texts,) = run_ranks(_warnings_of_idle_options, 1, tmp_path)
    for option in ("activation_checkpointing_reentrant=True", "gradient_sync='last_micro_batch'"):
        assert any(f"`{option}` without" in text and "no effect" in text for text in texts)


def test_methods_other_than_forward(tmp_path):  # C39
    expected = run_ranks(_fit_coding, 2, "ddp", "decode", tmp_path, False)
    assert run_ranks(_fit_coding, 2, "toy_fsdp", "decode", tmp_path, False) == expected


def test_an_unregistered_method_is_named_with_the_remedy(tmp_path):  # C39
    strategy = ToyFSDPStrategy(auto_wrap_policy=["Coding"])
    message = (
        r"`Coding.direct` uses weights of unit `net`.*register_forward_method\(module, 'direct'"
    )
    with pytest.raises(Exception, match=message):
        run_ranks(_fit_coding, 2, strategy, "direct", tmp_path, False)
    expected = run_ranks(
        _fit_coding, 2, "ddp_find_unused_parameters_true", "direct", tmp_path, False
    )
    assert run_ranks(_fit_coding, 2, strategy, "direct", tmp_path, True) == expected


class Busy(LitStack):
    """Own parameter, updated metric, own freezing, a checkpoint inside a step, two rounds."""

    def __init__(self, path):
        super().__init__()
        self.automatic_optimization = False
        self.own = nn.Parameter(torch.ones(5))
        self.mean = MeanMetric()
        self.path = path

    def training_step(self, batch, _):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.mse_loss(self.net(batch[0] * self.own), batch[1])
            self.trainer.save_checkpoint(self.path)
            self.losses.append(loss.item())
            self.mean(loss.detach())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_train_batch_end(self, *_):
        if isinstance(self.trainer.strategy, ToyFSDPStrategy):
            with self.trainer.strategy.unsharded():
                assert self.net.inp.weight.shape == (7, 5)

    def configure_optimizers(self):
        self.net.head.requires_grad_(False)
        matrices = [p for p in self.net.parameters() if p.ndim == 2 and p.requires_grad]
        return torch.optim.SGD(matrices, 0.1), torch.optim.SGD([self.own], 0.1)


def _busy(strategy, directory):
    torch.manual_seed(0)
    module = Busy(directory / "inside.ckpt")
    make_trainer(strategy, directory, use_distributed_sampler=False).fit(module, regression_data())
    if strategy == "toy_fsdp":
        module.trainer.strategy.register_forward_method(module.net, "forward")
        module.trainer.strategy.register_forward_method(module.net, "forward")
        restore(get_root(module))
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return module.losses, weights


def test_a_busy_module_matches_one_process(tmp_path):
    # DDP does not know parameters frozen after its construction: one process on one rank.
    losses, weights = run_ranks(_busy, 1, "auto", tmp_path)[0]
    ours, our_weights = run_ranks(_busy, 1, "toy_fsdp", tmp_path)[0]
    assert ours == losses
    assert_equal(our_weights, weights)
    (_, first), (_, second) = run_ranks(_busy, 2, "toy_fsdp", tmp_path)
    assert_equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first["net.head.weight"], Busy(tmp_path).net.head.weight)
