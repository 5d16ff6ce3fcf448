"""The model of time: kernels by waves, what a transport exposes, a step's items, and its schedule."""

import dataclasses

import pytest

from tpformer.config import SCHEDULES, build_config
from tpformer.distributed.links import Link, all_reduce_seconds, all_to_all_seconds
from tpformer.kernels.pack.format import packed_bytes
from tpformer.ops.row_exchange import share_of_rank
from tpformer.planner.devices import load_device
from tpformer.planner.kept import kept_by_kind
from tpformer.planner.layer_time import exposed_seconds
from tpformer.planner.roofline import BEGIN, GAP, gemm_seconds
from tpformer.planner.software import OURS, Software
from tpformer.planner.step_time import StepModel

H100 = load_device("h100")
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
MODEL = {"vocab_size": 32000, "seq_length": 2048, "n_layers": 24, "hidden_size": 4096, "n_heads": 32}
EXPERTS = {
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "ffn_hidden_size": 8192,
    "n_experts": 64, "experts_per_token": 8, "expert_ffn_size": 1024,
}  # fmt: skip
CP8 = {"context_parallel": 8, "zero_stage": 3}
GROUPED = {"n_kv_heads": 8, "seq_length": 131072, "tie_embeddings": False, "position": "rope"}
EXCHANGED = {**EXPERTS, "n_experts": 128, "expert_ffn_size": 1536, "seq_length": 4096}
SHARDS = {"data_parallel_shard": 32, "zero_stage": 1}
UNIT = 2 * 256 * 512 * 2  # bytes of two samples' residual stream
PACKED = packed_bytes(UNIT // 2)
BOTH, LESS = UNIT + PACKED, UNIT - PACKED  # of a pass that packs or unpacks; what a kernel reads less
# units that the forward packs; that passes unpack; that kernels read in packed form
MOVED = {
    "none": (10, 5, 8),  # q, k, v, attention's result twice; two norms and their backwards, fc1's output
    "mlp": (6, 6, 2),  # the region's input, too
    "full": (1, 1, 0),
}


def model(parallel, batch=64, microbatch=1, software=OURS, device=H100, **others):
    train = {"global_batch_size": batch, "microbatch_size": microbatch, "dtype": "bfloat16", "device": "cuda"}
    config = build_config({"model": {**MODEL, **others}, "parallel": parallel, "train": train})
    return StepModel(config, device, software)


def test_gemms_take_whole_waves():
    wave = gemm_seconds(256, 128 * 132, 4096, H100)
    assert gemm_seconds(256, 128 * 132 - 100, 4096, H100) == pytest.approx(wave, rel=0.02)
    assert gemm_seconds(256, 128 * 133, 4096, H100) > 1.2 * wave, "one tile more begins another wave, of smaller tiles"
    large = gemm_seconds(16384, 16896, 8192, H100)
    assert 2 * 16384 * 16896 * 8192 / large == pytest.approx(700e12, rel=0.1)
    assert gemm_seconds(16, 4096, 4096, H100) >= 2 * 4096 * 4096 / 3e12, "a thin product reads its weight"
    assert gemm_seconds(1, 1, 1, H100) < 2 * (BEGIN + GAP)


def test_transports():
    sizes, gemm = (8192, 4096, 4096), 300e-6
    names = ("sequential", "pipelined", "fused", "auto")
    sequential, pipelined, fused, auto = (exposed_seconds(GATHER, sizes, 8, each, H100, gemm, 2) for each in names)
    assert sequential > pipelined >= 0 and auto == min(sequential, fused)
    assert exposed_seconds(GATHER, sizes, 1, "sequential", H100, gemm, 2) == 0


def test_the_items_of_a_step_are_its_seconds():
    found = model({"tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel_shard": 2, "zero_stage": 1})
    step = found.step()
    assert all(each >= 0 for each in step) and step.seconds == sum(step)
    assert step.compute + step.tp + step.pp + step.bubble + step.host == pytest.approx(found.span)
    assert step.tp > 0 and step.dp > 0 and step.bubble > 0
    alone = model({}).step()
    assert (alone.tp, alone.pp, alone.dp) == (0, 0, 0) and alone.bubble == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("naive", "DualPipeV")])
