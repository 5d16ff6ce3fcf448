"""Closed forms of the kernels' loops, by hand; `make execute` compares them with what compiled kernels do."""

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from tpformer.kernels.configurations import TILES
from tpformer.ops.transports import exchange
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

LARGE = TILES["large"]  # 128 x 256, 8 rows a step


def counts(op: str, m: int, n: int, k: int, programs: int = 132, signals: int = 1) -> exchange.Exchange:
    return exchange.tiled_exchange(op, (m, n, k), 8, 2, LARGE, programs, signals)


def test_two_shot_all_reduce() -> None:
    """8 chunks of 512 rows: 4 x 32 tiles of 16 units, 2048 units to add and 7 x 2048 to copy."""
    found = counts(ALL_REDUCE, 4096, 8192, 1024)
    assert found.tiles == 8  # of 1024
    assert found.waits == 16 * 8 + 109  # ceil(2048 / 132) units with 8 sources each, ceil(7 * 2048 / 132) copies
    assert found.releases == 8 + 16 * 7
    assert found.sent == 2 * 7 * 512 * 8192 * 2
    assert found.seconds == pytest.approx(237 * 0.6e-6 + 120 * 2e-6)


def test_one_shot_all_reduce() -> None:
    found = counts(ALL_REDUCE, 16, 8192, 3584)
    assert (found.tiles, found.waits, found.releases) == (1, 8 * 4, 8)  # 32 tiles, 512 units
    assert found.sent == 7 * 128 * 8192 * 2  # whole tiles, although 16 rows exist


def test_reduce_scatter() -> None:
    found = counts(SCATTER, 8192, 4096, 1792)
    assert (found.tiles, found.waits, found.releases) == (8, 8, 1)  # 1024 tiles; 128 units; 64 flags
    assert found.sent == 7 * 1024 * 4096 * 2


def test_gather() -> None:
    found = counts(GATHER, 8192, 1792, 4096, programs=124, signals=8)
    assert (found.tiles, found.waits, found.releases) == (4, 56, 0)
    assert found.sent == 7 * 1024 * 4096 * 2
    assert counts(GATHER, 8192, 1792, 4096).waits == 7
    assert counts(GATHER, 8192, 1792, 4095).sent == found.sent  # rows are padded to 16 bytes
