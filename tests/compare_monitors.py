"""Times training steps without monitors, with all of them, and with the trace as well, interleaved.

Run it on an otherwise idle machine::

    python -m tests.compare_monitors devices=2 trainer.max_steps=600

It is `train.py` (whose overrides it takes), training only, with one more callback, which lets the
monitors take turns: ten steps of each in every round, in alternating order. What counts is the
ratio within a round, because machines drift; the median's interval is a bootstrap over rounds.
What a run does once is left out: the pictures of one step, and writing the trace in the end.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_fsdp_toy.monitors.monitor import Monitor
from lightning_fsdp_toy.monitors.recording import StepRecorder

STEPS = 10  # of a variant in a round; the monitors log once in ten by default
VARIANTS = ("off", "monitors", "trace")  # the last: monitors, and the recorder of `+trace=true`


class Turns(Callback):
    """Takes the monitors out of the Trainer and puts them back; prints the ratios in the end."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self._num_batches = 0
        self._start = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._all = list(trainer.callbacks)  # type: ignore[attr-defined]
        self._choose(trainer, pl_module, self._variant(0))

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._num_batches % STEPS == 0:
            now = time.perf_counter()
            if self._num_batches:
                name = self._variant(self._num_batches // STEPS - 1)
                self.times[name].append((now - self._start) / STEPS)
            self._start = now

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self._num_batches += 1
        if self._num_batches % STEPS == 0:  # all others have seen the end of the block
            self._choose(trainer, pl_module, self._variant(self._num_batches // STEPS))

    @staticmethod
    def _variant(block: int) -> str:
        turn, at = divmod(block, len(VARIANTS))
        return VARIANTS[at if turn % 2 == 0 else -1 - at]

    def _choose(self, trainer: L.Trainer, pl_module: L.LightningModule, variant: str) -> None:
        is_on = variant != "off"
        chosen = [each for each in self._all if is_on or not isinstance(each, Monitor)]
        if variant == "trace":
            recorder = StepRecorder(num_steps=STEPS)
            recorder.on_train_start(trainer, pl_module)
            chosen.append(recorder)
        trainer.callbacks = chosen  # type: ignore[attr-defined]
        trainer.strategy.root.memory.counts_activations = is_on  # type: ignore[attr-defined]

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._choose(trainer, pl_module, "monitors")
        times = {name: seconds[1:] for name, seconds in self.times.items()}  # without warm-up
        rounds = min(map(len, times.values()))
        if not trainer.is_global_zero:
            return
        for name in VARIANTS[1:]:
            pairs = zip(times[name][:rounds], times["off"][:rounds], strict=True)
            ratios = [a / b for a, b in pairs]
            draw = random.Random(0)
            medians = sorted(statistics.median(draw.choices(ratios, k=rounds)) for _ in range(2000))
            print(
                f"{name:9} / off: median {statistics.median(ratios):.3f}, 95 % interval "
                f"{medians[50]:.3f} to {medians[1949]:.3f}, {rounds} rounds"
            )


def main() -> None:
    repo = Path(__file__).parents[1]
    turns = "+callbacks.turns._target_=tests.compare_monitors.Turns"
    only_training = ("trainer.limit_val_batches=0", "~callbacks.checkpoint", "~callbacks.pictures")
    subprocess.run(
        [sys.executable, "train.py", *only_training, turns, *sys.argv[1:]],
        cwd=repo,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo)},
        check=True,
    )


if __name__ == "__main__":
    main()
