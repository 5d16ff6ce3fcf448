"""A step reads nothing from the device but its numbers, and those when the next step is queued."""

import pytest
import torch
from testing import on_every_rank
from tiny_runs import values_with
from waits import CPU_READS, counted_waits

from tpformer.config import build_config
from tpformer.distributed import build_mesh
from tpformer.layers import SelfAttention
from tpformer.training.metrics import Speed
from tpformer.training.trainer import Trainer

STEPS = 4
TP2, PP2, ZERO3 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"data_parallel_shard": 2, "zero_stage": 3}
READ = "tpformer/training/transfers.py:Fetched.read tolist"
SKIPPED = "tpformer/training/model.py:ModelParts.first_not_finite tolist"
VOTE = "tpformer/parallel/pipeline.py:Pipeline._run"  # torch's, before the first step of a schedule
# what a GPU run does not do, does to tensors of the host, or does where nothing has to move
FREE = (
    *CPU_READS,
    "tpformer/distributed/shared_memory.py:",  # of CPU ranks
    "tpformer/training/model.py:ModelParts.data_rank",  # a DeviceMesh keeps its ranks on the host
    "tpformer/parallel/pipeline.py:Pipeline.__init__",  # the same, where the number of microbatches changes
    "tpformer/training/transfers.py:to_device to",  # its way for a CPU
    "tpformer/layers/dropout.py:DropoutKey.site to",  # indices are made on the device
    "tpformer/training/step.py:train_step to",  # moves the loss to the host with cpu_offload
    "tpformer/training/norms.py:NormWatch.measured to",  # the same
)


@pytest.mark.parametrize(("parallel", "dtype"), [(TP2, "float32"), (PP2, "float32"), (ZERO3, "float16")], ids=str)
@on_every_rank(2)
def test_steps_read_their_numbers_and_nothing_else(tiny_values, parallel, dtype):
    sections = {"parallel": parallel, "model": {"dropout": 0.1}, "data": {"valid": []}}
    log = {"norm_interval": 2, "noise_interval": 2, "interval": 2}
    train = {"steps": STEPS, "dtype": dtype, "microbatch_size": 1}
    trainer = Trainer(build_config(values_with(tiny_values, **sections, log=log, train=train)))
    trainer.saves.save, trainer.speed = lambda *_, **__: None, Speed(0)
    with trainer._watched, counted_waits() as waits:
        trainer._train(None, [])
    found = {place: number for place, number in waits.items() if not place.startswith(FREE)}
    schedules = 1 + 2 * (STEPS // 2)  # every second step runs half a batch before
    votes = {f"{VOTE} {what}": schedules for what in ("tensor", "_local_scalar_dense")}
    expected = {READ: STEPS, **({SKIPPED: trainer.tally.skipped} if trainer.tally.skipped else {})}
    assert found == expected | (votes if "pipeline_parallel" in parallel else {})


@on_every_rank(3)
def test_attention_with_key_value_heads_of_unlike_use_waits_for_nothing():
    """Of each rank's four query heads a key-value head serves three and another one the fourth, but in the middle."""
    mesh = build_mesh("cpu", tensor_parallel=3)["tp"]
    layer = SelfAttention(96, 12, n_kv_heads=4, tp=mesh)
    assert layer.attended_heads == (2 if mesh.get_local_rank() == 1 else 4)
    with counted_waits() as waits:
        layer(torch.randn(2, 6, 96)).sum().backward()
    assert not {place for place in waits if not place.startswith(FREE)}


@pytest.mark.parametrize("wait", [
    lambda x: x.item(), lambda x: f"{x:.3f}", lambda x: 1 if x > 0 else 0, lambda x: x.tolist(), lambda x: x.cpu(),
    lambda x: x.to("cpu"), lambda x: x.reshape(1)[x.reshape(1) > 0], lambda x: x.reshape(1).nonzero(),
    lambda x: torch.tensor([0.0], device=x.device),
])  # fmt: skip
def test_a_wait_is_counted(wait):
    with counted_waits() as found:
        wait(torch.tensor(2.0))
    assert found.total() > 0
