"""`python -m bench memory`: bytes of saved activations per layer, by name, beside torch's own and published formulas.

Belongs here: which layers, what must hold, the tables, the result file. The counting is in layer_memory.py.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.bars import Bar, write_bars
from harness.runner import Bench, Report, WrongCall, columns
from tpformer.config import RECOMPUTE
from tpformer.kernels.pack.format import BASES, ESCAPES, RECORD
from tpformer.models import GPTConfig, preset_config

from . import plain
from .layer_memory import (
    DTYPE,
    ORDER,
    SCORES,
    STATISTICS,
    UNPACKED,
    Counted,
    Layer,
    Step,
    count,
    expected_items,
    forward_flops,
)

DROPOUT = 0.1  # on the residual branches of layers with LayerNorm; Llama has none
GPT = GPTConfig(n_layers=1, hidden_size=512, n_heads=8, seq_length=256, dropout=DROPOUT)
LLAMA = GPTConfig(
    n_layers=1,
    hidden_size=512,
    n_heads=8,
    n_kv_heads=4,
    seq_length=256,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    bias=False,
)
MOE = replace(LLAMA, n_experts=8, experts_per_token=2, expert_ffn_size=512, shared_expert_size=256)
MODELS = {"GPT layer": GPT, "Llama layer": LLAMA, "MoE layer": MOE}
RANKS = (1, 2, 4)
SHARED = ((1, 2), (2, 2))  # tensor-parallel ranks and ranks that share each sample's tokens, of some rows more
LONGEST = 512  # tokens of a preset's sample: bytes per s b h / t do not depend on it
DURING = ("forward", "backward", "optimizer step")
GEMMS = ("forward", "backward", "recomputed")
OUTCOME = "every size and count is as it should be"
PROMISED = {"none": 20, "mlp": 12, "full": 2}  # sbh/t without statistics, of a GPT layer with d_ff = 4h
PACKED = {"none": 15.3, "mlp": 9.3, "full": 1.6}  # of it, at most, with packed activations
TOTAL = "total"  # of all items
TORCH, MEGATRON = "PyTorch TP+SP", "Megatron (formula)"
SOURCES = (
    "Counted with saved_tensors_hooks over unique storages of their whole size. Left out: parameters, and what all "
    "layers share (RoPE's table, the dropout's element indices). PyTorch TP+SP: nn modules under parallelize_module, "
    "dropout by torch.native_dropout (plain F.dropout on a CPU keeps a mask of 2 bytes an element, not 1; its "
    "norms' statistics are bfloat16 there). Formula: Korthikanti et al. (arXiv:2205.05198), tensor and sequence "
    "parallel, statistics not counted."
)


Row = dict[str, Any]


def memory_row(layer: Layer, items: dict[str, int]) -> Row:
    """What a rank keeps of one layer. items: bytes by name, of a formula TOTAL alone; unit: bytes of s b h / (t cp)."""
    model = f"{layer.model}, {TORCH}" if layer.torch else layer.model
    return {"model": model, **ranks_of(layer), "recompute": layer.recompute, "unit": layer.unit, "items": items}


def ranks_of(layer: Layer) -> Row:
    return {"tp": layer.tp} | ({"cp": layer.cp} if layer.cp > 1 else {})


def ranks_text(row: Row, equals: str) -> str:
    """The ranks of a row: t and, if several share each sample's tokens, cp."""
    return ", ".join(f"{name}{equals}{row[key]}" for name, key in (("t", "tp"), ("cp", "cp")) if key in row)


def formula_rows(layer: Layer) -> list[Row]:
    """What Megatron's sequence parallelism keeps by the paper's table 2, for layers it speaks of; its masks included.

    34 s b h / t with core attention recomputed and d_ff = 4h, in general 18 + 4 d_ff / h; 4 less when the two norms'
    outputs are recomputed as well.
    """
    config = layer.config
    if not plain.fits(config) or config.kv_heads != config.n_heads:
        return []
    size = 18 + 4 * config.ffn_size / config.hidden_size
    return [
        memory_row(
            layer._replace(model=f"{layer.model}, {MEGATRON}", recompute=recompute), {TOTAL: round(units * layer.unit)}
        )
        for recompute, units in (("attention", size), ("attention +norms", size - 4))
    ]


