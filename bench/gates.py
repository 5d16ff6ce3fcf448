"""Does every kernel give what it should on this GPU, asked before anything is timed?

Belongs here: the gates of other benches, on --quick's shapes, one after the other. One that fails stops no other.
"""

import argparse
import time
from collections.abc import Sequence

from harness.runner import Bench, Report, columns

LETTERS = 120  # of what a gate says


def verdict(bench: Bench) -> str:
    """What a bench's gate says; nothing if it passes."""
    assert bench.check is not None
    try:
        bench.check(True)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:LETTERS]
    return ""


def gates(benches: Sequence[Bench]) -> Bench:
    """The bench of these benches' gates."""
    gated = [bench for bench in benches if bench.check is not None]

    def run(options: argparse.Namespace) -> Report:
        rows, table = [], columns(("gate", "", "seconds"))
        for bench in gated:
            print(f"gate: {bench.name}", flush=True)  # the last line, should a kernel wait for ever
            begun = time.perf_counter()
            said = verdict(bench)
            rows.append({"gate": bench.name, "said": said, "seconds": round(time.perf_counter() - begun, 1)})
            table.add_row(bench.name, said or "passes", str(rows[-1]["seconds"]))
        wrong = [f"{row['gate']}: {row['said']}" for row in rows if row["said"]]
        return Report([table], {"rows": rows}, wrong, f"all {len(rows)} gates pass")

    description = "the gates of all benches of kernels, on --quick's shapes: is every kernel right on this GPU"
    return Bench(name="gates", description=description, device="cuda", options={}, run=run, draw=None)
