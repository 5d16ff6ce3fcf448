"""Layers take the shapes and strides that torch.nn takes, and empty batches; they compute no product that nobody
needs."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from testing import assert_same
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.distributed import build_mesh, record_collectives
from tpformer.layers import (
    MLP,
    LMHead,
    PositionEmbedding,
    Positions,
    RopeScaling,
    SelfAttention,
    TensorParallel,
    VocabParallelEmbedding,
)
from tpformer.models import GPT, GPTConfig

K, N = 8, 6
SIZES = {"x": K, "weight": K, "bias": N, "residual": N, "gate": K}


def draw(lead: tuple[int, ...], *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    leads = {"weight": (N,), "bias": ()}
    return {
        name: torch.randn(*leads.get(name, lead), SIZES[name], generator=generator, dtype=torch.float64)
        for name in names
    }


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (K,), torch.ones(K, dtype=x.dtype), 1e-5)


NORM = ops.Norm("rmsnorm", torch.ones(K, dtype=torch.float64), None, 1e-5)
LINEARS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[str, ...]]] = {
    "column": (ops.column_linear, F.linear, ("x", "weight", "bias")),
    "column of a norm, carried": (
        lambda x, weight, bias: torch.cat(ops.column_linear(x, weight, bias, norm=NORM, carry=True), -1),
        lambda x, weight, bias: torch.cat([F.linear(rms(x), weight, bias), x], -1),
        ("x", "weight", "bias"),
    ),
    "row": (ops.row_linear, F.linear, ("x", "weight", "bias")),
    "row, gated, with residual": (
        lambda x, weight, gate, residual: ops.row_linear(x, weight, activation="silu", gate=gate, residual=residual),
        lambda x, weight, gate, residual: residual + F.linear(F.silu(gate) * x, weight),
        ("x", "weight", "gate", "residual"),
    ),
}


def run(function: Callable[..., Tensor], tensors: dict[str, Tensor], strided: bool) -> list[Tensor]:
    inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    seen = [x.mT.contiguous().mT if strided and x.dim() > 1 else x for x in inputs.values()]
    y = function(*seen)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs.values())]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3), (0,), (2, 0), (0, 3), ()])
@pytest.mark.parametrize("name", LINEARS)
def test_linears_take_the_shapes_that_torch_takes(name, lead, strided):
    ours, theirs, names = LINEARS[name]
    tensors = draw(lead, *names)
    assert_same(run(ours, tensors, strided), run(theirs, tensors, strided))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("options", [{}, {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_samples_has_loss_zero(tied, options, recompute):
    config = {"vocab_size": 30, "seq_length": 4, "n_layers": 1, "hidden_size": 8, "n_heads": 2, "n_kv_heads": 1}
    model = GPT(GPTConfig(dropout=0.1, tie_embeddings=tied, **config, **options), recompute=recompute)
    ids = torch.zeros(0, 4, dtype=torch.long)
    dropout = {"sample_index": torch.arange(0), "step": 1}
    assert model(ids, **dropout).shape == (0, 4, 30)
    for position_ids in (None, ids):
        loss = model(ids, targets=ids, position_ids=position_ids, **dropout)
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in model.parameters())


def on_rank(transport: str, sequence_parallel: bool, queued: bool) -> None:
    """A row linear whose input needs no gradient gathers once and makes no dx; nor does a linear after a frozen
    norm."""
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], sequence_parallel, transport)
    x, weight = torch.randn(4, K), torch.randn(N, K, requires_grad=True)
    gemm, queue = 2 * 4 * K * N, ops.WeightGradientQueue()
    results = []
    for needed in (True, False):
        deferred = ops.Deferred(queue, [lambda g: results.append(g)]) if queued else None
        y = ops.row_linear(
            x.requires_grad_(needed), weight, activation="silu", group=tp.group, sequence_parallel=sequence_parallel,
            transport=tp.row_transport(x, K, N), deferred=deferred,
        )  # fmt: skip
        with FlopCounterMode(display=False) as flops, record_collectives() as calls:
            y.square().sum().backward()
            queue.run()
        if transport != "pipelined":  # torch's counter does not see products with an `out`
            assert flops.get_total_flops() == (2 if needed else 1) * gemm
        assert [name for name, _ in calls] == ["all_gather"] * tp.sharded
        if not queued:
            results.append(weight.grad)
            weight.grad = None
    assert torch.equal(*results)
    frozen = ops.Norm("rmsnorm", torch.ones(K), None, 1e-5)
    y = ops.column_linear(x.requires_grad_(False), weight, norm=frozen)
    with FlopCounterMode(display=False) as flops:
        y.square().sum().backward()
    assert flops.get_total_flops() == gemm


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("transport", ["sequential", "pipelined"])
@pytest.mark.parametrize("queued", [False, True])
def test_no_gradient_that_nobody_wants(ranks, transport, sequence_parallel, queued):
    ranks(2).run(on_rank, transport, sequence_parallel, queued)


def loss_in_chunks_of(tokens: int) -> Tensor:
    head = LMHead(30, 8)
    head.chunk_tokens = tokens
    return head(torch.ones(3, 8), targets=torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: VocabParallelEmbedding(0, 8),
            "vocab_size=0 must be at least",
        ),
        (lambda: LMHead(30, 8, vocab_multiple=0), "vocab_multiple=0 must be at least 1"),
        (lambda: PositionEmbedding(-2, 8), "seq_length=-2 must be at least 1"),
        (lambda: Positions(2, 3, offset=-1), "batch=2, seq_length=3, offset=-1: none may be negative"),
        (lambda: MLP(8, ffn_hidden_size=0), "out_features=0 must be at least 1"),
        (lambda: SelfAttention(8, 2, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)), "without rope_base would scale"),
        (lambda: SelfAttention(8, 2, rope_scaling=RopeScaling(8.0, 4.0, 1.0, 32)), "rope_low_frequency=4.0 must be"),
        (lambda: SelfAttention(8, 2, rope_base=0.0), "rope_base=0.0: .*give a number above 0"),
        (lambda: loss_in_chunks_of(0), "chunk_tokens=0: at least 1"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
