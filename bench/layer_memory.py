"""One transformer layer's saved activations on one rank: the layers that are counted, their items, what must come out.

Belongs here: building a layer from a GPTConfig, names and sizes of what it keeps, GEMMs and collectives of its forward
and backward. Nothing about tables, files or arguments.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from harness.ranks import Calls, Ranks
from harness.step_counts import Gemms
from tpformer import ops
from tpformer.config import MLP_ACTIVATIONS, check_context_length
from tpformer.distributed import build_mesh, record_collectives
from tpformer.kernels.pack.format import packed_bytes
from tpformer.kernels.route import reference as route
from tpformer.layers import DropoutKey, Positions, TensorParallel, keep
from tpformer.models import GPTConfig
from tpformer.models.blocks import gpt_block
from tpformer.ops import packing
from tpformer.ops.recompute import record_kept
from tpformer.parallel import reduce_partial_gradients
from tpformer.planner.storages import NO_NAMES, OTHER, RESULT, Saved

from .plain import parallelized

DTYPE, ITEM = torch.bfloat16, 2
RESIDUALS = ("residual before attention", "residual before MLP")
STATISTICS, SCORES = "norm mean and rstd", "log-sum-exp"
BEFORE_NORMS = "q and k before their norms"
EXPERTS, SHARED, ROUTING = "gate and up of experts", "gate and up of the shared expert", "routing"
UNPACKED = (STATISTICS, SCORES, ROUTING)
ORDER = (
    *(RESIDUALS[0], "norm output before attention", BEFORE_NORMS, "q", "k", "v", "attention output"),
    *(
        RESIDUALS[1],
        "norm output before MLP",
        "fc1 output",
        "gate pre-activation",
        "up pre-activation",
        "activation output",
    ),
    *(EXPERTS, SHARED, ROUTING),
    *("dropout mask", STATISTICS, SCORES, OTHER),
)
TORCH_NAMES = {
    "input_layernorm": {0: RESIDUALS[0]},
    "post_attention_layernorm": {0: RESIDUALS[1]},
    "self_attn.q_proj": {0: "norm output before attention"},
    "self_attn.o_proj": {0: "attention output"},
    "mlp.fc1": {0: "norm output before MLP", RESULT: "fc1 output"},
    "mlp.fc2": {0: "activation output"},
}


class Layer(NamedTuple):
    """The last layer of a model, which is counted: its architecture, tokens, ranks, whether it is tpformer's or
    torch's, and whether activations are packed. cp: ranks that share each sample's tokens."""

    model: str
    config: GPTConfig
    tp: int
    recompute: str = "none"
    torch: bool = False
    pack: bool = False
    cp: int = 1

    @property
    def seq_length(self) -> int:
        return self.config.seq_length

    @property
    def batch(self) -> int:
        """Samples: as few as ranks can share the tokens of."""
        return self.tp // math.gcd(self.seq_length, self.tp)

    @property
    def tokens(self) -> int:
        """Those of a tensor-parallel group."""
        return self.batch * self.seq_length // self.cp

    @property
    def unit(self) -> float:
        """s * b * h / (t cp)."""
        return self.tokens * self.config.hidden_size / self.tp

    def check(self) -> None:
        """ValueError, with the numbers, for what ranks cannot share evenly, or what this machine cannot hold."""
        config, tp = self.config, self.tp
        config.check_ranks(tp)
        check_context_length(self.seq_length, self.cp)
        width = "ffn_size" if config.n_experts is None else "shared_expert_size"
        for name, size in (("kv_heads", config.kv_heads), (width, getattr(config, width))):
            if size % tp:
                raise ValueError(f"{self.model}: {name}={size} cannot be split evenly over {tp} ranks")
        weights = ITEM * config.layer_parameters(config.n_layers - 1)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if weights > memory:
            raise ValueError(
                f"{self.model}: the ranks' weights are {weights / 2**30:.0f} GiB, more than this machine's "
                f"{memory / 2**30:.0f}: choose a smaller preset"
            )


def expected_items(layer: Layer) -> dict[str, int]:
    """Bytes by name that a rank of tpformer's layer keeps, by DESIGN: with sequence parallelism, all sizes even."""
    items = _plain_items(layer)
    if not layer.pack:
        return items
    # names that stand for one storage each, but for queries and keys before their norms
    return {name: size if name in UNPACKED else packed_bytes(size // ITEM) for name, size in items.items()}


def _plain_items(layer: Layer) -> dict[str, int]:
    config, tokens, t = layer.config, layer.tokens, layer.tp
    rows = tokens // t
    residual, hidden = ITEM * rows * config.hidden_size, ITEM * tokens * config.ffn_size // t
    routing = _routing(layer)
    if layer.recompute == "full":
        return {RESIDUALS[0]: residual} | routing
    q, kv = (ITEM * tokens * size // t for size in (config.query_size, config.kv_size))
    statistics = 4 * rows * (2 if config.norm == "layernorm" else 1)
    items = {
        **{RESIDUALS[0]: residual, RESIDUALS[1]: residual},
        **{"q": q, "k": kv, "v": kv},
        "attention output": q,
        SCORES: 4 * tokens * config.n_heads // t,
        **routing,
    }
    of_heads = 0
    if config.qk_norm:
        items[BEFORE_NORMS], of_heads = q + kv, 4 * tokens * (config.n_heads + config.kv_heads) // t
    if layer.recompute == "mlp":
        return items | {STATISTICS: statistics + of_heads}
    if config.n_experts is not None:
        items[EXPERTS] = ITEM * 2 * tokens * config.experts_per_token * config.expert_size // t
        if config.shared_expert_size:
            items[SHARED] = ITEM * 2 * tokens * config.shared_expert_size // t
    else:
        gated = MLP_ACTIVATIONS[config.activation][1]
        items |= dict.fromkeys(("gate pre-activation", "up pre-activation") if gated else ("fc1 output",), hidden)
    return items | {STATISTICS: 2 * statistics + of_heads}


def _routing(layer: Layer) -> dict[str, int]:
    """8 bytes for each row of this rank's experts, 4 K + 4 E for each of its tokens, and rows of experts by rank."""
    config, t = layer.config, layer.tp
    if config.n_experts is None:
        return {}
    chosen, rows = layer.tokens * config.experts_per_token // t, layer.tokens // t
    return {ROUTING: 8 * chosen + 4 * chosen + 4 * rows * config.n_experts + 4 * config.n_experts}


def forward_flops(config: GPTConfig, tokens: int) -> dict[str, int]:
    """GEMM FLOPs of one layer's forward by linear: what GEMM counts are compared with."""
    h, q, kv = config.hidden_size, config.query_size, config.kv_size
    hidden = config.activated_features(config.n_layers - 1)
    sizes = {"qkv": h * (q + 2 * kv), "o": h * q, "fc1": h * hidden}
    sizes["fc2"] = h * config.ffn_size if config.n_experts is None else h * hidden // 2
    sizes["router"] = h * (config.n_experts or 0)
    return {name: 2 * tokens * size for name, size in sizes.items()}


def leftover(layer: Layer, x: Tensor) -> str:
    """The name of what no module's input or result is, by its size."""
    tokens, config = layer.tokens, layer.config
    if x.dtype == torch.bool:
        return "dropout mask"
    if config.n_experts is not None and (name := _of_experts(layer, x)) is not None:
        return name
    if x.numel() == tokens // layer.tp or x.shape[1:] == (1,):
        return STATISTICS
    if config.qk_norm and x.shape[1:] == (config.head_size,):
        return BEFORE_NORMS
    if x.numel() == tokens * config.n_heads // layer.tp:
        return SCORES
    return OTHER


def _of_experts(layer: Layer, x: Tensor) -> str | None:
    """The name of what a layer of experts keeps beside its input; None for other tensors."""
    config, t = layer.config, layer.tp
    rows = layer.tokens * config.experts_per_token // t
    shared = (layer.tokens, config.shared_expert_size // t)
    names = {(rows, 2 * config.expert_size): EXPERTS, shared: SHARED}
    if x.dtype == torch.int32 or x.shape in ((rows,), (layer.tokens // t, config.n_experts)):
        return ROUTING
    return names.get(tuple(x.shape))


def balanced_route(logits: Tensor, policy: Any, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A stand-in for a router's decision: each expert gets as many tokens as the others."""
    tokens, n_experts = logits.shape
    chosen = torch.arange(tokens * policy.k, dtype=torch.int32).view(tokens, policy.k) % n_experts
    return chosen.sort(1).values, torch.ones(tokens, policy.k, dtype=logits.dtype), logits.softmax(1)


@contextmanager
def named_operations(saved: Saved, layer: Layer) -> Iterator[None]:
    """Names what this library's linears and shared attention are given, and what is packed of it.

    A hook would have their layers called as modules, not fused.
    """
    column_linear, row_linear, experts = ops.column_linear, ops.row_linear, ops.experts
    context_attention = ops.context_attention

    def mixture(x: Tensor, *args: Any, **options: Any) -> Any:
        saved.name(x, RESIDUALS[1])
        return experts(x, *args, **options)

    def column(x: Tensor, weights: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        saved.name(x, RESIDUALS[0] if len(weights) == 3 else RESIDUALS[1])  # queries, keys and values, or the MLP's
        return column_linear(x, weights, *args, **options)

    def row(x: Tensor, *args: Any, activation: str | None, gate: Tensor | None, **options: Any) -> Any:
        if activation is not None:
            saved.name(x, "fc1 output" if gate is None else "up pre-activation")
        if gate is not None:
            saved.name(gate, "gate pre-activation")
        return row_linear(x, *args, activation=activation, gate=gate, **options)

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        y = context_attention(q, k, v, *args, **options)
        for x, name in zip((q, k, v, y), ("q", "k", "v", "attention output"), strict=True):
            saved.name(x, name)
        return y

    pack_storage, buffers = packing.pack_storage, list[tuple[Tensor, Tensor]]()

    def pack(x: Tensor) -> Tensor | None:
        if (buffer := pack_storage(x)) is not None:
            buffers.append((buffer, x.detach()))
        return buffer

    patched = {"column_linear": column, "row_linear": row, "experts": mixture, "context_attention": attention}
    named = mock.patch.object(packing, "pack_storage", pack)
    with mock.patch.multiple(ops, **patched), named, record_kept() as decisions:
        yield
    for buffer, x in buffers:  # now x has its name
        saved.name(buffer, saved.names.get(x.untyped_storage()) or leftover(layer, x))
    for x in tree_leaves(decisions):  # what a recomputed region keeps beside its input
        if isinstance(x, Tensor):
            saved.pack(x)


class Step:
    """Forward and backward of a layer on this rank, of a mesh with the axes cp and tp. Its parameters have no values:
    counts do not depend on them."""

    def __init__(self, layer: Layer, mesh: DeviceMesh | None) -> None:
        config = layer.config
        self.layer = layer
        if layer.torch:
            self.block = parallelized(config, None if mesh is None else mesh["tp"], DTYPE)
            shape: tuple = (layer.batch, layer.seq_length // layer.tp, config.hidden_size)
        else:
            axes = (None, None) if mesh is None else (mesh["tp"], mesh["cp"])
            tp = TensorParallel(axes[0], sequence_parallel=True, context=axes[1])
            # values matter to packing alone, and take long to make
            device = "cpu" if layer.pack else "meta"
            block = gpt_block(config, config.n_layers - 1, device=device, tp=tp, dtype=DTYPE)
            self.block = keep(block, recompute=layer.recompute, pack_activations=layer.pack)
            if not layer.pack:
                self.block.to_empty(device="cpu")
            shape = (layer.tokens // layer.tp, config.hidden_size)
        self.x = torch.randn(shape).to(DTYPE).requires_grad_()

    def forward(self) -> Tensor:
        if self.layer.torch:
            return self.block(self.x)
        self.positions = Positions(self.layer.batch, self.layer.seq_length)
        key = DropoutKey(seed=0, step=1, sample_index=torch.arange(self.layer.batch), model=self.block)
        x = self.x.clone() if self.layer.pack else self.x  # a leaf would be held by others, and is not packed
        with mock.patch.object(route, "route_forward", balanced_route):
            return self.block(x, positions=self.positions, dropout_key=key)

    def saved_items(self) -> dict[str, int]:
        """Bytes by name that a forward keeps, parameters left out. What all layers share (RoPE's table, the starts of
        dropout's rows) no layer saves."""
        saved, names = Saved(), TORCH_NAMES if self.layer.torch else NO_NAMES
        with saved.recording(self.block, names), named_operations(saved, self.layer):
            y = self.forward()
        assert y.requires_grad
        items = saved.items(lambda x: leftover(self.layer, x))
        return dict(sorted(items.items(), key=lambda item: ORDER.index(item[0])))

    def gemms(self) -> tuple[int, int]:
        """GEMM FLOPs of (forward, backward) on this rank."""
        with Gemms() as forward:
            y = self.forward()
        with Gemms() as backward:
            y.backward(torch.ones_like(y))
        return forward.flops, backward.flops

    def collectives(self) -> dict[str, list[tuple[str, int]]]:
        """(name, bytes of the full tensor) of every collective of a forward, a backward and the optimizer's step."""
        with record_collectives() as forward:
            y = self.forward()
        with record_collectives() as backward:
            y.backward(torch.ones_like(y))
        with record_collectives() as step:
            reduce_partial_gradients(self.block)
        return {"forward": forward, "backward": backward, "optimizer step": step}


class Counted(NamedTuple):
    """What each rank counted: bytes by name, and collectives where they were asked for."""

    layer: Layer
    items: dict[str, int]
    collectives: dict[str, list[tuple[str, int]]]


def rank_calls(layers: Sequence[Layer]) -> Calls:
    """A rank's counts of the layer of that index."""
    mesh = build_mesh("cpu", tensor_parallel=layers[0].tp, context_parallel=layers[0].cp)

    def step(layer: Layer) -> Step:
        return Step(layer, None if layer.torch and layer.tp == 1 else mesh)

    calls: dict = {}
    for index, layer in enumerate(layers):
        calls[f"items {index}"] = lambda layer=layer: step(layer).saved_items()
        calls[f"collectives {index}"] = lambda layer=layer: step(layer).collectives()
    return calls


def count(layers: Sequence[Layer], *, collectives: bool = False) -> list[Counted]:
    """Count each layer on as many processes as it has ranks; ranks of a layer keep equally many bytes.

    collectives: also run each tpformer layer's backward, and count them. Raises ValueError for a layer that cannot be
    shared evenly, RuntimeError for ranks that keep different bytes.
    """
    for layer in layers:
        layer.check()
    counted: dict[Layer, Counted] = {}
    for tp, cp in sorted({(layer.tp, layer.cp) for layer in layers}):
        chosen, n = [layer for layer in layers if (layer.tp, layer.cp) == (tp, cp)], tp * cp
        with Ranks(n, max(1, torch.get_num_threads() // n), rank_calls, chosen) as ranks:
            for index, layer in enumerate(chosen):
                items, *others = ranks.call(f"items {index}")
                if any(other != items for other in others):
                    raise RuntimeError(f"{layer.model}: the ranks keep different bytes: {[items, *others]}")
                moved = collectives and not layer.torch
                calls = ranks.call(f"collectives {index}")[0] if moved else {}
                counted[layer] = Counted(layer, items, calls)
    return [counted[layer] for layer in layers]
