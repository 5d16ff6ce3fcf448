"""What a dry run counts on fake tensors is what ranks of a real run hold and communicate. Its formulas give the counted
bytes, and the largest example is counted in one process."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import ROOT
from turns import in_turns, of_turn

from tpformer.config import RunConfig, build_config, read_toml, to_toml
from tpformer.planner.bubbles import schedule_order
from tpformer.planner.dry_run import RankCount, _Rank, count_rank, default_ranks, plan_config
from tpformer.planner.layouts import parse_layout, with_layout
from tpformer.planner.rank_memory import predicted_memory, predicted_stage
from tpformer.planner.report import rank_lines, rank_plan, report, size

MODEL = {"vocab_size": 250, "seq_length": 16, "n_layers": 4, "hidden_size": 32, "n_heads": 4}
LLAMA = {
    **MODEL, "n_kv_heads": 2, "head_dim": 12, "qk_norm": True, "sliding_window": 7, "norm": "rmsnorm",
    "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
}  # fmt: skip
MOE = {
    **LLAMA, "sliding_window": None, "n_experts": 8, "experts_per_token": 4, "expert_ffn_size": 12,
    "shared_expert_size": 8, "first_dense_layers": 1, "router_bias": True,
}  # fmt: skip
TP2, ZERO1 = {"tensor_parallel": 2}, {"data_parallel_shard": 2}
ZERO2, ZERO3 = ({**ZERO1, "zero_stage": stage} for stage in (2, 3))
PP2 = {"pipeline_parallel": 2}
SCHEDULES = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
GPIPE, ILV, ZB, ZBV = ({**PP2, "pipeline_schedule": name} for name in SCHEDULES)


def configuration(parallel: dict, train: dict | None = None, model: dict | None = None, **sections: dict) -> RunConfig:
    values = {"global_batch_size": 8, "device": "cpu", **(train or {})}
    return build_config({"model": model or MODEL, "parallel": parallel, "train": values, **sections})


def held(count: RankCount) -> list[int]:
    """Bytes of a rank's states, in the order of a plan's."""
    return [count.parameters, count.gradients, count.optimizer, count.copies, count.accumulated]


def order_of(config: RunConfig):
    layout = config.parallel
    if layout.pipeline_parallel == 1:
        return None
    size = (layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank)
    return schedule_order(layout.pipeline_schedule, *size)


@of_turn(1)
def test_a_layout_that_does_not_fit_is_told_what_to_change():
    config = plan_config(configuration({"data_parallel_replicate": 2}, {"device": "cuda", "microbatch_size": 2}))
    count = count_rank(config, 0)
    fits, text = (list(rank_lines(config, count, None, memory)) for memory in (1e9, 1e6))
    assert any("fits," in line for line in fits) and not any("does not" in line for line in fits)
    assert any("predicted" in line and "does not fit" in line for line in text)
    for change in ("zero_stage = 3 with data_parallel_shard = 2", "cpu_offload = true", 'recompute = "full"'):
        assert any(line.strip().startswith(change) for line in text), change
    config = plan_config(configuration(ZERO1, {"device": "cuda"}))
    sharded = "\n".join(rank_lines(config, count_rank(config, 0), None, 1e5))
    assert "zero_stage = 3 " in sharded and "with data_parallel_shard" not in sharded, "it has it already"
    assert not dist.is_initialized()


@of_turn(0)
def test_a_report_of_experts_says_what_the_most_loaded_rank_needs():
    """With 2 of 8 experts a rank may get every token twice, beside its share of 2 x 4 / 8."""
    parallel = {"tensor_parallel": 4, "pipeline_parallel": 2}
    config = plan_config(configuration(parallel, {"device": "cuda", "microbatch_size": 2}, MOE))
    lines = list(report(config, [0], 1e9))
    assert f"({config.model.n_active_parameters / 1e6:.2f}M active)" in lines[0], "not rounded to 0.0B"
    (balanced,), (worst,) = ([line for line in lines if text in line] for text in ("equal numbers", "at worst"))
    assert balanced.endswith(": 32 rows of a microbatch in a layer on each rank")
    usual, most = (predicted_memory(config, 0, worst=each) for each in (False, True))
    # of layers 0 and 1 only the latter has experts; 2 microbatches wait: gate and up, slot and weight of 32 rows more
    assert most.peak.saved - usual.peak.saved == 2 * 32 * (2 * 2 * 12 + 8)
    row = re.search(r", 64 rows: (.*) more, (.*) in all, which fits \(formula\)$", worst)
    assert row and row[1] == size(most.total - usual.total)
    dense = plan_config(configuration({"pipeline_parallel": 2}, {"device": "cuda"}))
    assert not any("experts" in line for line in report(dense, [0], 1e9))


def test_the_command_counts_ranks_of_three_places_in_the_pipeline(commands, tmp_path):
    config = configuration({"pipeline_parallel": 3}, {"dtype": "bfloat16"}, {**MODEL, "n_layers": 3})
    (tmp_path / "run.toml").write_text(to_toml(config))
    code, out, err = commands.run("dry-run", str(tmp_path / "run.toml"))
    assert code == 0 and err == "", err
    line = "rank {0} (pp {0}, dp_replicate 0, dp_shard 0, cp 0, tp 0); stage {0}: layers {0} to {0}"
    assert [each for each in out.splitlines() if each.startswith("rank ")] == [line.format(rank) for rank in range(3)]


@of_turn(2)
def test_a_thousand_billion_parameters_on_3072_ranks():
    config = plan_config(build_config(read_toml(ROOT / "examples/gpt_1t.toml")))
    assert default_ranks(config) == [0, 1536, 3024]
    lines = list(report(config, [3024], 80e9))
    assert lines[0].startswith("1008.0B parameters, world size 3072: pp 64 x dp_replicate 6 x dp_shard 1 x tp 8")
    # arXiv:2104.04473, table 1, by hand: 2 layers of 25600 and the head on 8 tensor-parallel ranks
    h, t = 25600, 8
    layer = 12 * h * h // t + (3 + 4) * h // t + 2 * h + 4 * h
    m = 2 * layer + 51200 * h // t + 2 * h
    factors = {"parameters": 4, "gradients": 4, "optimizer": 8, "unsharded copies": 2, "accumulated gradients": 4}
    for name, factor in factors.items():
        (row,) = [line.split() for line in lines if line.startswith(f"  {name} ") and " M" in line]
        assert [int(number.replace(",", "")) for number in row[-2:]] == [factor * m] * 2, "by formula, and counted"


def test_what_cannot_run_is_refused_in_one_line(commands):
    for model, parallel, wanted in (
        ({"n_layers": 2}, {}, "set model.vocab_size"),
        ({"layers": 3}, {}, r"unknown key in \[model\] 'layers'"),
        (MODEL, {"pipeline_parallel": 13}, "every stage needs a layer"),
        (MODEL, {**TP2, "tensor_parallel": 5}, "choose tensor_parallel from"),
    ):
        with pytest.raises(ValueError, match=wanted) as error:
            plan_config(build_config({"model": model, "parallel": parallel}))
        assert "\n" not in str(error.value)
    code, out, err = commands.run("dry-run", str(ROOT / "examples/gpt_1t.toml"), "--ranks", "0,3072")
    assert code == 2 and out == ""
    assert err == "tpformer: --ranks: 3072 is none of the layout's 3072 ranks, 0 to 3071\n"


def test_a_tiny_mixture_of_experts_exchanges_tokens_as_its_formulas_say():
    """A token has 2 of 8 experts, and a rank 2: 13/28 of all sets of 2 have one of these. dp_shard and ep share the
    world's group."""
    values = {"tensor_parallel": 1, "data_parallel_shard": 4, "expert_parallel": 4}
    given = {"model": {"vocab_size": 256}, "parallel": values, "train": {"device": "cpu", "dtype": "bfloat16"}}
    config = plan_config(build_config(read_toml(ROOT / "examples/moe_tiny.toml"), given))
    count = count_rank(config, 1)
    plan = rank_plan(config, count, None)
    assert [state.nbytes for state in plan.states] == list(filter(None, held(count)))
    assert predicted_stage(config, 0) == count.stages[0] and predicted_memory(config, 0).total == plan.total
    m, tokens = config.n_microbatches, config.microbatch_size * 256
    rows, chosen, layers = 4 * round(tokens * 13 / 28), 2 * tokens, 4
    exchanges = {(c.operation, c.nbytes): times for c, times in count.collectives.items() if c.axis == "ep"}
    calls = {rows * 128 * 2: 5, 8 * chosen: 1, 4 * chosen: 1, 16 * 4: 1}
    assert exchanges == {("all_to_all", nbytes): m * layers * times for nbytes, times in calls.items()}
    lines = "\n".join(rank_lines(config, count, None, 1e9))
    assert "X = 196,608 of them of experts" in lines and "4 (M - X) / 4 + 4 X" in lines
    sent, most = size(rows * 128 * 2), size(4 * tokens * 128 * 2)
    assert f"an exchange sends {sent} for its own tokens, and as much comes, at worst {most}" in lines
    assert "on 4 ranks choose experts of this rank" in lines


