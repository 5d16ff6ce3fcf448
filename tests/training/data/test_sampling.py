"""Samples come in permuted epochs and exact blends, and each is a pure function of (seed, index)."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpformer.training.data import BlendedSamples, IndexedDataset, IndexedWriter, TokenSamples, check_vocab, permute
from tpformer.training.data.indexed import token_dtype
from tpformer.training.step import batch


def dataset_of(path: Path, n_tokens: int, vocab_size: int = 65536) -> IndexedDataset:
    """Token t of the stream is t itself, so a window shows where it came from."""
    return dataset_with(path, np.arange(n_tokens), vocab_size)


def dataset_with(path: Path, ids: np.ndarray, vocab_size: int) -> IndexedDataset:
    with IndexedWriter(path, token_dtype(vocab_size)) as writer:
        writer.add_document(ids)
    return IndexedDataset(path)


@given(n=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_permute_is_a_bijection_and_stays_in_range_for_any_n(n: int, key: int) -> None:
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))
    large = n * key + 1
    assert all(0 <= permute(i, large, key) < large for i in (0, key % large, large - 1))


def test_permute_reaches_every_order_about_equally_and_moves_neighbours_apart() -> None:
    counts = Counter(tuple(permute(i, 4, key) for i in range(4)) for key in range(24 * 200))
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 70  # chi-squared, 23 degrees: P < 2e-6
    images = np.array([permute(i, 10_000, 1) for i in range(10_000)])
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05
    for index, n in ((-1, 5), (5, 5), (0, 0)):
        with pytest.raises(ValueError, match=rf"range\({n}\), got {index}"):
            permute(index, n, 0)


def test_each_epoch_is_its_own_permutation_of_the_windows_and_a_batch_has_the_next_ones(tmp_path: Path) -> None:
    samples = TokenSamples(dataset_of(tmp_path / "a", 1004), seq_length=10, seed=7)
    assert samples.n_samples == 100
    for n_tokens, n_samples in ((11, 1), (20, 1), (21, 2), (101, 10)):  # the last window ends inside of the stream
        plain = TokenSamples(dataset_of(tmp_path / str(n_tokens), n_tokens), seq_length=10, shuffle=False)
        starts = [int(plain.sample(i)[0]) for i in range(n_samples + 1)]
        assert plain.n_samples == n_samples and starts == [*range(0, 10 * n_samples, 10), 0], "in order"
        assert plain.sample(n_samples - 1)[-1] == 10 * n_samples
    orders = []
    for epoch in range(3):
        starts = []
        for i in range(epoch * 100, (epoch + 1) * 100):
            window = samples.sample(i)
            assert window.dtype == np.int64
            assert np.array_equal(window, np.arange(window[0], window[0] + 11))
            starts.append(int(window[0]))
        assert sorted(starts) == list(range(0, 1000, 10))
        orders.append(tuple(starts))
    assert len(set(orders)) == 3
    rows = batch(samples, first=98, count=4)  # these samples cross the end of an epoch
    assert rows.dtype == torch.int64 and rows.shape == (4, 11)
    assert rows.tolist() == [samples.sample(i).tolist() for i in range(98, 102)]
    with pytest.raises(ValueError, match="count 0"):
        batch(samples, 0, 0)


def blend(folder: Path, seed: int = 5) -> BlendedSamples:
    """Three datasets; the second one repeats within the first block."""
    parts = []
    for name, n_windows in (("a", 1100), ("b", 50), ("c", 700)):
        prefix = folder / name
        dataset = IndexedDataset(prefix) if Path(f"{prefix}.bin").exists() else dataset_of(prefix, 2 * n_windows + 1)
        parts.append(TokenSamples(dataset, seq_length=2, seed=seed))
    return BlendedSamples(parts, [6.0, 1.0, 3.0], seed)


def test_blend_is_exact_in_every_block_and_uses_each_dataset_without_gaps_or_repetition(tmp_path: Path) -> None:
    samples, again = blend(tmp_path), blend(tmp_path)
    indices = [0, 1, 999, 1000, 4321, 10**12]
    forward = [samples.sample(i).tolist() for i in indices]
    assert [again.sample(i).tolist() for i in reversed(indices)] == forward[::-1], "in any order, in a new object"
    assert [blend(tmp_path, seed=6).sample(i).tolist() for i in indices] != forward
    located = [samples.locate(i) for i in range(3000)]
    orders = {tuple(part for part, _ in located[first : first + 1000]) for first in (0, 1000, 2000)}
    assert len(orders) == 3 and all(Counter(order) == {0: 600, 1: 100, 2: 300} for order in orders)
    for part, quota in enumerate(samples.quotas):
        assert sorted(index for owner, index in located if owner == part) == list(range(3 * quota))
    # so the first epoch of the small dataset, its samples 0..49, shows each window once
    starts = [int(samples.sample(i)[0]) for i, (part, index) in enumerate(located) if part == 1 and index < 50]
    assert sorted(starts) == list(range(0, 100, 2))


@pytest.mark.parametrize(("weights", "quotas"), [
    ([1, 1, 1], [334, 333, 333]), ([0.7, 0.2, 0.1], [700, 200, 100]), ([1e-3, 0.999], [1, 999]), ([9], [1000]),
    ([1.5e308, 1.5e308], [500, 500]), ([5e-324, 5e-324], [500, 500]),  # R18: their sum overflowed
])  # fmt: skip
def test_quotas_are_the_largest_remainder(tmp_path: Path, weights: list[float], quotas: list[int]) -> None:
    part = TokenSamples(dataset_of(tmp_path / "a", 21), seq_length=10)
    assert BlendedSamples([part] * len(weights), weights, seed=0).quotas == quotas


def test_samples_and_blends_that_cannot_be_are_refused(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "a", 21)
    for lengths, weights, message in (
        ([10, 10], [1.0, 0.0], "positive"), ([10, 10], [1.0, -1.0], "positive"),
        ([10, 10], [1.0, float("nan")], "positive"), ([10, 10], [1.0, float("inf")], "positive"),
        ([10, 10], [1.0, 1e-4], r"weight 0\.0001 of dataset 1"), ([10, 10], [1.0], "2 datasets, 1 weights"),
        ([], [], "0 datasets"), ([10, 5], [1, 1], r"\[5, 10\]"),
        ([21], [1], r"a\.bin has 21 tokens, fewer than the 22 of one sample at seq_length 21"), ([0], [1], "got 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            BlendedSamples([TokenSamples(dataset, length) for length in lengths], weights, seed=0)
    samples = TokenSamples(dataset, seq_length=3)
    for bad in (samples, BlendedSamples([samples], [1], seed=0)):
        with pytest.raises(ValueError, match="got -1"):
            bad.sample(-1)


def test_check_vocab_sees_a_large_id_in_any_chunk_and_a_negative_one(tmp_path: Path) -> None:
    n_tokens = 2**20 + 10  # the only large id is in the second chunk
    dataset = dataset_with(tmp_path / "a", np.append(np.zeros(n_tokens - 1, np.int64), 256), 300)
    check_vocab(dataset, 257)
    with pytest.raises(ValueError, match=r"a\.bin has token ids from 0 to 256, .* vocab_size is 256; .* at least 257"):
        check_vocab(dataset, 256)
    dataset_of(tmp_path / "b", 4, vocab_size=70000)
    (tmp_path / "b.bin").write_bytes(np.array([0, 1, -1, 2], dtype="<i4").tobytes())
    with pytest.raises(ValueError, match="from -1 to 2"):
        check_vocab(IndexedDataset(tmp_path / "b"), 10)