def collective_row(counted: Counted) -> Row:
    """What a layer communicates: for each of DURING [name, how often, bytes of the largest full tensor]."""
    layer, during = counted.layer, {}
    for phase, calls in counted.collectives.items():
        sizes = {name: [size for other, size in calls if other == name] for name, _ in calls}
        during[phase] = [(name, len(of_name), max(of_name)) for name, of_name in sizes.items()]
    return {"model": layer.model, **ranks_of(layer), "recompute": layer.recompute, **during}


def gemm_row(layer: Layer) -> Row:
    """GEMM FLOPs of a layer's forward and backward at t = 1, attention's own products left out."""
    forward, backward = Step(layer, None).gemms()
    flops = {"forward": forward, "backward": backward, "recomputed": backward - 2 * forward}
    return {"model": layer.model, "recompute": layer.recompute, **flops}


def item_problems(layer: Layer, items: Mapping[str, int]) -> list[str]:
    """A sentence for each item of a tpformer layer that has other bytes than expected_items."""
    where = f"{layer.model}, {ranks_text(ranks_of(layer), ' = ')}, recompute {layer.recompute}"
    expected = expected_items(layer)
    found = [
        f"{where}: {name} takes {items.get(name, 0)} bytes, not {expected.get(name, 0)}"
        for name in dict.fromkeys([*items, *expected])
        if items.get(name, 0) != expected.get(name, 0)
    ]
    activations = sum(size for name, size in items.items() if name not in (STATISTICS, SCORES)) / layer.unit
    if formula_rows(layer) and layer.config.ffn_size == 4 * layer.config.hidden_size:
        if layer.pack and activations > PACKED[layer.recompute]:
            found.append(f"{where}: {activations:g} sbh/t without statistics, above {PACKED[layer.recompute]}")
        if not layer.pack and activations != PROMISED[layer.recompute]:
            found.append(f"{where}: {activations:g} sbh/t without statistics, not {PROMISED[layer.recompute]}")
    return found


def gemm_problems(layer: Layer, row: Row) -> list[str]:
    """A sentence if the forward, or what the recompute mode repeats, has other GEMM FLOPs than the formula."""
    flops = forward_flops(layer.config, layer.tokens)
    repeated = {"none": (), "mlp": ("fc1",), "full": ("qkv", "o", "fc1")}[layer.recompute]
    expected = sum(flops[name] for name in repeated)
    found = []
    if row["forward"] != sum(flops.values()):
        found.append(f"forward of {row['forward']} GEMM FLOPs, not {sum(flops.values())}")
    if row["recomputed"] != expected:
        found.append(f"{row['recomputed']} GEMM FLOPs repeated, not {expected} ({' + '.join(repeated) or 'none'})")
    return [f"{layer.model}, recompute {layer.recompute}: {problem}" for problem in found]


def collective_problems(counted: Counted) -> list[str]:
    """A sentence for each number of calls, and for each message above tokens * h, that sequence parallelism does not
    need."""
    layer, found = counted.layer, []
    routes = int(layer.config.n_experts is not None)  # gathers and scatters of the routing
    # what the recomputed forward gathers and scatters again
    gathers, scatters = {"none": (0, 0), "mlp": (1, 0), "full": (2, 1)}[layer.recompute]
    expected = {
        "forward": Counter(all_gather=2 + routes, reduce_scatter=2),
        "backward": Counter(all_gather=4 + gathers, reduce_scatter=2 + routes + scatters),
        "optimizer step": Counter(all_reduce=1),
    }
    if layer.tp == 1:
        expected = {during: Counter() for during in expected}
    limit = layer.tokens * layer.config.hidden_size * DTYPE.itemsize
    if layer.cp > 1:  # keys and values, which "full" gathers once more
        expected["forward"] += Counter(all_gather=1)
        expected["backward"] += Counter(all_gather=1 + (layer.recompute == "full"), all_to_all=1)
        keys = 2 * layer.tokens * layer.cp * layer.config.kv_size // layer.tp * DTYPE.itemsize
        limit = max(limit, keys)
    for during, calls in counted.collectives.items():
        where = f"{layer.model}, {ranks_text(ranks_of(layer), ' = ')}, recompute {layer.recompute}, {during}"
        counts = Counter(name for name, _ in calls)
        if counts != expected[during]:
            found.append(f"{where}: {dict(counts)}, not {dict(expected[during])}")
        found += [f"{where}: {name} of {size} bytes, above {limit}" for name, size in calls if size > limit]
    return found


