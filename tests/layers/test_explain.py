"""explain() names what runs: the transport of each linear as recorded, its shapes, the reason and the predictions. Loss
and gradients are the same through every transport. The fused kernels run in Triton's interpreter."""

import importlib
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import theirs
import torch
import torch.distributed as dist
from context import context
from steps import Results, gradients, tp_mesh, with_keys_in_one
from testing import assert_kernel_close, on_every_rank
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from turns import in_turns

from tpformer import ops
from tpformer.kernels import cost
from tpformer.layers import MLP, ColumnParallelLinear, RowParallelLinear, TensorParallel, explain, linear_plans
from tpformer.layers.children import fusable, why_called
from tpformer.models import GPT, GPTConfig
from tpformer.ops.choice import Request

ALL_LOGITS = "vocab_parallel_cross_entropy"
CONFIG = {
    "vocab_size": 50, "vocab_multiple": 16, "seq_length": 8, "n_layers": 2, "hidden_size": 24, "n_heads": 6,
    "n_kv_heads": 3, "activation": "swiglu", "dropout": 0.1,
}  # fmt: skip
EXPERTS = {**CONFIG, "bias": False, "n_experts": 4, "expert_ffn_size": 12, "shared_expert_size": 8}
EXPERTS["first_dense_layers"] = 1
IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
HOOKS, REPLACED = "it has hooks", "its forward has been replaced"
H100 = cost.Machine("cpu", 989e12, 700e12, 380e9, 3e12)


def step(model: GPT) -> tuple[Results, list, list]:
    """Return loss and gradients, then what ran in the forward, then what ran in the backward."""
    with ops.record_transports() as forward:
        loss = model(IDS[:, :-1], targets=IDS[:, 1:], sample_index=torch.tensor([3, 8]), step=2)
    with ops.record_transports() as backward:
        loss.backward()
    return {"loss": loss.detach()} | gradients(model), forward, backward


def ran_of(model: GPT) -> list:
    return [plan for plan in linear_plans(model, 16) if plan.path != "lm_head (logits)"]


def run_and_explain(name: str, sequence_parallel: bool) -> tuple[Results, str]:
    """Loss and gradients, and explain()'s table, which is compared with what ran.
    With "mixed", neighbouring layers have different transports: a table that is right by chance fails."""
    mixed, name = name == "mixed", "sequential" if name == "mixed" else name
    model = GPT(GPTConfig(**CONFIG), seed=3, tp=TensorParallel(tp_mesh(), sequence_parallel, name))
    for index, layer in model.layers.items() if mixed else ():
        other = replace(model.tp, transport=("pipelined", "sequential")[int(index)])
        layer.mlp.down_proj.tp = layer.self_attn.q_proj.tp = other
    found, forward, backward = step(model)
    with ops.record_transports() as logits, torch.no_grad():
        model.eval()(IDS[:, :-1])
    plans = ran_of(model)
    # the forward records what communicates, in order; the backward the other half of each linear, in reverse
    assert forward == [(p.operation, p.decision.transport) for p in plans if p.operation != "matmul"]
    other = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}
    assert backward == [
        (other[p.operation] if sequence_parallel else p.request.op, p.decision.transport)
        for p in reversed(plans[:-1]) if sequence_parallel or p.operation == "matmul"
    ]  # fmt: skip
    if sequence_parallel:
        assert logits[-1] == ("all_gather_matmul", name)
    text = model.explain(16)
    for plan in plans[:-1]:  # a linear has a line of its own, or one with the other layer's
        names = {plan.path, re.sub(r"^layers\.\d\.", "layers.0-1.", plan.path)}
        (line,) = [line for line in text.splitlines() if line.split()[0] in names]
        assert f"  {plan.decision.transport}  " in line
    return found, text


