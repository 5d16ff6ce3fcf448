"""A pipeline of a user's own nn.Sequential has the gradients of one process, in every schedule."""

import pytest
import torch
import torch.nn.functional as F
from kept import kept
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import FSDPModule
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import transformer_block
from tpformer.parallel import SCHEDULES, Layout, pipeline_sequential

BATCH = 8


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3, 2), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(54, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 1, 7, 7, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def loss_fn(output, target):
    return F.cross_entropy(output, target, reduction="sum") / BATCH


def gradients(fields: dict) -> tuple[list[float], bool, dict[str, torch.Tensor]]:
    """The losses of a step and of an evaluation, whether this rank has the last stage, and its parts' gradients."""
    layout = Layout(**fields)
    sizes = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard")
    mesh = build_mesh("cpu", tensor_parallel=1, **{name: getattr(layout, name) for name in sizes})
    (x, target), share = data(), BATCH // layout.data_parallel
    first = mesh["dp_shard"].get_local_rank() * share
    m = 1 if layout.pipeline_schedule == "naive" else 4
    options = {"example": x[: share // m], "n_microbatches": m, "loss_fn": loss_fn}
    pipeline = pipeline_sequential(cnn(), layout, mesh, **options)
    assert not layout.cpu_offload or all(isinstance(part, FSDPModule) for part in pipeline.parts)
    own = x[first : first + share], target[first : first + share]
    losses = [float(run(*own)) for run in (pipeline.step, pipeline.evaluate)]
    found = {name: full_tensor(p.grad).clone() for part in pipeline.parts for name, p in part.named_parameters()}
    return losses, pipeline.is_last, found


LAYOUTS = [{"cpu_offload": True}, *({"pipeline_schedule": schedule} for schedule in SCHEDULES)]
LAYOUTS += [
    {"data_parallel_shard": 2, "pipeline_split": "time", "pipeline_schedule": schedule, "zero_stage": zero}
    for schedule, zero in (("1F1B", 1), ("1F1B", 3), ("ZBVZeroBubble", 1), ("Interleaved1F1B", 2))
]
KEPT = [LAYOUTS[n] for n in (1, len(SCHEDULES), -1)]


@pytest.mark.parametrize("fields", [*KEPT, *in_turns((each for each in LAYOUTS if each not in KEPT), first=0)], ids=str)
def test_every_layout_has_the_gradients_of_one_process(ranks, fields):
    whole = cnn()
    x, target = data()
    loss = loss_fn(whole(x), target)
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    replicas = fields.get("data_parallel_shard", 1)
    records = ranks(2 * replicas).run(gradients, {"pipeline_parallel": 2, **fields})
    for losses, is_last, found in records:
        assert is_last or losses == [0.0, 0.0]
        assert_same(found, {name: expected[name] for name in found})
    assert {name for *_, found in records for name in found} == set(expected)
    assert sum(is_last for _, is_last, _ in records) == replicas
    assert_same([sum(losses[i] for losses, *_ in records) for i in range(2)], [loss.item()] * 2)


def test_gathers_in_blocks_of_no_block_are_refused():
    """Of children in 16 bits, and of weights that no other rank shares."""
    for fields in ({"data_parallel_shard": 2, "zero_stage": 3}, {"data_parallel_replicate": 2}):
        layout, model = Layout(**fields, zero_gather="fp8"), nn.Sequential(nn.Linear(128, 128))
        with pytest.raises(ValueError, match=f"with {layout.shards} ranks that share each weight, and 0 weights"):
            pipeline_sequential(model, layout, None, example=None, n_microbatches=1, loss_fn=None)


def test_what_children_have_to_do_is_refused_by_name():
    refused = {"recompute": "mlp", "recompute_layers": "0:2", "recompute_interval": 2, "offload_activations": True}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"does not apply parallel.{name}={value!r}"):
            layout = Layout(pipeline_parallel=2, **{name: value})
            pipeline_sequential(cnn(), layout, None, example=data()[0], n_microbatches=2, loss_fn=loss_fn)


def blocks(recompute: str) -> list[torch.Tensor]:
    """This rank's gradients of blocks with dropout, which draw from their stage's generator."""
    torch.manual_seed(0)
    model = nn.Sequential(*(kept(transformer_block, 24, 4, dropout=0.1, recompute=recompute) for _ in range(3)))
    mesh = build_mesh("cpu", tensor_parallel=1, pipeline_parallel=2)
    x = torch.randn(4, 6, 24)
    options = {"example": x[:2], "n_microbatches": 2, "loss_fn": lambda y, target: (y - target).square().sum()}
    pipeline = pipeline_sequential(model, Layout(pipeline_parallel=2, pipeline_split="time"), mesh, **options)
    pipeline.step(x, x)
    return [p.grad for part in pipeline.parts for p in part.parameters()]


@on_every_rank(2)
def test_recomputed_children_have_the_same_gradients() -> None:
    kept, *again = (blocks(recompute) for recompute in ("none", "mlp", "full"))
    assert len(kept) > 0
    assert_identical(again, [kept, kept])
