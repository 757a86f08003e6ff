"""The timeline of a few steps and the pictures drawn from it."""

import json
import warnings
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fsdp_toy import ToyFSDPStrategy
from lightning_fsdp_toy.monitors import MemoryMonitor, Pictures, Timeline
from lightning_fsdp_toy.monitors.drawing import bytes_figure
from lightning_fsdp_toy.monitors.planned import plan
from lightning_fsdp_toy.monitors.recording import Recording, Span
from lightning_fsdp_toy.monitors.timeline import chrome_trace, unit_spans
from lightning_fsdp_toy.sharding import Ledger
from lightning_fsdp_toy.sharding.ledger import CollectiveRecord
from lightning_fsdp_toy.sharding.memory import KINDS
from lightning_fsdp_toy.sharding.observer import UnitEvent
from tests.core_helpers import Stack
from tests.lit_helpers import LitStack, make_trainer, regression_data
from tests.ranks import run_ranks

UNITS = ["<root>", "net.blocks.0", "net.blocks.1", "net.blocks.2"]


def _fit(directory, strategy, options):
    trainer = make_trainer(
        strategy,
        directory,
        max_steps=6,
        callbacks=[Timeline(f"{directory}/trace.json", **options)],
    )
    trainer.fit(LitStack(), regression_data(64))
    root = getattr(trainer.strategy, "root", None)
    return root is None or root.observers == root.memory.listeners == root.ledger.listeners == []


def trace_of(directory, strategy, options, world_size=2):
    assert all(run_ranks(_fit, world_size, str(directory), strategy, options))
    return json.loads((directory / "trace.json").read_text())["traceEvents"]


def lanes(events, rank):
    """Slices of a rank by the name of their lane, in the order of time."""
    names = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == rank
    }
    found = {name: [] for name in names.values()}
    for event in sorted(events, key=lambda e: e.get("ts", 0)):
        if event["ph"] == "X" and event["pid"] == rank:
            found[names[event["tid"]]].append(event)
    return found


def test_every_rank_has_its_lanes_in_one_file(tmp_path):
    events = trace_of(tmp_path, ToyFSDPStrategy(), {"first_step": 2, "num_steps": 2})
    for rank in (0, 1):
        found = lanes(events, rank)
        assert {"compute", "wait", "communication", *UNITS} <= set(found)
        names = [event["name"] for event in found["compute"]]
        assert [name for name in names if name.startswith("batch")] == ["batch 2", "batch 3"]
        for unit in UNITS:
            assert names.count(f"forward {unit}") == names.count(f"backward {unit}") == 2
        assert names.count("optimizer") == 2
        block = [event["name"] for event in found["net.blocks.0"]]
        assert set(block) == {"sharded", "all-gather", "unsharded", "computing", "reducing"}
        assert block.count("computing") == 4  # forward and backward of two steps
        assert block.count("reducing") == 2
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert all(set(e["args"]) == set(KINDS) for e in counters)
        assert min(e["args"]["shards"] for e in counters) > 0
    assert min(event["ts"] for event in events if "ts" in event) == 0


class Unprepared(LitStack):
    def setup(self, stage):
        raise LookupError("no data")


def _fail_before_sharding(directory):
    callbacks = [Timeline(f"{directory}/trace.json"), Pictures(directory), MemoryMonitor()]
    trainer = make_trainer(ToyFSDPStrategy(), directory, callbacks=callbacks)
    with pytest.raises(LookupError, match="no data"):
        trainer.fit(Unprepared(), regression_data())


def test_an_error_before_sharding_is_shown_as_it_is(tmp_path):
    run_ranks(_fail_before_sharding, 2, str(tmp_path))