@pytest.mark.parametrize("sequence_parallel", [True, *in_turns([False])])
def test_explain_names_what_ran_and_the_results_agree(ranks, interpreted, sequence_parallel):
    models = (GPT(GPTConfig(**CONFIG), seed=3, dtype=dtype) for dtype in (torch.float64, torch.float32))
    oracle, baseline = (with_keys_in_one(step(model)[0]) for model in models)
    tables = {}
    for name, pool in {"sequential": ranks, "pipelined": ranks, "mixed": ranks, "fused": interpreted}.items():
        for found, text in pool(2).run(run_and_explain, name, sequence_parallel):
            for key, value in with_keys_in_one(found).items():
                assert_kernel_close(value, oracle[key], baseline[key], f"{name} {key}")
            assert tables.setdefault(name, text) == text  # the same on all ranks
    lines = tables["pipelined"].splitlines()
    assert len(lines) == 8 and lines[1].startswith("layers.0-1.self_attn.q_proj+k_proj+v_proj  ")
    # layers that differ have lines of their own
    assert sum(line.startswith("layers.") for line in tables["mixed"].splitlines()) == 6


def explain_experts(name: str, sequence_parallel: bool) -> list[list[str]]:
    """The cells of the lines of experts in explain()'s table, which is compared with what ran."""
    model = GPT(GPTConfig(**EXPERTS), seed=3, tp=TensorParallel(tp_mesh(), sequence_parallel, name))
    with ops.record_transports() as forward:
        model(IDS[:, :-1], targets=IDS[:, 1:], sample_index=torch.tensor([3, 8]), step=2)
    assert forward == [(p.operation, p.decision.transport) for p in ran_of(model) if p.operation != "matmul"]
    return [re.split(" {2,}", line) for line in model.explain(16).splitlines() if line.startswith("layers.1.mlp.")]


@pytest.mark.parametrize("sequence_parallel", [True, *in_turns([False])])
def test_experts_have_a_line_for_each_side_and_one_for_their_router(ranks, interpreted, sequence_parallel):
    operations = ["all_gather_matmul", "matmul_reduce_scatter"]
    if not sequence_parallel:
        operations = ["matmul, backward matmul_all_reduce", "matmul_all_reduce"]
    for name, pool in {"sequential": ranks, "pipelined": ranks, "fused": interpreted}.items():
        carrier = "sequential" if name == "fused" else name
        for router, gather, reduce in pool(2).run(explain_experts, name, sequence_parallel):
            assert [router[1], router[4]] == ["matmul", "local"]
            assert ("16 bytes a token are gathered" in router[-1]) == sequence_parallel
            assert gather[:5] == ["layers.1.mlp.experts (gather)", operations[0], "16 x 48 x 24", "16 x 24 x 24", name]
            shapes = ["16 x 24 x 24", "16 x 24 x 12"]
            assert reduce[:5] == ["layers.1.mlp.experts (reduce)", operations[1], *shapes, carrier]


def test_what_is_called_as_a_module_is_named_with_the_reason():
    model = GPT(GPTConfig(**EXPERTS))
    text = model.explain()
    assert "called" not in text and "shared_experts." not in text
    theirs.put(model, "layers.0.self_attn.q_proj", nn.Sequential(model.layers["0"].self_attn.q_proj, nn.Tanh()))
    theirs.replace_forward(model, "layers.0.input_layernorm")
    theirs.subclass(model, "layers.0.mlp")
    theirs.ANYWHERE["forward hook"](model, "layers.1.mlp.gate")
    text = model.explain()
    called = [line.split(" is called as a module, not fused: ") for line in text.splitlines() if " is called " in line]
    assert {path.strip(): reason.split(": ")[0] for path, reason in called} == {
        "layers.0.input_layernorm": "its forward has been replaced",
        "layers.0.mlp": "it is a Scaled",
        "layers.0.self_attn.q_proj": "it is a Sequential",
        "layers.1.mlp.gate": "it has hooks",
    }
    assert "shared_experts.gate_proj+up_proj" in text


