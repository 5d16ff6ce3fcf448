"""Vocabulary-parallel cross entropy, from logits and fused with the projection, equals F.cross_entropy in float64.

Loss, per-token losses and every gradient, on 1 to 3 ranks with an uneven, padded last slice, for several chunk sizes.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import assert_same, join, leaves, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpformer import ops
from tpformer.distributed import record_collectives

EPS = 1e-5


def case(tokens=12, k=5, vocab=20, rows=24, kind="layernorm", sp=True, chunk: int | None = 5, scale=1.0) -> dict:
    """rows: of the padded table, split as DTensor splits it; uneven where t does not divide it."""
    return locals()


def tensors(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    values = make(3, dtype, x=(case["tokens"], case["k"]), weight=(case["rows"], case["k"]))
    values["weight"][case["vocab"] :] = 100.0  # padding that would dominate if it were counted
    if case["kind"]:
        values |= make(4, dtype, norm_weight=(case["k"],))
        values |= make(5, dtype, norm_bias=(case["k"],)) if case["kind"] == "layernorm" else {}
    targets = torch.randint(case["vocab"], (case["tokens"],), generator=torch.Generator().manual_seed(6))
    targets[:: max(2, case["tokens"] // 3)] = -100
    return values, targets


def plain(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    values, targets = tensors(case, dtype)
    inputs = leaves(values)
    normed, size = inputs["x"], (case["k"],)
    if case["kind"] == "layernorm":
        normed = F.layer_norm(normed, size, inputs["norm_weight"], inputs["norm_bias"], EPS)
    elif case["kind"] == "rmsnorm":
        normed = F.rms_norm(normed, size, inputs["norm_weight"], EPS)
    loss = F.cross_entropy((normed @ inputs["weight"].t())[:, : case["vocab"]], targets, reduction="sum")
    (loss * case["scale"]).backward()
    return {"loss": loss.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}


def vocab_slice(case: dict) -> tuple[int, int, ops.VocabSlice]:
    per_rank = -(-case["rows"] // dist.get_world_size())
    first = dist.get_rank() * per_rank
    last = min(first + per_rank, case["rows"])
    return first, last, ops.VocabSlice(first, max(0, min(last, case["vocab"]) - first))


def on_rank(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], list, list]:
    values, targets = tensors(case, dtype)
    first, last, vocab = vocab_slice(case)
    values["weight"] = values["weight"][first:last]
    if case["sp"]:
        values["x"] = values["x"].chunk(dist.get_world_size())[dist.get_rank()]
    inputs = leaves(values)
    norm = None
    if case["kind"]:
        norm = ops.Norm(case["kind"], inputs["norm_weight"], inputs.get("norm_bias"), EPS)
    with record_collectives() as forward:
        loss = ops.linear_cross_entropy(
            inputs["x"],
            inputs["weight"],
            targets,
            vocab,
            norm=norm,
            group=dist.group.WORLD,
            sequence_parallel=case["sp"],
            chunk_tokens=case["chunk"],
        )
    with record_collectives() as backward:
        (loss * case["scale"]).backward()
    return {"loss": loss.detach()} | {f"d{n}": x.grad for n, x in inputs.items()}, list(forward), list(backward)


def check(ranks, t: int, case: dict, dtype: torch.dtype) -> list[tuple]:
    results = ranks(t).run(on_rank, case, dtype)
    sums: int | str = "sum" if case["sp"] else "equal"
    how = {"loss": "equal", "dx": 0 if case["sp"] else "equal", "dweight": 0, "dnorm_weight": sums, "dnorm_bias": sums}
    actual = {name: join([result[0][name] for result in results], how[name]) for name in results[0][0]}
    assert_same(actual, plain(case, torch.float64), plain(case, dtype))
    return results


# with 3 ranks the slices of 22 rows are 8, 8, 6, and a vocabulary of 16 leaves the last one nothing but padding
@pytest.mark.parametrize("t", [1, 2, 3])
def test_fused_equals_plain_torch(ranks, t):
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(
        st.integers(1, 5).map(lambda n: 6 * n),
        st.sampled_from([(22, 22), (19, 22), (16, 22), (24, 24), (7, 30)]),
        st.sampled_from([None, "layernorm", "rmsnorm"]),
        st.booleans(),
        st.sampled_from([1, 2, 7, 100, None]),
    )
    def run(tokens, vocab_and_rows, kind, sp, chunk):
        vocab, rows = vocab_and_rows
        check(ranks, t, case(tokens, 5, vocab, rows, kind, sp, chunk, scale=0.25), torch.float64)

    run()


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("sp", [True, False])
def test_fused_float32(ranks, t, sp):
    check(ranks, t, case(12, 5, 19, 22, "rmsnorm", sp, 5), torch.float32)


@pytest.mark.parametrize("sp", [True, False])
def test_fused_communication(ranks, sp):
    t, nbytes = 2, 12 * 5 * 8
    for _, forward, backward in check(ranks, t, case(tokens=12, k=5, sp=sp, chunk=5), torch.float64):
        # three chunks of 5, 5, 2 tokens: three numbers per token and rank
        statistics = [("all_gather", 3 * tokens * t * 8) for tokens in (5, 5, 2)]
        if sp:
            assert forward == [("all_gather", nbytes), *statistics, ("reduce_scatter", nbytes)]
        else:
            assert forward == [*statistics, ("all_reduce", nbytes)]
        assert backward == []


def without_gradients():
    with torch.no_grad(), record_collectives() as calls:
        ops.linear_cross_entropy(
            torch.randn(2, 3), torch.randn(4, 3), torch.arange(4), ops.VocabSlice(4 * dist.get_rank(), 4),
            group=dist.group.WORLD,
        )  # fmt: skip
    return [name for name, _ in calls]


def test_without_gradients_nothing_is_reduced(ranks):
    assert ranks(2).run(without_gradients) == [["all_gather", "all_gather"]] * 2


def uneven_default_chunks():
    """2500 rows on 3 ranks are 834, 834, 832: 2**22 over each gives 5029 or 5041 tokens a chunk."""
    per_rank, rank = 834, dist.get_rank()
    rows = min(per_rank, 2500 - rank * per_rank)
    x, weight = torch.full((5030, 1), 0.5), torch.zeros(rows, 1)
    with torch.no_grad():
        loss = ops.linear_cross_entropy(
            x, weight, torch.zeros(5030, dtype=torch.int64), ops.VocabSlice(rank * per_rank, rows),
            group=dist.group.WORLD, sequence_parallel=False,
        )  # fmt: skip
    return float(loss)


def test_default_chunks_agree_on_uneven_slices(ranks):
    """Ranks exchange once per chunk: chunk sizes from their own slice would leave one waiting for another."""
    for loss in ranks(3).run(uneven_default_chunks, timeout=20):
        assert loss == pytest.approx(5030 * float(torch.tensor(2500.0).log()), rel=1e-5)


class LargestOutput(TorchDispatchMode):
    """The largest number of elements any operation returns while the mode is on."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_logits_exist_a_chunk_at_a_time():
    tokens, vocab, k, chunk = 64, 500, 3, 4
    values = leaves(make(0, torch.float32, x=(tokens, k), weight=(vocab, k)))
    targets = torch.arange(tokens)
    with LargestOutput() as fused:
        ops.linear_cross_entropy(
            **values, targets=targets, vocab=ops.VocabSlice(0, vocab), chunk_tokens=chunk
        ).backward()
    assert fused.numel == chunk * vocab
    with LargestOutput() as plain:  # the meter does see logits where they exist
        F.cross_entropy(values["x"] @ values["weight"].t(), targets).backward()
    assert plain.numel == tokens * vocab