class Alternating(LitStack):
    """Two networks, two backwards and two optimizers in one training step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = Stack()

    def training_step(self, batch, _):
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(batch[0]) - batch[1]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]


def _fit_alternating(directory):
    timeline = Timeline(f"{directory}/trace.json", num_steps=3)
    trainer = make_trainer(ToyFSDPStrategy(), directory, max_epochs=1, callbacks=[timeline])
    trainer.fit(Alternating(), regression_data(64))


@pytest.mark.parametrize("is_manual", [False, True])
def test_slices_of_a_lane_nest(tmp_path, is_manual):
    if is_manual:
        run_ranks(_fit_alternating, 2, str(tmp_path))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    else:
        events = trace_of(tmp_path, ToyFSDPStrategy(), {"num_steps": 3})
    steps = [e for e in lanes(events, 0)["compute"] if e["name"] == "optimizer"]
    assert len(steps) == (6 if is_manual else 3)
    for rank in (0, 1):
        for name, slices in lanes(events, rank).items():
            open_until = []
            for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
                start, end = event["ts"], event["ts"] + event["dur"]
                while open_until and open_until[-1] <= start + 1e-3:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 1e-3, (name, event)
                open_until.append(end)


def _end_early(directory):
    module, data = LitStack(), regression_data(64)

    class Evaluate(Callback):
        def on_train_end(self, trainer, pl_module):
            with torch.no_grad():
                module.net(next(iter(data))[0])

    callbacks = [Evaluate(), Timeline(f"{directory}/trace.json", num_steps=20)]
    make_trainer(ToyFSDPStrategy(), directory, max_steps=3, callbacks=callbacks).fit(module, data)


def test_a_trace_ends_with_the_last_step(tmp_path):
    run_ranks(_end_early, 2, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        found = lanes(events, rank)
        last = next(e for e in found["compute"] if e["name"] == "batch 2")
        for event in (event for slices in found.values() for event in slices):
            assert event["dur"] >= 0
            assert event["ts"] + event["dur"] <= last["ts"] + last["dur"] + 1e-3


def _record_many(directory):
    timeline = Timeline(f"{directory}/trace.json", num_steps=6)
    trainer = make_trainer(ToyFSDPStrategy(), directory, max_steps=6, callbacks=[timeline])
    with mock.patch.object(Ledger.__init__, "__defaults__", (4,)):  # keeps four records itself
        trainer.fit(LitStack(), regression_data(64))
    assert len(trainer.strategy.ledger.records) == 4
    reductions = [r for r in timeline.recording.collectives if r.operation == "reduce_scatter"]
    return len(reductions)


def test_a_long_trace_keeps_all_collectives(tmp_path):
    assert run_ranks(_record_many, 2, str(tmp_path)) == [6 * len(UNITS)] * 2


def _warnings_of(*args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(*args)
    return [str(each.message) for each in caught if "`Timeline`" in str(each.message)]


@pytest.mark.parametrize(
    "strategy, text",
    [
        ("toy_fsdp", "was not written: training ended after 6 batches, before `first_step=9`"),
        (
            "ddp",
            "will not be written: only `toy_fsdp` tells what units do, and this is DDPStrategy",
        ),
    ],
)
def test_a_trace_that_is_not_written_warns_once(tmp_path, strategy, text):
    options = {"first_step": 9}
    first, second = run_ranks(_warnings_of, 2, str(tmp_path), strategy, options)
    assert len(first) == 1 and text in first[0]
    assert second == []
    assert not (tmp_path / "trace.json").exists()


def test_bytes_in_the_trace_are_the_ledgers(tmp_path):
    events = trace_of(tmp_path, ToyFSDPStrategy(num_prefetch=0), {"first_step": 3})
    found = lanes(events, 0)
    assert [name for name in found if name.startswith("communication")] == ["communication"]
    steps = {e["name"] for e in found["compute"] if e["name"].startswith("batch")}
    gathers = [e for e in found["communication"] if e["name"].startswith("all_gather")]
    assert len(gathers) == len(steps) * (2 * len(UNITS) - 2)
    assert all(e["args"]["payload_bytes"] == 2 * e["args"]["sent_bytes"] for e in gathers)


def test_clocks_of_two_machines_are_brought_together():
    def recording(rank, host, offset, start):
        step = Span("batch 0", start, start + 1)
        return Recording(rank, ["<root>"], host, offset, steps=[step])

    trace = chrome_trace([recording(0, "a", 1000.0, 5.0), recording(1, "b", 2000.0, -994.0)])
    starts = {e["pid"]: e["ts"] for e in trace["traceEvents"] if e.get("cat") == "step"}
    assert starts == {0: 0.0, 1: pytest.approx(1e6)}


def test_states_of_a_unit_follow_its_events():
    recording = Recording(0, ["u"], steps=[Span("batch 0", 0.0, 10.0)])
    whats = ["gather", "unsharded", "forward", "end_forward", "sharded"]
    recording.events = [UnitEvent(1.0 + number, "u", what) for number, what in enumerate(whats)]
    recording.collectives = [CollectiveRecord("reduce_scatter", "u", 8, 4, 6.0, 7.0, 0.5, 4)]
    assert [(s.name, s.start_s, s.end_s) for s in unit_spans(recording, "u")] == [
        ("sharded", 0.0, 1.0),
        ("all-gather", 1.0, 2.0),
        ("unsharded", 2.0, 5.0),
        ("sharded", 5.0, 10.0),
        ("computing", 3.0, 4.0),
        ("reducing", 6.0, 7.0),
    ]


@pytest.mark.parametrize("options", [{"first_step": -1}, {"num_steps": 0}, {"num_steps": True}])
def test_numbers_of_steps_are_checked(options):
    with pytest.raises(ValueError, match="expected a whole number of at least"):
        Timeline("trace.json", **options)


@pytest.mark.parametrize("sync", ["every_micro_batch", "last_micro_batch"])
def test_a_picture_of_bytes_is_of_a_whole_optimizer_step(tmp_path, sync):
    for counted, formula in run_ranks(_bars, 2, str(tmp_path), sync):
        assert counted == formula and min(counted[:2]) > 0


def _bars(directory, sync):
    pictures = Pictures(directory)
    trainer = make_trainer(
        ToyFSDPStrategy(gradient_sync=sync),
        directory,
        max_steps=4,
        max_epochs=-1,
        accumulate_grad_batches=3,
        callbacks=[pictures],
    )
    trainer.fit(LitStack(), regression_data(128))
    recording = pictures.recording
    assert [step.name for step in recording.steps] == ["batch 6", "batch 7", "batch 8"]
    figure = bytes_figure(recording, plan(trainer, trainer.strategy.root, 3))
    bars = figure.axes[0].containers
    return [[bar.get_height() for bar in each] for each in bars]


def _draw(directory, options):
    trainer = make_trainer(
        ToyFSDPStrategy(**options),
        directory,
        logger=TensorBoardLogger(directory, name="", version=""),
        max_steps=4,
        callbacks=[Pictures(f"{directory}/pictures")],
    )
    trainer.fit(LitStack(), regression_data(64))


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}])
def test_pictures_are_files_and_images(tmp_path, options):
    run_ranks(_draw, 2, str(tmp_path), options)
    names = ["bytes", "memory", "ownership", "units"]
    assert sorted(path.stem for path in (tmp_path / "pictures").glob("*.png")) == names
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    assert sorted(events.Tags()["images"]) == [f"pictures/{name}" for name in names]
    for name in names:
        [image] = events.Images(f"pictures/{name}")
        assert image.width >= 600 and image.height >= 300
