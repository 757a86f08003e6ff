"""The runs of one stage: which strategy trains, and what it is compared with."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_fsdp_toy.handover import given_ranks
from lightning_fsdp_toy.monitors import count_tensor_bytes
from lightning_fsdp_toy.strategy import ToyFSDPStrategy
from lightning_fsdp_toy.tasks import Build, Job
from lightning_fsdp_toy.tasks.verify.comparison import AfterEveryStep, CompareWithPlain
from lightning_fsdp_toy.tasks.verify.ddp import OrderedDDPStrategy
from lightning_fsdp_toy.tasks.verify.families import (
    PLAIN,
    VerifyStage,
    make_module,
    optimizer_label,
    scratch_dir,
)
from lightning_fsdp_toy.tasks.verify.faults import Fault, make_fault
from lightning_fsdp_toy.tasks.verify.options import VerifyOptions
from lightning_fsdp_toy.tasks.verify.outcomes import Claim, Outcome, Sizes
from lightning_fsdp_toy.tasks.verify.reference import train_plainly
from lightning_fsdp_toy.tasks.verify.replica import Replica
from lightning_fsdp_toy.tasks.verify.trajectory import Trajectory

__all__ = ["StageRuns"]

_FORMS = ("full", "sharded")  # of checkpoints


class StageRuns:
    """Trains in every form that one stage has, on each of its ranks.

    Args:
        job: The job.
        build: Makes what its config describes.
        stage: What to do.
    """

    def __init__(self, job: Job, build: Build, stage: VerifyStage) -> None:
        self.job = job
        self.build = build
        self.stage = stage
        self.options = VerifyOptions.of(job.config)
        self.rows = set(self.options.rows)
        given = given_ranks()
        self.rank = 0 if given is None else given.global_rank()
        self.num_ranks = stage.num_ranks
        self.middle = self.options.steps // 2

    def run(self) -> list[Outcome]:
        """Run everything; called on every rank of the stage."""
        path = self.stage.path(self.job)
        if not Trajectory.exists(path):
            if self.rank == 0:
                self._say("one plain process")
                train_plainly(self.job, self.build, self.stage)
            Trajectory.wait_for(path)
        self.trajectory = self.stage.trajectory(self.job)
        runs = self._plain_runs() if self.stage.family.name == PLAIN else self._batch_runs()
        return list(runs)

    # -- one micro-batch a rank and step ---------------------------------------------------------

    def _plain_runs(self) -> Iterator[Outcome]:
        if self.rows & {"a", "b", "c"}:  # `c` is among them with `d` or `f`
            yield from self._base_run()
        if "b" in self.rows:
            for text, arguments in _FORMS_OF_SHARDING.items():
                if not self._is_configured(arguments):
                    is_whole = arguments["sharding_strategy"] == "NO_SHARD"
                    strategy = self.build("strategy", **arguments)
                    yield self._compared(_name_of(text), text, strategy, is_whole=is_whole)
        if "d" in self.rows:
            if self.num_ranks <= 2:
                stock = "Lightning's stock DDP"
                yield self._with_base(self._compared("d_ddp", stock, DDPStrategy(), is_whole=True))
            hook = "DDP, hook that adds in rank order"
            yield self._with_base(
                self._compared("d_ddp_ordered", hook, OrderedDDPStrategy(), is_whole=True)
            )
        if "f" in self.rows:
            depth = self.job.config["strategy"]["num_prefetch"]
            text = "not overlapped" if depth else "overlapped"
            strategy = self.build("strategy", num_prefetch=0 if depth else 1)
            text += f" (num_prefetch={strategy.num_prefetch})"
            yield self._with_base(self._compared("f_overlap", text, strategy))

    def _base_run(self) -> Iterator[Outcome]:
        """The configured strategy beside a replica: rows a and c, and where most faults go."""
        replica = Replica(make_module(self.job, self.build, self.stage), self.rank)
        fault = self._fault(is_here=self.options.plant != "order" or self.num_ranks >= 3)
        plain = CompareWithPlain(self.trajectory, self.rank)
        has_replica = "a" in self.rows
        watch = AfterEveryStep(
            *([fault.after_step] if fault else []),
            *([replica.compare_shards] if has_replica else []),
            plain,
        )
        self._say("toy_fsdp as configured")
        callbacks = [*([fault] if fault else []), *([replica] if has_replica else []), watch]
        _, sizes = self._train(self.build("strategy"), callbacks)
        self.base = plain.divergence
        facts = {"planted": fault.planted} if fault else {}
        if has_replica:
            shards = self._claim("a_shards", "shards: replica fed the same gradient")
            gathered = self._claim("a_gathered", "gathered weights: the same replica", first=1)
            yield self._outcome(shards, replica.shards, facts, sizes)
            yield self._outcome(gathered, replica.gathered, is_whole=True)
        for text, arguments in _FORMS_OF_SHARDING.items():
            if "b" in self.rows and self._is_configured(arguments):
                yield self._outcome(self._claim(_name_of(text), text), plain.divergence, {}, sizes)
        if "c" in self.rows:
            text = f"one process, micro-batches accumulated: {self.num_ranks}"
            yield self._outcome(self._claim("c_one_process", text), plain.divergence, facts, sizes)

    def _with_base(self, outcome: Outcome) -> Outcome:
        """The run equals the base run if both equal the plain one."""
        joined = outcome.divergence.joined(self.base)
        return replace(outcome, divergence=joined, needed=outcome.needed + self.trajectory.numel)

    def _is_configured(self, arguments: dict[str, Any]) -> bool:
        """Whether the job's own strategy has these arguments, so that the base run is this run."""
        configured: dict[str, Any] = self.job.config["strategy"]
        return arguments.items() <= configured.items()

    # -- four micro-batches a step, clipped, with dropout ----------------------------------------

    def _batch_runs(self) -> Iterator[Outcome]:
        fault = None
        if self.num_ranks == 2:
            fault = self._fault(is_here=self.options.plant == "order" and self._is_small)
        if "e" in self.rows or self.num_ranks == 2:
            saver = [_SaveInTheMiddle(self.middle, scratch_dir(self.job), self._tag)]
            saves = self.num_ranks == 2 and "f" in self.rows
            text = f"{self.num_ranks} x {self.stage.accumulate} micro-batches, {self._extras()}"
            yield self._compared(
                f"e_on_{self.num_ranks}",
                text,
                self.build("strategy"),
                fault,
                saver if saves else [],
            )
        if "f" in self.rows and self.num_ranks == 4:
            for form in _FORMS:
                path = scratch_dir(self.job) / f"{self._tag}_{form}.ckpt"
                text = f"saved on 2 ranks ({form}), resumed on 4"
                strategy = self.build("strategy", state_dict_type=form)
                name = f"f_resumed_{form}"
                yield self._compared(name, text, strategy, ckpt_path=str(path), first=self.middle)

    @property
    def _is_small(self) -> bool:
        """Whether the job has so few ranks that order matters with accumulation only."""
        return int(self.job.config["world_size"]) < 3

    @property
    def _tag(self) -> str:
        return self.stage.optimizer

    def _extras(self) -> str:
        """What is switched on in this family, in words."""
        family, facts = self.stage.family, self.trajectory.facts
        clip = f"clipped in {facts['num_clipped']} steps"
        return clip if family.dropout is None else f"{clip}, dropout {family.dropout:g}"

    # -- shared ----------------------------------------------------------------------------------

    def _fault(self, is_here: bool) -> Fault | None:
        kind = self.options.plant
        if kind is None or not is_here:
            return None
        return make_fault(kind, self.options.steps, self.num_ranks)

    def _compared(
        self,
        name: str,
        text: str,
        strategy: Strategy,
        fault: Fault | None = None,
        callbacks: list[Any] | None = None,
        ckpt_path: str | None = None,
        first: int = 0,
        is_whole: bool = False,
    ) -> Outcome:
        """Train and compare with the plain run after every step from `first` on.

        `is_whole`: every rank holds, and must compare, all weights.
        """
        self._say(text)
        plain = CompareWithPlain(self.trajectory, self.rank)
        watch = AfterEveryStep(plain)
        faults = [fault] if fault else []
        _, sizes = self._train(strategy, [*faults, watch, *(callbacks or [])], ckpt_path)
        facts = {"planted": fault.planted} if fault else {}
        claim = self._claim(name, text, first)
        return self._outcome(claim, plain.divergence, facts, sizes, is_whole)

    def _train(
        self, strategy: Strategy, callbacks: list[Callback], ckpt_path: str | None = None
    ) -> tuple[L.Trainer, Sizes | None]:
        """A real `Trainer.fit`, as `task=fit` does it, without its side effects."""
        config, family = self.job.config, self.stage.family
        is_whole_job = self.num_ranks == config["world_size"]
        module = make_module(self.job, self.build, self.stage)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator=config["accelerator"],
            devices=config["devices"] if is_whole_job else self.num_ranks,
            num_nodes=config["num_nodes"] if is_whole_job else 1,
            precision=config["precision"],
            max_steps=self.options.steps,
            max_epochs=-1,
            accumulate_grad_batches=self.stage.accumulate,
            gradient_clip_val=family.clip,
            gradient_clip_algorithm=None if family.clip is None else "norm",
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, measure := _Measure()],
        )
        trainer.fit(module, datamodule=self.build("data"), ckpt_path=ckpt_path)
        if trainer.received_sigterm:
            raise SystemExit(143)  # 128 + SIGTERM; Lightning would report success
        gc.collect()  # modules and their hooks refer to each other
        return trainer, measure.sizes

    def _claim(self, name: str, text: str, first: int = 0) -> Claim:
        label = optimizer_label(self.job, self.stage.optimizer)
        return Claim(name, text, self.num_ranks, label, (first, self.options.steps))

    def _outcome(
        self,
        claim: Claim,
        divergence: Any,
        facts: dict[str, Any] | None = None,
        sizes: Sizes | None = None,
        is_whole: bool = False,
    ) -> Outcome:
        known = self.trajectory.facts | (facts or {})
        num_copies = self.num_ranks if is_whole else 1
        needed = self.trajectory.numel * num_copies
        return Outcome(claim, divergence, self.trajectory.numel, needed, known, sizes)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            label = optimizer_label(self.job, self.stage.optimizer)
            print(f"verify: on {self.num_ranks}, {label}: {text} ...", flush=True)


