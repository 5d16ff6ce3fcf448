"""How fast are forward and backward of one transformer block on one GPU, beside the same block in plain PyTorch?

Belongs here: which blocks, what is timed beside what, what must agree, the required ratio, the model of the time.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness.accuracy import require_accurate
from harness.ratios import Row, compared, ratio_bench
from harness.timing import FULL, QUICK, Call, measure
from tpformer.config import MLP_ACTIVATIONS, preset_config
from tpformer.kernels.activation.reference import activation_cost
from tpformer.kernels.cost import Machine, gemm_seconds
from tpformer.kernels.dropout.reference import dropout_apply, finish_cost
from tpformer.kernels.norm.reference import norm_cost
from tpformer.kernels.rope.reference import rope_cost
from tpformer.layers import DropoutKey, Positions, TransformerBlock, keep
from tpformer.models import GPTConfig
from tpformer.models.blocks import gpt_block

from .plain import Drop, plain_block
from .predict import ITEMSIZE, PEAK, present_machine, share_row

DEVICE, DTYPE = "cuda", torch.bfloat16
OURS, EAGER, COMPILED, COMPILED_FUSED = "tpformer", "PyTorch", "torch.compile", "torch.compile, fused qkv"
PACKED = f"{OURS}, packed"
RECOMPUTED = ("mlp", "full")
SLOWER = 1.04  # what packed activations may cost at most
REQUIRED = 1.1  # of torch.compile, on the GPT block
CHECKED_TOKENS = 256  # of the gate, which has float64 to pay


class Layer(NamedTuple):
    """config: of a model with this one layer. batch: samples of config.seq_length tokens."""

    name: str
    config: GPTConfig
    batch: int = 4

    def __str__(self) -> str:
        dropout = f", dropout {self.config.dropout:g}" if self.config.dropout else ""
        return f"{self.name}{dropout}, {self.batch} x {self.config.seq_length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.config.seq_length

    @property
    def flops(self) -> int:
        """FLOPs of the model, forward and backward: nothing that is computed twice counts twice."""
        return self.tokens * self.config.flops_per_token


def layers(quick: bool) -> list[Layer]:
    one: dict = {"n_layers": 1, "seq_length": 2048, "vocab_size": None}
    listed = [
        *(Layer("GPT-7B", preset_config("megatron-7.5b", dropout=p, **one)) for p in (0.0, 0.1)),
        Layer("Llama-8B", preset_config("llama3-8b", **one)),
    ]
    return [listed[0]._replace(batch=1)] if quick else listed


def our_block(config: GPTConfig, recompute: str = "none", packs: bool = False) -> TransformerBlock:
    return keep(gpt_block(config, device=DEVICE, dtype=DTYPE), recompute=recompute, pack_activations=packs)


def inputs_of(model: nn.Module, config: GPTConfig, batch: int, length: int) -> tuple[Tensor, Tensor, dict]:
    """x and the output's gradient (batch, seq, hidden); what our block is told besides, shared by all layers."""
    x, dy = torch.randn(2, batch, length, config.hidden_size, device=DEVICE, dtype=DTYPE)
    key = DropoutKey(seed=1, step=1, sample_index=torch.arange(batch, device=DEVICE), model=model)
    return x, dy, {"positions": Positions(batch, length), "dropout_key": key}


