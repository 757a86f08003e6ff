"""Weight averaging in shards is the average of an unsharded run (C22)."""

import warnings

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
)
from torch.utils.data import DataLoader

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.averaging import ShardedAverage
from tests.core_helpers import Stack, assert_equal, full_parameters, make_batches
from tests.lit_helpers import make_trainer
from tests.ranks import run_ranks

STEP = 4  # micro-batches of an optimizer step, all ranks together
TRAIN, VAL = make_batches(2 * STEP), make_batches(STEP, seed=2)


class Averaged(L.LightningModule):
    """Remembers the loss of every validation batch by its place among all ranks' batches."""

    def __init__(self, net=None):
        super().__init__()
        if net is None:
            torch.manual_seed(0)
            net = Stack()
        self.net = net
        self.register_buffer("scale", torch.ones(3))
        self.val_losses = {}
        self.num_validations = 0

    def training_step(self, batch, _):
        return F.mse_loss(self.net(batch[0]) * self.scale, batch[1])

    def on_before_optimizer_step(self, _):
        self.scale *= 1.03125  # a buffer that moves, the same on all ranks

    def on_validation_epoch_start(self):
        self.num_validations += 1

    def validation_step(self, batch, index):
        key = (self.num_validations, index * self.trainer.world_size + self.trainer.global_rank)
        self.val_losses[key] = F.mse_loss(self.net(batch[0]) * self.scale, batch[1]).item()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def deal(batches):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return DataLoader(batches[rank::world_size], batch_size=None)