class _Measure(Callback):
    """Counts what a rank holds between steps."""

    sizes: Sizes | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, ToyFSDPStrategy):
            return
        counted = count_tensor_bytes(pl_module, trainer.optimizers)
        pool_bytes = trainer.strategy.root.memory.held["pool"]
        self.sizes = Sizes(counted.parameters, counted.optimizer, pool_bytes)


class _SaveInTheMiddle(Callback):
    """Saves both forms of checkpoint after some step."""

    def __init__(self, step: int, folder: Any, tag: str) -> None:
        self.step = step
        self.folder = folder
        self.tag = tag
        self.is_saved = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != self.step or self.is_saved:
            return
        self.is_saved = True
        strategy: Any = trainer.strategy
        configured = strategy.state_dict_type
        for form in _FORMS:
            strategy.state_dict_type = form
            trainer.save_checkpoint(self.folder / f"{self.tag}_{form}.ckpt")
        strategy.state_dict_type = configured


def _name_of(form: str) -> str:
    """Return the name of the claim for a form of sharding."""
    kind, _, units = form.partition(", ")
    return f"b_{kind.lower()}" + ("_one_unit" if "one unit" in units else "")


def _form(sharding_strategy: str, auto_wrap_policy: str | None) -> dict[str, Any]:
    return {"sharding_strategy": sharding_strategy, "auto_wrap_policy": auto_wrap_policy}


_FORMS_OF_SHARDING = {
    "FULL_SHARD, a unit per block": _form("FULL_SHARD", "auto"),
    "FULL_SHARD, the model as one unit": _form("FULL_SHARD", None),
    "SHARD_GRAD_OP, a unit per block": _form("SHARD_GRAD_OP", "auto"),
    "NO_SHARD, a unit per block": _form("NO_SHARD", "auto"),
}