@pytest.mark.parametrize("touch, reason", [
    (lambda child: child.register_forward_hook(lambda *_: None), HOOKS),
    (lambda child: child.register_forward_pre_hook(lambda *_: None), HOOKS),
    (lambda child: child.register_full_backward_hook(lambda *_: None), HOOKS),
    (lambda child: child.register_full_backward_pre_hook(lambda *_: None), HOOKS),
    (lambda child: setattr(child, "forward", child.forward), REPLACED),
    (lambda child: child.compile(), REPLACED),
    (lambda child: register_module_forward_hook(lambda *_: None), "hooks are registered for all modules"),
])  # fmt: skip
def test_each_way_to_touch_a_child_is_seen(touch, reason):
    child = MLP(4)
    assert why_called(child, MLP) is None
    handle = touch(child)
    try:
        assert why_called(child, MLP) == reason and not fusable(MLP, child)
    finally:
        if handle is not None:
            handle.remove()
    assert fusable(MLP, child) == (handle is not None)


def test_one_rank_has_shapes_and_no_predictions():
    body = nn.ModuleDict({"in": ColumnParallelLinear(8, 12), "mlp": MLP(12)})
    own = nn.ModuleDict({"embed": nn.Linear(4, 8), "body": body, "out": RowParallelLinear(12, 5)})
    _, *rows, note = (re.split(" {2,}", line) for line in explain(own, 64).splitlines())
    assert [row[0] for row in rows] == ["body.in", "body.mlp.fc1", "body.mlp.fc2", "out"]
    assert rows[0][1:] == ["matmul", "64 x 12 x 8", "64 x 12 x 8", "local", *"----", "12", "one rank"]
    assert note == ["times and break-even: no performance model of cpu"]
    assert explain(nn.Sequential(nn.Linear(2, 2)), 4).splitlines()[-1] == "no tensor-parallel linear in this module"
    # numbered layers with equal lines share one
    numbered = nn.Sequential(*(RowParallelLinear(4, 4) for _ in range(3)), RowParallelLinear(4, 8), nn.Identity())
    numbered.append(RowParallelLinear(4, 4))
    assert [line.split()[0] for line in explain(numbered, 4).splitlines()][1:3] == ["0,1,2,5", "3"]
    model = GPT(GPTConfig(**CONFIG), device="meta")
    assert model.explain() == model.explain(8) == explain(model, 8)


@pytest.mark.parametrize("edit, operation, reason", [
    (lambda model: None, "linear_cross_entropy", "one rank"),
    (lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None), "linear_cross_entropy", "one rank"),
    (lambda model: model.lm_head.register_forward_hook(lambda *_: None), ALL_LOGITS, "it has hooks"),
    (lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)), ALL_LOGITS, "it is in a Sequential"),
])  # fmt: skip
def test_the_loss_is_the_one_that_runs(edit, operation, reason):
    model = GPT(GPTConfig(**CONFIG, tie_embeddings=False))
    edit(model)
    (line,) = [line for line in model.explain().splitlines() if "(loss)" in line]
    assert line.split(" (loss)")[1].split()[0] == operation and line.endswith(reason)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with mock.patch.object(ops, ALL_LOGITS, wraps=getattr(ops, ALL_LOGITS)) as made:
        model(ids, targets=ids)
    assert made.called == (operation == ALL_LOGITS)


def table_of_mlp(precision: str, machine: cost.Machine) -> list[str]:
    """explain()'s lines of LLaMA-70B's MLP, if this CPU were this machine."""
    tp = TensorParallel(tp_mesh(), True, precision=precision)
    options = {"tp": tp, "device": "meta", "dtype": torch.bfloat16, "bias": False}
    mlp = MLP(8192, ffn_hidden_size=28672, activation="swiglu", **options)
    with mock.patch.object(cost, "MACHINES", (machine,)):
        return explain(nn.ModuleList([mlp]), 8192).splitlines()


@on_every_rank(2)
def test_predictions_are_those_of_the_cost_model() -> None:
    """And linears that keep nothing sharded say so."""
    gathers = ColumnParallelLinear(8, 12, gather_output=True, tp=tp_mesh())
    edges = explain(nn.Sequential(gathers, RowParallelLinear(12, 8, input_is_parallel=False, tp=tp_mesh())), 8)
    assert "; as a module it gathers its output" in edges and "; as a module it takes an unsharded input" in edges
    header, gate, down, note = table_of_mlp("16", H100)
    assert header.split()[-3:] == ["break-even", "width", "reason"]
    # by hand: 2 * 8192 * 28672 * 8192 / 700e12 and 8192 * 8192 * 2 / 2 / 380e9; the reduction's GEMM is half as large
    assert gate.split("sequential")[1].split()[:5] == ["5498", "177", "5498", "921", "28672"]
    assert down.split("sequential")[1].split()[:5] == ["2749", "177", "2749", "921", "14336"]
    assert "are predictions for cpu (700 TFLOP/s, 380 GB/s), not measurements" in note


