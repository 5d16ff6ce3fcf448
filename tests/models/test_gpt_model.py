"""A GPT's loss is that of its logits; evaluation pads, documents are packed, wrong batches are refused. tests/layers
compares the model with modules of torch.nn."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from testing import assert_same
from torch import Tensor

from tpformer.config import selected_layers
from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig

TINY = {"vocab_size": 50, "vocab_multiple": 16, "seq_length": 8, "n_layers": 2, "hidden_size": 24, "n_heads": 6}
LLAMA = {
    **TINY,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "tie_embeddings": False,
    "n_kv_heads": 3,
}
# 3 ranks have 22, 22 and 20 of the vocabulary's 64 rows, and of the last rank's rows 6 are real
DOCUMENTS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])


def build(config: dict, mesh=None, **options) -> GPT:
    return GPT(GPTConfig(**config), tp=mesh, seed=3, dtype=torch.float64, **options)


def tokens(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(TINY["vocab_size"], (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:].clone()


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt", "llama"])
def test_loss_is_the_cross_entropy_of_the_logits(config):
    model = build(config)
    ids, targets = tokens(2, 7)
    targets[1, 2:4] = -100
    logits = model(ids)
    assert logits.shape == (2, 7, 50)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert_same(model(ids, targets=targets), expected)
    assert_same(model(ids, targets=targets, reduction="mean"), expected / 12)


def test_label_smoothing_and_z_loss_are_of_training_only():
    model = build(TINY, label_smoothing=0.1, z_loss=1e-2)
    ids, targets = tokens(2, 8)
    logits, flat = model(ids).flatten(0, 1), targets.flatten()
    plain = F.cross_entropy(logits, flat, reduction="sum")
    smooth = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=0.1)
    smooth = smooth + 1e-2 * logits.logsumexp(-1).square().sum()
    assert_same(model(ids, targets=targets), smooth)
    assert_same(model.eval()(ids, targets=targets), plain)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt", "llama"])
def test_packed_documents_equal_documents_apart(config):
    model = build(config)
    ids, _ = tokens(2, 5)
    packed = model(ids, position_ids=DOCUMENTS)
    for sample, first, last in ((0, 0, 5), (1, 0, 2), (1, 2, 5)):
        alone = model(ids[sample : sample + 1, first:last])[0]
        assert_same(packed[sample, first:last], alone)


def test_rope_conventions_differ_by_the_order_of_a_heads_features():
    """A model that turns (2i, 2i + 1) is one that turns (i, i + d / 2), once the rows of q and k are reordered."""
    half, interleaved = build(LLAMA), build({**LLAMA, "rope_interleaved": True})
    ids, _ = tokens(2, 8)
    wanted = half(ids)
    with pytest.raises(AssertionError):
        assert_same(interleaved(ids), wanted)
    with torch.no_grad():
        for name, p in interleaved.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.copy_(p.view(-1, 2, 2, p.shape[1]).transpose(1, 2).reshape(p.shape))  # head dim 4: two halves of 2
    assert_same(interleaved(ids), wanted)


# 3 does not divide 2 * 5 and 1 * 8 tokens. The table of learned positions has 8, so padding runs past it
BATCHES = [(2, 5, None), (2, 5, DOCUMENTS), (1, 8, None), (1, 1, None)]


def evaluated(config: dict) -> list[list[Tensor]]:
    """For each of BATCHES: the summed loss, the mean loss, the logits."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"] if dist.is_initialized() else None
    model, found = build(config, mesh).eval(), []
    for batch, seq, position_ids in BATCHES:
        ids, targets = tokens(batch, seq)
        losses = [model(ids, targets=targets, position_ids=position_ids, reduction=each) for each in ("sum", "mean")]
        found.append([*(loss.detach() for loss in losses), model(ids, position_ids=position_ids).detach()])
    return found


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt", "llama"])
def test_evaluation_pads_on_the_right(ranks, config):
    by_rank = ranks(3).run(evaluated, config)
    for expected, results in zip(evaluated(config), zip(*by_rank, strict=True), strict=True):
        for *losses, _ in results:
            assert_same(losses, expected[:2])
        logits = [mine for *_, mine in results]
        assert [mine.shape[-1] for mine in logits] == [22, 22, 6]
        assert_same(torch.cat(logits, -1), expected[2])


