"""A run whose ZeRO gathers blocks has the losses, gradients and parameters of one that gathers 16 bits, to the bit, and
sends half of the bytes. Wrong gathers do not."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import WorkerPool
from small_runs import build, run_config, take_step
from testing import assert_identical, fails_on_a_rank, on_every_rank
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.utils import prune
from turns import in_turns

from harness.step_counts import DATA, count_step
from tpformer.config import Layout
from tpformer.distributed import build_mesh
from tpformer.kernels.quantize.format import BLOCK, LOWEST
from tpformer.kernels.quantize.reference import dequantize_weight, quantize_weight
from tpformer.layers import ColumnParallelLinear, TensorParallel, init_weights
from tpformer.parallel import apply_zero, block_gather, gathers_of, local_part
from tpformer.parallel.block_gather import BlockGather, SentShard
from tpformer.parallel.zero import parameter_groups
from tpformer.training.checkpoint import Checkpointer

GPT = {"vocab_size": 64, "seq_length": 8, "n_layers": 2, "hidden_size": 256, "n_heads": 2, "ffn_hidden_size": 512}
LLAMA = {
    **GPT, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "head_dim": 128,
    "tie_embeddings": False,
}  # fmt: skip
# half of the keys' and values' rows, and of the MLP's features, are no whole blocks
ODD = {**LLAMA, "n_kv_heads": 1, "ffn_hidden_size": 640, "qkv_bias": True, "qk_norm": True}
EXPERTS = {**LLAMA, "n_experts": 4, "expert_ffn_size": 128, "shared_expert_size": 256, "first_dense_layers": 1}
THREE = {**EXPERTS, "n_experts": 3}  # of which two ranks have two and one
DP2, TP2, EP2 = {"data_parallel_shard": 2}, {"tensor_parallel": 2}, {"expert_parallel": 2}
ZERO3 = {**DP2, "zero_stage": 3}
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ZERO3, ODD, "float64"),
    ({**DP2, "zero_stage": 1}, GPT, "float32"),
]
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ZERO3, GPT, "bfloat16"),
    (ZERO3, THREE, "float64"),
    ({**ZERO3, **TP2}, EXPERTS, "float64"),
    ({**ZERO3, **TP2}, {**LLAMA, "head_dim": 256, "n_kv_heads": 1}, "float32"),  # both ranks compute keys and values
    ({**ZERO3, **TP2, "sequence_parallel": False}, {**LLAMA, "dropout": 0.1}, "float32"),
    ({**ZERO3, **EP2, "data_parallel_shard": 4}, EXPERTS, "float64"),
    ({**DP2, "zero_stage": 2, "recompute": "full"}, LLAMA, "float32"),
    ({**ZERO3, "recompute": "mlp", "data_parallel_replicate": 2}, LLAMA, "float64"),
    ({**ZERO3, "cpu_offload": True}, LLAMA, "float32"),
    ({**ZERO3, "pipeline_parallel": 2, "pipeline_schedule": "1F1B"}, LLAMA, "float64"),
    ({**DP2, "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}, {**LLAMA, "n_layers": 4}, "float64"),
    ({"context_parallel": 2, "zero_stage": 3}, LLAMA, "float64"),
    ({**ZERO3, **TP2}, LLAMA, "bfloat16"),
]
STEPS, MICROBATCHES = 2, 2
SHARDS = [SentShard("norm", (5,), False), SentShard("w", (128, 256), True), SentShard("router", (3, 7), False),
          SentShard("experts", (2, 128, 128), True), SentShard("odd", (64, 256), True)]  # fmt: skip


def config_of(parallel: dict, model: dict, dtype: str, gather: str, precision: str = "fp8") -> Any:
    copies = parallel.get("data_parallel_shard", 1) * parallel.get("data_parallel_replicate", 1)
    microbatches = MICROBATCHES * parallel.get("pipeline_parallel", 1)
    batch = {"global_batch_size": copies * microbatches, "microbatch_size": 1, "dtype": dtype, "precision": precision}
    return run_config({**parallel, "zero_gather": gather}, model, **batch)


def taken(config: Any) -> tuple[list[Tensor], list[str]]:
    """Loss and norms of each step, the validation loss, and this rank's parameters; and what is said of gathers."""
    model, optimizers = build(config)
    batch = config.train.global_batch_size
    rows = torch.randint(64, (STEPS * batch, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(STEPS):
        result = take_step(model, optimizers, rows[step * batch : (step + 1) * batch], step * batch)
        found += [result.loss, result.norm, result.local]
    first, share = model.own_samples(0, batch)
    found.append(model.summed_loss(rows[first : first + share]))
    parameters = [local_part(each).detach().clone() for each in model.parameters()]
    return [*found, *parameters], [line for part in model.parts for line in gathers_of(part)]


def with_gather(config: Any, gather: str) -> Any:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero_gather=gather))


