"""Items 14-18 and 23: what made other systems train to another loss, or not at all, without a message. Each test
compares a layout with one process, in the terms of the report, and in float64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from runs import LLAMA, MODEL, alone, as_alone, built, own_batch, run_config, step
from testing import assert_identical, assert_same

from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.ops import cross_entropy


def loss_by_torch(model: dict) -> float:
    """Of the whole logits of the batch."""
    whole = built(run_config(model, {}))
    batch, _ = own_batch(whole)
    return float(F.cross_entropy(whole.parts[0](batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).detach())


@pytest.mark.parametrize("multiple", [1, 128])
def test_item_14_vocabulary_that_tp_does_not_divide(ranks, multiple):
    """A prime vocabulary on 4 ranks has the loss and the gradients of one process that pads nothing. Fails if padding
    rows enter the softmax, if a rank takes targets of its neighbour's rows, or if the uneven last shard is read at
    another one's offset."""
    model, table = {**MODEL, "vocab_size": 251, "vocab_multiple": 1}, "embed_tokens.weight"
    expected = alone(ranks, model)
    assert_same(expected["loss"], ranks(1).run(loss_by_torch, model)[0])
    for found in ranks(4).run(step, {**model, "vocab_multiple": multiple}, {"tensor_parallel": 4}, {}):
        padding = found["gradients"][table][251:]
        assert len(padding) == -251 % multiple and not padding.any()
        found["gradients"][table] = found["gradients"][table][:251]
        for name in ("loss", "norm", "gradients"):
            assert_same(found[name], expected[name])


@pytest.mark.parametrize(("model", "norms"), [(MODEL, 10), (LLAMA, 5)], ids=["layernorm", "rmsnorm"])
def test_item_15_norm_gradients_are_equal_on_all_ranks(ranks, model, norms):
    """Fails if the gradient of any norm, the last one too, is the sum over one rank's part of the sequence."""
    expected = alone(ranks, model)
    first, *others = as_alone(ranks, expected, model, {"tensor_parallel": 4})
    names = {name for name in expected["gradients"] if "norm" in name}
    assert "norm.weight" in names and len(names) == norms and names <= first["shared"].keys()
    assert_identical([other["shared"] for other in others], [first["shared"]] * 3)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_item_16_dropout_does_not_depend_on_tensor_parallelism(ranks, sequence_parallel):
    """Fails if ranks draw one mask for different rows, or without sequence parallelism different masks for the same
    rows. The loss of the first step then grows with tp."""
    model = {**MODEL, "dropout": 0.5}
    expected = alone(ranks, model)
    assert expected["loss"] != alone(ranks, MODEL)["loss"], "dropout is on"
    for tp in (2, 4):
        as_alone(ranks, expected, model, {"tensor_parallel": tp, "sequence_parallel": sequence_parallel})


def step_in_chunks(*arguments) -> dict:
    """A step with a loss that takes 5 of the 16 tokens at a time."""
    with mock.patch.multiple(cross_entropy, CPU_LOGITS=1, CPU_TOKENS=5):
        return step(*arguments)


@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["tied", "untied"])
def test_item_17_chunked_loss_with_smoothing_and_z_loss(ranks, model):
    """Fails if the loss takes one rank's part for the sum: of the normalisers, or of the gradients of its input."""
    train = {"label_smoothing": 0.1, "z_loss": 1e-2, "microbatch_size": 2}
    expected = alone(ranks, model, **train)
    assert expected["loss"] != alone(ranks, model)["loss"]
    for sequence_parallel in (True, False):
        layout = {"tensor_parallel": 4, "sequence_parallel": sequence_parallel}
        as_alone(ranks, expected, model, layout, step_in_chunks, **train)


ODD = {**MODEL, "seq_length": 15}


def refuse() -> None:
    mesh = build_mesh("cpu", tensor_parallel=4)["tp"]
    ids = torch.zeros(2, 15, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"2 \* 15 = 30 tokens cannot be split over tensor_parallel=4"):
        GPT(GPTConfig(**ODD), tp=TensorParallel(mesh, True))(ids, targets=ids)


def test_item_17_sequence_that_tp_does_not_divide_is_refused(ranks):
    """Both the configuration and the model refuse it. Fails if 15 tokens on 4 ranks are cut to 12, or padded in
    training."""
    with pytest.raises(ValueError, match=r"1 \* 15 = 15 tokens cannot be split over parallel.tensor_parallel=4"):
        run_config(ODD, {"tensor_parallel": 4})
    ranks(4).run(refuse)
    # without sequence parallelism nothing is cut
    as_alone(ranks, alone(ranks, ODD), ODD, {"tensor_parallel": 4, "sequence_parallel": False})


def step_of_another_seed(*arguments) -> dict:
    torch.manual_seed(99)
    return step(*arguments)


@pytest.mark.parametrize("mode", ["mlp", "full"])
def test_item_18_recomputation_draws_the_same_dropout(ranks, mode):
    """Recomputation keeps every bit, whatever torch's generator is seeded with. Fails if the second run of a layer
    draws other masks than the first."""
    model = {**MODEL, "dropout": 0.5}
    kept, (again,) = alone(ranks, model), ranks(1).run(step_of_another_seed, model, {"recompute": mode}, {})
    for name in ("loss", "gradients"):
        assert_identical(again[name], kept[name])


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_item_23_more_ranks_than_key_value_heads(ranks, n_kv_heads):
    """Fails with the reports' shape error, or if gradients of shared heads miss other ranks' queries."""
    model = {**LLAMA, "n_kv_heads": n_kv_heads}
    as_alone(ranks, alone(ranks, model), model, {"tensor_parallel": 4})
