"""Attention of samples whose tokens lie on several ranks is ops.attention of whole samples, with every gradient, for
all heads, documents and windows. What it keeps and sends is as promised, and what does not fit is refused."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context import BATCH, DOCUMENTS, SEQ, WIDTH, shared, tensors, whole, with_gradients
from hypothesis import given
from hypothesis import strategies as st
from testing import assert_identical, assert_kernel_close, assert_same, on_every_rank
from torch import Tensor
from turns import in_turns

from tpformer import ops
from tpformer.distributed import record_collectives, use_backend
from tpformer.ops import flash
from tpformer.ops.context import PARTS, Part, RankSegments, Segment, parts, segments, within

HEADS = [(4, 4), (4, 2), (4, 1)]


@on_every_rank(3, *in_turns([2, 4], first=1))
def test_it_is_attention_of_whole_samples() -> None:
    own = ops.own_tokens(SEQ, dist.get_world_size(), dist.get_rank())
    for heads in HEADS:
        inputs = tensors(*heads, torch.float64)
        for documents in (None, DOCUMENTS):
            for window in (None, 1, 7, SEQ - 1, SEQ):
                found, expected = (by(*inputs, documents, window) for by in (shared, whole))
                assert_same(found, [x[:, own] for x in expected], f"{heads} {documents} {window}")


@on_every_rank(1)
def test_one_rank_has_whole_samples_and_sends_nothing() -> None:
    """With a group of it alone, or with none, also where keys come in parts."""
    for heads, wanted, window, group in product(HEADS, (1, 4), (None, 7), (None, dist.group.WORLD)):
        q, k, v, dy = tensors(*heads, torch.float64)
        attention = partial(ops.context_attention, documents=DOCUMENTS, window=window, group=group)
        with mock.patch.dict(PARTS, cpu=wanted), record_collectives() as calls:
            found = with_gradients(attention, q, k, v, dy=dy)
        assert_same(found, whole(q, k, v, dy, DOCUMENTS, window), f"{heads} {wanted} {window} {group}")
        assert calls == []


def close_to_whole_samples(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype, device: str = "cpu", group=None
) -> list:
    """This rank's result and gradients, which are about as exact as one process's in this dtype."""
    own, inputs = ops.own_tokens(SEQ, dist.get_world_size(), dist.get_rank()), tensors(*heads, dtype)
    oracle, plain = (whole(*(x.to(each) for x in inputs), DOCUMENTS, window) for each in (torch.float64, dtype))
    found = shared(*(x.to(device) for x in inputs), DOCUMENTS, window, group)
    for name, x, exact, same in zip(("y", "dq", "dk", "dv"), found, oracle, plain, strict=True):
        assert x.dtype == dtype
        assert_kernel_close(x.cpu(), exact[:, own], same[:, own], f"{name} {heads} {window} {dtype}")
    return found


@pytest.mark.gpu
@on_every_rank(2, 3, pool="one_gpu")
def test_on_a_gpu() -> None:
    """In parts, by heads and by halves of samples. They travel by gloo, and variable-length calls compute with them; in
    float32 scores are made whole."""
    for heads, window, dtype in product(HEADS, (None, 7), (torch.bfloat16, torch.float32)):
        close_to_whole_samples(heads, window, dtype, "cuda:0")


def between_devices(device: str, backend: str) -> None:
    group = dist.new_group(backend=backend)
    for heads, window, dtype in product(HEADS, (None, 7), (torch.bfloat16, torch.float32)):
        close_to_whole_samples(heads, window, dtype, device, group)


@pytest.mark.nvlink
@on_every_rank(2, 3, 4, pool="gpus")
def test_on_several_gpus() -> None:
    """They travel by NCCL, a part beside the work on another one."""
    torch.cuda.set_device(dist.get_rank())
    between_devices("cuda", "nccl")


@on_every_rank(2)
def test_what_several_gpus_do_is_done_by_ranks_of_a_cpu() -> None:
    """In the parts of a GPU, in a group that is not the world."""
    with mock.patch.dict(PARTS, cpu=PARTS["cuda"]):
        between_devices("cpu", "gloo")


@on_every_rank(2)
def test_features_need_not_be_adjacent_and_documents_may_be_tensors() -> None:
    group, inputs = dist.group.WORLD, tensors(4, 2, torch.float64)
    own = ops.own_tokens(SEQ, group.size(), group.rank())
    q, k, v, dy = (torch.stack([x[:, own]] * 2, -1)[..., 0].requires_grad_() for x in inputs)
    y = ops.context_attention(q, k, v, [torch.tensor(starts) for starts in DOCUMENTS], group=group)
    assert_same([y, *torch.autograd.grad(y, (q, k, v), dy)], [x[:, own] for x in whole(*inputs, DOCUMENTS, None)])


@given(st.sets(st.integers(1, SEQ - 1)), st.sampled_from([2, 3, 4]), st.sampled_from([None, 1, 5, SEQ]))
def test_the_busiest_rank_of_packed_documents(starts, size, window):
    documents = [[0, *sorted(starts)], [0]]
    token = torch.arange(SEQ)
    pairs = torch.zeros(size)
    for sample in documents:
        document = (token[:, None] >= torch.tensor(sample)).sum(1)
        seen = (document[:, None] == document) & (token <= token[:, None]) & (token > token[:, None] - (window or SEQ))
        pairs += torch.stack([seen[ops.own_tokens(SEQ, size, rank)].sum() for rank in range(size)])
    assert ops.context_balance(documents, SEQ, size, window) == pairs.max().item() * size / pairs.sum().item()
    assert ops.context_balance([[0]], SEQ, size) == 1


@on_every_rank(2, 4)
def test_what_it_sends_and_keeps() -> None:
    """Keys and values, not the heads that share them, go over the wire; nothing gathered waits for the backward."""
    group = dist.group.WORLD
    size, (batch, heads, kv) = group.size(), (BATCH, 4, 2)
    q, k, v, dy = (x[:, : SEQ // size].clone().requires_grad_() for x in tensors(heads, kv, torch.float32))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with record_collectives() as calls, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = ops.context_attention(q, k, v, group=group)
    tokens, nbytes = batch * SEQ // size, 2 * batch * SEQ * kv * WIDTH * 4
    assert calls == [("all_gather", nbytes)]
    assert sum(kept.values()) == 4 * tokens * ((2 * heads + 2 * kv) * WIDTH + heads)
    with record_collectives() as calls:
        y.backward(dy)
    assert calls == [("all_gather", nbytes), ("all_to_all", nbytes)]


@on_every_rank(2)
def test_heads_in_parts_give_the_same_bits() -> None:
    """As on CUDA, where the next part's keys and values are on their way while one attends."""
    group = dist.group.WORLD
    for backend in ("shared", "gloo"):
        use_backend(group, backend)
        for heads, asked in (((4, 4), (1, 3, 4)), ((4, 2), (1, 2, 3)), ((4, 1), (0, 1))):
            inputs, found = tensors(*heads, torch.bfloat16), []
            for wanted in asked:
                with mock.patch.dict(PARTS, cpu=wanted), record_collectives() as calls:
                    found.append(shared(*inputs, DOCUMENTS, None))
                n = max(1, min(wanted, heads[1]))
                assert [name for name, _ in calls] == n * ["all_gather"] + _backward(n), (backend, heads, wanted)
            assert_identical(found[1:], [found[0]] * (len(asked) - 1), f"{backend} {heads}")


