"""On one GPU: bfloat16 training, packed documents through the variable-length kernel, resume."""

import pytest
import torch

from tpformer import ops
from tpformer.training.config import build_config
from tpformer.training.metrics import read_metrics
from tpformer.training.trainer import pretrain

pytestmark = pytest.mark.gpu


def pretrain_on_cuda(values: dict) -> None:
    pretrain(build_config(values, {"train": {"device": "cuda", "steps": 20}, "model": {"n_heads": 1}}))


def test_bfloat16_run(ranks, tmp_path, tiny_values):
    ranks(1).run(pretrain_on_cuda, tiny_values)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_packed_documents_equal_separate_ones(kv_heads):
    lengths = [100, 1, 27, 128]
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(256, heads, 64) for heads in (8, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    packed = ops.causal_attention(q, k, v, 1, (boundaries, max(lengths)))
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    apart = torch.cat([ops.causal_attention(*part, 1) for part in parts])
    torch.testing.assert_close(packed, apart, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(packed)
    for one, other in zip(
        torch.autograd.grad(packed, (q, k, v), upstream), torch.autograd.grad(apart, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