def item_table(rows: Sequence[Row], *, sizes: bool) -> Table:
    """Items down; recompute mode and ranks across, in s b h / t; sizes: and in MiB. A formula holds for any t."""
    heads: dict[str, Row] = {}
    for row in rows:
        _, _, whose = row["model"].partition(", ")
        t = "any t" if whose == MEGATRON else ranks_text(row, "=")
        lines = [*whose.split(" ", 1), *row["recompute"].split(" "), t]
        heads["\n".join(line for line in lines if line)] = row
    table = columns(["saved for the backward"], heads)
    for item in (*sorted({name for row in rows for name in row["items"]} - {TOTAL}, key=ORDER.index), TOTAL):
        cells = []
        for row in heads.values():
            found = sum(row["items"].values()) if item == TOTAL else row["items"].get(item)
            size = f" ({found / 2**20:.2f})" if sizes and found is not None else ""
            cells.append("" if found is None else f"{found / row['unit']:.8g}{size}")
        table.add_row(item, *cells)
    return table


def gemm_table(rows: Sequence[Row]) -> Table:
    """A line for each layer and recompute mode, in GFLOPs."""
    table = columns(("model", "recompute"), GEMMS)
    for row in rows:
        table.add_row(row["model"], row["recompute"], *(f"{row[name] / 1e9:.3f}" for name in GEMMS))
    return table


def collective_table(rows: Sequence[Row]) -> Table:
    """One line for each layout: what its forward, its backward and, once for all, an optimizer step communicate."""
    table = Table("model", "recompute", "ranks", *DURING, box=None, pad_edge=False)
    for row in rows:
        cells = (", ".join(f"{n} {name} of {size:,}" for name, n, size in row[phase]) for phase in DURING)
        table.add_row(row["model"], row["recompute"], ranks_text(row, " = "), *cells)
    return table


def draw(path: Path) -> Path:
    """A bar of items for each row of the result file, in s b h / t."""
    bars = []
    for row in json.loads(path.read_text())["rows"]:
        sizes = {name: size / row["unit"] for name, size in row["items"].items()}
        t = "any t" if MEGATRON in row["model"] else ranks_text(row, " = ")
        bars.append(Bar(row["model"], f"{t}, recompute {row['recompute']}", sizes, f"{sum(sizes.values()):.2f}"))
    note = (
        "Bytes of activations that one rank keeps of one layer for the backward, as multiples of s b h / t: sequence "
        "length, batch, hidden size, and t tensor-parallel ranks, or of s b h / (t cp) where cp ranks share each "
        "sample's tokens. recompute: what the backward computes again. Grey: a published formula, not measured."
    )
    return write_bars(path, note, "bytes / (s b h / t)", bars, alone=[TOTAL])


def layers_of(model: str, config: GPTConfig, ranks: Sequence[int]) -> list[Layer]:
    """The layer in every recompute mode at each number of ranks, and torch's block where it has that architecture."""
    layers = [Layer(model, config, tp, recompute) for recompute in RECOMPUTE for tp in ranks]
    if plain.fits(config):
        layers += [Layer(model, config, tp, torch=True) for tp in ranks if config.seq_length % tp == 0]
    return layers


def rows_and_problems(counted: Sequence[Counted]) -> tuple[list[Row], list[str]]:
    """All rows of one model, the formulas' last, and what is not as it should be."""
    rows = [memory_row(layer, items) for layer, items, _ in counted] + formula_rows(counted[0].layer)
    found = [problem for layer, items, _ in counted if not layer.torch for problem in item_problems(layer, items)]
    return rows, found + [problem for each in counted for problem in collective_problems(each)]


def measure_models(layers: Sequence[Layer]) -> Report:
    """Measure both models' layers at every number of ranks, and count what one step of them does."""
    tables: list[Table | str] = []
    rows: list[Row] = []
    gemms: list[Row] = []
    problems: list[str] = []
    everything = count(layers, collectives=True)
    for model, config in MODELS.items():
        of_model, found = rows_and_problems([each for each in everything if each.layer.model == model])
        shape = f"hidden {config.hidden_size}, {config.seq_length} tokens, bfloat16"
        tables += [f"\n{model}: {shape}. By recompute and t: s b h / t", item_table(of_model, sizes=False)]
        rows, problems = rows + of_model, problems + found
        for layer in (Layer(model, config, 1, recompute) for recompute in RECOMPUTE):
            gemms.append(gemm_row(layer))
            problems += gemm_problems(layer, gemms[-1])
    moved = [collective_row(each) for each in everything if any(each.collectives.values())]
    tables += ["\nGEMMs of one layer at t = 1, in GFLOPs (2 M N K)", gemm_table(gemms)]
    if moved:
        tables += ["\nCollectives of one layer, in bytes of the full tensor", collective_table(moved)]
    models = {model: asdict(config) for model, config in MODELS.items()}
    content = {"models": models, "rows": rows, "gemms": gemms, "collectives": moved}
    return Report(tables, content, problems, OUTCOME)


