"""FP8 in the models of time and memory: its rates, its passes as the linears make them, and what is refused."""

import dataclasses
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from turns import in_turns

from tpformer.cli.plan import plan_command
from tpformer.config import RunConfig, build_config
from tpformer.kernels import cost
from tpformer.kernels.quantize import reference
from tpformer.kernels.quantize.format import NUMBER_BYTES, VALUES
from tpformer.layers import TensorParallel
from tpformer.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpformer.models import GPT
from tpformer.ops.choice import Grouped, Request, break_even, choose_transport
from tpformer.ops.choice.prediction import fused_times, grouped_seconds
from tpformer.ops.implementation import implementation
from tpformer.ops.quantized_product import quantized_product
from tpformer.ops.transports import quantized
from tpformer.ops.transports.interface import REGISTRY
from tpformer.planner.devices import as_if_on, load_device
from tpformer.planner.dry_run import fake_world
from tpformer.planner.layer_time import LayerModel
from tpformer.planner.memory_budget import with_budget
from tpformer.planner.quantising import PASS, SCALES, WRITTEN, launches, quantising_bytes, weight_bytes
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.software import ours
from tpformer.planner.terms import Linear

H100 = load_device("h100")
MACHINE = H100.machine
GATHER, SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OLD = {"vocab_size": 256, "seq_length": 64, "n_layers": 1, "hidden_size": 256, "n_heads": 2, "ffn_hidden_size": 640}
NEW = {
    **OLD, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "n_kv_heads": 1,
    "head_dim": 128, "tie_embeddings": False,
}  # fmt: skip
EXPERTS = {**NEW, "n_experts": 4, "expert_ffn_size": 128, "shared_expert_size": 256}
LLAMA = {**NEW, "vocab_size": 32000, "seq_length": 4096, "n_layers": 2, "hidden_size": 4096, "n_heads": 32,
         "n_kv_heads": 8, "ffn_hidden_size": 14336}  # fmt: skip
EACH_USE = {"data_parallel_shard": 2, "zero_stage": 3}


def run(model: dict, precision: str = "fp8", parallel: dict | None = None, **train: Any) -> RunConfig:
    train = {"global_batch_size": 8, "dtype": "bfloat16", "device": "cuda", "precision": precision, **train}
    return build_config({"model": model, "parallel": parallel or {}, "train": train})


def layer(*arguments: Any, device: Any = H100, **options: Any) -> LayerModel:
    config = run(*arguments, **options)
    return LayerModel(config, device, ours(config.parallel, device))


def test_break_even_widths_are_those_of_the_research() -> None:
    """By hand: 7 / 8 * bytes * FLOP/s / (2 * 380 GB/s) on 8 H100, of 2 and 129 / 128 bytes at 700 and 1000 TFLOP/s."""
    assert round(cost.break_even_width(8, MACHINE, 2)) == 1612
    found = cost.break_evens_in_blocks(8, MACHINE, 2)
    assert found is not None and [*map(round, found)] == [1160, 2303]
    assert [machine.name for machine in cost.MACHINES if machine.of_blocks] == ["H200", "H100"]


