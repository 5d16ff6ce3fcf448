"""A GPT's loss is that of its logits, and of one process in any layout; evaluation pads, wrong batches are refused.
tests/layers compares the model with modules of torch.nn, and training/test_separation.py packed documents with those
apart."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kept import kept
from steps import Results, gradients
from testing import assert_identical, assert_same
from torch import Tensor
from turns import in_turns

from tpformer.config import selected_layers
from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig

TINY = {"vocab_size": 50, "vocab_multiple": 16, "seq_length": 8, "n_layers": 2, "hidden_size": 24, "n_heads": 6}
LLAMA = {
    **TINY, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "n_kv_heads": 3,
}  # fmt: skip
# 3 ranks have 22, 22 and 20 of the vocabulary's 64 rows, and of the last rank's rows 6 are real
DOCUMENTS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])


def build(config: dict, mesh=None, **options) -> GPT:
    return kept(GPT, GPTConfig(**config), tp=mesh, seed=3, dtype=torch.float64, **options)


def tokens(batch: int, seq: int, vocab: int = TINY["vocab_size"]) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:].clone()


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt", "llama"])
def test_loss_is_the_cross_entropy_of_the_logits(config):
    """Label smoothing and z-loss are of training only."""
    model = build(config, label_smoothing=0.1, z_loss=1e-2)
    ids, targets = tokens(2, 7)
    targets[1, 2:4] = -100
    logits = model(ids)
    assert logits.shape == (2, 7, 50)
    flat = logits.flatten(0, 1), targets.flatten()
    plain, smooth = (F.cross_entropy(*flat, reduction="sum", label_smoothing=each) for each in (0.0, 0.1))
    smooth = smooth + 1e-2 * logits.logsumexp(-1)[targets >= 0].square().sum()
    for mode, expected in ((model.train, smooth), (model.eval, plain), (build(config).train, plain)):
        module = mode()
        assert_same(module(ids, targets=targets), expected)
        assert_same(module(ids, targets=targets, reduction="mean"), expected / 12)


# 2, 3 and 4 ranks divide the 2 * 12 tokens
WIDE = {"vocab_size": 250, "seq_length": 12, "n_layers": 2, "hidden_size": 48, "n_heads": 4, "dropout": 0.1}
TWO_HEADS = {**WIDE, "n_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
# all that Llama 3.1, Qwen and Mistral add, in one model
NEWER = {
    **TWO_HEADS, "bias": False, "head_dim": 8, "qk_norm": True, "qkv_bias": True, "sliding_window": 5,
    "rope_base": 100.0, "rope_scaling_factor": 8.0, "rope_original_length": 16,
}  # fmt: skip
UNTIED, FULL = {"tie_embeddings": False}, {"recompute": "full"}
# config, tensor_parallel, sequence_parallel, further options of GPT
LAYOUTS = [
    (WIDE, 2, True, {"recompute": "mlp"}),
    (TWO_HEADS, 4, True, {**FULL, "recompute_layers": "1"}),
    (NEWER, 2, False, {**FULL, "recompute_interval": 2}),
    # a prime vocabulary, whose last shard is smaller
    ({**WIDE, "vocab_size": 251, "vocab_multiple": 1}, 4, True, {}),
]
OTHERS = [
    ({**WIDE, **UNTIED}, 4, False, {}),
    (TWO_HEADS, 4, False, {}),
    ({**NEWER, **UNTIED, "n_heads": 12, "n_kv_heads": 4}, 3, True, {}),
    ({**WIDE, "n_heads": 6, "vocab_size": 300, "vocab_multiple": 100, "position": "rope"}, 3, True, {}),
    ({**WIDE, "vocab_size": 251}, 4, True, {}),  # whose last shard has padding
]


def trained(config: dict, t: int, sequence_parallel: bool, options: dict) -> Results:
    """Loss and gradients of a step of training."""
    mesh = build_mesh("cpu", tensor_parallel=t)["tp"] if t > 1 else None
    model, (ids, targets) = build(config, TensorParallel(mesh, sequence_parallel), **options), tokens(2, 12, 250)
    loss = model(ids, targets=targets, sample_index=torch.arange(2), step=1)
    loss.backward()
    found = {"loss": loss.detach()} | gradients(model)
    assert not found["embed_tokens.weight"][config["vocab_size"] :].any(), "padding has no gradient"
    # full_tensor would add up what has not been
    assert t == 1 or not any(place.is_partial() for p in model.parameters() for place in p.grad.placements)
    return found


@pytest.mark.parametrize(("config", "t", "sequence_parallel", "options"), [*LAYOUTS, *in_turns(OTHERS, first=0)])
def test_any_layout_trains_as_one_process(ranks, config, t, sequence_parallel, options):
    """Among them are fewer key-value heads than ranks, and vocabularies that the ranks do not share equally."""
    results = ranks(t).run(trained, config, t, sequence_parallel, options)
    assert_same(results, [trained(config, 1, True, {})] * t)
    assert_identical(results, [results[0]] * t, "else parameters that all ranks share would drift apart")


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
    """For each of BATCHES: the summed loss, the mean loss, the logits. Training does not pad on several ranks."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"] if dist.is_initialized() else None
    model, found = build(config, mesh), []
    if mesh is not None:
        with pytest.raises(ValueError, match=r"2 \* 5 = 10 tokens cannot be split over.*=3 ranks: .*multiple of 3"):
            model(tokens(2, 5)[0])
    model.eval()
    for batch, seq, position_ids in BATCHES:
        ids, targets = tokens(batch, seq)
        losses = [model(ids, targets=targets, position_ids=position_ids, reduction=each) for each in ("sum", "mean")]
        found.append([*(loss.detach() for loss in losses), model(ids, position_ids=position_ids).detach()])
    return found