@on_every_rank(2, 3)
def test_halves_of_samples_are_the_same_attention() -> None:
    """Where a rank has fewer key-value heads than parts: queries attend to the first half of the keys, and later to the
    second one. As many bytes are sent."""
    group, own = dist.group.WORLD, ops.own_tokens(SEQ, dist.get_world_size(), dist.get_rank())
    for heads, wanted, n in (((4, 1), 4, 2), ((4, 2), 4, 4)):
        inputs = tensors(*heads, torch.float64)
        for documents, window in ((None, None), (DOCUMENTS, None), (None, 7), (DOCUMENTS, 1), (DOCUMENTS, SEQ - 1)):
            with mock.patch.dict(PARTS, cpu=wanted), record_collectives() as calls:
                found = shared(*inputs, documents, window)
            assert_same(found, [x[:, own] for x in whole(*inputs, documents, window)], f"{heads} {documents} {window}")
            nbytes = 2 * BATCH * SEQ * heads[1] * WIDTH * 8 // n
            assert calls == [(name, nbytes) for name in n * ["all_gather"] + _backward(n)]
    found = []
    for backend in ("shared", "gloo", "gloo"):
        use_backend(group, backend)
        with mock.patch.dict(PARTS, cpu=2):
            found.append(close_to_whole_samples((4, 1), 20, torch.bfloat16))
    assert_identical(found[1:], [found[0]] * 2)