def compared(config: Any) -> list[str]:
    """What is said of gathers in blocks, whose run has the bits of one without."""
    found, words = taken(config)
    whole, said = taken(with_gather(config, "16"))
    assert all(map(torch.equal, found, whole)) and not said
    return words


@pytest.mark.parametrize("parallel, model, dtype", [*CASES, *in_turns(OTHERS)])
def test_numbers_are_those_of_gathers_in_16_bits(ranks: WorkerPool, parallel: dict, model: dict, dtype: str) -> None:
    config = config_of(parallel, model, dtype, "fp8")
    for words in ranks(config.parallel.world_size).run(compared, config):
        assert words and all(line.startswith("ZeRO gathers shards in blocks of e4m3") for line in words)


def sent_bytes(config: Any) -> tuple[int, list[str]]:
    """Of FSDP2's gathers in a step, of all ranks together; and what explain() says of them."""
    model, _ = build(config)
    with count_step(model.mesh) as counts:  # type: ignore[arg-type]
        model.gradients(torch.zeros(MICROBATCHES, 9, dtype=torch.long), first_sample=MICROBATCHES * model.data_rank)
    sent = sum(call.nbytes * n for call, n in counts.items() if (call.of, call.name) == (DATA, "all_gather"))
    lines = model.explain(torch.bfloat16).splitlines()
    return sent, [line for line in lines if line.startswith("ZeRO gathers")]


def test_a_weight_is_sent_in_a_byte_a_number(ranks: WorkerPool) -> None:
    """And a byte for its block, 0.50003 of bfloat16, in both gathers of each microbatch. What else is gathered has as
    many bytes as before, and less than 16 behind it."""
    config = config_of(ZERO3, ODD, "bfloat16", "fp8")
    shards = {"self_attn.q_proj": (128, 256), "self_attn.o_proj": (128, 256), "mlp.down_proj": (128, 640)}
    saved = 2 * sum(map(math.prod, shards.values())) * (2 - (1 + 1 / BLOCK**2))
    gathers = 2 * MICROBATCHES * ODD["n_layers"]
    (before, said), (sent, words) = (ranks(2).run(sent_bytes, with_gather(config, each))[0] for each in ("16", "fp8"))
    assert 0 <= sent - (before - gathers * saved) <= gathers * 2 * 15
    blocks, others = words[0].split("; as they are")
    assert not said and all(f"{name}.weight {rows} x {columns}" in blocks for name, (rows, columns) in shards.items())
    assert (blocks.count(" x "), others.count(" x ")) == (len(shards), 1 + 4) and "mlp.gate_proj.weight 320 x" in others


def one_ranks_exponents(self: BlockGather, received: Any, outputs: Any) -> None:
    """A receiver that takes one rank's exponents for everyone's."""
    matrices = sum(shard.in_blocks for shard in self.shards)
    received = list(received)
    received[-matrices:] = [x[:1].expand_as(x) for x in received[-matrices:]]
    TAKE(self, received, outputs)


