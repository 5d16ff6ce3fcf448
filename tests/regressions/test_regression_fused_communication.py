"""Items 9 and 10: a fused path that was asked for and cannot run is an error with the reason, never a slow success."""

import pytest
import torch
import torch.distributed as dist
from testing import on_every_rank

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=60, seq_length=8, n_layers=1, hidden_size=16, n_heads=2)


def build(transport: str) -> tuple[GPT, torch.Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    return GPT(CONFIG, tp=TensorParallel(mesh, True, transport)), torch.arange(16).view(2, 8)


@on_every_rank(2)
def test_item_09_what_was_asked_for_and_cannot_run_raises() -> None:
    """Fails if "fused" without a GPU silently becomes a sequential step, in the table or in the computation."""
    model, ids = build("fused")
    for ask in (lambda: model.explain(16), lambda: model(ids, targets=ids)):
        with pytest.raises(ValueError, match=r'^fused needs a CUDA device with NVLink.*; use transport="auto" to have'):
            ask()


def step(transport: str) -> tuple[str, list[tuple[str, str]]]:
    """A training step's explanation and the transports that it recorded."""
    model, ids = build(transport)
    with ops.record_transports() as used:
        model(ids, targets=ids).backward()
    return model.explain(16), used


@pytest.mark.parametrize("transport", ["sequential", "pipelined"])
def test_item_10_every_linear_runs_as_explain_says(ranks, transport):
    """Fails if an operation is left out of the choice, as when the flag was on and no operation was replaced."""
    for text, used in ranks(2).run(step, transport):
        linears = [line.split() for line in text.splitlines() if line.startswith("layers.")]
        assert len(linears) == 4 and all(transport in words for words in linears)
        block = [name for operation, name in used if operation != "linear_cross_entropy"]
        # each linear has one operation forward and one backward
        assert block == [transport] * 8
