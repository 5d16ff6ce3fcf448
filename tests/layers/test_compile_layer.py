"""torch.compile(block) has the block's results and gradients, and keeps no more than the block, on 1 and 2 ranks."""

import shutil
from functools import partial

import pytest
import torch
from steps import Results, each_case, own, tp_mesh, with_keys_in_one
from test_block_layer import BATCH, HIDDEN, SEQ, inputs, make_block
from testing import assert_kernel_close, assert_same, on_every_rank
from turns import in_turns, of_turn

from tpformer.layers import MLP, ColumnParallelLinear, DropoutKey, LayerNorm, Positions, RowParallelLinear
from tpformer.planner.storages import Saved

KINDS = ["gelu-layernorm", "qk-norm-head-dim-scaling"]
CASES = [
    (1, KINDS[0], "none", "eager"),
    *in_turns([
        (1, KINDS[0], "full", "aot_eager"),
        *((2, kind, "none", "aot_eager") for kind in KINDS),
        # inductor compiles C++, which takes half a minute
        *((*case, "inductor") for case in ((1, KINDS[0], "none"), (2, KINDS[1], "none"), (2, KINDS[0], "full"))),
    ]),
]  # fmt: skip
SAMPLES = torch.arange(BATCH)
SIZES = ((ColumnParallelLinear, 8, 4), (RowParallelLinear, 8, 4), (LayerNorm, 8), (MLP, 8))
LAYERS = [partial(kind, *sizes, dtype=torch.float64) for kind, *sizes in SIZES]


def run(mesh, kind: str, dtype: torch.dtype, recompute: str, backend: str | None) -> Results:
    """Return output, gradients and saved bytes of the second of two steps, which uses what the first one compiled."""
    block = make_block(kind, mesh, dropout=0.1, recompute=recompute, dtype=torch.float32).to(dtype)
    step = block if backend is None else torch.compile(block, backend=backend)
    for index in (0, 1):
        block.zero_grad()
        x, dy = (own(z.float().to(dtype).flatten(0, 1)) for z in inputs())
        x.requires_grad_()
        with Saved(*block.parameters()).recording() as saved:
            y = step(x, positions=Positions(BATCH, SEQ), dropout_key=DropoutKey(0, index, SAMPLES, block))
        y.backward(dy)
    gradients = {name: p.grad.to_local() for name, p in block.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "saved": torch.tensor(saved.total())} | with_keys_in_one(gradients)


@pytest.mark.parametrize("t, kind, recompute, backend", CASES)
def test_results_and_gradients(ranks, t, kind, recompute, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    ways = [(torch.float64, None), (torch.float32, None), (torch.float32, backend)]
    cases = [(kind, dtype, recompute, compiler) for dtype, compiler in ways]
    (_, oracles), (_, baselines), (_, compiled) = each_case(ranks, t, run, cases)
    for oracle, baseline, actual in zip(oracles, baselines, compiled, strict=True):
        saved = actual.pop("saved")
        for name, x in actual.items():
            assert_kernel_close(x, oracle[name], baseline[name], f"{kind} t={t} {backend} {name}")
        assert saved <= baseline["saved"]


@pytest.mark.parametrize("make", [*LAYERS[:1], *in_turns(LAYERS[1:], first=0)], ids=lambda make: make.func.__name__)
def test_one_graph_is_refused_with_the_reason(make):
    """Compiled state is reset first: the reason is also given to a process that has compiled nothing yet."""
    torch._dynamo.reset()
    layer = make()
    x = torch.ones(2, 4, next(layer.parameters()).shape[-1], dtype=torch.float64)
    refusal = "operations of tpformer run as they are, .* leave fullgraph="
    with pytest.raises(torch._dynamo.exc.Unsupported, match=refusal):
        torch.compile(layer, fullgraph=True, backend="eager")(x)
    assert_same(torch.compile(layer, backend="eager")(x), layer(x))


@of_turn(2)
@on_every_rank(2)
def test_sequence_lengths_are_compiled_twice_at_most():
    """For one length, then for any: nothing is asked that grows with the calls, such as the transports opened."""
    mlp = MLP(HIDDEN, ffn_hidden_size=2 * HIDDEN, tp=tp_mesh())
    torch._dynamo.reset()
    step = torch.compile(mlp, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for seq in (6, 8, 10, 12, 14):
            step(torch.ones(seq, HIDDEN))
