"""Items 27 to 48: experts on tensor-parallel ranks, with pipelines, ZeRO and recomputation, beside one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import small_runs
import torch
from small_runs import build, built, take_step, taken_gradients
from testing import assert_same, on_every_rank
from turns import in_turns

from tpformer.config import RunConfig
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers.router import routers
from tpformer.models import GPT
from tpformer.ops.route import record_routing
from tpformer.training.model import ModelParts

BATCH, N_EXPERTS = 4, 8
MODEL = {
    "vocab_size": 60, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 4, "norm": "rmsnorm",
    "activation": "swiglu", "position": "rope", "bias": False, "n_experts": N_EXPERTS, "expert_ffn_size": 12,
    "shared_expert_size": 8, "router_bias": True,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-no-sp-recomputed": {"tensor_parallel": 2, "sequence_parallel": False, "recompute": "full"},
    "tp2-pp2-recomputed": {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "mlp"},
    "pp2-zbv": {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"},
    "tp2-zero3": {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3},
}
STARVED = 2  # of the first layer's experts no token goes to the last ones


def run_config(model: Mapping, parallel: Mapping, **train: Any) -> RunConfig:
    train = {"global_batch_size": BATCH, "microbatch_size": 1, "dtype": "float64"} | train
    return small_runs.run_config(dict(parallel), dict(model), **train)


def whole_batch(model: ModelParts, targets: float = 1.0) -> torch.Tensor:
    """Samples, of whose tokens this share are targets."""
    size = (BATCH, model.config.seq_length + 1)
    batch = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(1))
    return torch.where(drawn < targets, batch, ~batch)


def gradients(model: ModelParts, targets: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and this rank's parameters' whole gradients."""
    first, share = model.own_samples(0, BATCH)
    rows = whole_batch(model, targets)[first : first + share]
    loss = float(model.gradients(rows, first_sample=first))
    return loss, taken_gradients(model)


def trained(parallel: Mapping[str, Any], microbatch_size: int, n_layers: int, balance_loss: float = 1.0) -> dict:
    """Two steps with starved experts: losses and norms, loads, how many decisions were taken, parameters and buffers.
    Then loss and gradients where few tokens are targets, and where none is."""
    train = {"microbatch_size": microbatch_size, "balance_loss": balance_loss}
    model, optimizers = build(run_config({**MODEL, "n_layers": n_layers}, parallel, **train))
    for part in model.parts:
        if "0" in part.layers:
            part.layers["0"].mlp.gate.bias[-STARVED:] = -9
    found: dict[str, Any] = {"numbers": [], "loads": []}
    with record_routing() as decisions:
        for _ in range(2):
            result = take_step(model, optimizers, whole_batch(model))
            found["numbers"] += [float(result.loss), float(result.norm)]
            found["loads"].append(result.loads.tolist())
    found["decisions"] = len(decisions)
    found["held"] = {name: full_tensor(t).clone() for part in model.parts for name, t in part.state_dict().items()}
    return found | {"few": gradients(model, 0.3), "none": gradients(model, 0.0)}


@pytest.fixture(scope="module")
def alone(ranks) -> dict[tuple, dict]:
    """What one process finds, by the samples of a microbatch, the layers, and the balance loss's coefficient."""
    cases = [(BATCH, 2, 1.0), (BATCH, 4, 1.0), (2, 2, 1.0), (2, 2, 0.0)]
    return {case: ranks(1).run(trained, {}, *case)[0] for case in cases}


@pytest.fixture(scope="module", params=[*[*LAYOUTS][1:3], *in_turns([*LAYOUTS][::3], first=1)])
def run(ranks, alone, request) -> tuple[dict[str, Any], list[dict], dict]:
    """A layout, what its ranks find, and what one process finds."""
    parallel, n_layers = LAYOUTS[request.param], 4 if request.param == "pp2-zbv" else 2
    n_ranks = run_config({**MODEL, "n_layers": n_layers}, parallel).parallel.world_size
    return parallel, ranks(n_ranks).run(trained, parallel, 1, n_layers), alone[BATCH, n_layers, 1.0]


