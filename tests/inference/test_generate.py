"""Every tensor-parallel layout samples the same text from the same logits of the whole vocabulary."""

import pytest
import torch

from tpformer.distributed import build_mesh
from tpformer.inference.generate import generate, next_token_logits
from tpformer.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=250, seq_length=16, n_layers=1, hidden_size=48, n_heads=6)
PROMPT = torch.tensor([1, 2, 249, 4, 5])


def logits_and_text(tp: int):
    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"]
    model = GPT(CONFIG, tp=mesh, seed=3).eval()
    ids = generate(model, PROMPT, 20, temperature=0.7, seed=1)
    return next_token_logits(model, PROMPT), ids


# 3 ranks have 86, 86 and 84 of 256 padded rows
@pytest.mark.parametrize("tp", [2, 3])
def test_every_layout_samples_the_same(ranks, tp):
    expected_logits, expected_ids = ranks(1).run(logits_and_text, 1)[0]
    assert expected_logits.shape == (250,) and len(expected_ids) == 25
    for logits, ids in ranks(tp).run(logits_and_text, tp):
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-6)
        assert torch.equal(ids, expected_ids)
