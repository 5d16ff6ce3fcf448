"""Layers take the shapes and strides that torch.nn takes, and empty batches, and train after inference; they compute no
product that nobody needs."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kept import kept
from steps import draw, tp_mesh
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tpformer import ops
from tpformer.config import RECOMPUTE, TRANSPORTS
from tpformer.distributed import record_collectives
from tpformer.layers import DropoutKey, PositionEmbedding, Positions, TensorParallel, transformer_block
from tpformer.models import GPT, GPTConfig

SMALL = {"vocab_size": 30, "seq_length": 4, "n_layers": 1, "hidden_size": 8, "n_heads": 2}
K, N = 8, 6
NORM = ops.Norm("rmsnorm", torch.ones(K, dtype=torch.float64), None, 1e-5)
LINEARS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[str, ...]]] = {
    "column": (ops.column_linear, F.linear, ("x", "weight", "bias")),
    "column of a norm, carried": (
        lambda x, weight, bias: torch.cat(ops.column_linear(x, weight, bias, norm=NORM, carry=True), -1),
        lambda x, weight, bias: torch.cat([F.linear(F.rms_norm(x, (K,), NORM.weight, 1e-5), weight, bias), x], -1),
        ("x", "weight", "bias"),
    ),
    "row": (ops.row_linear, F.linear, ("x", "weight", "bias")),
    "row, gated, with residual": (
        lambda x, weight, gate, residual: ops.row_linear(x, weight, activation="silu", gate=gate, residual=residual),
        lambda x, weight, gate, residual: residual + F.linear(F.silu(gate) * x, weight),
        ("x", "weight", "gate", "residual"),
    ),
}
ON_TRANSPORTS = list(product(("sequential", "pipelined"), (False, True)))  # with and without sequence shards


def run(function: Callable[..., Tensor], tensors: list[Tensor], strided: bool) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in tensors]
    y = function(*(x.mT.contiguous().mT if strided and x.dim() > 1 else x for x in inputs))
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3), (0,), (2, 0), (0, 3), ()])
@pytest.mark.parametrize("name", LINEARS)
def test_linears_take_the_shapes_that_torch_takes(name, lead):
    ours, theirs, names = LINEARS[name]
    shapes = {"x": (*lead, K), "weight": (N, K), "bias": (N,), "residual": (*lead, N), "gate": (*lead, K)}
    tensors = draw(*(shapes[name] for name in names))
    for strided in (False, True):
        assert_same(run(ours, tensors, strided), run(theirs, tensors, strided), f"{strided=}")


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tied, options", [
    (False, {}), (True, {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "n_kv_heads": 1}),
])  # fmt: skip
def test_a_model_without_samples_has_loss_zero(tied, options, recompute):
    model = kept(GPT, GPTConfig(dropout=0.1, tie_embeddings=tied, **SMALL, **options), recompute=recompute)
    ids = torch.zeros(0, 4, dtype=torch.long)
    dropout = {"sample_index": torch.arange(0), "step": 1}
    assert model(ids, **dropout).shape == (0, 4, 30)
    for position_ids in (None, ids):
        loss = model(ids, targets=ids, position_ids=position_ids, **dropout)
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("transport, sequence_parallel", ON_TRANSPORTS)
@on_every_rank(2)
def test_no_gradient_that_nobody_wants(transport: str, sequence_parallel: bool, queued: bool) -> None:
    """A row linear whose input needs no gradient gathers once and makes no dx, as does a linear after a frozen norm."""
    tp = TensorParallel(tp_mesh(), sequence_parallel, transport)
    x, weight, results = torch.randn(4, K), torch.randn(N, K, requires_grad=True), []
    gemm, queue = 2 * 4 * K * N, ops.WeightGradientQueue()
    for needed in (True, False):
        deferred = ops.Deferred(queue, [lambda g: results.append(g)]) if queued else None
        y = ops.row_linear(
            x.requires_grad_(needed), weight, activation="silu", transport=tp.row_transport(x, K, N), deferred=deferred
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


@pytest.mark.parametrize("transport, sequence_parallel", ON_TRANSPORTS)
@on_every_rank(2)
def test_training_after_inference_has_the_same_gradients(transport: str, sequence_parallel: bool) -> None:
    """What inference_mode leaves behind, such as views of shared memory, can be used in training."""
    assert {*TRANSPORTS} - {"auto", "fused"} == {each for each, _ in ON_TRANSPORTS}
    ids, results, config = torch.arange(12).view(3, 4), [], GPTConfig(**SMALL, vocab_multiple=4)
    for infer_first in (False, True):
        model = GPT(config, tp=TensorParallel(tp_mesh(), sequence_parallel, transport), seed=1)
        with torch.inference_mode():
            for targets in (None, ids) if infer_first else ():
                model(ids, targets=targets)
        model(ids, targets=ids).backward()
        results.append([p.grad.to_local() for p in model.parameters()])
    assert_identical(*results)


def test_objects_that_a_user_keeps():
    """One Positions and one DropoutKey serve an evaluation and the training after it."""
    block, table = transformer_block(8, 2, rope_base=1e4, dropout=0.1), PositionEmbedding(6, 8)
    with torch.inference_mode():
        made_there = Positions(2, 4, key_padding_mask=torch.tensor([[False, False, False, True]] * 2))
    ids = torch.tensor([[0, 1, 2, 0]] * 2)
    for positions in (Positions(2, 4), Positions(2, 4, ids), Positions(2, 4, offset=2), made_there):
        key, x = DropoutKey(1, 2, torch.arange(2), block), torch.randn(8, 8, requires_grad=True)
        with torch.inference_mode():
            first = block(table(x, positions), positions=positions, dropout_key=key)
        second = block(table(x, positions), positions=positions, dropout_key=key)
        second.sum().backward()
        assert torch.equal(first, second)
        for cached in (positions.flat_ids(x.device), *positions.rope(4, 1e4, x.device, x.dtype)[0]):
            assert not cached.is_inference()
        assert positions.ids is None or not positions.documents(x.device)[0].is_inference()
        assert not any(start.is_inference() for start in key._starts.values())