def test_a_step_takes_as_long_as_simulated(schedule):
    """With slow messages a schedule may repeat itself later than after three rounds."""
    before = 0.0
    for network in (42e9, 1e9, 0.5e9, 0.2e9):
        device = dataclasses.replace(H100, network=network, gpus_per_node=1)
        found = model({"pipeline_parallel": 8, "pipeline_schedule": schedule}, device=device)
        assert found.span == pytest.approx(max(action.end for action in found.timeline()), rel=1e-6)
        assert found.least_span <= found.span * (1 + 1e-12) and found.span > before
        before = found.span
    found = model({"pipeline_parallel": 4, "pipeline_schedule": schedule})
    assert found.span == pytest.approx(max(action.end for action in found.timeline()), rel=1e-9)
    assert 0.8 * found.span < found.least_span <= found.span * (1 + 1e-12)


def test_what_makes_a_step_slower_or_faster():
    pipeline = {"pipeline_parallel": 4}
    plain = model(pipeline)
    slow = dataclasses.replace(H100, network=1e9)
    assert model(pipeline, device=slow).span >= plain.span
    blocking = model(pipeline, device=slow, software=Software(blocking_pipeline=True)).step()
    assert blocking.pp > 0 == plain.step().pp
    full = model({**pipeline, "recompute": "full"}).step()
    half = model({**pipeline, "recompute": "full", "recompute_layers": "::2"}).step()
    assert plain.step().compute < half.compute < full.compute < 4 / 3 * plain.step().compute
    many = {"data_parallel_shard": 16, "zero_stage": 1}
    assert model({**many, "zero_stage": 3}, device=slow).step().dp > model(many, device=slow).step().dp > 0
    assert model(many).step().optimizer == pytest.approx(model({}).step().optimizer / 16)
    starved = model({}, device=H100, software=dataclasses.replace(OURS, host_kernel=1e-3)).step()
    assert starved.host > 0 and starved.seconds > model({}).step().seconds


