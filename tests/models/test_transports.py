"""A GPT has one loss and one set of gradients, whichever transport carries its linears, and explain() names it.

The fused kernels run in Triton's interpreter. float32 by the error of a float32 run in one process, against float64.
"""

import pytest
import torch
import torch.distributed as dist
from steps import gradients
from testing import assert_kernel_close
from torch import Tensor

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel, linear_plans
from tpformer.models import GPT, GPTConfig

BATCH, SEQ = 2, 4
TINY = {"vocab_size": 30, "vocab_multiple": 16, "seq_length": SEQ, "n_layers": 2, "hidden_size": 16, "n_heads": 4}
CONFIGS = {
    "gelu": {**TINY, "dropout": 0.1},
    "swiglu-gqa": {
        **TINY,
        "dropout": 0.1,
        "n_kv_heads": 2,
        "ffn_hidden_size": 24,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "bias": False,
    },
}
OTHER = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}


def train_on_rank(config: dict, sequence_parallel: bool, transport: str) -> tuple[dict[str, Tensor], str]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    return train(config, torch.float32, tp=TensorParallel(mesh, sequence_parallel, transport))


def train(config: dict, dtype: torch.dtype, **options) -> tuple[dict[str, Tensor], str]:
    """Loss and all gradients of one step, whole, and explain()'s table, which is held against what was seen to run."""
    model = GPT(GPTConfig(**config), seed=5, dtype=dtype, **options)
    ids = torch.randint(config["vocab_size"], (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    with ops.record_transports() as forward:
        loss = model(ids[:, :-1], targets=ids[:, 1:], sample_index=torch.tensor([3, 8]), step=2)
    with ops.record_transports() as backward:
        loss.backward()
    text = model.explain(BATCH * SEQ)
    if options:
        check_plans(model, forward, backward, options["tp"].transport, text)
    return {"loss": loss.detach()} | gradients(model), text


def check_plans(model: GPT, forward: list, backward: list, transport: str, text: str) -> None:
    """Every linear's plan is what ran, in order: what communicates in the forward, its other half in the backward."""
    plans = [plan for plan in linear_plans(model, BATCH * SEQ) if plan.path != "lm_head (logits)"]
    linears = plans[:-1]  # the last is the loss, with collectives of its own
    assert forward == [(p.operation, p.decision.transport) for p in plans if p.operation != "matmul"]
    if model.tp.sequence_parallel:
        assert backward == [(OTHER[p.operation], p.decision.transport) for p in reversed(linears)]
    else:
        assert backward == [(p.request.op, p.decision.transport) for p in reversed(linears) if p.operation == "matmul"]
    assert {plan.decision.transport for plan in linears} == {transport} and len(linears) == 4 * len(model.layers)
    for plan in linears:
        (line,) = [line for line in text.splitlines() if line.split()[0].endswith(plan.path.split(".", 2)[2])]
        assert f"  {transport}  " in line and line.startswith("layers.0-1.")


@pytest.mark.parametrize(("name", "sequence_parallel"), [("gelu", True), ("gelu", False), ("swiglu-gqa", True)])
def test_loss_and_gradients_are_the_same(ranks, interpreted, name, sequence_parallel):
    config = CONFIGS[name]
    (oracle, _), (baseline, _) = train(config, torch.float64), train(config, torch.float32)
    for transport, pool in {"sequential": ranks, "pipelined": ranks, "fused": interpreted}.items():
        results = pool(2).run(train_on_rank, config, sequence_parallel, transport)
        assert results[0][1] == results[1][1]  # one table on all ranks
        for result, _ in results:
            assert result.keys() == oracle.keys()
            for key, value in result.items():
                assert_kernel_close(value, oracle[key], baseline[key], f"{transport} {key}")
