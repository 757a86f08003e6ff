"""Whole jobs from composed configs, without the command line."""

import inspect
import json
import os
import random
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.jobs import JobError
from lightning_fsdp_toy.launch import launch
from lightning_fsdp_toy.messages import describe_unknown_key
from lightning_fsdp_toy.monitors import count_tensor_bytes
from lightning_fsdp_toy.tasks import Build, Job

CONF = str(Path(__file__).parents[1] / "conf")
TINY = [
    "data.batch_size=2",
    "data.seq_len=16",
    "model.d_model=16",
    "model.num_layers=2",
    "data.val_batches=4",
    "trainer.val_check_interval=1000",
    "accelerator=cpu",
    "lit_module.schedule=constant",
]


def compose(run_dir: Path, *overrides: str) -> DictConfig:
    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        return hydra.compose("train", [*TINY, f"run_dir={run_dir}", *overrides])


def check_refused(run_dir: Path, text: str, *overrides: str) -> None:
    """Launch what cannot run: one line that has `text` in it, exit code 2, and nothing written."""
    with pytest.raises(JobError) as caught:
        launch(compose(run_dir, *overrides))
    message = str(caught.value)
    assert text in message
    assert "\n" not in message and caught.value.exit_code == 2
    assert not run_dir.exists()


def read_summary(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def read_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_job_writes_what_the_design_lists(tmp_path: Path) -> None:
    metric = launch(compose(tmp_path, "trainer.max_steps=3", "trainer.accumulate_grad_batches=2"))
    summary = read_summary(tmp_path)
    assert metric == summary["metrics"]["val/loss"] > 0
    assert {name: summary[name] for name in list(summary)[:5]} == {
        "task": "fit",
        "strategy": "ToyFSDPStrategy",
        "world_size": 2,
        "precision": "32-true",
        "steps": 3,
    }
    assert list(summary["metrics"]) == ["train/loss", "val/loss", "val/perplexity"]
    assert summary["throughput"]["tokens_per_s"] > 0
    # 2 ranks x 2 micro-batches x 2 windows x 16 tokens in an optimizer step
    tokens = summary["throughput"]["tokens_per_s"] * summary["throughput"]["step_s"]
    assert tokens == pytest.approx(128)
    assert list(summary["memory"]["measured"]) == [
        *("shards_bytes", "gradients_bytes", "optimizer_bytes"),
        *("pool_bytes", "unsharded_peak_bytes", "peak_bytes", "process_peak_bytes"),
    ]
    assert list(summary["communication"]["measured"]) == [
        *("all_gather_bytes", "reduce_scatter_bytes", "all_reduce_bytes"),
        *("total_bytes", "wire_bytes"),  # none of them, in shared memory
    ]
    assert summary["communication"]["measured"]["wire_bytes"] == 0
    assert all(summary[group]["planned"] == {} for group in ("memory", "communication"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("checkpoints", "pictures", "ranks", "summary.json", "tensorboard")
    ]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert [step for step, _ in read_scalars(tmp_path, "val/loss")] == [0, 3]
    assert [step for step, _ in read_scalars(tmp_path, "train/loss")] == [0, 1, 2]


def test_final_metrics_stand_beside_the_hyper_parameters_once(tmp_path: Path) -> None:  # C71
    launch(compose(tmp_path, "trainer.max_steps=2", "strategy=ddp"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    summaries = events.summary_metadata
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(summaries)
    content = summaries["_hparams_/session_start_info"].plugin_data.content
    assert b"model.d_model" in content and b"trainer.max_steps" in content
    experiment = summaries["_hparams_/experiment"].plugin_data.content
    columns = HParamsPluginData.FromString(experiment).experiment
    first = sorted(columns.hparam_infos, key=lambda each: (not each.differs, each.name))[:5]
    assert {"devices", "precision", "strategy.name"} < {each.name for each in first}
    assert [each.name.tag for each in columns.metric_infos][:5] == [
        *("train/loss", "val/loss", "throughput/run_tokens_per_s"),
        *("memory/run_peak_mib", "memory/run_process_peak_mib"),  # the former of toy_fsdp only
    ]
    memory = ("memory/run_tensors_mib", "memory/run_process_peak_mib")
    for tag in ("val/loss", "val/perplexity", "throughput/run_tokens_per_s", *memory):
        assert tag.encode() in experiment
        values = read_scalars(tmp_path, tag)
        assert len({step for step, _ in values}) == len(values)
    final = read_summary(tmp_path)["metrics"]["val/loss"]
    assert read_scalars(tmp_path, "val/loss")[-1][1] == pytest.approx(final)


def test_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    launch(compose(whole, "trainer.max_steps=6", "strategy=ddp"))
    launch(compose(first, "trainer.max_steps=3", "strategy=ddp"))
    last = first / "checkpoints" / "last.ckpt"
    launch(compose(second, "trainer.max_steps=6", "strategy=ddp", f"ckpt_path={last}"))
    resumed = read_scalars(second, "train/loss")
    assert resumed == read_scalars(whole, "train/loss")[3:]
    weights = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        for run in (whole, second)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_finished_run_cannot_be_resumed(tmp_path: Path) -> None:
    launch(compose(tmp_path / "run", "trainer.max_steps=2", "strategy=ddp", "devices=1"))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    resume = (f"ckpt_path={last}", "strategy=ddp", "devices=1")
    with pytest.raises(JobError, match=r"already at step 2 of `trainer.max_steps=2`: raise it"):
        launch(compose(tmp_path / "again", *resume, "trainer.max_steps=2"))
    more = (*resume, "trainer.max_steps=3")
    with pytest.raises(JobError, match=r"net\S+ is \(.*, .* and \d+ more; use the `model` options"):
        launch(compose(tmp_path / "again", *more, "model.d_model=32"))
    bad = {
        "cut.ckpt": last.read_bytes()[:-999],
        "text.ckpt": b"no checkpoint at all",
        "folder.ckpt": None,
        "other.ckpt": {"state_dict": {}},
    }
    for name, content in bad.items():
        path = tmp_path / name
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(
            JobError, match=rf"`ckpt_path=\S+{name}` is (a folder but )?no "
        ) as caught:
            launch(compose(tmp_path / "again", *more, f"ckpt_path={path}"))
        assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "again").exists()


def test_bar_checkpoints_and_loggers_can_be_left_out(tmp_path: Path) -> None:
    off = ("trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", "~logger")
    launch(compose(tmp_path, "trainer.max_steps=1", "strategy=ddp", "devices=1", *off))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks", "summary.json"]
    plain = ("~callbacks", "~logger", "strategy=single", "trainer.max_steps=1", "devices=1")
    launch(compose(tmp_path / "plain", *plain))
    assert (tmp_path / "plain" / "checkpoints" / "last.ckpt").is_file()


class StopOnce(Callback):
    """Ends rank 1 hard in step 3 of the first attempt."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and trainer.global_step == 3 and trainer.global_rank == 1:
            os._exit(9)


def test_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    overrides = (
        "trainer.max_steps=5",
        "strategy=ddp",
        "callbacks.checkpoint.every_n_train_steps=2",
    )
    loss = launch(compose(whole, *overrides))
    callback = "+callbacks.stop._target_=tests.test_launch_jobs.StopOnce"
    assert launch(compose(broken, *overrides, callback, "launch.max_restarts=1")) == loss


def report_draw(job: Job, build: Build) -> float:
    """A task that says what its rank got."""
    rank = os.environ["RANK"]
    seen = {key: job.config[key] for key in ("model", "run_dir")} | {"pid": os.getpid()}
    Path(job.run_dir, f"seen_{rank}.json").write_text(json.dumps(seen))
    return float(job.config["model"]["d_model"])


def test_sampled_values_are_equal_on_all_ranks_of_a_trial(tmp_path: Path) -> None:  # C59
    sampler = random.Random(0)
    values = []
    for trial in range(3):
        width = 4 * sampler.randrange(2, 64)
        cfg = compose(
            tmp_path / str(trial),
            f"model.d_model={width}",
            "task._target_=tests.test_launch_jobs.report_draw",
        )
        values.append(launch(cfg))
        seen = [
            json.loads((tmp_path / str(trial) / f"seen_{rank}.json").read_text())
            for rank in range(2)
        ]
        assert [each["model"]["d_model"] for each in seen] == [width, width]
        assert values[-1] == width
    assert len(list(tmp_path.glob("*/seen_*.json"))) == 6  # one job a trial


def test_paths_are_relative_to_where_the_program_was_started(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    Path("text.txt").write_text("some words of a text, again and again; " * 200)
    launch(compose(tmp_path / "run", "data.files=text.txt", "trainer.max_steps=1", "devices=1"))
    assert read_summary(tmp_path / "run")["world_size"] == 1


HYBRID = "strategy.sharding_strategy=HYBRID_SHARD strategy.device_mesh"
POLICY = "strategy.mixed_precision={_target_:lightning_fsdp_toy.sharding.MixedPrecisionPolicy"
BAD_INPUT = {
    "devices=0": "`devices=0`: expected a whole number of at least 1",
    "devices=two": "`devices=two`: expected a whole number",
    "devices=2 strategy=single": "`strategy=single` runs in one process, got `devices=2`",
    "num_nodes=2": "`num_nodes=2`: start one process per rank on every machine",
    "accelerator=gpu devices=99": "`devices=99` is more than the ",
    "accelerator=abacus": "`accelerator=abacus` is unknown: choose one of auto, cpu",
    "precision=8": "`precision=8` is unknown: choose one of 32-true",
    "seed=-1": "`seed=-1`: expected a whole number",
    "ckpt_path=missing.ckpt": "missing.ckpt` does not exist: check the path",
    "trainer.max_steps=-5": "`trainer.max_steps=-5`: expected a whole number",
    "trainer.gradient_clip_algorithm=x": "`trainer.gradient_clip_algorithm`",
    "launch.num_threads=0": "`launch.num_threads=0`: expected a whole number of at least 1",
    "data.batch_size=0": "`data.batch_size` must be at least 1, got 0",
    "data.batch_size=100000": "lower `data.batch_size`",
    "data.files=missing.txt": "`data.files`: '",
    "data.files=empty.txt": "is empty: name a file with text",
    "data.seq_len=1024": "`data.seq_len=1024` is longer than `model.max_seq_len=256`",
    "model.nhead=3": "`model.d_model` must be a multiple",
    "model.vocab_size=65": "`model.vocab_size=65` is too small for the 256 different tokens",
    "optimizer.lr=-1": "`optimizer`: ",
    "+optimizer.momentun=1": "`optimizer.momentun`: AdamW takes no argument momentun; it takes",
    "optimizer.lr=abc": "`optimizer.lr=abc`: expected a number",
    "optimizer._target_=torch.optim.Nope": "`optimizer._target_=torch.optim.Nope`: there is no",
    "optimizer._target_=torch.optim.LBFGS": "remove it with `~optimizer.betas ~optimizer.eps ~opt",
    "data.batch_size=x": "`data.batch_size=x`: expected a whole number",
    "data.batch_size=2.5": "`data.batch_size=2.5`: expected a whole number",
    "data.files=3": "`data.files`: expected a path, a glob or a list of them, got 3",
    "data.val_batches=1": "`data.val_batches`=1 is fewer than the 2 ranks",
    "ckpt_path=3": "`ckpt_path=3` does not exist",
    "precision=16-mixed": "`precision=16-mixed` needs a GPU: use `precision=bf16-mixed`",
    "trainer.accumulate_grad_batches=0": "`trainer.accumulate_grad_batches=0`: expected at least",
    "trainer.gradient_clip_val=-1": "`trainer.gradient_clip_val=-1`: expected a number of at least",
    "trainer.deterministic=foo": "`trainer.deterministic=foo`: expected true or false or 'warn'",
    "trainer.val_check_interval=0": "`trainer.val_check_interval=0`: expected a number above 0",
    "trainer.barebones=true": "`trainer.barebones=true` leaves out the metrics",
    "+trainer.strategy=ddp": "unknown key `trainer.strategy`: use `strategy`",
    "task.evaluate_before_fit=foo": "`task.evaluate_before_fit=foo`: expected true or false",
    "strategy.timeout.minutes=0": "`strategy.timeout`: expected a timedelta above 0 such as",
    "strategy.timeout=3": "`strategy.timeout=3`: expected null or timedelta",
    "strategy.process_group_backend=foo": "`strategy.process_group_backend=foo` is unknown: choose",
    "strategy.allow_optimizers=[foo]": "`strategy.allow_optimizers`: 'foo' is no optimizer class",
    "strategy=fsdp strategy.sharding_strategy=FOO": "`strategy`: ",
    "strategy=fsdp strategy.auto_wrap_policy=[Blok]": "`strategy.auto_wrap_policy` names 'Blok'",
    "strategy=fsdp strategy.timeout=3": "`strategy.timeout=3`: expected a time above 0",
    "world_size=7": "`world_size=7` is computed: leave it out and set `devices`, `num_nodes`",
    "~optimizer": "`optimizer` is null or missing",
    "+foo=1": "unknown key `foo`: keys are accelerator",
    "+device=1": "unknown key `device`: did you mean `devices`?",
    "strategy.auto_wrap_policy=[Blok]": "`strategy.auto_wrap_policy` names 'Blok'",
    "strategy.sharding_strategy=HALF": "`strategy.sharding_strategy`: expected one of FULL_SHARD",
    "lit_module.schedule=linear": "`lit_module.schedule`",
    "strategy.num_prefetch=-1": "`strategy.num_prefetch`: expected a whole number of units, at",
    "strategy.num_prefetch=0.5": "`strategy.num_prefetch=0.5`: expected a whole number",
    "strategy.gradient_sync=last": "`strategy.gradient_sync=last`: expected 'every_micro_batch' or",
    "strategy.transport=fast": "`strategy.transport=fast`: expected 'auto' or 'native' or",
    "strategy.cpu_offload=maybe": "`strategy.cpu_offload=maybe`: expected true or false",
    "strategy.debug=1": "`strategy.debug=1`: expected true or false",
    "strategy.device_mesh=[2,1]": "`strategy.device_mesh` is for sharding_strategy='HYBRID_SHARD'",
    "strategy.device_mesh=2": "`strategy.device_mesh=2`: expected null or a list",
    f"{HYBRID}=[2,2]": "`strategy.device_mesh`: 2 replicas x 2 shards are 4 ranks, but there are 2",
    f"{HYBRID}=[2]": "`strategy.device_mesh`: expected (replicas, shards), two whole numbers",
    f"{HYBRID}=[a,b]": "`strategy.device_mesh`: expected (replicas, shards), two whole numbers",
    "strategy.activation_checkpointing_policy=[Blok]": "checkpointing_policy` names 'Blok', but",
    "strategy.activation_checkpointing_policy=DecoderLayer": "one class name, write ['DecoderL",
    f"{POLICY},param_dtype:int8}}": "`strategy.mixed_precision.param_dtype`: expected a floating",
    f"{POLICY},reduce_dtype:bfloat}}": "or 'bfloat16', or None, got 'bfloat'",
    f"{POLICY},param_dtyp:bfloat16}}": "`strategy.mixed_precision.param_dtyp`: MixedPrecision",
    "strategy.mixed_precision=bfloat16": "`strategy.mixed_precision=bfloat16`: expected null or {",
    "optimizer._target_=torch.optim.Adafactor ~optimizer.betas ~optimizer.eps": (
        "`optimizer._target_=torch.optim.Adafactor`: Adafactor is not known to update elements"
    ),
    "callbacks.memory=false": "`callbacks.memory=False`: expected a config with `_target_`",
    "callbacks.plan.tolerance=-1": "`tolerance`: expected a number of at least 0, got -1",
    "logger.tensorboard=3": "`logger.tensorboard=3`: expected a config with `_target_`",
}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, overrides: str) -> None:
    os.chdir(tmp_path)
    Path("empty.txt").touch()
    cfg = compose(tmp_path / "run", *overrides.split())
    with pytest.raises(JobError) as caught:
        launch(cfg)
    message = str(caught.value)
    assert BAD_INPUT[overrides] in message
    assert "\n" not in message
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    "overrides",
    [
        f"{HYBRID}=[2,1] strategy.num_prefetch=2 strategy.debug=true",
        f"{POLICY},param_dtype:bfloat16}} strategy.activation_checkpointing_policy=[DecoderLayer] "
        "strategy.gradient_sync=last_micro_batch trainer.accumulate_grad_batches=2",
    ],
)
def test_every_argument_of_the_strategy_reaches_its_ranks(tmp_path: Path, overrides: str) -> None:
    launch(compose(tmp_path, "trainer.max_steps=2", *overrides.split()))
    summary = read_summary(tmp_path)
    assert summary["steps"] == 2
    sent = summary["communication"]["measured"]
    gathered, reduced = sent["all_gather_bytes"], sent["reduce_scatter_bytes"]
    if "HYBRID" in overrides:  # a shard group is one rank: nothing but the all-reduce across groups
        assert gathered == reduced == 0 and sent["all_reduce_bytes"] > 0
    else:  # blocks are gathered 4 times, the rest twice, at half the width; 1 reduction
        assert reduced < gathered < 2 * reduced


def test_bytes_are_counted_once_for_each_memory() -> None:
    layer = torch.nn.Linear(3, 5, bias=False)
    tied = torch.nn.ModuleList([layer, torch.nn.Linear(3, 5, bias=False)])
    tied[1].weight = layer.weight
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9)
    assert count_tensor_bytes(tied, [optimizer]).gradients == 0
    tied[1](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    counted = count_tensor_bytes(tied, [optimizer])
    assert (counted.parameters, counted.gradients, counted.optimizer) == (60, 60, 60)
    flat = torch.zeros(10)
    views = torch.nn.ParameterList([flat[:4], flat[4:]])  # parts of one flat parameter
    assert count_tensor_bytes(views).parameters == 40


def signature_keys(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_every_argument_is_a_key_of_the_config(tmp_path: Path) -> None:
    cfg = compose(tmp_path)
    elsewhere = {"strategy", "devices", "num_nodes", "accelerator", "precision"}
    elsewhere |= {"logger", "callbacks"}
    trainer = signature_keys(inspect.unwrap(L.Trainer.__init__))
    assert set(cfg.trainer) == trainer - elsewhere
    assert elsewhere < set(cfg)
    strategy = signature_keys(ToyFSDPStrategy.__init__)
    assert set(cfg.strategy) - {"_target_"} == strategy
    assert {path.stem for path in Path(CONF, "strategy").iterdir()} == {
        *("toy_fsdp", "toy_fsdp_whole", "fsdp", "fsdp2", "ddp", "single")
    }


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("strategy.time_out", "did you mean `strategy.timeout`?"),
        ("trainr.max_steps", "did you mean `trainer.max_steps`?"),
        ("trainer.devices", "did you mean `devices`?"),
        ("strategy.foo", "`strategy` has auto, timeout"),
        ("strategy.auto.x", "`strategy.auto` is one value: set it whole, as in conf/"),
        ("foo", "the config has devices, lit_module, strategy, trainer"),
        ("strategy.timeout.x", "`strategy.timeout` has minutes"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, message: str) -> None:
    keys = ["devices", "strategy", "strategy._target_", "strategy.auto", "strategy.timeout"]
    keys += ["strategy.timeout.minutes", "trainer.max_steps", "lit_module.max_steps"]
    assert describe_unknown_key(key, keys) == f"unknown key `{key}`: {message}"
