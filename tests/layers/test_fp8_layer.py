"""Layers in FP8: which of a model's linears are quantised, sizes and parts that are refused, and what else stays."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpformer import ops
from tpformer.config import GPTConfig
from tpformer.in_place import parallelize
from tpformer.kernels.quantize.reference import quantize_rows
from tpformer.layers import MoE, TensorParallel, keep, linear_plans, transformer_block
from tpformer.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpformer.models import GPT
from tpformer.ops.transports.quantized import record_blocks

FP8 = TensorParallel(precision="fp8")
SIZES: dict = {"vocab_size": 100, "seq_length": 8, "n_layers": 1, "hidden_size": 128, "n_heads": 2, "head_dim": 128}
GATED = {**SIZES, "norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
OLD = GPTConfig(**SIZES, ffn_hidden_size=256)
NEW = GPTConfig(**GATED, ffn_hidden_size=256, qk_norm=True, n_kv_heads=1, tie_embeddings=False)
MOE = GPTConfig(**GATED, bias=False, n_experts=4, expert_ffn_size=128, shared_expert_size=256)
IDS = torch.arange(16).view(2, 8) % 100


def shapes_of_blocks(model: GPT) -> list[list[torch.Size]]:
    """Of what a forward quantises, and of what its backward does."""
    with record_blocks() as forward:
        loss = model(IDS, targets=IDS)
    with record_blocks() as backward:
        loss.backward()
    return [sorted(each.values.shape for each in blocks) for blocks in (forward, backward)]


@pytest.mark.parametrize("config", [OLD, NEW], ids=["gpt2", "newer"])
def test_the_linears_of_blocks_are_quantised_and_nothing_else(config: GPTConfig) -> None:
    """Embeddings, head, norms of queries and keys are not; each matrix of a forward is quantised once."""
    model = GPT(config, tp=FP8, dtype=torch.float64)
    plans = {plan.path: plan.decision.reason for plan in linear_plans(model, IDS.numel())}
    blocks = {path for path, reason in plans.items() if "FP8" in reason}
    assert {path for path in plans if path.startswith("layers.")} == blocks
    assert plans.keys() - blocks == {"lm_head (logits)", "lm_head (loss)"}
    forward, backward = shapes_of_blocks(model)
    linears = [each for each in model.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    weights = [each.weight.shape for each in linears]
    inputs = [(16, 128), (16, config.query_size), (16, 128), (16, config.ffn_size)]
    assert forward == sorted([*weights, *inputs])
    outputs = [(16, each.out_features) for each in linears]
    # a weight for dgrad, a gradient of each output, and again what the weight gradients are made of
    assert backward == sorted([*weights, *outputs, *inputs])


def gradients(model: GPT) -> list[Tensor]:
    return list(torch.autograd.grad(model(IDS, targets=IDS), [*model.parameters()]))


def test_the_rows_and_matrices_of_experts_are_quantised_and_no_router() -> None:
    """The rows of all tokens once, before they go to experts; dispatched rows have those of the activations."""
    model = GPT(MOE, tp=FP8, dtype=torch.float64)
    reasons = {plan.path: plan.decision.reason for plan in linear_plans(model, IDS.numel())}
    assert {path for path, reason in reasons.items() if "FP8" in reason and "experts" in path} == {
        "layers.0.mlp.experts (gather)", "layers.0.mlp.experts (reduce)",
    }  # fmt: skip
    forward, backward = shapes_of_blocks(model)
    attention = [(16, 128), (16, 256), *[(256, 128)] * 3, (128, 256)]
    matrices = [(4 * 256, 128), (4 * 128, 128), *[(256, 128)] * 2, (128, 256)]  # the shared expert's come last
    inputs = [(16, 128), (32, 128), (16, 256)]  # of all, of two experts a token, of the shared one
    assert forward == sorted([*attention, *matrices, *inputs])
    outputs = [(16, 128), *[(16, 256)] * 3, (16, 128), (32, 256), *[(16, 256)] * 2]
    assert backward == sorted([*attention, *matrices, *inputs, *outputs])


@pytest.mark.parametrize("config", [OLD, NEW, MOE], ids=["gpt2", "newer", "experts"])
def test_recompute_and_split_backwards_quantise_the_same_numbers(config: GPTConfig) -> None:
    model = GPT(config, tp=FP8, dtype=torch.float64)
    whole = gradients(model)
    for recompute in ("mlp", "full"):
        again = GPT(config, tp=FP8, dtype=torch.float64)
        again.load_state_dict(model.state_dict())
        keep(again, recompute=recompute)
        assert_identical(gradients(again), whole, recompute)
    queue = ops.WeightGradientQueue()
    with queue.collect():
        loss = model(IDS, targets=IDS)
    loss.backward()
    assert len(queue) == 4
    queue.run()
    assert_same([parameter.grad for parameter in model.parameters()], whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_loss_and_the_norm(value: float) -> None:
    """One of a weight, and one of an activation's gradient."""
    model = GPT(OLD, tp=FP8, dtype=torch.float64)
    weights = [each.weight for each in model.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    assert len(weights) == 6
    for weight in weights:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[5, 77] = value
        assert not model(IDS, targets=IDS).isfinite(), weight.shape
        with torch.no_grad():
            weight.copy_(kept)
    model.layers["0"].mlp.register_full_backward_hook(lambda *_: (torch.full((16, 128), value, dtype=torch.float64),))
    assert not all(gradient.norm().isfinite() for gradient in gradients(model))


def test_other_sizes_and_layers_are_refused() -> None:
    for make, message in (
        (lambda: ColumnParallelLinear(100, 128, tp=FP8), "in_features=100: 128 features share a scale"),
        (lambda: ColumnParallelLinear(128, 192, tp=FP8), "out_features=192"),
        (lambda: RowParallelLinear(192, 128, tp=FP8), "in_features=192"),
        (lambda: RowParallelLinear(128, 64, tp=FP8), "out_features=64"),
        (lambda: ColumnParallelLinear(128, 256, used_rows=slice(64, 192), tp=FP8), "used_rows.start=64: 128 features"),
        (lambda: ColumnParallelLinear(128, 256, used_rows=slice(128, 192), tp=FP8), "used_rows.stop=192"),
        (lambda: MoE(128, 4, ffn_hidden_size=192, tp=FP8), "ffn_hidden_size of an expert=192: 128 features"),
        (lambda: MoE(192, 4, ffn_hidden_size=128, tp=FP8), "hidden_size=192: 128 features"),
        (lambda: MoE(128, 4, ffn_hidden_size=128, shared_ffn_size=64, tp=FP8), "out_features=64: 128 features"),
        (lambda: TensorParallel(precision="fp4"), "precision='fp4': choose one of 16, fp8"),
        (lambda: parallelize(nn.Linear(128, 128), FP8), "parallelize leaves modules that it does not cut"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    block = transformer_block(128, n_heads=1, tp=FP8)
    with pytest.raises(ValueError, match="1 tensor-parallel rank, in FP8: build it with the same tp"):
        block.mlp = transformer_block(128, n_heads=1).mlp
    layer = ColumnParallelLinear(128, 128, tp=FP8, dtype=torch.float16)
    with pytest.raises(ValueError, match="FP8 with float16"):
        layer(torch.ones(2, 128, dtype=torch.float16))


def test_ranks_and_precision_go_with_copies() -> None:
    layer = ColumnParallelLinear(128, 128, tp=FP8)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(other).endswith("tp=1, in FP8)")
        assert (other.tp.precision, other.tp.in_16_bits.precision) == ("fp8", "16")
        assert torch.equal(other(torch.ones(3, 128)), layer(torch.ones(3, 128)))
    assert FP8.with_all_rows.precision == TensorParallel(None, True, precision="fp8").with_all_rows.precision == "fp8"


@on_every_rank(2)
def test_autocast_quantises_what_it_casts() -> None:
    """The numbers of bfloat16, on one rank as on two."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 128), torch.randn(256, 128)
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for tp in (FP8, TensorParallel(mesh, precision="fp8")):
        layer = ColumnParallelLinear(128, 256, bias=False, gather_output=True, tp=tp)
        with torch.no_grad():
            layer.local("weight").copy_(weight.chunk(tp.size)[tp.rank])
        with torch.autocast("cpu", torch.bfloat16), record_blocks() as made:
            results.append(layer(x))
        assert results[-1].dtype == torch.bfloat16
        expected = quantize_rows(x.bfloat16())
        assert any(torch.equal(each.values.view(torch.uint8), expected.values.view(torch.uint8)) for each in made)
    assert_identical(*results)
    assert dist.get_world_size() == 2