def trainer_for(strategy, directory, callbacks, **options):
    defaults = {
        "max_epochs": 3,
        "accumulate_grad_batches": STEP // dist.get_world_size(),
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    saver = ModelCheckpoint(
        directory, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    return make_trainer(strategy, directory, callbacks=[*callbacks, saver], **defaults | options)


CALLBACKS = {
    "swa": WeightAveraging,
    "swa_avg_fn": lambda: WeightAveraging(avg_fn=get_swa_avg_fn()),
    "ema": lambda: EMAWeightAveraging(decay=0.75),
    "ema_late": lambda: EMAWeightAveraging(
        decay=0.75, update_every_n_steps=2, update_starting_at_step=1
    ),
    "ema_multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.75)),
    "by_epoch": lambda: ByEpoch(avg_fn=get_ema_avg_fn(0.5), use_buffers=False, device="cpu"),
}


class ByEpoch(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


def fit(strategy, directory, name, ckpt_path=None, net=None, **options):
    """Run on all ranks; return validation losses of this rank and the state after fit."""
    module = Averaged(net)
    trainer = trainer_for(strategy, directory, [CALLBACKS[name]()], **options)
    trainer.fit(module, deal(TRAIN), deal(VAL), ckpt_path=ckpt_path)
    return module.val_losses, whole_state(trainer, module)


def whole_state(trainer, module):
    if isinstance(trainer.strategy, ToyFSDPStrategy):
        strategy = trainer.strategy
        before, strategy.state_dict_type = strategy.state_dict_type, "full"
        state = strategy.lightning_module_state_dict()
        strategy.state_dict_type = before
        return state
    return {key: value.clone() for key, value in module.state_dict().items()}


def merge(ranks):
    losses = {}
    for rank_losses, _ in ranks:
        assert not losses.keys() & rank_losses.keys()
        losses |= rank_losses
    return losses, ranks[0][1]


def read(path):
    return torch.load(path, weights_only=False)


def assert_same_averages(ours, theirs):
    assert list(ours) == list(theirs)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert list(ours[key]) == list(theirs[key])
        assert_equal(ours[key], theirs[key])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """For each callback: directory, validation losses, final state of an unsharded process."""
    runs = {}

    def run(name):
        if name not in runs:
            directory = tmp_path_factory.mktemp(name)
            runs[name] = (directory, *merge(run_ranks(fit, 1, "auto", directory, name)))
        return runs[name]

    return run


@pytest.mark.parametrize(
    ("name", "world_size", "sharding"),
    [
        *((name, 2, "FULL_SHARD") for name in CALLBACKS),
        *(("ema", world_size, "FULL_SHARD") for world_size in (1, 4)),
        ("ema", 2, "SHARD_GRAD_OP"),
        ("ema", 2, "NO_SHARD"),
    ],
)
def test_average_and_validation_are_those_of_one_process(
    one_process, tmp_path, name, world_size, sharding
):
    directory, losses, final = one_process(name)
    strategy = ToyFSDPStrategy(sharding_strategy=sharding)
    ours, state = merge(run_ranks(fit, world_size, strategy, tmp_path, name))
    assert len(losses) == 3 * STEP
    assert len(set(losses.values())) > STEP  # the average moves between validations
    assert ours == losses
    assert_equal(state, final)
    for epoch in range(3):
        file = f"epoch={epoch}.ckpt"
        saved = read(tmp_path / file)
        assert_same_averages(saved, read(directory / file))
    assert not torch.equal(
        saved["state_dict"]["net.inp.weight"], saved["current_model_state"]["net.inp.weight"]
    )


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resume_goes_on_with_the_average(one_process, tmp_path, form, world_size):
    directory, losses, final = one_process("ema")
    strategy = ToyFSDPStrategy(state_dict_type=form)
    run_ranks(fit, 2, strategy, tmp_path, "ema")
    path = tmp_path / "epoch=1.ckpt"
    assert path.is_dir() == (form == "sharded")
    ours, state = merge(run_ranks(fit, world_size, strategy, tmp_path / "resumed", "ema", path))
    last = {key[1]: value for key, value in losses.items() if key[0] == 3}
    assert {key[1]: value for key, value in ours.items()} == last
    assert_equal(state, final)
    if form == "full":
        file = "epoch=2.ckpt"
        assert_same_averages(read(tmp_path / "resumed" / file), read(directory / file))


@pytest.mark.parametrize("theirs_first", [True, False])
def test_the_average_crosses_to_an_unsharded_run_and_back(one_process, tmp_path, theirs_first):
    directory, _, final = one_process("ema")
    path = directory / "epoch=1.ckpt"
    if not theirs_first:
        run_ranks(fit, 2, ToyFSDPStrategy(), tmp_path, "ema")
        path = tmp_path / "epoch=1.ckpt"
    strategy, world_size = (ToyFSDPStrategy(), 2) if theirs_first else ("auto", 1)
    _, state = merge(run_ranks(fit, world_size, strategy, tmp_path / "resumed", "ema", path))
    assert_equal(state, final)


def fit_with_batch_norm(strategy, directory, name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(5), Stack())
    # With accumulation DDP adds the micro-batches of a rank first: other bits.
    return fit(strategy, directory, name, net=net, accumulate_grad_batches=1)


@pytest.mark.parametrize("name", ["ema", "by_epoch"])  # buffers averaged, or followed
def test_averaged_buffers_are_those_of_rank_0_under_ddp(tmp_path, name):
    runs = {
        key: run_ranks(fit_with_batch_norm, 2, strategy, tmp_path / key, name)
        for key, strategy in {"ddp": "ddp", "ours": ToyFSDPStrategy()}.items()
    }
    assert_equal(runs["ours"][0][1], runs["ddp"][0][1])
    assert runs["ours"][0][0] == runs["ddp"][0][0]  # under DDP other ranks have other buffers
    for epoch in range(3):
        ours, theirs = (read(tmp_path / key / f"epoch={epoch}.ckpt") for key in ("ours", "ddp"))
        assert_same_averages(ours, theirs)


def validate_on_every_rank(directory):
    torch.manual_seed(0)
    module = Averaged(nn.Sequential(nn.BatchNorm1d(5), Stack()))
    callback = EMAWeightAveraging(decay=0.75)
    trainer = trainer_for(ToyFSDPStrategy(), directory, [callback], limit_val_batches=0)
    trainer.fit(module, deal(TRAIN))
    losses = []
    for _ in range(2):
        trainer.limit_val_batches = 1.0
        module.val_losses.clear()
        trainer.validate(module, DataLoader(VAL, batch_size=None), verbose=False)
        losses.append(list(module.val_losses.values()))
    return losses


def test_all_ranks_validate_with_the_same_averaged_buffers(tmp_path):
    first, second = run_ranks(validate_on_every_rank, 2, tmp_path)
    assert first == second
    assert first[0] == first[1] and len(first[0]) == STEP


def pieces_and_second_fit(directory):
    module, callback = Averaged(), EMAWeightAveraging(decay=0.75)
    trainer = trainer_for(ToyFSDPStrategy(), directory, [callback])
    trainer.fit(module, deal(TRAIN), deal(VAL))
    average = callback._average_model
    numels = (sum(p.numel() for p in average.module.parameters()), average.n_averaged.item())
    trainer.fit_loop.max_epochs = 4  # a further epoch, averaged anew
    trainer.fit(module, deal(TRAIN), deal(VAL))
    assert callback._average_model is not average
    return numels, callback._average_model.n_averaged.item(), whole_state(trainer, module)


def second_fit_unsharded(directory):
    module, callback = Averaged(), EMAWeightAveraging(decay=0.75)
    trainer = trainer_for("auto", directory, [callback])
    trainer.fit(module, deal(TRAIN), deal(VAL))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, deal(TRAIN), deal(VAL))
    return callback._average_model.n_averaged.item(), whole_state(trainer, module)


def test_a_rank_averages_its_pieces_only_and_a_second_fit_averages_anew(tmp_path):
    num_second, final = run_ranks(second_fit_unsharded, 1, tmp_path)[0]
    ranks = run_ranks(pieces_and_second_fit, 4, tmp_path)
    whole = sum(param.numel() for param in Averaged().parameters())
    assert sum(numels[0] for numels, _, _ in ranks) == whole
    assert max(numels[0] for numels, _, _ in ranks) < 0.4 * whole
    assert all(numels[1] == 6 and second == num_second == 2 for numels, second, _ in ranks)
    assert_equal(ranks[0][2], final)


class BuiltLate(Averaged):
    def __init__(self):
        super().__init__(nn.Identity())

    def configure_model(self):
        if isinstance(self.net, nn.Identity):
            self.net = Stack()
            assert self.net.inp.weight.is_meta


def fit_from_meta(directory):
    L.seed_everything(0, verbose=False)
    module = BuiltLate()
    trainer = trainer_for(ToyFSDPStrategy(), directory, [EMAWeightAveraging(decay=0.75)])
    trainer.strategy.tensor_init_context = lambda empty_init=None: torch.device("meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, deal(TRAIN), deal(VAL))
    assert not [w for w in caught if "doesn't support sharding" in str(w.message)]
    return trainer.callbacks[0]._average_model.n_averaged.item()


def test_a_model_built_on_the_meta_device_is_averaged(tmp_path):
    assert run_ranks(fit_from_meta, 2, tmp_path) == [6, 6]


def validate_checkpoint(path):
    module = Averaged()
    trainer = trainer_for(ToyFSDPStrategy(), path.parent, [])
    trainer.validate(module, deal(VAL), ckpt_path=path, verbose=False)
    return module.val_losses, None


def resume_without_average(strategy, path, directory):
    module, callback = Averaged(), WeightAveraging()
    trainer = trainer_for(strategy, directory, [callback], max_epochs=2)
    trainer.fit(module, deal(TRAIN), deal(VAL), ckpt_path=path)
    return callback._average_model.n_averaged.item(), whole_state(trainer, module)


def fit_without_average(strategy, directory):
    trainer_for(strategy, directory, [], max_epochs=1).fit(Averaged(), deal(TRAIN), deal(VAL))


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints_with_and_without_an_average_are_read_either_way(one_process, tmp_path, form):
    _, losses, _ = one_process("ema")
    strategy = ToyFSDPStrategy(state_dict_type=form)
    run_ranks(fit, 2, strategy, tmp_path, "ema")
    ours, _ = merge(run_ranks(validate_checkpoint, 2, tmp_path / "epoch=2.ckpt"))
    assert {key[1]: value for key, value in ours.items()} == {
        key[1]: value for key, value in losses.items() if key[0] == 3
    }
    run_ranks(fit_without_average, 2, strategy, tmp_path / "plain")
    run_ranks(fit_without_average, 1, "auto", tmp_path / "alone")
    plain, alone = (tmp_path / name / "epoch=0.ckpt" for name in ("plain", "alone"))
    ours = run_ranks(resume_without_average, 2, strategy, plain, tmp_path / "more")[0]
    theirs = run_ranks(resume_without_average, 1, "auto", alone, tmp_path / "most")[0]
    assert ours[0] == theirs[0]
    assert_equal(ours[1], theirs[1])


class OwnSetup(EMAWeightAveraging):
    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.stage = stage


class OwnAverage(WeightAveraging):
    def setup(self, trainer, pl_module, stage):
        self._average_model = AveragedModel(pl_module)


def run_setups(directory):
    callback = OwnSetup(decay=0.75)
    module = Averaged()
    trainer_for(ToyFSDPStrategy(), directory, [callback]).fit(module, deal(TRAIN))
    assert callback.stage == "fit"
    assert isinstance(callback._average_model, ShardedAverage)
    # The same callback under a strategy that does not shard.
    trainer_for("auto" if dist.get_world_size() == 1 else "ddp", directory, [callback]).fit(
        Averaged(), deal(TRAIN)
    )
    assert type(callback._average_model) is AveragedModel
    trainer = trainer_for(ToyFSDPStrategy(), directory, [OwnAverage()])
    with pytest.raises(ValueError, match=r"`OwnAverage\.setup` makes an average of its own"):
        trainer.fit(Averaged(), deal(TRAIN))


def test_a_setup_of_the_users_own_is_called_and_its_own_average_refused(tmp_path):
    run_ranks(run_setups, 2, tmp_path)


def fit_with_swa(directory):
    trainer = trainer_for(ToyFSDPStrategy(), directory, [StochasticWeightAveraging(1e-2)])
    trainer.fit(Averaged(), deal(TRAIN))


def test_stochastic_weight_averaging_is_refused_with_its_replacement(tmp_path):
    with pytest.raises(
        Exception,
        match=r"`StochasticWeightAveraging` copies and averages whole modules.*"
        r"Use `WeightAveraging`",
    ):
        run_ranks(fit_with_swa, 2, tmp_path)


def average_of_all(directory):
    module = Averaged()
    callback = EMAWeightAveraging(decay=0.75)
    trainer_for(ToyFSDPStrategy(), directory, [callback], accumulate_grad_batches=1).fit(
        module, deal(TRAIN[:6])
    )
    return full_parameters(module)


def test_weights_after_fit_are_the_average_at_three_ranks(tmp_path):
    """Not in bits: three ranks sum in another order than powers of two."""
    final = run_ranks(average_of_all, 3, tmp_path)
    for rank in final[1:]:
        assert_equal(rank, final[0])
    saved = read(tmp_path / "epoch=2.ckpt")["state_dict"]
    assert_equal(final[0], {name: saved[name] for name in final[0]})
