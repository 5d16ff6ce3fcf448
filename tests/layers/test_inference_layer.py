"""What inference_mode leaves behind (views of shared memory, positions, dropout's starts) can be used in training."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.distributed import build_mesh
from tpformer.layers import DropoutKey, Positions, TensorParallel, TransformerBlock
from tpformer.layers.embedding import PositionEmbedding
from tpformer.models import GPT, GPTConfig
from tpformer.ops import TRANSPORTS

OPTIONS = {"seq_length": 4, "n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 30, "vocab_multiple": 4}


def gradients(infer_first: bool, transport: str, sequence_parallel: bool) -> list[Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    model = GPT(GPTConfig(**OPTIONS), tp=TensorParallel(mesh, sequence_parallel, transport), seed=1)
    ids = torch.arange(12).view(3, 4)
    if infer_first:
        with torch.inference_mode():
            model(ids)
            model(ids, targets=ids)
    model(ids, targets=ids).backward()
    return [p.grad.to_local() for p in model.parameters()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name not in ("auto", "fused")])
def test_training_after_inference_has_the_same_gradients(ranks, transport, sequence_parallel):
    found, expected = (ranks(2).run(gradients, first, transport, sequence_parallel) for first in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_objects_that_a_user_keeps():
    """One Positions and one DropoutKey serve an evaluation and the training after it."""
    block = TransformerBlock(8, 2, rope_base=1e4, dropout=0.1)
    table = PositionEmbedding(6, 8)
    ids = torch.tensor([[0, 1, 2, 0]] * 2)
    for positions in (Positions(2, 4), Positions(2, 4, ids), Positions(2, 4, offset=2)):
        key = DropoutKey(1, 2, torch.arange(2), block)
        x = torch.randn(8, 8, requires_grad=True)
        results = []
        for inference in (True, False):
            with torch.inference_mode(inference):
                y = block(table(x, positions), positions=positions, dropout_key=key)
            results.append(y)
        results[1].sum().backward()
        assert torch.equal(*results)
        for cached in (positions.flat_ids(x.device), *positions.rope(4, 1e4, x.device, x.dtype)[0]):
            assert not cached.is_inference()
        assert positions.ids is None or not positions.documents(x.device)[0].is_inference()
        assert not any(start.is_inference() for start in key._starts.values())