@on_every_rank(2)
def test_linears_of_blocks_have_their_own_rates_bytes_and_both_break_evens() -> None:
    """The same MLP in FP8, on an H100 and on a GPU whose rate of blocks is not known."""
    _, gate, down, note = table_of_mlp("fp8", H100._replace(fp8_flops=1000e12))
    # by hand: FLOPs / 1000e12; 8192 * (8192 + 64) / 2 / 380e9, and the reduction as in 16 bits
    assert gate.split("sequential")[1].split()[:5] == ["3848", "89", "3848", "663", "28672"]
    assert down.split("sequential")[1].split()[:5] == ["1924", "177", "1924", "1316", "14336"]
    both = "what blocks stand for; break-even of its gather 663, of its reduction in bfloat16 1316"
    assert all(f"the GEMM multiplies {both}" in line for line in (gate, down))
    assert "for cpu (700 TFLOP/s, of blocks 1000, 380 GB/s), not measurements" in note
    _, gate, _, note = table_of_mlp("fp8", H100)
    assert gate.split("sequential")[1].split()[:4] == ["-"] * 4 and "of blocks unknown" in note


@on_every_rank(2)
def test_attention_on_context_parallel_ranks_says_what_it_gathers() -> None:
    """By hand, of Llama-3 8B: 2 * 8192 * 8 * 128 * 2 bytes, half of which are another rank's."""
    with mock.patch.object(cost, "MACHINES", (H100,)):
        sizes = {"vocab_size": 50, "seq_length": 8192, "hidden_size": 4096, "n_heads": 32, "n_kv_heads": 8}
        model = GPT(GPTConfig(**sizes, n_layers=2), tp=context(), device="meta", dtype=torch.bfloat16)
        one, two = model.explain(), model.explain(2 * 8192)
    (line,) = [line for line in one.splitlines() if "gathers keys" in line]
    assert line.startswith("layers.0-1.self_attn gathers keys and values over 2 context-parallel ranks: 16.8 MB")
    # and 2 products of half of 4096 x 8192 pairs, 2 FLOPs each, of 4096 features
    assert "44 us before 393 us of attention at the GEMMs' rate (11.2%)" in line
    assert "88 us before 785 us" in two, "samples are as long as before"
    (fc1,) = [line for line in one.splitlines() if line.startswith("layers.0-1.mlp.fc1")]
    assert fc1.split()[2:5] == ["4096", "x", "16384"], "M is of the own tokens"


def test_processors_that_are_left_to_other_groups_are_named(monkeypatch):
    """With what NCCL_MAX_CTAS would gain: of 132 SMs a GEMM then has 116 in place of 100."""
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    layers_explain = importlib.import_module("tpformer.layers.explain")  # the package has a function of that name
    properties = SimpleNamespace(name="H100", multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(layers_explain, "why_not_fused", lambda request: None)
    sizes = ("matmul_reduce_scatter", 8192, 8192, 14336, torch.bfloat16, torch.device("cuda"))
    request, h100 = Request(*sizes, SimpleNamespace(size=lambda: 2), "fused"), cost.machine_for("H100")
    assert layers_explain._spare_note([request], h100) == []  # no group but this one
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    (note,) = layers_explain._spare_note([request, request._replace(transport="sequential")], h100)
    assert "leave 32 SMs to NCCL" in note and "NCCL_MAX_CTAS=16" in note and "a pipeline's" in note
    before, after = (int(number) for number in re.findall(r"(\d+) us", note))
    assert before / after == pytest.approx(116 / 100, rel=0.02)
    (best,) = layers_explain._spare_note([request._replace(transport="auto")], h100)
    assert int(re.findall(r"(\d+) us", best)[0]) < before  # what is sequential then
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    assert layers_explain._spare_note([request], h100) == []
