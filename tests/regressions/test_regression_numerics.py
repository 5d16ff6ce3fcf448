"""Items 14-19 and 23: what made other systems train to another loss, or not at all, without a message. Each test
compares a layout with one process, in the terms of the report, and in float64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from testing import assert_same
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpformer.config import build_config, check_config
from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.ops import cross_entropy
from tpformer.parallel import reduce_partial_gradients

TINY = {"vocab_size": 60, "seq_length": 12, "n_layers": 2, "hidden_size": 48, "n_heads": 4}
LLAMA = {**TINY, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}
BATCH = 2


def build(config: dict, tp: int, sequence_parallel: bool = True, **options) -> GPT:
    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"] if tp > 1 else None
    options = {"dtype": torch.float64, "tp": TensorParallel(mesh, sequence_parallel), **options}
    return GPT(GPTConfig(**config), seed=5, **options)


def batch_of(model: GPT) -> Tensor:
    size = (BATCH, model.config.seq_length + 1)
    return torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0))


def loss_of(model: GPT, step: int = 1) -> Tensor:
    """The mean loss of one batch, the same in every step. Its samples' numbers differ, and so does the dropout."""
    batch = batch_of(model)
    index = torch.arange(BATCH) + BATCH * step
    loss = model(batch[:, :-1], targets=batch[:, 1:], sample_index=index, step=step)
    return loss / (BATCH * model.config.seq_length)


def backward(config: dict, tp: int, options: dict) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss, all whole gradients, and this rank's copies of those that tp ranks share."""
    model = build(config, tp, **options)
    loss = loss_of(model)
    loss.backward()
    reduce_partial_gradients(model)
    whole, shared = {}, {}
    for name, p in model.named_parameters():
        whole[name] = p.grad
        if isinstance(p.grad, DTensor):
            whole[name] = p.grad.full_tensor()
            if p.grad.placements[0].is_replicate():
                shared[name] = p.grad.to_local()
    return float(loss.detach()), whole, shared


def backward_in_chunks(config: dict, tp: int, options: dict) -> tuple:
    """`backward`, with a loss that takes 5 of the 24 tokens at a time."""
    with mock.patch.multiple(cross_entropy, CPU_LOGITS=1, CPU_TOKENS=5):
        return backward(config, tp, options)


def refusal(config: dict, tp: int) -> str:
    with pytest.raises(ValueError) as error:
        backward(config, tp, {})
    return str(error.value)


def check(results: list, expected: tuple) -> None:
    for loss, gradients, _ in results:
        assert_same(loss, expected[0])
        assert_same(gradients, expected[1])


def descend(config: dict, tp: int, steps: int, rate: float, options: dict | None = None) -> list[float]:
    """Return the losses of plain gradient descent, at a rate so high that any mistake grows."""
    model = build(config, tp, **(options or {}))
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(float(loss.detach()))
        loss.backward()
        reduce_partial_gradients(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=rate)
                p.grad = None
    return losses


@pytest.mark.parametrize("multiple", [1, 128])
def test_item_14_vocabulary_that_tp_does_not_divide(ranks, multiple):
    """A prime vocabulary on 4 ranks, at the report's learning rate of 0.3, trains as one process that pads nothing.
    Fails if padding rows enter the softmax, if a rank takes targets of its neighbour's rows, or if the uneven last
    shard is read at another one's offset."""
    config = {**TINY, "vocab_size": 251}
    model = build({**config, "vocab_multiple": 1}, 1)
    batch, expected = batch_of(model), descend({**config, "vocab_multiple": 1}, 1, 12, 0.3)
    first = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert expected[-1] < expected[0]
    assert_same(expected[0], first.item())
    for losses in ranks(4).run(descend, {**config, "vocab_multiple": multiple}, 4, 12, 0.3):
        assert_same(losses, expected)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["layernorm", "rmsnorm"])
def test_item_15_norm_gradients_are_equal_on_all_ranks(ranks, config):
    """Fails if the gradient of any norm, the last one too, is the sum over one rank's part of the sequence."""
    expected = backward(config, 1, {})
    results = ranks(4).run(backward, config, 4, {})
    check(results, expected)
    names = {name for name in expected[1] if "norm" in name}
    assert "norm.weight" in names and len(names) == (10 if config is TINY else 5)
    for _, _, shared in results:
        assert names <= shared.keys()
        assert all(torch.equal(shared[name], results[0][2][name]) for name in names)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_item_16_dropout_does_not_depend_on_tensor_parallelism(ranks, sequence_parallel):
    """Fails if ranks draw one mask for different rows, or without sequence parallelism different masks for the same
    rows. The loss of the first step then grows with tp."""
    config, options = {**TINY, "dropout": 0.5}, {"sequence_parallel": sequence_parallel}
    expected = backward(config, 1, {})
    assert expected[0] != backward(TINY, 1, {})[0], "dropout is on"
    for tp in (2, 4):
        check(ranks(tp).run(backward, config, tp, options), expected)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["tied", "untied"])
def test_item_17_chunked_loss_with_smoothing_and_z_loss(ranks, config):
    """Fails if the loss takes one rank's part for the sum: of the normalisers, or of the gradients of its input."""
    options = {"label_smoothing": 0.1, "z_loss": 1e-2}
    expected = backward(config, 1, options)
    assert expected[0] != backward(config, 1, {})[0]
    for sequence_parallel in (True, False):
        results = ranks(4).run(backward_in_chunks, config, 4, {**options, "sequence_parallel": sequence_parallel})
        check(results, expected)


def test_item_17_sequence_that_tp_does_not_divide_is_refused(ranks):
    """Both the configuration and the model refuse it. Fails if 15 tokens on 4 ranks are cut to 12, or padded in
    training."""
    values = {
        "model": {**TINY, "seq_length": 15},
        "data": {"train": ["somewhere"]},
        "parallel": {"tensor_parallel": 4},
        "train": {"microbatch_size": 1},
    }
    with pytest.raises(ValueError, match=r"1 \* 15 = 15 tokens cannot be split over parallel.tensor_parallel=4"):
        check_config(build_config(values))
    for message in ranks(4).run(refusal, {**TINY, "seq_length": 15}, 4):
        assert "2 * 15 = 30 tokens cannot be split over tensor_parallel=4" in message
    # without sequence parallelism nothing is cut
    results = ranks(4).run(backward, {**TINY, "seq_length": 15}, 4, {"sequence_parallel": False})
    check(results, backward({**TINY, "seq_length": 15}, 1, {}))


@pytest.mark.parametrize("mode", ["mlp", "full"])
def test_item_18_recomputation_draws_the_same_dropout(mode):
    """Recomputation keeps every bit, whatever torch's generator is seeded with. Fails if the second run of a layer
    draws other masks than the first."""
    config = {**TINY, "dropout": 0.5}
    expected = descend(config, 1, 6, 0.1)
    torch.manual_seed(99)
    assert descend(config, 1, 6, 0.1, {"recompute": mode}) == expected


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_item_23_more_ranks_than_key_value_heads(ranks, n_kv_heads):
    """Fails with the reports' shape error, or if gradients of shared heads miss other ranks' queries."""
    config = {**LLAMA, "n_kv_heads": n_kv_heads}
    check(ranks(4).run(backward, config, 4, {}), backward(config, 1, {}))