@on_every_rank(3)
def test_ranks_add_gradients_up_in_float32() -> None:
    """All keys weigh alike, so the query at position i gives each of its keys dy / (i + 1): 256, 1 and 1 of three ranks
    are 258, of which sums in bfloat16 leave 256."""
    own = ops.own_tokens(24, 3, dist.get_rank())
    q, dy = torch.zeros(2, 1, 24, 1, WIDTH, dtype=torch.bfloat16)
    expected = torch.zeros(q.shape)
    for position, share in ((3, 256), (7, 1), (15, 1)):
        dy[:, position] = share * (position + 1)
        expected[:, : position + 1] += share
    q, k, v = (q[:, own].requires_grad_() for _ in range(3))
    y = ops.context_attention(q, k, v, group=dist.group.WORLD)
    assert_identical(torch.autograd.grad(y, v, dy[:, own]), (expected[:, own].bfloat16(),))


def _backward(parts: int) -> list[str]:
    """A gather begins before the part before it is exchanged."""
    return ["all_gather", *["all_gather", "all_to_all"] * (parts - 1), "all_to_all"]


def test_parts_are_cut_by_heads_first() -> None:
    for heads, device, expected in (
        (8, "cpu", [(0, 8, (0, 1))]),
        (8, "cuda", [(2 * i, 2 * i + 2, (0, 1)) for i in range(4)]),
        (3, "cuda", [(i, i + 1, (0, 1)) for i in range(3)]),
        (2, "cuda", [(0, 1, (0,)), (0, 1, (1,)), (1, 2, (0,)), (1, 2, (1,))]),
        (1, "cuda", [(0, 1, (0,)), (0, 1, (1,))]),
    ):
        found = parts(4 * heads, heads, device)
        assert found == [Part(slice(4 * a, 4 * b), slice(a, b), places) for a, b, places in expected]


