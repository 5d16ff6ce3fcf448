"""The keys and values of all layers of a GPT, kept while text is generated.

Belongs here: how many tokens each sample has in them. One layer's memory is in layers/cache.py.
"""

from collections.abc import Sequence

from tpformer.layers import Positions
from tpformer.layers.cache import LayerCache


class KVCache:
    """What a GPT keeps of the tokens it has seen, so that each new one costs one token's work.

        cache = KVCache()
        logits = model(prompt, cache=cache)          # (batch, seq) -> (batch, seq, vocab)
        logits = model(next_token, cache=cache)      # (batch, 1) -> (batch, 1, vocab)

    lengths: how many tokens each sample has. They may differ: `GPT.forward` takes right-padded rows with `lengths`.
    capacity: for how many tokens of a sample memory is made at first. It is doubled when it is full. With all of them
    known beforehand, nothing is copied.
    Memory of a rank, in bytes: 2 * n_layers * batch * capacity * (the rank's key-value heads) * head_dim * itemsize of
    the compute dtype. Each rank keeps the heads that its queries need.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = max(1, capacity)
        self.lengths: list[int] = []
        self._layers: dict[str, LayerCache] = {}
        self._tables: dict = {}

    def layer(self, name: str) -> LayerCache:
        """The memory of one layer."""
        if name not in self._layers:
            self._layers[name] = LayerCache(self.capacity)
        return self._layers[name]

    def positions(self, batch: int, seq_length: int) -> Positions:
        """The positions of seq_length further tokens of each sample. ValueError for another batch than before."""
        if self.lengths and len(self.lengths) != batch:
            raise ValueError(f"{batch} samples, but the cache has {len(self.lengths)}: make one for each batch")
        return Positions(batch, seq_length, offset=self.lengths or 0, tables=self._tables)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what comes after these numbers of tokens. ValueError for more tokens than there are."""
        fits = len(lengths) == len(self.lengths)
        if not fits or any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"a cache of {self.lengths} tokens cannot be cut to {list(lengths)}: only shortened")
        self.lengths = list(lengths)

    def select(self, samples: Sequence[int]) -> None:
        """Keep these samples, in this order; one may come several times, to go on in several ways. Copies them."""
        self.lengths = [self.lengths[sample] for sample in samples]
        for layer in self._layers.values():
            layer.select(samples)