def compiled(block: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(block, dynamic=False)


def step(block: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Forward and backward: the output, and the gradients of the input and of every parameter, by name."""
    x = x.detach().requires_grad_()
    names, parameters = zip(*block.named_parameters(), strict=True)
    y = function(x)
    gradients = torch.autograd.grad(y, [x, *parameters], dy)
    return dict(zip(("output", "input", *names), (y.detach(), *gradients), strict=True))


def check(quick: bool) -> None:
    for layer in layers(quick):
        check_layer(layer.config, compiles=not quick)


def check_layer(config: GPTConfig, tokens: int = CHECKED_TOKENS, compiles: bool = True) -> None:
    """Ours in every recompute mode, and what torch.compile makes of the plain block if it is timed, against float64.

    With dropout the plain blocks have our mask, and torch.compile, which is timed with torch's own, is left out.
    """
    block = our_block(config)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim == 1:  # neither zeros nor ones
                parameter.add_(0.1 * torch.randn_like(parameter))
    x, dy, options = inputs_of(block, config, 1, tokens)
    drop = our_dropout(config, options) if config.dropout else lambda x, branch: x
    exact, plain = (plain_block(block, config, dtype, drop=drop) for dtype in (torch.float64, DTYPE))
    oracle, baseline = step(exact, exact, x.double(), dy.double()), step(plain, plain, x, dy)

    def require(name: str, results: dict[str, Tensor]) -> None:
        for result, actual in results.items():
            # without positions to tell keys apart, softmax does not see a key's bias: its gradient is rounding only
            if result != "self_attn.k_proj.bias" or config.position == "rope":
                require_accurate(f"{config.norm} layer, {name}: {result}", actual, oracle[result], baseline[result])

    for recompute in ("none", *RECOMPUTED):
        keep(block, recompute=recompute)
        require(f"{OURS}, {recompute}", step(block, partial(block, **options), x, dy))
    keep(block, pack_activations=True)
    require(PACKED, step(block, partial(block, **options), x, dy))
    if compiles and not config.dropout:
        require(COMPILED, step(plain, compiled(plain), x, dy))


def our_dropout(config: GPTConfig, options: dict) -> Drop:
    """Dropout of the plain block with the bits that ours has."""
    key = options["dropout_key"]

    def drop(x: Tensor, branch: str) -> Tensor:
        rows = x.flatten(0, 1)
        site = key.site(config.dropout, key.model, branch, rows, options["positions"], 0)
        return dropout_apply(rows, site.start, site.key, site.p).view(x.shape)

    return drop


def calls_of(layer: Layer, quick: bool) -> dict[str, Call]:
    """The calls to time. quick: without torch.compile, which compiles for long."""
    config = layer.config
    blocks = {recompute: our_block(config, recompute) for recompute in ("none", *RECOMPUTED)}
    blocks["packed"] = our_block(config, packs=True)
    x, dy, options = inputs_of(nn.ModuleDict(blocks), config, layer.batch, config.seq_length)
    functions = {
        {"none": OURS, "packed": PACKED}.get(way) or recomputing(way): (block, partial(block, **options))
        for way, block in blocks.items()
    }
    eager, same = (plain_block(blocks["none"], config, DTYPE) for _ in range(2))
    functions[EAGER] = eager, eager
    if not quick:
        functions[COMPILED] = same, compiled(same)
    if not quick and config.position != "rope":
        fused = plain_block(blocks["none"], config, DTYPE, fused_qkv=True)
        functions[COMPILED_FUSED] = fused, compiled(fused)
    return {name: Call(partial(step, block, function, x, dy)) for name, (block, function) in functions.items()}


def recomputing(recompute: str) -> str:
    return f"{OURS}, recompute {recompute}"


def layer_rows(layer: Layer, quick: bool) -> list[Row]:
    effort = QUICK if quick else FULL
    seconds = measure(calls_of(layer, quick), effort) | {
        PEAK: [layer.flops / present_machine().peak_flops] * effort.rounds
    }
    required = REQUIRED if layer.config.position != "rope" else None
    pairs = [
        *((OURS, COMPILED, required), (OURS, COMPILED_FUSED, required), (OURS, EAGER), (COMPILED, EAGER)),
        *((recomputing(recompute), OURS) for recompute in RECOMPUTED),
        (PACKED, OURS, 1 / SLOWER),
        *((OURS, PEAK), (COMPILED, PEAK)),
    ]
    return compared("forward, backward", layer, seconds, pairs, unit="TFLOP/s", amount=layer.flops / 1e12)


def rows(quick: bool) -> list[Row]:
    found: list[Row] = []
    for layer in layers(quick):
        torch.compiler.reset()
        found += layer_rows(layer, quick)
        torch.cuda.empty_cache()
    return found


def predicted_seconds(layer: Layer, machine: Machine, recompute: str = "none") -> float:
    """GEMMs and the causal half of attention at the machine's FLOP/s, and every memory-bound pass at its bandwidth."""
    config, m = layer.config, layer.tokens
    h, f, first = config.hidden_size, config.ffn_size, config.hidden_features
    q, kv = config.query_size, config.kv_size
    others = [(q, h), (kv, h), (kv, h), (h, q), (h, f)]  # (N, K) of each GEMM, fc1's apart
    column = gemm_seconds(m, first, h, ITEMSIZE, machine)
    gemms = column + sum(gemm_seconds(m, n, k, ITEMSIZE, machine) for n, k in others)
    attention = 2 * m * q * layer.config.seq_length / machine.flops  # forward; twice that backward
    again = {"none": 0.0, "mlp": column, "full": gemms - gemm_seconds(m, h, f, ITEMSIZE, machine) + attention}
    return 3 * (gemms + attention) + again[recompute] + passes_bytes(layer) / machine.memory


def passes_bytes(layer: Layer) -> int:
    """Norms, activation, what follows a reduction, and RoPE, forward and backward, with the norms rebuilt once."""
    config, m = layer.config, layer.tokens
    h, f, gated = config.hidden_size, config.ffn_size, MLP_ACTIVATIONS[config.activation][1]
    after: dict = {"bias": config.bias, "dropout": config.dropout > 0}
    branches = [
        *2 * [norm_cost(m, h, ITEMSIZE, config.norm)],
        norm_cost(m, h, ITEMSIZE, config.norm, backward=True, residual=True),
        finish_cost(m, h, ITEMSIZE, residual=True, **after),
        finish_cost(m, h, ITEMSIZE, backward=True, **after),
    ]
    costs = [activation_cost(m, f, ITEMSIZE, gated), activation_cost(m, f, ITEMSIZE, gated, backward=True)]
    if config.position == "rope":
        costs += 2 * [rope_cost(m, config.n_heads, config.kv_heads, config.head_size, ITEMSIZE)]
    return sum(cost.bytes for cost in (*branches, *branches, *costs))


def predictions() -> list[Row]:
    machine = present_machine()
    return [
        share_row("forward, backward", layer, predicted_seconds(layer, machine, recompute), layer.flops, provider)
        for layer in layers(quick=False)
        for recompute, provider in {"none": "predicted", **{r: f"predicted, recompute {r}" for r in RECOMPUTED}}.items()
    ]


BENCH = ratio_bench(
    rows,
    predictions,
    name="layer",
    description="forward and backward of a GPT-7B- and a Llama-8B-shaped block against plain PyTorch, compiled (1 GPU)",
    device="cuda",
    check=check,
    note="TFLOP/s: the model's FLOPs (6 per weight and token, attention over seq x seq; nothing recomputed counts) "
    "over the time of forward and backward, gradients of input and parameters included. Plain blocks use torch's SDPA "
    "and its random numbers for dropout; torch.compile in its default mode; fused qkv: one projection for q, k and v. "
    "Ratio to the data-sheet peak: the share of it. Prediction: GEMMs and half of the attention at F, "
    "every memory-bound pass once at the memory bandwidth (kernels/cost.py).",
)