def test_what_is_said_of_a_linear_is_at_the_rate_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear in FP8 is not compared with 16 bits' rates, nor one in 16 bits with FP8's."""
    monkeypatch.setattr(cost, "MACHINES", (MACHINE._replace(name="cpu"),))
    group: Any = mock.Mock(size=lambda: 8)
    both = "break-even of its gather 1160, of its reduction in bfloat16 2303"
    for op, *widths in ((GATHER, 1160, 1612), (SCATTER, 2303, 1612), (ALL_REDUCE, 4605, 3224)):
        request = Request(op, 8192, 4096, 4096, torch.bfloat16, torch.device("cpu"), group, precision="fp8")
        assert [round(break_even(each) or 0) for each in (request, request._replace(precision="16"))] == widths
        reason = choose_transport(request).reason
        assert "the GEMM multiplies what blocks stand for" in reason and (both in reason) == (op != ALL_REDUCE)
    monkeypatch.setattr(cost, "MACHINES", (MACHINE._replace(name="cpu", fp8_flops=None),))
    assert break_even(request) is None and "break-even" not in choose_transport(request).reason


def test_forward_and_input_gradients_run_at_the_rate_of_blocks_and_weight_gradients_do_not() -> None:
    """8192 x 4096 x 14336 fills the GPU, so its time is FLOPs over the rate. Collectives have bytes of blocks."""
    fp8, plain = (layer(LLAMA, precision, microbatch_size=2) for precision in ("fp8", "16"))
    for linear in fp8.linears[False]:
        blocks, bits = ([each.linear_forward(linear), *each.linear_backward(linear)] for each in (fp8, plain))
        assert blocks[2]["gemm"] == bits[2]["gemm"] and bits[0]["cast"] == bits[1]["cast"] == bits[2]["cast"] == 0
        for forward_or_inputs in (0, 1):
            ratio = bits[forward_or_inputs]["gemm"] / blocks[forward_or_inputs]["gemm"]
            assert 1.25 < ratio < 1000 / 700, "a tile's begin and stores take as long"
    shared = {"tensor_parallel": 8, "transport": "sequential"}
    fp8, plain = (layer(LLAMA, precision, shared, microbatch_size=8) for precision in ("fp8", "16"))
    for linear in fp8.linears[False]:
        blocks, bits = (each.linear_forward(linear)["tp"] for each in (fp8, plain))
        sizes = linear.rows, linear.n, linear.k
        if linear.column:  # a byte a number, and one for each 128
            assert blocks == cost.collective_seconds(GATHER, *sizes[:2], 4096 + 32, 8, 1, MACHINE) < 0.6 * bits
        else:
            assert blocks == bits == cost.collective_seconds(SCATTER, *sizes, 8, 2, MACHINE)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "each use"])
@pytest.mark.parametrize("dropout", [0.1, *in_turns([0.0])], ids=["dropout", ""])
@pytest.mark.parametrize("sizes", [OLD, NEW, EXPERTS], ids=["gpt2", "newer", "experts"])
def test_passes_are_those_that_the_linears_make(sizes: dict, dropout: float, kept: bool) -> None:
    """Bytes and launches of a layer on one rank, in all microbatches of a step, counted where the linears quantise,
    multiply and dequantise. In ZeRO stage 3 weights are quantised in each use."""
    sizes = {**sizes, "dropout": dropout}
    config = run(sizes, microbatch_size=2, device="cpu")
    model = GPT(config.model, tp=TensorParallel(precision="fp8"), dtype=torch.bfloat16)
    per_number = {"quantize_rows": PASS, "quantize_weight": 3, "quantize_weight_twice": 4, "dequantize": PASS}
    moved, calls = [0.0, 0.0], [0, 0]  # of forwards and of backwards
    direction = 0

    def counted(op: str, like: torch.Tensor) -> Any:
        def counting(name: str) -> Any:
            def count(x: Any, *rest: Any) -> Any:
                moved[direction] += per_number[name] * (x if isinstance(x, torch.Tensor) else x.values).numel()
                calls[direction] += 1
                return getattr(reference, name)(x, *rest)

            return count

        if op != "quantize":
            return implementation(op, like)
        return SimpleNamespace(**{name: counting(name) for name in per_number})

    def multiplied(*operands: Any) -> torch.Tensor:
        calls[direction] += SCALES
        return quantized_product(*operands)

    ids = torch.arange(2 * 64).view(2, 64)
    counting_all = mock.patch.multiple(quantized, implementation=counted, quantized_product=multiplied)
    with counting_all, quantized.keep_blocks() if kept else nullcontext():
        for _ in range(config.n_microbatches):
            direction = 0
            loss = model(ids, targets=ids)
            direction = 1
            loss.backward()
    found = layer(sizes, parallel=None if kept else EACH_USE, microbatch_size=2)
    linears, tokens, m = found.linears[config.model.n_experts is not None], 2 * 64, config.n_microbatches
    assert found.uses == (m if kept else None)
    given = tokens, False, tokens
    forward, inputs, weights = map(sum, zip(*(quantising_bytes(each, *given) for each in linears), strict=True))
    of_weights = [sum(each) for each in zip(*(weight_bytes(each, found.uses) for each in linears), strict=True)]
    other = [sum(each) for each in zip(*(of_other_kernels(each) for each in linears), strict=True)]
    expected = forward + of_weights[0] - other[0], inputs + of_weights[1] + weights - other[1]
    assert [m * each for each in expected] == pytest.approx(moved, rel=1e-12)
    others = [sum(each) for each in zip(*(added_up(each) for each in linears), strict=True)]
    others[1] += 1  # attention's result
    launched = [n - other for n, other in zip(launches(linears, found.uses), others, strict=True)]
    assert [m * each for each in launched] == calls


def of_other_kernels(linear: Linear) -> tuple[float, float]:
    """Bytes of the forward and of the backward that no pass of the transports moves: norms and activations, also again,
    write blocks in place of 16 bits, and so does dropout's backward; the backwards of an activation and of a block's
    second norm write some beside their gradients, and the sum for a bias beside what it reads; what several add is
    added up. What a backward makes again of no activation, attention's result, is quantised beside the activations."""
    column, row = linear.rows * linear.k, linear.rows * linear.n
    finished = WRITTEN if linear.dropout else NUMBER_BYTES * (linear.bias or linear.normed)
    if linear.experts is not None:
        return 0.0, finished * 2 * 64 * linear.n
    if linear.column:
        normed = WRITTEN * column * (not linear.silent)
        beside = NUMBER_BYTES * row * (linear.name != "qkv")
        return normed, normed + beside + 6 * added_up(linear)[1] * column
    activated = WRITTEN * column * (linear.name != "o")
    finished *= not linear.silent
    return activated + 6 * added_up(linear)[0] * row, (activated or PASS * column) + finished * row


