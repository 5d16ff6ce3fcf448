"""Items 27 to 43: experts on tensor-parallel ranks, with pipelines, ZeRO and recomputation, beside one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpformer.config import RunConfig, build_config, check_config
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import MoE, Policy, TensorParallel
from tpformer.layers.moe import routers
from tpformer.models import GPT
from tpformer.ops.route import record_routing
from tpformer.parallel import clip_grad_norm_, reduce_partial_gradients
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

MODEL = {
    **{"vocab_size": 60, "seq_length": 8, "n_layers": 4, "hidden_size": 16, "n_heads": 4, "bias": False},
    **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "n_experts": 8, "expert_ffn_size": 12},
    **{"shared_expert_size": 8, "router_bias": True},
}
BATCH = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4": {"tensor_parallel": 4},
    "tp2-no-sp-recomputed": {"tensor_parallel": 2, "sequence_parallel": False, "recompute": "full"},
    "tp2-pp2-recomputed": {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "mlp"},
    "pp2-zbv": {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"},
    "tp2-zero3": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
}


def run_config(parallel: Mapping[str, Any], microbatch_size: int, **train: Any) -> RunConfig:
    section = {"global_batch_size": BATCH, "microbatch_size": microbatch_size, "dtype": "float64", "device": "cpu"}
    config = build_config(
        {"model": MODEL, "parallel": dict(parallel), "train": section | train, "data": {"train": ["none"]}}
    )
    check_config(config)
    return config


def build(config: RunConfig, starved: bool = False) -> ModelParts:
    """A model; starved: no token of the first layer goes to its last two experts."""
    model = build_model(config, run_mesh(config, "cpu"))
    for part in model.parts:
        if starved and "0" in part.layers:
            part.layers["0"].mlp.gate.bias[-2:] = -9
    return model


def own_batch(model: ModelParts) -> tuple[torch.Tensor, int]:
    batch = torch.randint(60, (BATCH, 9), generator=torch.Generator().manual_seed(0))
    share = BATCH // model.layout.data_parallel
    first = model.data_rank * share
    return batch[first : first + share], first


def trained(parallel: Mapping[str, Any], microbatch_size: int = 1, starved: bool = False, balance_loss: float = 0.0):
    """Two steps: losses, norms, loads, how many decisions were taken, and parameters and buffers after them."""
    model = build(run_config(parallel, microbatch_size, balance_loss=balance_loss), starved)
    optimizers = [build_optimizer(part, run_config(parallel, microbatch_size).optimizer) for part in model.parts]
    rows, first = own_batch(model)
    numbers, loads = [], []
    with record_routing() as decisions:
        for step in (1, 2):
            options: dict = {"first_sample": first, "step": step, "lr": 1e-2, "clip_norm": 1.0}
            result = train_step(model, optimizers, rows, **options)
            numbers += [float(result.loss), float(result.norm)]
            loads.append(result.loads.tolist())
    held = {name: full_tensor(t).clone() for part in model.parts for name, t in part.state_dict().items()}
    return numbers, loads, len(decisions), held


def check(results: list, expected: tuple) -> None:
    """Numbers and values agree to the rounding of float64, loads exactly."""
    numbers, loads, _, held = expected
    for found_numbers, found_loads, _, found in results:
        assert found_numbers == pytest.approx(numbers, rel=1e-12) and found_loads == loads
        for name, value in found.items():
            torch.testing.assert_close(value, held[name], rtol=1e-9, atol=1e-11, msg=name)


def ranks_of(parallel: Mapping[str, Any]) -> int:
    return run_config(parallel, 1).parallel.world_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_items_27_28_30_31_every_layout_routes_counts_and_trains_as_one_process(ranks, layout):
    """Fails if a recomputed region routes anew or counts its tokens again, if a router's gradient misses the tokens of
    another rank, or if an expert's gradient is summed over ranks that do not hold it, or divided by them."""
    expected = ranks(1).run(trained, {})[0]
    results = ranks(ranks_of(LAYOUTS[layout])).run(trained, LAYOUTS[layout])
    check(results, expected)
    # each of the 4 layers decides once for each microbatch and step
    parallel = LAYOUTS[layout]
    stages, shards = parallel.get("pipeline_parallel", 1), parallel.get("data_parallel_shard", 1)
    assert all(decisions == 2 * 4 // stages * BATCH // shards for _, _, decisions, _ in results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_item_29_a_balance_loss_is_the_same_with_any_microbatch_and_layout(ranks, layout):
    """Fails if the balance loss or its gradient is scaled by ranks or microbatches, or lost in a pipeline."""
    expected = ranks(1).run(trained, {}, 8, False, 1.0)[0]
    without = ranks(1).run(trained, {}, 8)[0]
    assert expected[0][0] > 1.01 * without[0][0]
    check(ranks(1).run(trained, {}, 2, False, 1.0), expected)
    check(ranks(ranks_of(LAYOUTS[layout])).run(trained, LAYOUTS[layout], 2, False, 1.0), expected)


def balance_alone(parallel: Mapping[str, Any], targets: list[float]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """What a balance loss adds to the loss and to its gradients, where these shares of the tokens are targets."""
    results = []
    for share in targets:
        found = []
        for coefficient in (0.0, 1.0):
            model = build(run_config(parallel, 2, balance_loss=coefficient))
            rows, first = own_batch(model)
            drawn = torch.rand(BATCH, 9, generator=torch.Generator().manual_seed(1))[first : first + len(rows)]
            loss = model.gradients(torch.where(drawn < share, rows, ~rows), first_sample=first, step=1)
            named = [pair for part in model.parts for pair in part.named_parameters()]
            found.append((float(loss), {name: full_tensor(p.grad).clone() for name, p in named}))
        (without, less), (loss, gradients) = found
        results.append((loss - without, {name: gradient - less[name] for name, gradient in gradients.items()}))
    return results


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_item_48_a_balance_loss_is_a_mean_over_tokens_whatever_part_of_them_are_targets(ranks, layout):
    """Fails if a balance loss, a sum over all tokens, is divided by the number of targets, as losses of targets are."""
    parallel = {} if layout is None else LAYOUTS[layout]
    ((expected, gradients),) = ranks(1).run(balance_alone, {}, [1.0])[0]
    assert expected > 1
    for (loss, own), (nothing, none) in ranks(ranks_of(parallel)).run(balance_alone, parallel, [0.3, 0.0]):
        assert loss == pytest.approx(expected, rel=1e-12)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-13, msg=name)
        assert nothing == 0 and not any(gradient.any() for gradient in none.values()), "a batch without targets"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_items_32_38_39_an_expert_without_tokens_has_a_gradient_of_zero(ranks, layout):
    """Fails if rows beyond the last group reach a sum, if a rank without tokens leaves a collective out, or if AdamW
    steps an expert without tokens in one layout only."""
    expected = ranks(1).run(trained, {}, 1, True)[0]
    assert expected[1][0][6:8] == [0, 0]
    check(ranks(ranks_of(LAYOUTS[layout])).run(trained, LAYOUTS[layout], 1, True), expected)


def clipped() -> float:
    config = run_config({"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3}, 1)
    model = build(config)
    rows, first = own_batch(model)
    model.gradients(rows, first_sample=first, step=1)
    return float(clip_grad_norm_(model.parts[0], 0.1))


def test_item_34_clipping_counts_experts_once(ranks):
    """Fails if the norm over experts, shared parameters and routers, on two meshes, is not that of one process."""
    one = trained_alone()
    assert ranks(4).run(clipped) == pytest.approx([one] * 4, rel=1e-12)


def trained_alone() -> float:
    config = run_config({}, 8)
    part = GPT(config.model.architecture, seed=config.train.seed, dtype=torch.float64)
    model = ModelParts([part], microbatch_size=8)
    rows, first = own_batch(model)
    model.gradients(rows, first_sample=first, step=1)
    return float(clip_grad_norm_(part, 0.1))


def layer(tp: TensorParallel | None = None, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(16, 8, Policy(2), ffn_hidden_size=12, tp=tp, **{"dtype": torch.float64} | options)


def test_item_37_the_bias_chooses_and_does_not_weigh():
    """Fails if the bias that balances loads is part of the weights."""
    moe, x = layer(router_bias=True), torch.randn(5, 16, dtype=torch.float64)
    before = moe.gate(x)
    moe.gate.bias += 100.0
    assert torch.equal(moe.gate(x).experts, before.experts) and torch.equal(moe.gate(x).weights, before.weights)


def initial() -> list[float]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    pairs = zip(layer(TensorParallel(mesh)).parameters(), layer().parameters(), strict=True)
    return [float((full_tensor(p.detach()) - q).abs().max()) for p, q in pairs]


def test_item_40_initial_experts_do_not_depend_on_the_ranks(ranks):
    """Fails if an expert's initial values follow from its index on a rank."""
    assert ranks(4).run(initial) == [[0.0] * 3] * 4
    first, second = layer().experts.gate_up_proj[:2]
    assert not torch.equal(first, second)


def test_item_41_a_router_computes_in_float32_whatever_the_rows_are():
    """Fails if scores are rounded to 16 bits, which makes ties of scores that differ."""
    moe = layer(dtype=torch.bfloat16)
    x = torch.randn(64, 16).bfloat16()
    routing = moe.gate(x)
    exact = (x.double() @ moe.gate.weight.double().t()).softmax(1)
    assert routing.weights.dtype == torch.float32
    wanted = exact.gather(1, routing.experts.long())
    torch.testing.assert_close(routing.weights.double(), wanted / wanted.sum(1, keepdim=True), rtol=1e-5, atol=0)


def zero_router(sequence_parallel: bool) -> list[list[int]]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    moe = layer(TensorParallel(mesh, sequence_parallel))
    with torch.no_grad():
        moe.gate.weight.zero_()
    return moe.gate(torch.randn(4, 16, dtype=torch.float64)).experts.tolist()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_item_42_of_equal_scores_the_first_experts_are_chosen(ranks, sequence_parallel):
    """Fails if ties, as of a router that begins with zeros, are broken by chance: torch.topk promises no order."""
    for experts in ranks(2).run(zero_router, sequence_parallel):
        assert experts == [[0, 1]] * (8 if sequence_parallel else 4)


def test_item_43_evaluation_moves_no_bias_and_building_on_meta_sets_it_to_zero():
    """Fails if evaluation counts tokens, or if a bias that was built without memory holds what the memory held."""
    config = run_config({}, 1)
    part = GPT(config.model.architecture, dtype=torch.float64, device="meta").to_empty(device="cpu")
    for router in routers(part).values():
        router.bias.fill_(float("nan"))
    part.init_weights()
    assert all(not router.bias.any() for router in routers(part).values())
    model = ModelParts([part], microbatch_size=8)
    model.train(False)
    model.summed_loss(own_batch(model)[0])
    assert all(router.load is None for router in routers(part).values())


def test_item_44_repeated_steps_have_the_same_bits(ranks):
    """Fails if rows of a token are added in an order that changes from run to run."""
    first, second = (ranks(4).run(bits) for _ in range(2))
    assert first == second


def bits() -> list[float]:
    mesh = build_mesh("cpu", tensor_parallel=4)["tp"]
    moe = layer(TensorParallel(mesh, True), dtype=torch.float32)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(mesh.get_local_rank()), requires_grad=True)
    moe(x).square().sum().backward()
    reduce_partial_gradients(moe)
    return [float(each.double().sum()) for each in (x.grad, *(full_tensor(p.grad) for p in moe.parameters()))]