def stale(self: BlockGather, output_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """A gather that keeps what it got in the first step."""
    if not hasattr(self, "kept"):
        CALL(self, output_tensor, *args, **kwargs)
        self.kept = output_tensor.clone()  # type: ignore[attr-defined]
    output_tensor.copy_(self.kept)


def another_order(output: Tensor, own: Tensor, group: Any) -> None:
    """A gather whose ranks are in another order."""
    GATHER(output, own, group=group)
    output.copy_(output.view(group.size(), -1).flip(0).flatten())


CALL, TAKE, GATHER = BlockGather.__call__, BlockGather._take, block_gather.all_gather_single
MISTAKES: dict[str, Any] = {
    "one rank's exponents": mock.patch.object(BlockGather, "_take", one_ranks_exponents),
    "stale blocks": mock.patch.object(BlockGather, "__call__", stale),
    "another order": mock.patch.object(block_gather, "all_gather_single", another_order),
}


def differs(config: Any, mistake: str) -> bool:
    with MISTAKES[mistake]:
        return fails_on_a_rank(lambda: compared(config))


@pytest.mark.parametrize("mistake", [*list(MISTAKES)[:1], *in_turns(list(MISTAKES)[1:], first=0)])
def test_a_wrong_gather_is_noticed(ranks: WorkerPool, mistake: str) -> None:
    config = config_of(ZERO3, {**LLAMA, "n_layers": 1}, "float64", "fp8")
    assert all(ranks(2).run(differs, config, mistake))


def test_nothing_else_is_gathered_in_blocks(ranks: WorkerPool) -> None:
    """Units without linears in FP8, and runs that were not asked, keep FSDP2's own gather."""
    for gather, precision, blocks in (("fp8", "fp8", [False, True, True]), ("16", "fp8", 3 * [False])):
        config = config_of(ZERO3, LLAMA, "float32", gather, precision)
        assert ranks(2).run(gathers, config) == [blocks] * 2


def gathers(config: Any) -> list[bool]:
    model, optimizers = build(config)
    batch = config.train.global_batch_size
    take_step(model, optimizers, torch.zeros(batch, 9, dtype=torch.long))
    return [isinstance(group._all_gather_comm, BlockGather) for group in parameter_groups(model.parts[0])]  # type: ignore[arg-type]


class Halved(ColumnParallelLinear):
    """A linear that multiplies another weight than it has."""

    def local_parameters(self) -> Any:
        weight, bias = super().local_parameters()
        return weight - weight.roll(1, 0) / 2, bias  # type: ignore[union-attr]


class Tied(nn.Module):
    """A linear in 16 bits that has another module's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_part(self.weight))


def linear(kind: type[ColumnParallelLinear] = ColumnParallelLinear) -> ColumnParallelLinear:
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=1, data_parallel_shard=2)["tp"], precision="fp8")
    layer = kind(256, 256, False, tp=tp, dtype=torch.float64)
    init_weights(layer, seed=0)
    return layer


def tied() -> nn.Sequential:
    first = linear()
    return nn.Sequential(first, Tied(first.weight))


def pruned() -> nn.Sequential:
    """Without its larger weights, whose magnitudes would be scales."""
    layer = linear()
    prune.custom_from_mask(layer, "weight", (layer.weight.abs() < 0.05).to(layer.weight.dtype))
    return nn.Sequential(layer)


def computed(make: Callable[[], nn.Sequential], gather: str) -> tuple[list[Tensor], list[str]]:
    """A step's result and gradients, of one unit; and what is said of its gathers."""
    part, mesh = make(), build_mesh("cpu", tensor_parallel=1, data_parallel_shard=2)
    apply_zero(part, [], mesh, Layout(data_parallel_shard=2, zero_stage=3, zero_gather=gather), torch.float64)
    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = part(x)
    y.square().sum().backward()
    return [y.detach(), *(local_part(each.grad) for each in part.parameters())], gathers_of(part)


@on_every_rank(2)
def test_what_more_than_a_linear_in_fp8_reads_is_gathered_as_before() -> None:
    for make, in_blocks in ((lambda: nn.Sequential(linear()), 1), (lambda: nn.Sequential(linear(Halved)), 0),
                            (tied, 0), (pruned, 0)):  # fmt: skip
        (found, words), (whole, _) = computed(make, "fp8"), computed(make, "16")
        assert_identical(found, whole)
        assert len(words) == in_blocks, words


def saved(config: Any, directory: Path, after: int, steps: int) -> list[Tensor]:
    """Parameters after these steps; those up to `after` are loaded, and if there are none the others are saved."""
    model, optimizers = build(config)
    batch, checkpointer = config.train.global_batch_size, Checkpointer(directory)
    if after:
        checkpointer.load(checkpointer.newest(), model.parts, optimizers)
    for step in range(after, steps):
        rows = torch.randint(64, (batch, 9), generator=torch.Generator().manual_seed(step))
        take_step(model, optimizers, rows, step * batch)
    if not after:
        checkpointer.save(steps, model.parts, optimizers, {})
        checkpointer.wait()
    return [local_part(each).detach().clone() for each in model.parameters()]


def test_a_run_goes_on_with_the_other_gather(ranks: WorkerPool, tmp_path: Path) -> None:
    """A checkpoint knows nothing of gathers."""
    blocks, whole = (config_of(ZERO3, {**LLAMA, "n_layers": 1}, "bfloat16", gather) for gather in ("fp8", "16"))
    expected = ranks(2).run(saved, blocks, tmp_path / "whole", 0, 3)
    ranks(2).run(saved, blocks, tmp_path / "stopped", 0, 2)
    for config in (blocks, whole):
        assert_identical(ranks(2).run(saved, config, tmp_path / "stopped", 2, 3), expected)


def test_blocks_of_what_blocks_stand_for_stand_for_the_same() -> None:
    """In every dtype, whatever a block's largest magnitude is. Bytes are others only where this was rounded to 224
    scales: then values are twice as large, and the exponent is one less. Doing it again changes nothing."""
    drawn = torch.Generator().manual_seed(0)
    every = 1 + torch.arange(256) / 256  # every mantissa that bfloat16 has, and as many more
    few = every[::16]  # what is left to ask where all that changes is the exponent
    shapes = torch.randn(256, BLOCK, BLOCK, generator=drawn, dtype=torch.float64).clamp_(-1, 1)
    shapes[:, 0, 0] = 1
    for exponent, mantissas, may_halve in (
        (0, every, 1), (-60, few, 1), (-112, few, 1), (-113, few, 0), (-131, few, 0), (100, few, 1)
    ):  # fmt: skip
        largest = mantissas.double() * 2.0**exponent
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            weight = (shapes[: len(largest)] * largest[:, None, None]).to(dtype).flatten(0, 1)
            once = quantize_weight(weight)
            stood_for = dequantize_weight(once, dtype)
            twice = quantize_weight(stood_for)
            assert dequantize_weight(twice, dtype).equal(stood_for)
            magnitudes = once.values.float().abs().unflatten(0, (-1, BLOCK)).amax((1, 2))
            halved = (magnitudes == 224) & (once.exponents[:, 0] > LOWEST)
            assert (once.exponents - twice.exponents)[:, 0].equal(halved.to(torch.int8))
            again = quantize_weight(dequantize_weight(twice, dtype))
            assert again.exponents.equal(twice.exponents)
            assert again.values.view(torch.uint8).equal(twice.values.view(torch.uint8))
            assert halved.any() == may_halve


def gathered(device: str, dtype: torch.dtype) -> None:
    """One gather by itself, of vectors, matrices and experts, whose sizes are no multiples of a word."""
    size, rank = dist.get_world_size(), dist.get_rank()
    places = [math.prod(shard.shape) for shard in SHARDS]
    drawn = [torch.randn(sum(places), generator=torch.Generator().manual_seed(n)) for n in range(size)]
    everyones = torch.stack(drawn).to(device, dtype)
    everyones[0, 5 + 1000] = math.inf  # whose block of the first rank's "w" is NaN for everyone
    output = torch.empty(everyones.numel(), device=device, dtype=dtype)
    own = output.view(size, -1)[rank].copy_(everyones[rank])  # FSDP2's input is a part of its output
    BlockGather(SHARDS)(output, own, dist.group.WORLD)
    parts = (each.view(size, -1).split(places, 1) for each in (output, everyones))
    for shard, found, whole in zip(SHARDS, *parts, strict=True):
        wanted = whole.cpu()
        if shard.in_blocks:
            matrix = wanted.reshape(-1, shard.shape[-1])
            wanted = dequantize_weight(quantize_weight(matrix), dtype).view_as(whole)
        assert found.isnan().cpu().equal(wanted.isnan()) and found.isnan().any() == (shard.name == "w")
        assert found.cpu().nan_to_num().equal(wanted.nan_to_num()), shard.name


@on_every_rank(2, 3)
def test_one_gather() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        gathered("cpu", dtype)


@pytest.mark.gpu
@on_every_rank(2, pool="one_gpu")
def test_one_gather_on_a_gpu() -> None:
    """Kernels quantise and dequantise, also from places that are no multiples of 16 bytes."""
    gathered("cuda:0", torch.bfloat16)