def added_up(linear: Linear) -> tuple[int, int]:
    """Sums in 16 bits of the forward and of the backward: of a shared expert with what experts make, too."""
    return int(linear.silent and not linear.column), linear.column * (linear.weights - 1 + linear.silent)


def test_kept_blocks_have_the_predicted_bytes_and_are_not_made_again() -> None:
    """On one rank counted; on four, of which each two share a key-value head, by the widths of their linears."""
    experts = {**NEW, "n_experts": 4, "expert_ffn_size": 128, "first_dense_layers": 0}
    for sizes in (OLD, {**NEW, "n_layers": 2}, experts):
        config = run(sizes, microbatch_size=2, device="cpu")
        model, ids = GPT(config.model, tp=TensorParallel(precision="fp8")), torch.zeros(1, 64, dtype=torch.int64)
        with quantized.keep_blocks():
            model(ids, targets=ids)
            made = [part for kept in (REGISTRY.blocks or {}).values() for blocks in kept.both for part in blocks]
        assert dict(predicted_memory(config, 0).parts)["weights in blocks *"] == sum(part.numel() for part in made)
    sizes = {**NEW, "n_heads": 4, "n_kv_heads": 2, "hidden_size": 512, "ffn_hidden_size": 1024, "n_layers": 2}
    config = run(sizes, parallel={"tensor_parallel": 4}, microbatch_size=2)
    with fake_world(3, 4):
        model = GPT(config.model, tp=TensorParallel(init_device_mesh("cpu", (4,)), precision="fp8"), device="meta")
        linears = [x for x in model.modules() if isinstance(x, ColumnParallelLinear | RowParallelLinear)]
        elements = sum(x.width * (x.in_features if isinstance(x, ColumnParallelLinear) else 512) for x in linears)
    assert dict(predicted_memory(config, 0).parts)["weights in blocks *"] == 2 * elements * (1 + 2**-14)
    shared = run(sizes, parallel=EACH_USE, microbatch_size=2)
    assert "weights in blocks *" not in dict(predicted_memory(shared, 0).parts)
    assert "weights in blocks *" not in dict(predicted_memory(run(sizes, "16", microbatch_size=2), 0).parts)
    again, once = (layer(sizes, parallel=each, microbatch_size=2).again("full") for each in (EACH_USE, None))
    elements = sum(linear.n * linear.k for linear in layer(sizes).linears[False][:-1])  # the last one is not repeated
    assert again - once == pytest.approx(3 * elements / MACHINE.memory)


