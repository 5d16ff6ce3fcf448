"""Measured times of the transports by shape: the table that overrides the performance model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.words import shown

from .checks import parsed

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = ("float32", "bfloat16", "float16", "float64")
TIMES = {"sequential": "sequential_us", "pipelined": "pipelined_us", "fused": "fused_us"}
# a fused gather by copy engines and by programs that push; a row may lack them
WAYS = {"copy": "copy_us", "push": "push_us"}
SIZES = ("ranks", "m", "n", "k")
FARTHEST = 1.0  # in log2: a row stands for shapes up to a factor 2 away in each of m, n and k


class MeasuredRow(NamedTuple):
    """One row: an operation, its shape (ops.transports.interface.Request), and microseconds by transport.

    times lacks the transports that were not measured, and `ways`, of a fused gather, those of WAYS.
    """

    number: int
    op: str
    ranks: int
    dtype: str
    m: int
    n: int
    k: int
    times: dict[str, float]
    ways: dict[str, float]


class TransportTable(NamedTuple):
    """The rows of one file, in its order."""

    path: str
    rows: list[MeasuredRow]

    def nearest(self, op: str, ranks: int, dtype: str, m: int, n: int, k: int) -> MeasuredRow | None:
        """The row of the same op, ranks and dtype whose shape is nearest, by the sum of |log2| of each size's ratio.

        None where every row is more than a factor 2 away in one of m, n and k.
        """
        best, distance = None, math.inf
        for row in self.rows:
            if (row.op, row.ranks, row.dtype) != (op, ranks, dtype):
                continue
            apart = [abs(math.log2(a / b)) for a, b in zip((m, n, k), (row.m, row.n, row.k), strict=True) if a]
            if len(apart) == 3 and max(apart) <= FARTHEST and sum(apart) < distance:
                best, distance = row, sum(apart)
        return best


def read_transport_table(path: str | Path) -> TransportTable:
    """The table in a JSON file: a list of {op, ranks, dtype, m, n, k, sequential_us, pipelined_us, fused_us}.

    Times may be null (not measured). A gather's row may have copy_us and push_us, too: the times of the fused transport
    by copy engines and by programs that push. Other keys are ignored. FileNotFoundError without the file; a ValueError
    names the file, the row and the key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no table of measured transports {path}: leave parallel.transport_table out")
    values = parsed(path, "JSON", json.loads)
    if not isinstance(values, list):
        raise ValueError(f"{path}: expected a list of rows, not {type(values).__name__}")
    return TransportTable(str(path), [_row(path, number, row) for number, row in enumerate(values)])


def _row(path: Path, number: int, row: Any) -> MeasuredRow:
    where = f"{path} row {number}"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, not {shown(row)}")
    missing = [key for key in ("op", "dtype", *SIZES, *TIMES.values()) if key not in row]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; a time that was not measured is null")
    if row["op"] not in OPERATIONS:
        raise ValueError(f"{where}: op {shown(row['op'])}, expected one of {', '.join(OPERATIONS)}")
    if row["dtype"] not in DTYPES:
        raise ValueError(f"{where}: dtype {shown(row['dtype'])}, expected one of {', '.join(DTYPES)}")
    for key in SIZES:
        if type(row[key]) is not int or row[key] < 1:
            raise ValueError(f"{where}: {key} {shown(row[key])}, expected a whole number from 1")
    sizes = (row["m"], row["n"], row["k"])
    return MeasuredRow(
        number, row["op"], row["ranks"], row["dtype"], *sizes, _times(where, row, TIMES), _times(where, row, WAYS)
    )


def _times(where: str, row: dict, keys: dict[str, str]) -> dict[str, float]:
    """The microseconds of a row under these keys, by name, without those that were not measured."""
    times = {name: row[key] for name, key in keys.items() if row.get(key) is not None}
    for name, time in times.items():
        if type(time) not in (int, float) or not 0 < time < math.inf:
            raise ValueError(f"{where}: {keys[name]} {shown(time)}, expected microseconds above 0, or null")
    return times