def test_items_27_28_30_31_every_layout_routes_counts_and_trains_as_one_process(run):
    """Fails if a recomputed region routes anew or counts its tokens again, if a router's gradient misses the tokens of
    another rank, or if an expert's gradient is summed over ranks that do not hold it, or divided by them."""
    parallel, results, expected = run
    stages, shards = parallel.get("pipeline_parallel", 1), parallel.get("data_parallel_shard", 1)
    for found in results:
        assert found["loads"] == expected["loads"]
        of_layers = 2 * BATCH * 8 * len(expected["loads"][0]) // N_EXPERTS
        assert [sum(loads) for loads in found["loads"]] == [of_layers] * 2, "two experts for each token of a step"
        assert_same(found["held"], {name: expected["held"][name] for name in found["held"]})
        # each layer decides once for each microbatch and step
        assert found["decisions"] == 2 * len(expected["loads"][0]) // N_EXPERTS // stages * BATCH // shards
    assert {name for found in results for name in found["held"]} == expected["held"].keys()


def test_item_29_a_balance_loss_is_the_same_with_any_microbatch_and_layout(run, alone):
    """Fails if the balance loss or its gradient is scaled by ranks or microbatches, or lost in a pipeline."""
    _, results, expected = run
    assert_same([found["numbers"] for found in results], [expected["numbers"]] * len(results))
    whole, small, without = (alone[case] for case in ((BATCH, 2, 1.0), (2, 2, 1.0), (2, 2, 0.0)))
    assert small["numbers"][0] > 1.01 * without["numbers"][0]
    assert_same([small["numbers"], small["held"]], [whole["numbers"], whole["held"]])


def test_item_48_with_few_targets_or_none_loss_and_gradients_are_those_of_one_process(run):
    """Fails if a rank divides a balance loss by its own number of targets, or adds it to no targets at all."""
    _, results, expected = run
    loss, whole = expected["few"]
    for found in results:
        assert_same(found["few"], (loss, {name: whole[name] for name in found["few"][1]}))
        assert found["none"][0] == 0 and not any(each.any() for each in found["none"][1].values()), "no targets"


@on_every_rank(1)
def test_item_48_a_balance_loss_is_a_mean_over_tokens_whatever_part_of_them_are_targets() -> None:
    """Fails if a balance loss, a sum over all tokens, is divided by the number of targets, as losses of targets are."""
    plain, balanced = (built(run_config(MODEL, {}, balance_loss=coefficient)) for coefficient in (0.0, 1.0))
    added = []
    for share in (0.3, 1.0):
        (without, less), (loss, found) = (gradients(model, share) for model in (plain, balanced))
        added.append((loss - without, {name: gradient - less[name] for name, gradient in found.items()}))
    assert added[0][0] > 1
    assert_same(*added)


def test_items_32_38_39_an_expert_without_tokens_has_a_gradient_of_zero(run):
    """Fails if rows beyond the last group reach a sum, if a rank without tokens leaves a collective out, or if AdamW
    steps an expert without tokens in one layout only."""
    _, results, expected = run
    assert expected["loads"][0][N_EXPERTS - STARVED : N_EXPERTS] == [0] * STARVED
    name = "layers.0.mlp.experts.gate_up_proj"
    holders = [found for found in results if name in found["held"]]
    assert holders and not any(found["few"][1][name][-STARVED:].any() for found in holders)
    assert_same([found["held"][name] for found in holders], [expected["held"][name]] * len(holders))


def test_item_43_evaluation_moves_no_bias_and_building_on_meta_sets_it_to_zero():
    """Fails if evaluation counts tokens, or if a bias that was built without memory holds what the memory held."""
    part = GPT(run_config(MODEL, {}).model.architecture, dtype=torch.float64, device="meta").to_empty(device="cpu")
    for router in routers(part).values():
        router.bias.fill_(float("nan"))
    part.init_weights()
    assert all(not router.bias.any() for router in routers(part).values())
    model = ModelParts([part], microbatch_size=8)
    model.train(False)
    model.summed_loss(whole_batch(model))
    assert all(router.load is None for router in routers(part).values())