def test_a_gather_joins_and_parts_blocks() -> None:
    """Of 4 ranks each joins a quarter of the rows and parts all of them: 2 * 129 / 128 bytes a number each."""
    column, row = layer(NEW, microbatch_size=2).linears[False][2:]
    own = column.rows / 4
    for linear, places, features in ((column, (0, 2), column.k), (row, (1,), row.n)):
        alone, gathered = (quantising_bytes(linear, own, each) for each in (False, True))
        for place in range(3):
            more = gathered[place] - alone[place]
            assert more == pytest.approx((place in places) * 2 * NUMBER_BYTES * 1.25 * linear.rows * features)


def fused_and_plain(model: dict) -> tuple[LayerModel, LayerModel]:
    """On 8 ranks, through either transport."""
    eight = {"tensor_parallel": 8}
    return tuple(
        layer(model, parallel={**eight, "transport": each}, microbatch_size=8) for each in ("fused", "sequential")
    )


def test_fused_kernels_hide_what_blocks_send_and_need_neither_scales_nor_sums() -> None:
    """Each collective as the model of `auto` has it, at the rate of blocks, and a column linear's input is gathered
    again under a GEMM; nothing of a forward's gather is parted, or launched, that a kernel does in its place."""
    pytest.importorskip("triton")
    fused, plain = fused_and_plain(LLAMA)
    assert fused.fuses and not plain.fuses
    for linear in fused.linears[False]:
        sizes, back = (linear.rows, linear.n, linear.k), (linear.rows, linear.k, linear.n)
        ops = (GATHER, SCATTER) if linear.column else (SCATTER, GATHER)
        given = [fused.linear_forward(linear), fused.linear_backward(linear)[0]]
        for op, of_way, found in zip(ops, (sizes, back), given, strict=True):
            with as_if_on(H100) as device:
                alone = fused_times(op, of_way, 8, VALUES, device, MACHINE.of_blocks or MACHINE).device
            gathered = cost.collective_seconds(GATHER, linear.rows, 4096, 4096 + 32, 8, 1, MACHINE)  # again, under it
            again = max(0.0, gathered - found["gemm"]) * (linear.column and op == SCATTER)
            assert found["tp"] == max(0.0, alone - found["gemm"]) + again
        behind = plain.linear_forward(linear), plain.linear_backward(linear)[0]
        assert sum(each["tp"] for each in given) < sum(each["tp"] for each in behind)
    linears, weights = fused.linears[False], sum(linear.weights for linear in fused.linears[False])
    more = [a - b for a, b in zip(launches(linears, 4), launches(linears, 4, True), strict=True)]
    assert more == [SCALES * weights, SCALES * weights + weights - len(linears)]
    for linear in linears:
        own, several = linear.rows / 8, linear.weights - 1
        bytes_of = [quantising_bytes(linear, own, True, 0.0, each) for each in (False, True)]
        parted, added = 2 * NUMBER_BYTES * linear.rows * linear.k, 6 * several * linear.rows * linear.k
        expected = (parted * linear.column, added * linear.column, 0.0)
        assert [a - b for a, b in zip(*bytes_of, strict=True)] == pytest.approx(expected, abs=1.0)