@given(
    size=st.integers(1, 4),
    chunk=st.integers(1, 4),
    cuts=st.sets(st.integers(1, 31)),
    window=st.one_of(st.none(), st.integers(1, 32)),
)
def test_halves_see_every_key_once(size: int, chunk: int, cuts: set[int], window: int | None) -> None:
    seq = 2 * size * chunk
    starts = [0, *sorted(cut for cut in cuts if cut < seq)]
    for rank in range(size):
        own, found = ops.own_tokens(seq, size, rank).tolist(), segments(starts, seq, size, rank)
        assert within(found, slice(0, seq), window) == found
        pairs, before = [], set[int]()
        for low in (0, seq // 2):
            now = set()
            for segment in within(found, slice(low, low + seq // 2), window):
                assert set(own[segment.rows][: segment.earlier]) == before.intersection(own[segment.rows])
                for query in own[segment.rows]:
                    keys = range(low + segment.first, low + min(segment.keys.stop, query - low + 1))
                    seen = [(query, key) for key in keys if window is None or key > query - window]
                    assert seen
                    pairs += seen
                    now.add(query)
            before = now
        expected = []
        for query in own:
            first = max(start for start in starts if start <= query)
            first = first if window is None else max(first, query + 1 - window)
            expected += [(query, key) for key in range(first, query + 1)]
        assert sorted(pairs) == sorted(expected)


def test_scores_made_whole_are_what_kernels_compute() -> None:
    """The way of CUDA devices in 32 and 64 bits, which nothing else runs without one."""
    q, k, v, dy = (x[0] for x in tensors(4, 4, torch.float64))
    found = [Segment(0, 4, 8, 3), Segment(4, 6, 12, 12)]

    def run(device: str) -> list[Tensor]:
        rows = q[:10].to(device)
        out, lse = torch.empty_like(rows), rows.new_empty(4, 10)
        totals = [torch.zeros_like(x) for x in (rows, k, v)]
        for window in (None, 5):
            flash.attend(rows, k, v, found, window, out, lse)
            flash.attend_backward(dy[:10], rows, k, v, found, window, out, lse, *totals)
        return [out, lse, *totals]

    expected = run("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "KERNELS", {})
        assert_same(run("cpu"), expected)


def by_virtual_ranks(size: int, window: int | None, inputs: list[Tensor], halves: bool) -> list[Tensor]:
    """Result and gradients of one sample, each rank's part computed in this process from all keys and values, in halves
    or at once."""
    q, k, v, dy = inputs
    y, wide = torch.empty_like(q), torch.promote_types(q.dtype, torch.float32)
    totals = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for rank in range(size):
        own, found = ops.own_tokens(SEQ, size, rank, q.device), RankSegments(DOCUMENTS[:1], SEQ, size, rank)
        out, lse, dq = torch.empty_like(q[own]), q.new_empty(4, len(own), dtype=wide), totals[0][own]
        places = [slice(0, SEQ // 2), slice(SEQ // 2, SEQ)] if halves else [slice(0, SEQ)]
        for keys in places:
            flash.attend(q[own], k[keys], v[keys], flash.prepared(found, keys, window, q)[0], window, out, lse)
        for keys in places:
            work, sums = flash.prepared(found, keys, window, q)[0], [total[keys] for total in totals[1:]]
            flash.attend_backward(dy[own], q[own], k[keys], v[keys], work, window, out, lse, dq, *sums)
        y[own], totals[0][own] = out, dq
    return [y, *(total.to(q.dtype) for total in totals)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_virtual_ranks_together_have_the_whole_result(device: str, dtype: torch.dtype) -> None:
    """On CUDA by variable-length calls, whose causal masks are aligned with the last key, not the first one."""
    inputs = tensors(4, 2, dtype)
    for window in (None, 7):
        exact, plain = (
            whole(*(x[:1].to(each) for x in inputs), DOCUMENTS[:1], window) for each in (torch.float64, dtype)
        )
        for size, halves in ((1, False), (1, True), (2, False), (2, True), (3, False), (3, True)):
            found = by_virtual_ranks(size, window, [x[0].to(device) for x in inputs], halves)
            for name, x, y, same in zip(("y", "dq", "dk", "dv"), found, exact, plain, strict=True):
                assert_kernel_close(x.cpu(), y[0], same[0], f"{name} {size} {window} {halves}")


def test_sequences_of_many_lengths_are_what_segments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable-length calls of CUDA in 16 bits, with plain sequences in the place of its kernels."""

    def sequences(q, k, queries, keys, window, is_causal) -> Iterator[tuple[slice, slice, Tensor]]:
        for rows, seen in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
            rows, seen = slice(*rows), slice(*seen)
            beside = torch.arange(len(q[rows]))[:, None] + len(k[seen]) - len(q[rows])
            key = torch.arange(len(k[seen]))
            hidden = (key > beside) & is_causal | (key <= beside - (SEQ + SEQ if window is None else window))
            yield rows, seen, torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)

    def forward(q, k, v, queries, keys, most, most_keys, *of_window) -> tuple[Tensor, Tensor]:
        found = []
        for rows, seen, bias in sequences(q, k, queries, keys, *of_window):
            assert bias.shape[0] <= most and bias.shape[1] <= most_keys
            y, lse = flash.PLAIN[0](*(flash._heads(x, 4) for x in (q[rows], k[seen], v[seen])), False, bias)
            found.append((y[0].transpose(0, 1), lse[0]))
        return torch.cat([y for y, _ in found]), torch.cat([lse for _, lse in found], 1)

    def backward(dout, q, k, v, out, lse, queries, keys, most, most_keys, *of_window) -> list[Tensor]:
        totals = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, seen, bias in sequences(q, k, queries, keys, *of_window):
            own = [flash._heads(x, 4) for x in (dout[rows], q[rows], k[seen], v[seen], out[rows])]
            dq, *dkv = (x[0].transpose(0, 1) for x in flash.PLAIN[1](*own, lse[None, :, rows], False, bias))
            totals[0][rows] += dq
            for total, x in zip(totals[1:], dkv, strict=True):
                total[seen] += x.unflatten(1, (2, 2)).sum(2)
        return totals

    monkeypatch.setattr(flash, "_varlen", lambda q: True)
    monkeypatch.setattr(flash, "flash_varlen", forward)
    monkeypatch.setattr(flash, "flash_varlen_backward", backward)
    inputs = tensors(4, 2, torch.float64)
    for window in (None, 1, 7, 20):
        expected = [x[0] for x in whole(*(x[:1] for x in inputs), DOCUMENTS[:1], window)]
        for size, halves in ((1, True), (2, False), (2, True), (3, True)):
            assert_same(by_virtual_ranks(size, window, [x[0] for x in inputs], halves), expected)


def test_calls_for_sequences_of_many_lengths_join_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys of a chunk's documents are adjacent; those of the next chunk begin elsewhere. They are made once
    for all layers."""
    monkeypatch.setattr(flash, "_varlen", lambda q: True)
    found = RankSegments([[0, 5, 6, 7, 20]], SEQ, 2, 0)
    batches = flash.prepared(found, slice(0, SEQ), None, torch.zeros(0))[0]
    assert [(each.rows, each.keys) for each in batches] == [(slice(0, 6), slice(0, 6)), (slice(6, 12), slice(7, 24))]
    (queries, keys, most, most_keys) = batches[1].lengths
    assert (queries.tolist(), keys.tolist(), most, most_keys) == ([0, 2, 6], [0, 13, 17], 4, 13)
    assert flash.prepared(found, slice(0, SEQ), None, torch.zeros(0))[0] is batches


@on_every_rank(2)
def test_what_does_not_fit_is_refused() -> None:
    group = dist.group.WORLD
    q, k, v, _ = (x[:, : SEQ // 2] for x in tensors(4, 2, torch.float32))
    of_another_length = RankSegments([[0]] * 3, 48, 2, dist.get_rank())
    for words, call in (
        (
            "seq_length=22 tokens cannot be shared by ranks=2 context-parallel ranks",
            lambda: (q[:, 1:], k[:, 1:], v[:, 1:]),
        ),
        ("4 heads of q and 3 of k", lambda: (q, k[:, :, :1].expand(-1, -1, 3, -1), v)),
        ("v is", lambda: (q, k, v[:, :, :1])),
        ("documents of 2 samples", lambda: (q, k, v, [[0], [0]])),
        ("ascending positions from 0", lambda: (q, k, v, [[0], [0, 3, 3], [0]])),
        ("ascending positions from 0", lambda: (q, k, v, [[0], [1], [0]])),
        ("ascending positions from 0 to below 24", lambda: (q, k, v, [[0], [0, 24], [0]])),
        ("documents of 3 samples of 48 tokens on 2 ranks, for 3 of 24 on 2", lambda: (q, k, v, of_another_length)),
        ("a sliding window of 0", lambda: (q, k, v, None, 0)),
        ("a sliding window of 2.5", lambda: (q, k, v, None, 2.5)),
    ):
        with pytest.raises(ValueError, match=words):
            ops.context_attention(*call(), group=group)
    with pytest.raises(RuntimeError, match="context_attention"):
        ops.context_attention(q, k, v, window=3 + dist.get_rank(), group=group)