@pytest.mark.parametrize("ranks, slow", [(4, False), (8, False), (16, True)])
def test_a_pipeline_over_several_nodes_sends_over_the_network(ranks, slow):
    """Even if most neighbours are in the same node."""
    found = model({"pipeline_parallel": ranks // 2, "data_parallel_replicate": 2}, batch=64, tie_embeddings=True)
    link = found.slow if slow else found.fast
    assert found.message() == link.seconds(1, 2 * 2048 * 4096)
    assert found._tied(0) == pytest.approx(link.seconds(2, 4 * 32000 * 4096), rel=0.01)


def test_experts_take_longer_than_an_mlp_of_their_width():
    """The same FLOPs are in more and smaller GEMMs, and a router and its collectives are added."""
    dense = {key: value for key, value in EXPERTS.items() if "expert" not in key}
    parallel = {"tensor_parallel": 4, "data_parallel_shard": 2, "zero_stage": 1}
    plain, experts = model(parallel, **dense), model(parallel, **EXPERTS)
    first, second = (each.layer.work(experts=kind) for each, kind in ((plain, False), (experts, True)))
    assert first.forward["gemm"] < second.forward["gemm"] < 1.3 * first.forward["gemm"]
    assert first.weights["gemm"] < second.weights["gemm"] and first.forward["tp"] < second.forward["tp"]
    assert first.forward["attention"] == second.forward["attention"]
    alone = model({"data_parallel_shard": 8, "zero_stage": 1}, **EXPERTS).layer.work(experts=True)
    # a microbatch's 8 rows of each token, a fourth of them on a rank, and their sum; 2 bytes read and written
    combined = experts.layer.routing().forward["elementwise"]
    assert combined == pytest.approx(2 * 4096 * 2048 * (8 / 4 + 1) / H100.machine.memory)
    assert second.forward["wait"] == 2 * OURS.host_kernel > 0 == first.forward["wait"] == alone.forward["wait"]
    step = experts.step()
    assert all(each >= 0 for each in step) and experts.least() <= step.seconds
    assert step.optimizer > 5 * plain.step().optimizer, "the optimizer has all experts"
    shared = model(parallel, **EXPERTS, shared_expert_size=1024).layer.work(experts=True)
    assert shared.forward["gemm"] > second.forward["gemm"] and shared.forward["tp"] == second.forward["tp"]
    some = model(parallel, **EXPERTS, first_dense_layers=12).step()
    assert some.optimizer < step.optimizer and plain.step().compute < some.compute < step.compute


def test_experts_are_reduced_by_a_collective_and_gathered_for_as_their_tokens_allow():
    """A rank's only expert is one, too. With few tokens a fused gather would read the matrices too often."""
    for n_experts, samples, few in ((8, 8, False), (64, 1, True)):
        layer = model({"tensor_parallel": 8}, microbatch=samples, **{**EXPERTS, "n_experts": n_experts}).layer
        up, down = (linear for linear in layer.linears[True] if linear.experts)
        assert down.experts == n_experts // 8
        assert layer.linear_forward(down)["tp"] == layer._links(SCATTER)
        assert (layer.linear_forward(up)["tp"] < layer._links(GATHER)) != few
    parallel = {"tensor_parallel": 8, "sequence_parallel": True}
    shards = model(parallel, **EXPERTS).layer.routing()
    whole = model({**parallel, "sequence_parallel": False}, **EXPERTS).layer.routing()
    assert shards.forward["tp"] > 0 == whole.forward["tp"], "every rank routes all tokens"
    assert whole.inputs["tp"] > shards.inputs["tp"] > 0, "and all-reduces their weights' gradients"


def test_context_parallel_ranks_share_all_but_what_they_exchange():
    """In a node, of whose links a gather takes all; 8 of 32 heads have keys and values that travel."""
    alone, shared = (model(each, batch=8, **GROUPED).layer.work() for each in ({}, CP8))
    for one, many in zip(alone, shared, strict=True):
        assert many["attention"] == pytest.approx(one["attention"] / 8, rel=1e-3)
        assert one["gemm"] / 8 <= many["gemm"] < 1.05 * one["gemm"] / 8, "waves of tiles are less full"
    received = 7 / 8 * 2 * 131072 * 8 * 128 * 2
    gather = shared.forward["cp"]
    assert gather == pytest.approx(received / H100.inside[1], rel=0.05) and alone.forward["cp"] == 0
    assert shared.inputs["cp"] == pytest.approx(2 * gather, rel=0.05), "a gather and an exchange"
    again = model(CP8, batch=8, **GROUPED).layer.work("full")
    assert again.inputs["cp"] == shared.inputs["cp"] + gather
    assert model(CP8, batch=8, **GROUPED).layer.work("mlp").inputs["cp"] == shared.inputs["cp"]
    step = model(CP8, batch=8, **GROUPED).step()
    assert step.cp == pytest.approx(8 * 24 * 3 * gather, rel=0.05) and step.seconds == sum(step)


def test_context_parallel_ranks_share_states_and_lie_between_others():
    """Of 8 devices in a node, 4 are tensor-parallel: pairs of context-parallel ranks are neighbours, and 8 are in 4."""
    whole = model({"data_parallel_shard": 8, "zero_stage": 3}, **GROUPED)
    parallel = {"context_parallel": 4, "data_parallel_shard": 2, "zero_stage": 3}
    shared = model(parallel, **GROUPED)
    assert shared.step().optimizer == whole.step().optimizer and shared.collective(1e9) == whole.collective(1e9)
    assert H100.spread(2, 4) == (2, 1) and H100.spread(8, 4) == (2, 4) and H100.spread(6, 2) == (3, 2)
    links = Link(*H100.inside), Link(H100.network_latency, H100.network)
    nbytes = 2 * 131072 * 2 * 128 * 2
    for ranks, nodes in ((2, 1), (8, 4)):
        layer = model({"tensor_parallel": 4, "context_parallel": ranks}, **GROUPED).layer
        gather, exchange = (cost(nbytes, 2, nodes, *links) for cost in (all_reduce_seconds, all_to_all_seconds))
        assert layer.keys_and_values() == (gather / 2, exchange)
    assert exchange == links[1].seconds(1, 6 / 8 * nbytes), "six of eight parts leave the node, by one adapter"


def test_tokens_are_exchanged_five_times_with_nothing_beside():
    """As of Qwen3-235B-A22B, 4096 tokens a rank with 8 of 128 experts each: between nodes exchanges take longest."""
    near, far = (model({**SHARDS, "expert_parallel": ep}, **EXCHANGED).layer for ep in (8, 32))
    network, node = Link(H100.network_latency, H100.network), Link(*H100.inside)
    rows = 8 * round(4096 * share_of_rank(8, 128, 8)), 32 * round(4096 * share_of_rank(8, 128, 32))
    sent = [each * 4096 * 2 for each in rows]
    assert [near.exchanged_bytes(), far.exchanged_bytes()] == sent and far.exchanged_bytes(8) == sent[0]
    assert near.exchange(sent[0]) == far.exchange(sent[0], 8) == node.seconds(1, 7 / 8 * sent[0])
    assert far.exchange(sent[1]) == network.seconds(1, 24 / 32 * sent[1]), "three of four parts leave the node"
    assert near.exchanging() < near.experts_gemms() < far.exchanging() and far.exchanging(8) == near.exchanging()
    work = far.work(experts=True)
    once = far.exchange(sent[1])
    for terms, times in zip(work, (2, 2, 1), strict=True):
        assert terms["ep"] == pytest.approx(times * once, rel=0.02), "beside rows few numbers travel"
    assert sum(terms["ep"] for terms in far.work()) == 0, "of a layer without experts"
    for recompute in ("mlp", "full"):
        again = far.work(recompute, experts=True)
        assert again.inputs["ep"] == pytest.approx(work.inputs["ep"] + once)
    step = model({**SHARDS, "expert_parallel": 32}, **EXCHANGED).step()
    assert step.ep == pytest.approx(2 * 24 * 5 * once, rel=0.02) and step.seconds == sum(step)


def test_ranks_that_exchange_tokens_compute_as_much_and_share_other_states():
    """With equal loads the rows of all ranks' tokens, for fewer experts. Copies of experts add up over fewer ranks."""
    every, few = (model({**SHARDS, **ep}, **EXCHANGED) for ep in ({}, {"expert_parallel": 8}))
    grouped = [each.layer.linears[True][2] for each in (every, few)]
    assert [(linear.rows, linear.experts) for linear in grouped] == [(256, 128), (2048, 16)]
    assert few.layer.experts_gemms() < every.layer.experts_gemms(), "larger groups, and fewer matrices to read"
    assert few.layer.work(experts=True).forward["wait"] > 0 == every.layer.work(experts=True).forward["wait"]
    experts, rest = few.of_rank(0).exchanged, few.of_rank(0).total - few.of_rank(0).exchanged
    assert experts == every.of_rank(0).total - rest - (every.of_rank(0).total - rest) * 7 / 8
    assert few.optimizer(0) == pytest.approx(every.optimizer(0)), "32 ranks share everything in both"
    nbytes = 4 * experts
    assert few.collective(nbytes, experts=True) == all_reduce_seconds(nbytes, 1, 4, few.fast, few.slow)
    assert few.collective(nbytes, True, True) == 0 < few.data_parallel(0) < every.data_parallel(0)
    tp = {"tensor_parallel": 4, "expert_parallel": 2, "data_parallel_shard": 2, "zero_stage": 1}
    shared = model(tp, **EXCHANGED, shared_expert_size=1024).layer
    routed, dense = shared.linears[True][2], shared.linears[True][4]
    assert shared.linear_forward(routed)["tp"] == 0 < shared.linear_forward(dense)["tp"], "it is on tp ranks"


def test_stages_of_different_layers_differ():
    found = model({"pipeline_parallel": 4, "pipeline_split": "time"}, **EXPERTS, first_dense_layers=8)
    kinds = [tuple(map(found.model.has_experts, layers)) for layers in found.ranges]
    assert len(set(kinds)) == 3 and not any(kinds[0]) and kinds[1] != kinds[2] == kinds[3]
    seconds = [stage.seconds("F") for stage in found.stages]
    assert len(set(seconds)) == 4, "the last one has the head"
    assert found.span == pytest.approx(max(action.end for action in found.timeline()))


def test_the_rank_with_most_parameters_counts():
    """With 23 layers on 6 ranks those between the ends have different numbers of them."""
    found = model({"pipeline_parallel": 6, "cpu_offload": True}, batch=6, n_layers=23, vocab_size=128)
    assert found.step().optimizer == max(map(found.optimizer, range(6)))


def test_data_parallel_ranks_in_a_node_share_its_adapters():
    found = model({"tensor_parallel": 2, "data_parallel_replicate": 16})
    nbytes = 4 * found.of_rank(0).total
    assert found.collective(nbytes, replicas=True) == all_reduce_seconds(nbytes, 4, 4, found.fast, found.slow)


@pytest.mark.parametrize("recompute", MOVED)
def test_bytes_that_packing_moves_by_hand(recompute):
    small = {"seq_length": 256, "hidden_size": 512, "n_heads": 8}
    layer = model({"pack_activations": True, "recompute": recompute}, 32, 2, **small).layer
    packs, passes, inside = MOVED[recompute]
    expected = packs * BOTH, passes * BOTH - inside * LESS
    assert kept_by_kind(layer.config)[False].packing(recompute) == pytest.approx(expected)
    plain, packed = layer.work(recompute), layer.work(recompute, packs=True)
    seconds = [packed.forward["packing"], packed.inputs["packing"]]
    assert sum(seconds) == pytest.approx(sum(expected) / H100.machine.memory, rel=0.05)
    assert sum(t.seconds for t in packed) == pytest.approx(sum(t.seconds for t in plain) + sum(seconds))