# GB by formula; the first is what a prototype of the exchange held, whatever else it sent
@pytest.mark.parametrize("layout, states, fits", [
    ("dp=8,ep=8,zero=1", [15.27, 15.27, 30.53, 10.33, 20.66], False),
    ("dp=16,ep=8,zero=1", [7.63, 7.63, 15.27, 10.33, 20.66], True),
])  # fmt: skip
def test_memory_of_a_large_mixture_of_experts_that_exchanges_tokens(layout, states, fits):
    """Qwen3-30B-A3B: too much for 8 GPUs of 80 GB, and on 16 two ranks share what each of 8 had."""
    given = {"model": {"preset": "qwen3-30b-a3b", "seq_length": 4096}, "train": {"global_batch_size": 128}}
    given["train"] |= {"device": "cuda", "dtype": "bfloat16", "microbatch_size": 1}
    memory = predicted_memory(with_layout(build_config(given), parse_layout(layout)), 0)
    assert [round(state.nbytes / 1e9, 2) for state in memory.states] == states
    assert round(memory.peak.saved / 1e9, 2) == 12.72 and (memory.total < 80e9) == fits


@of_turn(1)
def test_a_rank_of_a_large_mixture_of_experts_is_counted_by_three_microbatches_of_its_layers():
    parallel = {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel_shard": 4, "recompute": "full"}
    model = {"preset": "qwen3-235b-a22b", "seq_length": 4096}
    train = {"device": "cuda", "global_batch_size": 64, "microbatch_size": 1}
    config = plan_config(configuration(parallel, train, model))
    with mock.patch.object(_Rank, "_microbatch", autospec=True, side_effect=_Rank._microbatch) as run:
        count = count_rank(config, 64)
    assert run.call_count == 3 < config.n_microbatches and count.stages[0].layers == range(47, 71)
    plan = rank_plan(config, count, order_of(config))
    assert predicted_memory(config, 2).total == pytest.approx(plan.total, rel=0.001)
    assert [state.nbytes for state in plan.states][:3] == held(count)[:3]


@pytest.mark.parametrize(("device", "dtype"), [
    ("cuda", "bfloat16"), *in_turns([("cuda", "float32"), ("cpu", "bfloat16")], first=1)
])  # fmt: skip
def test_only_a_gpu_in_16_bits_needs_no_mask_of_a_window(device, dtype):
    """Counted and by formula."""
    models = ({**LLAMA, "n_layers": 1, "sliding_window": window} for window in (7, None))
    configs = (plan_config(configuration({}, {"device": device, "dtype": dtype}, model)) for model in models)
    counted = [(count_rank(config, 0).stages[0], predicted_stage(config, 0)) for config in configs]
    saved = [count.saved for count, predicted in counted if count == predicted]
    mask = 16 * 16 * getattr(torch, dtype).itemsize
    assert saved[0] - saved[1] == (0 if (device, dtype) == ("cuda", "bfloat16") else mask)
