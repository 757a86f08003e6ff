"""`ToyFSDPFabricStrategy` on GPUs."""

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_fsdp_toy import ToyFSDPFabricStrategy
from tests.core_helpers import OPTIMIZERS, Stack, make_batches, train_reference
from tests.fabric_helpers import train, whole
from tests.gpu.groups import every_group, on_gpus


def _make(cpu_offload, precision=None):
    where = {"devices": dist.get_world_size()}
    if torch.cuda.device_count() < dist.get_world_size():
        where = {"devices": 1, "num_nodes": dist.get_world_size()}
    strategy = ToyFSDPFabricStrategy(cpu_offload=cpu_offload)
    fabric = Fabric(accelerator="cuda", strategy=strategy, precision=precision, **where)
    fabric.launch()
    torch.manual_seed(0)
    model = Stack()
    model, optimizer = fabric.setup(model, OPTIMIZERS["adamw"](model.parameters()))
    return fabric, model, optimizer


def _loop():
    torch.manual_seed(0)
    reference, batches = Stack().cuda(), [(x.cuda(), y.cuda()) for x, y in make_batches(8)]
    expected = train_reference(reference, batches, 4, "adamw")
    for cpu_offload in (False, True):
        fabric, model, optimizer = _make(cpu_offload)
        train(fabric, model, optimizer, batches, 4)
        for name, value in whole(fabric, model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        kind = "cpu" if cpu_offload else "cuda"
        assert {param.device.type for param in model.parameters()} == {kind}
        moments = [entry["exp_avg"] for entry in optimizer.state.values()]
        assert {moment.device.type for moment in moments} == {kind}


@every_group
def test_loop_ends_with_the_weights_of_one_process(group):
    on_gpus(_loop, group)


def _clip():
    batches = [(x.cuda(), y.cuda()) for x, y in make_batches(8)]
    for cpu_offload in (False, True):
        for precision in ("bf16-mixed", "16-mixed"):
            fabric, model, optimizer = _make(cpu_offload, precision)
            norms = []

            def clip(fabric=fabric, model=model, optimizer=optimizer, norms=norms):
                norms.append(
                    float(
                        fabric.clip_gradients(
                            model, optimizer, max_norm=0.1, error_if_nonfinite=False
                        )
                    )
                )

            train(fabric, model, optimizer, batches, 4, before_step=clip)
            assert len(norms) == 2 and all(norm > 0 for norm in norms)
            assert all(value.isfinite().all() for value in whole(fabric, model).values())


@every_group
def test_mixed_precision_clips_and_offloads(group):
    on_gpus(_clip, group)