def test_gradients_of_shared_keys_and_values_are_added_up_before_they_are_quantised() -> None:
    """Linears of 4 heads on 8 ranks are as large as of 8, and in 16 bits such gradients are added up once a step."""
    for precision in ("fp8", "16"):
        models = ({**LLAMA, "n_kv_heads": n} for n in (4, 8))
        shared, whole = (layer(each, precision, {"tensor_parallel": 8}, microbatch_size=2).work() for each in models)
        adding = cost.collective_seconds(ALL_REDUCE, 8192, 2 * 4 * 128, 1, 8, 2, MACHINE) * (precision == "fp8")
        assert shared.inputs["tp"] - whole.inputs["tp"] == pytest.approx(adding, rel=1e-9)
        assert shared.forward == whole.forward and shared.weights == whole.weights


def test_gathers_for_experts_hide_under_their_products() -> None:
    """Those of gate and up, and of down's gradient, as the model of `auto` has them; reductions are collectives."""
    pytest.importorskip("triton")
    model = {**LLAMA, "hidden_size": 2048, "head_dim": 128, "n_experts": 128, "experts_per_token": 8,
             "expert_ffn_size": 768}  # fmt: skip
    fused, plain = fused_and_plain(model)
    up, down = fused.linears[True][2:4]
    m, machine = fused.tokens, MACHINE.of_blocks or MACHINE
    for found, behind, n in (
        (fused.linear_forward(up), plain.linear_forward(up), 1536),
        (fused.linear_backward(down)[0], plain.linear_backward(down)[0], 768),
    ):
        grouped = Grouped(8, 16, n)
        with as_if_on(H100) as device:
            parts = grouped_seconds(grouped, m, 2048, 8, 8, VALUES, device, machine)
            alone = fused_times(GATHER, (m, grouped.width(8), 2048), 8, VALUES, device, machine, gemm=parts).device
        assert found["tp"] == max(0.0, alone - found["gemm"]) < behind["tp"]
    assert fused.linear_forward(down)["tp"] == plain.linear_forward(down)["tp"]


def test_rows_leave_for_their_experts_in_blocks_and_come_home_in_16_bits() -> None:
    """Of five exchanges three send rows out, 129 / 256 of the bytes, joined before and parted behind."""
    parallel = {"data_parallel_shard": 4, "zero_stage": 1, "expert_parallel": 4}
    blocks, bits = (layer({**EXPERTS, "seq_length": 4096}, each, parallel, microbatch_size=2) for each in ("fp8", "16"))
    home, out = (blocks.exchanged_bytes(home=each) for each in (True, False))
    assert home == bits.exchanged_bytes() == bits.exchanged_bytes(home=False) and out / home == 129 / 256
    assert blocks.exchanging() == 3 * blocks.exchange(out) + 2 * blocks.exchange(home) < bits.exchanging()
    for each, of_bits in zip(blocks.work(experts=True), bits.work(experts=True), strict=True):
        assert of_bits["ep"] - each["ep"] == pytest.approx(blocks.exchange(home) - blocks.exchange(out)), "one is out"
    grouped, _ = blocks.linears[True][2:4]
    there, own = home / 2 / 256, 2 * 4096
    assert grouped.experts == 1 and grouped.silent
    found = quantising_bytes(grouped, own, True, there)[0]
    assert found == pytest.approx((PASS * own + 2 * NUMBER_BYTES * (own + there)) * 256)


