"""A module whose training goes wrong in chosen runs of `task=verify`, to see that rows can fail."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_fsdp_toy.lit_module import LitLanguageModel


class Mutant(LitLanguageModel):
    """Changes one gradient element on rank 0 in every step of the runs named in `wrong_in`."""

    def __init__(self, wrong_in: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wrong_in = wrong_in

    def kinds(self) -> set[str]:
        """What the present run is called."""
        trainer, strategy = self.trainer, self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            return {type(strategy).__name__}
        is_batch = trainer.gradient_clip_val is not None
        kinds = {f"batch on {trainer.world_size}"} if is_batch else {"plain"}
        kinds.add("resumed" if trainer.ckpt_path else "from the start")
        if not is_batch:
            kinds.add(f"prefetch {strategy.num_prefetch}")
            kinds.add("whole" if strategy.auto_wrap_policy is None else "blocks")
            kinds.add(strategy.sharding_strategy)
        return kinds

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.trainer.global_rank == 0 and self.kinds() & set(self.wrong_in):
            grads = [p.grad for p in self.parameters() if p.grad is not None and p.grad.numel()]
            grads[0].view(-1)[0] += 1.0
