"""Which tokens sample i has. It is a pure function of (seed, i), so there is no state to save or restore.

Only orders, windows and blends belong here. A resumed run goes on exactly by asking for the next sample's number.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .indexed import IndexedDataset

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: splitmix64's increment
_ROUNDS = 6
_BLOCK = 1000


class Samples(Protocol):
    """An endless numbered sequence of training windows."""

    @property
    def seq_length(self) -> int:
        """The number of inputs, and of targets, in a window."""

    def sample(self, i: int) -> np.ndarray:
        """Window i >= 0, int64 (seq_length + 1,): inputs are [:-1] and targets [1:]; -1 - id for no targets."""


def _mix(value: int) -> int:
    """splitmix64's output function (Steele, Lea & Flood 2014): 64 bits to 64 bits, each depending on all."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _key(*parts: int) -> int:
    """A 64-bit key made from several integers. It depends on their order and number, too."""
    key = 0
    for part in parts:
        key = _mix((key + _GOLDEN) ^ _mix(part))
    return key


def permute(index: int, n: int, key: int) -> int:
    """The image of index under a keyed bijection of range(n), in O(1) memory and time for any n.

    It is a Feistel network over pairs of digits in the smallest base whose square is at least n. An image outside of
    range(n) is permuted again until it falls inside, which keeps the map a bijection ("cycle walking"). Both ideas are
    from Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). The shuffle is not cryptographic.

    Raises ValueError unless 0 <= index < n.
    """
    if not 0 <= index < n:
        raise ValueError(f"index must lie in range({n}), got {index}")
    base = math.isqrt(n - 1) + 1
    first_state = _mix(key)
    while True:
        left, right = divmod(index, base)
        state = first_state
        for _ in range(_ROUNDS):
            state += _GOLDEN
            left, right = right, (left + _mix(state ^ right)) % base
        index = left * base + right
        if index < n:
            return index


class TokenSamples:
    """The windows of one dataset, each epoch in an order of its own, without replacement.

    The stream is cut into n_samples = (n_tokens - 1) // seq_length windows of seq_length + 1 tokens. A shorter rest at
    its end is left out. Neighbours share one token, so each token used, but the first, is a target once per epoch.
    With shuffle=False, as for validation, the windows come in the stream's order, and the seed has no effect.
    Raises ValueError when seq_length < 1 or the dataset has fewer than seq_length + 1 tokens.
    """

    def __init__(self, dataset: IndexedDataset, seq_length: int, seed: int = 0, *, shuffle: bool = True) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be at least 1, got {seq_length}")
        if dataset.n_tokens < seq_length + 1:
            raise ValueError(
                f"{dataset.bin_path} has {dataset.n_tokens} tokens, fewer than the {seq_length + 1} of one sample at "
                f"seq_length {seq_length}; use a longer dataset or a shorter seq_length"
            )
        self.dataset = dataset
        self.seq_length = seq_length
        self.n_samples = (dataset.n_tokens - 1) // seq_length
        self._seed = seed
        self._shuffle = shuffle

    def sample(self, i: int) -> np.ndarray:
        """Window i, int64 (seq_length + 1,), of epoch i // n_samples; ValueError when i < 0."""
        _check_index(i)
        epoch, window = divmod(i, self.n_samples)
        if self._shuffle:
            window = permute(window, self.n_samples, _key(self._seed, epoch))
        start = window * self.seq_length
        return self.dataset.tokens(start, start + self.seq_length + 1)

    def n_targets(self, n_samples: int) -> int:
        """Targets of the first n_samples windows in the stream's order. ValueError if there is none."""
        found = self.dataset.n_targets(1, 1 + n_samples * self.seq_length)
        if found == 0:
            raise ValueError(
                f"{self.dataset.mask_path} marks no target in the first {n_samples} samples of {self.seq_length} "
                f"tokens, so they have no loss: take more samples, or another dataset"
            )
        return found


class BlendedSamples:
    """Several datasets mixed in proportion to their weights, in every block of 1000 samples.

    In each block a dataset has the same number of samples: its share, rounded by largest remainder. The order in a
    block is keyed by (seed, block). Each dataset goes on where it stopped in the block before.
    Raises ValueError when there are no parts, the numbers of parts and weights or the sequence lengths differ, a weight
    is not positive and finite, or a weight is too small for even one sample in 1000.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float], seed: int) -> None:
        if len(parts) == 0 or len(parts) != len(weights):
            raise ValueError(f"a blend needs one weight per dataset, got {len(parts)} datasets, {len(weights)} weights")
        lengths = {part.seq_length for part in parts}
        if len(lengths) > 1:
            raise ValueError(f"all datasets of a blend must have one seq_length, got {sorted(lengths)}")
        self.seq_length = parts[0].seq_length
        self.quotas = _quotas(weights)
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(self.quotas))
        self._seed = seed

    def sample(self, i: int) -> np.ndarray:
        """Sample i of the blend, int64 (seq_length + 1,); ValueError when i < 0."""
        part, index = self.locate(i)
        return self._parts[part].sample(index)

    def locate(self, i: int) -> tuple[int, int]:
        """(number of the dataset that sample i comes from, number of the sample in it). ValueError when i < 0."""
        _check_index(i)
        block, position = divmod(i, _BLOCK)
        # the block size in the key makes this order differ from the epochs' orders, which have the same seed
        slot = permute(position, _BLOCK, _key(self._seed, _BLOCK, block))
        part = bisect.bisect_right(self._ends, slot)
        quota = self.quotas[part]
        rank = slot - (self._ends[part] - quota)
        return part, block * quota + rank


def check_vocab(dataset: IndexedDataset, vocab_size: int) -> None:
    """Raise ValueError when the dataset has an id outside 0 .. vocab_size - 1; one pass over the file."""
    extremes = [(int(chunk.min()), int(chunk.max())) for chunk in dataset.chunks()]
    lowest, highest = min(low for low, _ in extremes), max(high for _, high in extremes)
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{dataset.bin_path} has token ids from {lowest} to {highest}, but the model's vocab_size is {vocab_size}; "
            f"set vocab_size to at least {highest + 1}, or rebuild the dataset with the model's tokenizer"
        )


def _check_index(i: int) -> None:
    if i < 0:
        raise ValueError(f"samples are numbered from 0, got {i}")


def _quotas(weights: Sequence[float]) -> list[int]:
    """How many of every _BLOCK samples come from each dataset: shares rounded by largest remainder, so they add up."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"blend weights must be positive and finite, got {list(weights)}")
    exponent = math.frexp(max(weights))[1]
    parts = [math.ldexp(weight, -exponent) for weight in weights]  # the same ratios to the bit, and no sum overflows
    shares = [_BLOCK * part / math.fsum(parts) for part in parts]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: quotas[part] - shares[part])
    for part in by_remainder[: _BLOCK - sum(quotas)]:
        quotas[part] += 1
    if 0 in quotas:
        part = quotas.index(0)
        raise ValueError(
            f"weight {weights[part]} of dataset {part} is less than one sample in {_BLOCK}: it would never be seen; "
            "raise the weight or leave the dataset out"
        )
    return quotas