def measure_preset(layers: Sequence[Layer]) -> Report:
    """One layer of a named architecture, forward only."""
    start = time.perf_counter()
    rows, problems = rows_and_problems(count(layers))
    seconds, layer = time.perf_counter() - start, layers[0]
    shape = f"hidden {layer.config.hidden_size}, {layer.batch} x {layer.config.seq_length} tokens, bfloat16"
    title = f"\n{layer.model}: {shape}. By recompute and t: s b h / t (MiB). Counted in {seconds:.0f} s"
    return Report([title, item_table(rows, sizes=True)], {}, problems, OUTCOME)


def packed_parts(layer: Layer, items: Mapping[str, int]) -> dict[str, float]:
    """What the packed bytes of a layer are, in s b h / t."""
    packed = sum(size for name, size in items.items() if name not in UNPACKED)
    sizes = {"signs, mantissas, codes": BASES, "bases": ESCAPES - BASES, "slots of escapes": RECORD - ESCAPES}
    return {name: packed * size / RECORD / layer.unit for name, size in sizes.items()}


def measure_packed(ranks: Sequence[int]) -> Report:
    """Every model's layer with packed activations beside the same as it is, and what the packed bytes are."""
    layers = [
        Layer(model, config, tp, recompute, pack=True)
        for model, config in MODELS.items()
        for recompute in RECOMPUTE
        for tp in ranks
    ]
    counted = count(layers)
    tables: list[Table | str] = []
    for model in MODELS:
        rows = [memory_row(layer, items) for layer, items, _ in counted if layer.model == model]
        tables += [f"\n{model}, packed. By recompute and t: s b h / t", item_table(rows, sizes=False)]
    parts = columns(("model", "recompute", "t"), (*packed_parts(*counted[0][:2]), "all", "as it is", "share"))
    for layer, items, _ in counted:
        total, plain = (sum(each.values()) / layer.unit for each in (items, expected_items(layer._replace(pack=False))))
        found = [f"{size:.4g}" for size in packed_parts(layer, items).values()]
        whole = f"{total:.2f}", f"{plain:.2f}", f"{total / plain:.4f}"
        parts.add_row(layer.model, layer.recompute, str(layer.tp), *found, *whole)
    tables += ["\nWhat the packed bytes are, in s b h / t. All: with statistics", parts]
    problems = [problem for layer, items, _ in counted for problem in item_problems(layer, items)]
    return Report(tables, {}, problems, OUTCOME)


def chosen_layers(preset: str | None, tp: int | None) -> list[Layer]:
    """The layers that a call asks for; ValueError for a preset or a layout that does not exist."""
    if tp is not None and tp < 1:
        raise ValueError(f"--tp {tp} must be at least 1")
    if preset is None:
        ranks = RANKS if tp is None else [tp]
        layers = [layer for model, config in MODELS.items() for layer in layers_of(model, config, ranks)]
        if tp is None:
            layers += [Layer(model, config, t, cp=cp) for model, config in MODELS.items() for t, cp in SHARED]
    else:
        config = preset_config(preset, n_layers=1, seq_length=min(preset_config(preset).seq_length, LONGEST))
        config = replace(config, dropout=DROPOUT if config.norm == "layernorm" else 0.0)
        layers = layers_of(f"{preset} layer", config, [tp or 1])
    for layer in layers:
        layer.check()
    return layers


def run(options: argparse.Namespace) -> Report:
    """Count the layers that the options name."""
    if options.pack:
        return measure_packed(RANKS if options.tp is None else [options.tp])
    try:
        layers = chosen_layers(options.preset, options.tp)
    except ValueError as error:
        raise WrongCall(str(error)) from None
    return measure_models(layers) if options.preset is None else measure_preset(layers)


BENCH = Bench(
    name="memory",
    description="bytes of saved activations per layer by name, at 1, 2 and 4 ranks, beside torch's TP+SP; on a CPU",
    options={
        "--preset": {"help": "a layer of this named architecture; printed, nothing written"},
        "--tp": {"type": int, "help": "tensor-parallel ranks; printed, nothing written"},
        "--pack": {"action": "store_true", "help": "with packed activations; printed, nothing written"},
    },
    run=run,
    draw=draw,
    note=SOURCES,
)