@pytest.mark.parametrize("config", [LLAMA, *in_turns([TINY], first=1)], ids=["llama", "gpt"])
def test_evaluation_pads_on_the_right_and_training_refuses(ranks, config):
    by_rank = ranks(3).run(evaluated, config)
    for expected, results in zip(evaluated(config), zip(*by_rank, strict=True), strict=True):
        for *losses, _ in results:
            assert_same(losses, expected[:2])
        logits = [mine for *_, mine in results]
        assert [mine.shape[-1] for mine in logits] == [22, 22, 6]
        assert_same(torch.cat(logits, -1), expected[2])


def of_meta(**options) -> GPT:
    fields = {name: options.pop(name) for name in ("n_heads", "head_dim", "position") if name in options}
    return kept(GPT, GPTConfig(**TINY | fields), device="meta", **options)


ZEROS = torch.zeros(2, 8, dtype=torch.int64)
DROPPING = {**TINY, "dropout": 0.1}
REFUSED = [
    (lambda: GPT(GPTConfig()), "GPTConfig.vocab_size is unset: give it"),
    (lambda: of_meta(n_heads=7), "hidden_size=24 is not a multiple of n_heads=7"),
    (lambda: of_meta(n_heads=7, head_dim=9, position="rope"), "RoPE needs an even head dim, not head_dim=9"),
    (lambda: of_meta(recompute_layers="1"), "recompute_layers='1' chooses layers, but recompute is none: set it to"),
    (lambda: of_meta(**FULL, recompute_interval=0), "recompute_interval=0 must be at least 1"),
    (lambda: of_meta(recompute="mlp", recompute_interval=2), "=2 with recompute='mlp': only whole layers"),
    *((lambda each=each: selected_layers(each, 6), f"'{each}': '{each.split(',')[-1]}' selects none of the 6 layers")
      for each in ("6", "0,two", "1:2:3:4", "3:3", "::0", ",")),
    (lambda: build(TINY)(torch.zeros(1, 9).long()), "9 tokens per sample, but the model has 8 learned positions"),
    (lambda: build(TINY)(torch.arange(8)), r"token ids are \(8,\) torch.int64: give an int64 tensor \(batch, seq\)"),
    (lambda: build(TINY)(torch.rand(1, 8)), r"token ids are \(1, 8\) torch.float32: give"),
    (lambda: build(TINY)(ZEROS, targets=ZEROS[:, 1:]), r"targets are \(2, 7\) for token ids \(2, 8\): give one"),
    (lambda: build(TINY)(ZEROS, targets=ZEROS.t()), r"targets are \(8, 2\) for token ids \(2, 8\)"),
    (lambda: build(TINY)(ZEROS, targets=ZEROS + 50), r"targets span \[50, 50\], outside the vocabulary"),
    (lambda: build(DROPPING)(ZEROS, step=1), "dropout=0.1 in training needs sample_index beside step: together"),
    (lambda: build(DROPPING)(ZEROS, sample_index=torch.arange(2)), "training needs step beside sample_index: together"),
]  # fmt: skip


def test_what_does_not_fit_is_refused():
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()
    assert build(LLAMA)(torch.zeros(1, 9).long()).shape == (1, 9, 50), "RoPE goes on"


def test_dropout_depends_on_the_step_alone():
    model, (ids, targets) = build(DROPPING), tokens(2, 8)
    losses = [model(ids, targets=targets, sample_index=torch.arange(2), step=step) for step in (1, 1, 2)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


PATTERNS = {"": range(6), "0:2": [0, 1], "::2": [0, 2, 4], "5": [5], "-1, 0": [0, 5], "4:,0:1": [0, 4, 5]}


def test_recomputed_layers_are_selected_as_python_selects():
    for pattern, layers in PATTERNS.items():
        assert selected_layers(pattern, 6) == set(layers)
        config = GPTConfig(**{**TINY, "n_layers": 6})
        model = kept(GPT, config, recompute="mlp", recompute_layers=pattern, device="meta")
        modes = [layer.keep.recompute for layer in model.layers.values()]
        assert modes == ["mlp" if index in layers else "none" for index in range(6)]


def test_built_on_meta_then_filled_equals_built():
    meta = build(TINY, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.to_empty(device="cpu").init_weights()
    assert_identical(dict(meta.named_parameters()), dict(build(TINY).named_parameters()))


def test_output_projections_start_smaller():
    """Projections into the residual stream start with init_std / sqrt(2 * n_layers), others with init_std."""
    layer = build({**TINY, "hidden_size": 96, "n_layers": 8}).layers["3"]
    for module, std in ((layer.mlp.fc2, 0.02 / 4), (layer.self_attn.o_proj, 0.02 / 4), (layer.mlp.fc1, 0.02)):
        weight = module.weight.detach()
        # six standard errors of the standard deviation of so many normal numbers
        assert abs(float(weight.std()) - std) <= 6 * std / math.sqrt(2 * weight.numel())