@pytest.mark.parametrize("options, message", [
    (["--preset", "llama3-8b", "--device", "a100-80"], r"FP8 on a GPU of sm_80: .* H100 and B200"),
    (["--preset", "llama3-8b", "--device", "b200"],
     "FP8 on b200: the rate .* only that of H200, H100; give a device's"),
    (["--preset", "llama3-8b", "--device", "cpu"], "FP8 on cpu: the rate of its GEMMs of blocks is not known"),
    (["--preset", "gpt2-1.5b"], "^FP8 with model.hidden_size=1600: .* choose a multiple of 128, or leave FP8 out$"),
    (["--preset", "llama3-70b", "--gpus", "1"], "no layout works on 1 x h100: .* or plan with --precision 16"),
    (["--preset", "gpt2-124m", "--within", "tp=1", "--precision", "fp4"],
     "train.precision='fp4': choose one of 16, fp8"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_one_sentence(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_command(["--precision", "fp8", *options])


def test_a_devices_file_may_have_the_rate_of_blocks(tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "mine.toml"
    text = (load_device.__globals__["DIRECTORY"] / "b200.toml").read_text()
    file.write_text(text.replace("[gpu]", "[gpu]\nfp8_tflops = 2000.0"))
    device = load_device(str(file))
    assert device.machine.fp8_flops == 2000e12 and device.scaled(0.5).machine.fp8_flops == 1000e12
    assert layer(LLAMA, device=device, microbatch_size=2).speed == 2000e12 / device.machine.flops
    file.write_text(text.replace("[gpu]", "[gpu]\nfp8_tflops = 5000.0"))
    with pytest.raises(ValueError, match="fp8_tflops = 5000 is above the 4500 TFLOP/s of a peak that is twice"):
        load_device(str(file))


def test_a_plan_in_fp8_says_what_it_gains_and_skips_layouts_that_cut_blocks(tmp_path: Any, capsys: Any) -> None:
    """A file's precision is planned for, too. Everything that is printed is predicted, and MFU has its denominator."""
    options = ["--preset", "llama2-7b", "--gpus", "4", "--batch", "64", "--within", "pp=1,microbatch=1"]
    plan_command([*options, "--precision", "fp8", "--top", "2"])
    out = capsys.readouterr().out
    assert "predicted, 4 x h100: steps of 64 samples of 4,096 tokens, FP8, FLOP/s x" in out and "MFU of 16 bits" in out
    assert "1  FP8 with model.ffn_hidden_size=11008 / 4 tensor-parallel ranks = 2752: 128 features share a scale" in out
    (line,) = [line for line in out.splitlines() if "in 16 bits this layout takes" in line]
    found = re.search(r"takes ([\d.]+) s for a step: FP8 is ([\d.]+) times as fast", line)
    assert found is not None and "FP8, predicted:" in out and "MFU is of the dense peak of 16 bits, 989" in out
    html, values = tmp_path / "plan.html", tmp_path / "plan.json"
    plan_command([*options, "--precision", "fp8", "--top", "1", "--html", str(html), "--json", str(values)])
    assert "<th>MFU of 16 bits</th>" in html.read_text() and '"mfu_of_flops": 989' in values.read_text()
    capsys.readouterr()
    explained = [*options[:6], "--explain", "tp=2,dp=2,zero=1"]
    plan_command([*explained, "--precision", "fp8"])
    # at 0.79 of 380 GB/s links' FLOP/s; test_break_even_widths has those of an H100 as it is
    said = capsys.readouterr().out
    assert re.search(r"than their gather from \d+ on, and than a reduction in 16 bits from \d+", said)
    plan_command(explained)
    assert "FP8" not in capsys.readouterr().out


def test_a_budget_is_met_in_fp8_on_a_gpu_alone() -> None:
    model = {**NEW, "n_layers": 4}
    found, _ = with_budget(run(model, parallel={"memory_budget": "40GiB"}))
    assert found.parallel.keep
    on_cpu = run(model, parallel={"memory_budget": "40GiB"}, device="cpu")
    with pytest.raises(ValueError, match="train.precision='fp8' has no model of its time on this device"):
        with_budget(dataclasses.replace(on_cpu, train=dataclasses.replace(on_cpu.train, dtype="float32")))
