"""Digests tell blocks apart by every byte and exponent, but not by their order; and the table of scalings shows what
shares a scale beyond a shard."""

import torch

from checks.quantized_blocks import LEAST, differing, digests, joined_steps, run_hash_of
from checks.quantized_errors import MOST, Operands, beyond, errors_table, quantised, relative, results, rounded
from checks.scalings import ACTIVATIONS, WEIGHTS, scalings_table
from checks.scalings import differing as of_shards
from tpformer.kernels.quantize.reference import dequantize_weight, quantize_rows, quantize_weight

X = torch.randn(6, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_blocks_are_known_by_what_they_hold() -> None:
    whole = digests([quantize_rows(X)])
    assert len(whole) == 12
    parts = [quantize_rows(X[3:, 128:]), quantize_rows(X[:3, 128:]), quantize_rows(X[:, :128]), quantize_rows(X)]
    assert digests(parts) == whole, "in any order, and however often"
    values, exponents = quantize_rows(X)
    other = values.view(torch.uint8).clone()
    other[5, 255] ^= 1
    assert len(whole & digests([quantize_rows(X)._replace(values=other.view(values.dtype))])) == 11
    assert len(whole & digests([quantize_rows(X)._replace(exponents=exponents + 1)])) == 0
    weight = X.repeat(64, 1)[:256]
    assert digests([quantize_weight(weight)]) == digests([quantize_weight(part) for part in weight.chunk(2)])
    assert len(digests([quantize_weight(weight)])) == 4
    rounded = torch.where(weight.abs() > 0.5, 226.0, weight)  # to 224 scales, so that the linear has other bytes of it
    linears = quantize_weight(dequantize_weight(quantize_weight(rounded), torch.float64))
    assert linears.exponents.eq(quantize_weight(rounded).exponents - 1).all()
    assert digests([linears]) == digests([quantize_weight(rounded)]) != digests([quantize_weight(weight)])
    noise = X * 2.0 ** (LEAST - 20)
    assert not digests([quantize_rows(noise)]), "zeros but for rounding"


def test_a_run_is_the_sets_of_its_steps() -> None:
    a, b = (digests([quantize_rows(x)]) for x in X.chunk(2))
    assert run_hash_of(joined_steps([[a, b], [b, b]])) == run_hash_of([a | b, b]) != run_hash_of([b, a | b])
    assert differing(a, a) == 0 and differing(a, b) == 1 and differing(a | b, b) == 0.5


def test_only_blocks_do_not_depend_on_shards() -> None:
    """One scale a row depends on how features are cut, and one scale a matrix on everything."""
    table = [row for row in zip(*(column.cells for column in scalings_table().columns), strict=True)]
    shares = {str(name): (float(str(rows)), float(str(cut))) for name, rows, cut in table}
    assert len(shares) == len(ACTIVATIONS) + len(WEIGHTS) == 8
    for name, (rows, cut) in shares.items():
        assert (rows > 0.5) == ("matrix" in name) and (cut > 0.5) == ("128" not in name), name
        assert rows == 0 or rows > 0.5
    assert of_shards(lambda x: x, X.repeat(8, 1), 0) == 0


def test_errors_are_of_what_a_precision_rounds() -> None:
    """e4m3 has four bits fewer than bfloat16: about 16 times the error. A scale for many rows would have more."""
    drawn = torch.Generator().manual_seed(0)
    each = Operands(*(torch.randn(128, 128, dtype=torch.float64, generator=drawn) for _ in range(3)))
    exact = results(*each)
    errors = {name: [relative(y, right) for y, right in zip(made(each), exact, strict=True)]
              for name, made in {"bfloat16": rounded, "FP8": quantised}.items()}  # fmt: skip
    whole = {name: [*some, 1.0] for name, some in errors.items()}
    assert not beyond(whole) and all(8 < fp8 / bfloat16 for bfloat16, fp8 in zip(*errors.values(), strict=True))
    twice = {**whole, "FP8": [whole["FP8"][0], 2 * whole["FP8"][1], float("nan"), 1.0]}
    assert [text.split(", ")[1] for text in beyond(twice)] == ["gradient of the input", "gradient of the weight"]
    assert len(errors_table(whole).rows) == 4 and max(MOST) < 20
