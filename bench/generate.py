"""How much faster is a token with a KV cache than without, and how many texts does one step serve?

Belongs here: the model, what is timed beside what, what must agree, the required ratios, the model of the time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.ratios import Row, compared, draw_ratios, ratios
from harness.runner import Bench
from harness.timing import interleave, timed
from tpformer.inference.generate import next_logits
from tpformer.models import GPT, GPTConfig, KVCache

from .plain import require_close

CONFIG = GPTConfig(vocab_size=257, seq_length=512, n_layers=4, hidden_size=256, n_heads=4)
CONTEXTS, BATCHES = (64, 256, 448), (1, 8, 32)
CACHED, UNCACHED, MODEL = "cached", "uncached", "bytes and FLOPs"
REQUIRED_CONTEXT, REQUIRED = 256, 5.0  # tokens of context, and how much faster a token is with a cache
SERVED_CONTEXT, SERVED = 64, 8.0  # tokens of context, and how many times the tokens of 1 text 32 texts get
TOLERANCE = 1e-12  # float64
NOTE = (
    "One core, float32. A step is the logits of one token for each text, and the context is what it attends to. bytes "
    "and FLOPs: the longer of two times, to read weights and cache once, and to compute, at the read bandwidth and the "
    "GEMM speed that this core showed before anything else was timed. The host's work for each operation is not in it."
)


def text(context: int) -> list[int]:
    ids = torch.randint(CONFIG.vocab_size or 0, (context,), generator=torch.Generator().manual_seed(0))
    return ids.tolist()


def build(dtype: torch.dtype = torch.float32) -> GPT:
    return GPT(CONFIG, seed=1, dtype=dtype).eval()


def cached(model: GPT, context: int, batch: int = 1) -> Callable[[], Tensor]:
    """A step with a cache; each forgets its token again, so that the context stays."""
    cache = KVCache(context)
    *before, last = text(context)
    next_logits(model, [before], cache)
    cache.select([0] * batch)

    def step() -> Tensor:
        logits = next_logits(model, [[last]] * batch, cache)
        cache.truncate([context - 1] * batch)
        return logits

    return step


def uncached(model: GPT, context: int) -> Callable[[], Tensor]:
    """A step that computes the whole text again."""
    ids = torch.tensor([text(context)])

    @torch.no_grad()
    def step() -> Tensor:
        return model(ids)[:, -1]

    return step


def check(quick: bool) -> None:
    model = build(torch.float64)
    for context in CONTEXTS:
        for batch in BATCHES:
            expected = uncached(model, context)().expand(batch, -1)
            require_close("logits", cached(model, context, batch)(), expected, TOLERANCE)


def roofs() -> tuple[float, float]:
    """(bytes/s of a read, FLOP/s of a GEMM) of this core, each the best of five."""
    x, a = torch.ones(2**25), torch.randn(512, 512)

    def best(function: Callable[[], object]) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return x.nbytes / best(x.sum), 2 * 512**3 / best(lambda: a @ a)


def predicted(context: int, batch: int, bandwidth: float, speed: float, *, cache: bool = True) -> float:
    """Seconds of a step in float32."""
    c = CONFIG
    weights = sum(p.numel() for name, p in build().named_parameters() if "embed_positions" not in name)
    flops_of_token = 2 * weights + 4 * c.n_layers * context * c.query_size
    if not cache:
        flops = context * (2 * weights + 2 * c.n_layers * context * c.query_size)
        return max(4 * weights / bandwidth, flops / speed)
    kept = 2 * c.n_layers * batch * context * c.kv_size
    return max(4 * (weights + kept) / bandwidth, batch * flops_of_token / speed)


@contextmanager
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rows(quick: bool) -> list[Row]:
    rounds, steps = (2, 2) if quick else (7, 10)
    contexts, found, served = CONTEXTS[:1] if quick else CONTEXTS, [], []
    with one_core():
        measured = roofs()
        model = build()
        for context in contexts:
            shape = f"4 layers of 256, context {context}"
            predictions = {batch: predicted(context, batch, *measured) for batch in BATCHES}
            samples = {f"{batch} texts": timed(cached(model, context, batch), steps) for batch in BATCHES}
            samples[UNCACHED] = timed(uncached(model, context), max(1, steps // 5))
            seconds = interleave(samples, rounds)
            one = seconds[CACHED] = seconds["1 texts"]
            seconds[MODEL] = [predictions[1]] * rounds
            bar = (REQUIRED,) if context == REQUIRED_CONTEXT else ()
            found += compared(
                "a token", shape, seconds, [(CACHED, UNCACHED, *bar), (CACHED, MODEL)], unit="tokens/s", amount=1
            )
            seconds[MODEL] = [predicted(context, 1, *measured, cache=False)] * rounds
            found += compared("a token", shape, seconds, [(UNCACHED, MODEL)], unit="tokens/s", amount=1)
            for batch in BATCHES[1:]:
                per_token = {f"{batch} texts": [s / batch for s in seconds[f"{batch} texts"]], "1 text": one}
                per_token[MODEL] = [predictions[batch] / batch] * rounds
                bar = (SERVED,) if (context, batch) == (SERVED_CONTEXT, BATCHES[-1]) else ()
                pairs = [(f"{batch} texts", "1 text", *bar), (f"{batch} texts", MODEL)]
                served += compared("tokens of all texts", shape, per_token, pairs, unit="tokens/s", amount=1)
    return found + served


BENCH = Bench(
    name="generate",
    description="a token with a KV cache against one without, and many texts in one step against one",
    check=check,
    run=ratios(rows),
    draw=draw_ratios,
    note=NOTE,
)