def refuse_to_pad() -> None:
    model = build(TINY, build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"])
    with pytest.raises(ValueError, match=r"2 \* 5 = 10 tokens cannot be split over.*=3 ranks: .*multiple of 3"):
        model(tokens(2, 5)[0])


def test_training_refuses_to_pad(ranks):
    ranks(3).run(refuse_to_pad)


def test_samples_longer_than_the_learned_positions_are_refused():
    with pytest.raises(ValueError, match="9 tokens per sample, but the model has 8 learned positions"):
        build(TINY)(torch.zeros(1, 9, dtype=torch.int64))
    assert build(LLAMA)(torch.zeros(1, 9, dtype=torch.int64)).shape == (1, 9, 50)


@pytest.mark.parametrize(
    "ids, targets, words",
    [
        (torch.arange(8), None, r"token ids are \(8,\) torch.int64: give an int64 tensor \(batch, seq\)"),
        (torch.rand(1, 8), None, r"token ids are \(1, 8\) torch.float32: give"),
        (torch.zeros(2, 8).long(), torch.zeros(2, 7).long(), r"targets are \(2, 7\) for token ids \(2, 8\): give one"),
        (torch.zeros(2, 8).long(), torch.zeros(8, 2).long(), r"targets are \(8, 2\) for token ids \(2, 8\)"),
        (torch.zeros(1, 8).long(), torch.full((1, 8), 50), r"targets span \[50, 50\], outside the vocabulary"),
    ],
)
def test_batches_that_do_not_fit_are_refused(ids, targets, words):
    with pytest.raises(ValueError, match=words):
        build(TINY)(ids, targets=targets)


def test_dropout_takes_sample_index_and_step_together():
    model = build({**TINY, "dropout": 0.1})
    ids, targets = tokens(2, 8)
    index = torch.arange(2)
    for given, message in (
        ({"step": 1}, "sample_index beside step"),
        ({"sample_index": index}, "step beside sample_index"),
    ):
        with pytest.raises(ValueError, match=f"dropout=0.1 in training needs {message}: together"):
            model(ids, targets=targets, **given)
    one, again, later = (model(ids, targets=targets, sample_index=index, step=step) for step in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, later)


@pytest.mark.parametrize(
    "pattern, layers",
    [("", range(6)), ("0:2", [0, 1]), ("::2", [0, 2, 4]), ("5", [5]), ("-1, 0", [0, 5]), ("4:,0:1", [0, 4, 5])],
)
def test_recomputed_layers_are_selected_as_python_selects(pattern, layers):
    assert selected_layers(pattern, 6) == set(layers)
    model = GPT(GPTConfig(**{**TINY, "n_layers": 6}), recompute="mlp", recompute_layers=pattern, device="meta")
    modes = [layer.recompute for layer in model.layers.values()]
    assert modes == ["mlp" if index in layers else "none" for index in range(6)]


@pytest.mark.parametrize(
    "pattern, part",
    [("6", "6"), ("0,two", "two"), ("1:2:3:4", "1:2:3:4"), ("3:3", "3:3"), ("::0", "::0"), (",", "")],
)
def test_patterns_that_select_nothing_are_refused(pattern, part):
    with pytest.raises(ValueError, match=f"recompute_layers='{pattern}': '{part}' selects none of the 6 layers"):
        selected_layers(pattern, 6)


def test_layers_without_a_mode_are_refused():
    with pytest.raises(ValueError, match="recompute_layers='1' chooses layers, but recompute is none: set it to"):
        GPT(GPTConfig(**TINY), recompute_layers="1", device="meta")


def test_built_on_meta_then_filled_equals_built():
    meta = build(TINY, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.to_empty(device="cpu")
    meta.init_weights()
    for (name, p), q in zip(meta.named_parameters(), build(TINY).parameters(), strict=True):
        assert torch.equal(p, q), name


def test_output_projections_start_smaller():
    """Projections into the residual stream start with init_std / sqrt(2 * n_layers), others with init_std."""
    layer = build({**TINY, "hidden_size": 96, "n_layers": 8}).layers["3"]
    for module, std in ((layer.mlp.fc2, 0.02 / 4), (layer.self_attn.o_proj, 0.02 / 4), (layer.mlp.fc1, 0.02)):
        weight = module.weight.detach()
        # six standard errors of the standard deviation of so many normal numbers
        assert abs(float(weight.std()) - std) <= 6 * std / math.sqrt(2 * weight.numel())