def from_logits(vocab: int, rows: int, ignore_index: int) -> tuple[Tensor, Tensor, list, list]:
    logits, targets, upstream = logits_case(vocab, rows, ignore_index)
    first, last, piece = vocab_slice({"rows": rows, "vocab": vocab})
    local = logits[:, first:last].clone().requires_grad_()
    with record_collectives() as forward:
        losses = ops.vocab_parallel_cross_entropy(
            local, targets, piece, group=dist.group.WORLD, ignore_index=ignore_index
        )
    with record_collectives() as backward:
        losses.backward(upstream)
    return losses.detach(), local.grad, list(forward), list(backward)


def logits_case(vocab: int, rows: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    values = make(7, torch.float64, logits=(9, rows), upstream=(9,))
    values["logits"][:, vocab:] = 100.0
    targets = torch.arange(9) % vocab
    targets[3] = ignore_index
    return values["logits"], targets, values["upstream"]


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("vocab, rows", [(22, 22), (19, 22), (16, 22)])
@pytest.mark.parametrize("ignore_index", [-100, 2])  # 2 is also a real entry of the vocabulary
def test_from_logits_equals_plain_torch(ranks, t, vocab, rows, ignore_index):
    logits, targets, upstream = logits_case(vocab, rows, ignore_index)
    leaf = logits.requires_grad_()
    losses = F.cross_entropy(leaf[:, :vocab], targets, reduction="none", ignore_index=ignore_index)
    losses.backward(upstream)
    results = ranks(t).run(from_logits, vocab, rows, ignore_index)
    torch.testing.assert_close(join([r[0] for r in results], "equal"), losses.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(join([r[1] for r in results], 1), leaf.grad, rtol=1e-12, atol=1e-12)
    for *_, forward, backward in results:
        assert forward == ([] if t == 1 else [("all_gather", 3 * 9 * 8 * t)]) and backward == []
