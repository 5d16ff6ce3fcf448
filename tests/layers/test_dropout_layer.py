"""A TransformerBlock's name in the model's tree decides which elements it drops; how the model is laid out does not."""

import copy

import pytest
import torch
from kept import kept
from steps import Results, each_case, gradients
from test_block_layer import BATCH, HIDDEN, SEQ, make_block
from testing import assert_identical
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer import ops
from tpformer.layers import DropoutKey
from tpformer.models import GPT, GPTConfig

P = 0.5
REGIONS = {
    "mlp": {"own": "mlp"}, "full": {"own": "full"}, "ops.recompute": {"region": ops.recompute},
    "of regions": {"region": ops.recompute, "own": "full"},
    "checkpoint": {"region": lambda function, x: checkpoint(function, x, use_reentrant=False)},
}  # fmt: skip


def blocks(**options) -> nn.ModuleList:
    """Zero weights leave x + dropout(bias) twice, so each branch shows its mask by its own bias."""
    layers = nn.ModuleList(make_block("gelu-layernorm", dropout=P, **options) for _ in range(2))
    for name, p in layers.named_parameters():
        nn.init.constant_(p, {"self_attn.o_proj.bias": 1.0, "mlp.fc2.bias": 100.0}.get(name[2:], 0.0))
    return layers


def masks(layer: nn.Module, **options) -> list[Tensor]:
    """Return which elements (batch, seq, hidden) each of the two branches keeps."""
    seq = options.pop("seq", SEQ)
    y = layer(torch.zeros(BATCH, seq, HIDDEN, dtype=torch.float64, requires_grad=True), **options)
    assert set(y.unique().tolist()) == {0.0, 1 / P, 100 / P, 101 / P}
    return [y % 100 == 1 / P, y >= 100 / P]


def key_of(model: nn.Module, samples: tuple[int, ...] = (5, 9), step: int = 1) -> DropoutKey:
    return DropoutKey(0, step, torch.tensor(samples), model)


def assert_all_differ(drawn: list[Tensor]) -> None:
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            assert 0.3 < (one == other).double().mean() < 0.7, "independent, not merely different"


def wrap_second(wrap, **options) -> nn.ModuleList:
    layers = blocks(**options)
    layers[1] = wrap(layers[1])
    return layers


WRAPPED = {
    # the block recomputes all, so the compiler sees only what draws dropout
    "compiled": lambda: wrap_second(lambda block: torch.compile(block, backend="eager"), recompute="full"),
    "all compiled": lambda: torch.compile(blocks(), backend="eager"),
    "checkpointed": lambda: wrap_second(checkpoint_wrapper),
    "FSDP2": lambda: wrap_second(lambda block: fully_shard(block, mesh=init_device_mesh("cpu", (1,)))),
    "DDP": lambda: nn.parallel.DistributedDataParallel(blocks()),
    "copied": lambda: copy.deepcopy(blocks()),
    "alone of a part": lambda: nn.ModuleDict({"1": blocks()[1]}),
    "recomputed": lambda: blocks(recompute="full"),
}


def on_rank(mesh, how: str) -> list[Tensor]:
    model = WRAPPED[how]()
    layers = getattr(model, {"DDP": "module", "all compiled": "_orig_mod"}.get(how, ""), model)
    return masks(layers["1" if how == "alone of a part" else 1], dropout_key=key_of(model))


@pytest.mark.parametrize("how", [*[*WRAPPED][::2], *in_turns([*WRAPPED][1::2])])
def test_the_name_does_not_depend_on_what_wraps_a_layer(ranks, how):
    layers = blocks()
    ((_, (found,)),) = each_case(ranks, 1, on_rank, [(how,)])
    assert_identical(found, masks(layers[1], dropout_key=key_of(layers)))


def test_every_site_of_every_layer_has_its_own_and_so_has_a_layer_that_came_later():
    layers = blocks()
    before = masks(layers[1], dropout_key=key_of(layers))
    layers.insert(0, blocks()[0])
    drawn = [masks(layer, dropout_key=key_of(layers)) for layer in layers]
    assert_all_differ([mask for pair in drawn for mask in pair])
    assert torch.equal(drawn[1][0], before[0]), "it has become layer 1"


def test_samples_of_another_length_share_nothing():
    """Sample 6 of 6 tokens and sample 4 of 9 tokens begin at the same count of elements, and draw differently."""
    layers = blocks()
    short = masks(layers[0], seq=6, dropout_key=key_of(layers, (6, 7)))
    long = masks(layers[0], seq=9, dropout_key=key_of(layers, (4, 5)))
    assert_all_differ([mask.flatten()[: 6 * HIDDEN] for mask in (*short, *long)])


def test_indices_of_any_integer_type_are_the_same_samples():
    layers, samples = blocks(), torch.tensor([2**30, 2**30 + 1])
    keys = [DropoutKey(0, 1, samples.to(dtype), layers) for dtype in (torch.int64, torch.int32)]
    assert_identical(*(masks(layers[0], dropout_key=key) for key in keys))


def test_without_a_key_every_forward_and_site_draws_its_own():
    layers = blocks()
    torch.manual_seed(3)
    first, second, other = masks(layers[0]), masks(layers[0]), masks(layers[1])
    assert_all_differ([*first, *second, *other])
    torch.manual_seed(3)
    assert_identical(masks(layers[0]), first)


def through(region=lambda function, x: function(x), own: str = "none") -> Results:
    """Results and gradients of a GPT and of two blocks without keys; `region(function, x)` makes each call."""
    torch.manual_seed(7)
    x, ids = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True), torch.randint(16, (BATCH, SEQ))
    layers = nn.ModuleList(make_block("gelu-layernorm", dropout=P, recompute=own) for _ in range(2))
    config = GPTConfig(vocab_size=16, seq_length=SEQ, n_layers=2, hidden_size=HIDDEN, n_heads=6, dropout=P)
    model = kept(GPT, config, recompute=own, dtype=torch.float64)
    y = region(layers[1], region(layers[0], x))
    loss = region(lambda ids: model(ids, targets=ids), ids)
    (y.square().sum() + loss).backward()
    return {"y": y.detach(), "loss": loss.detach(), "dx": x.grad} | gradients(nn.ModuleList([*layers, model]))


@pytest.mark.parametrize("name", REGIONS)
def test_without_a_key_a_second_run_draws_the_same(name):
    assert_identical(through(**REGIONS[name]), through())
