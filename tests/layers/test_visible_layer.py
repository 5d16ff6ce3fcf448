"""What a token attends to: a block equals the plain one with an explicit mask in float64, with every gradient.

Causal attention, bidirectional, in sliding windows; whole samples, packed documents and padding; one rank and two.
"""

import pytest
import torch
import torch.distributed as dist
from plain import block as plain_block
from test_block_layer import BATCH, HEADS, HIDDEN, KINDS, SEQ, inputs, make_block
from torch import Tensor, nn

from tpformer.distributed import build_mesh
from tpformer.layers import PositionEmbedding, Positions, SelfAttention, TransformerBlock
from tpformer.parallel import reduce_partial_gradients

ROW, COLUMN = torch.arange(SEQ)[:, None], torch.arange(SEQ)
ATTENTION = {
    "causal": ({}, COLUMN <= ROW),
    "bidirectional": ({"is_causal": False}, COLUMN >= 0),
    "window": ({"sliding_window": 2}, (COLUMN <= ROW) & (COLUMN > ROW - 2)),
    "window of one": ({"sliding_window": 1}, COLUMN == ROW),
    "window of all": ({"sliding_window": SEQ}, COLUMN <= ROW),
}
# how samples are divided: arguments of Positions, and the document that each token is in, negative for padding
SAMPLES: dict[str, tuple[dict, list[list[int]]]] = {
    "whole": ({}, [[0] * SEQ] * BATCH),
    "documents": (
        {"ids": torch.tensor([[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]])},
        [[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]],
    ),
}

for name, documents in {
    "left padding": [[-1, -1, 0, 0, 0, 0], [0] * SEQ],
    "right padding": [[0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, -1]],
    "padding around": [[-1, 0, 0, 0, -1, -1], [-1] * SEQ],
}.items():
    SAMPLES[name] = ({"key_padding_mask": torch.tensor(documents) < 0}, documents)


def upstream(samples: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, the gradient of the result, which nobody reads at padding, and the documents."""
    x, dy = inputs()
    document = torch.tensor(SAMPLES[samples][1])
    return x.requires_grad_(), dy * (document >= 0)[..., None], document


def expected(kind: str, attention: str, samples: str) -> dict[str, Tensor]:
    x, dy, document = upstream(samples)
    p = {name: p.detach().clone().requires_grad_() for name, p in make_block(kind).named_parameters()}
    options = {name: value for name, value in KINDS[kind].items() if name in ("n_kv_heads", "activation", "rope_base")}
    same = (document[:, :, None] == document[:, None]) & (document >= 0)[:, None] | torch.eye(SEQ).bool()
    visible = same & ATTENTION[attention][1]
    y = plain_block(x, p, HEADS, norm_kind=KINDS[kind].get("norm", "layernorm"), visible=visible, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: tensor.grad for name, tensor in p.items()}


def on_rank(kind: str, attention: str, samples: str) -> dict[str, Tensor]:
    t, rank = dist.get_world_size(), dist.get_rank()
    block = make_block(kind, build_mesh("cpu", tensor_parallel=t)["tp"], **ATTENTION[attention][0])
    x, dy, _ = (z.detach().chunk(t, 1)[rank].clone() for z in upstream(samples))
    y = block(x.requires_grad_(), positions=Positions(BATCH, SEQ, **SAMPLES[samples][0]))
    y.backward(dy)
    reduce_partial_gradients(block)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad.full_tensor() for name, p in block.named_parameters()}


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", ["gelu-erf", "swiglu-rmsnorm-rope-gqa"])
def test_equals_plain_block(ranks, kind, attention, samples, t):
    results = ranks(t).run(on_rank, kind, attention, samples)
    whole = {name: torch.cat([each[name] for each in results], 1) for name in ("y", "dx")}
    wanted, document = expected(kind, attention, samples), upstream(samples)[2]
    for result in results:
        found = result | whole
        for name in wanted:
            kept = document >= 0 if name == "y" else slice(None)
            torch.testing.assert_close(found[name][kept], wanted[name][kept], rtol=1e-10, atol=1e-10)


def encoder_layer(block: nn.Module) -> nn.TransformerEncoderLayer:
    """torch.nn's layer with the values of a bidirectional block."""
    layer = nn.TransformerEncoderLayer(
        HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    values = block.state_dict()
    for kind in ("weight", "bias"):
        values[f"self_attn.in_proj_{kind}"] = torch.cat([values.pop(f"self_attn.{name}_proj.{kind}") for name in "qkv"])
    theirs = {"o_proj": "out_proj", "mlp.fc1": "linear1", "mlp.fc2": "linear2"}
    theirs |= {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
    for ours, name in theirs.items():
        values = {key.replace(ours, name): value for key, value in values.items()}
    layer.load_state_dict(values)
    return layer


@pytest.mark.parametrize("samples", ["whole", "left padding", "right padding"])
def test_equals_torch_encoder_layer(samples):
    block = make_block("gelu-erf", is_causal=False)
    mask = SAMPLES[samples][0].get("key_padding_mask")
    (x, dy, document), (other, *_) = upstream(samples), upstream(samples)
    y, wanted = block(x, key_padding_mask=mask), encoder_layer(block)(other, src_key_padding_mask=mask)
    torch.testing.assert_close(y[document >= 0], wanted[document >= 0], rtol=1e-12, atol=1e-12)
    for each in (y, wanted):
        each.backward(dy)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"sliding_window": 0}, {"sliding_window": 4, "is_causal": False}])
def test_windows_that_are_refused(options):
    with pytest.raises(ValueError, match="it has at least 1 token, the query itself"):
        TransformerBlock(8, 2, **options)


def test_learned_positions_begin_at_the_first_real_token():
    embedding = PositionEmbedding(SEQ, HIDDEN)
    mask = torch.tensor([[True, True, False, False, False, True]])
    y = embedding(torch.zeros(1, SEQ, HIDDEN), Positions(1, SEQ, key_padding_mask=mask))
    assert torch.equal(y[0, 2:5], embedding.weight[:3])


REAL = torch.zeros(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"key_padding_mask": torch.tensor([[False, True, False]])}, "padding between real tokens of a sample: move"),
        ({"key_padding_mask": REAL.float()}, r"is \(1, 3\) torch.float32: give .* = \(1, 3\) bool"),
        ({"key_padding_mask": REAL[:, :2]}, r"is \(1, 2\) torch.bool: give .* = \(1, 3\) bool"),
        ({"key_padding_mask": REAL, "offset": 1}, "offset=1 is where whole samples begin"),
        ({"key_padding_mask": REAL, "ids": torch.arange(3)[None]}, "beside ids: let ids restart at 0 where padding"),
    ],
)
def test_masks_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Positions(1, 3, **arguments)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape):
    mask, block = torch.zeros(shape, dtype=torch.bool), make_block("mqa")
    x = torch.zeros(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    for y in (block(x), block(x, key_padding_mask=mask)):
        assert y.shape == x.shape
        y.sum().backward()


def test_padding_beside_positions():
    with pytest.raises(ValueError, match=r"beside positions: give it once, as Positions\(..., key_padding_mask=...\)"):
        SelfAttention(8, 2)(torch.zeros(1, 3, 8), positions=Positions(1, 3), key_padding_mask=REAL)
