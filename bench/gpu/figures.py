"""What a file of results says, in some words.

Belongs here: a way for each kind of results. The whole of them is in the file.
"""

import json
from pathlib import Path

from harness.ratios import Row

from ..matmul_trials import TRIAL

ASSUMED = "kernels/cost.py"  # the baseline of what the model has constants for


def figure(path: Path) -> str:
    """What a result says, in some words."""
    if path.suffix != ".json":
        return f"see {path.name}"
    found = json.loads(path.read_text())
    if "counts" in found:
        return ", ".join(f"{number} {outcome}" for outcome, number in found["counts"].items())
    rows = found["rows"]
    if "gate" in rows[0]:
        wrong = [row["gate"] for row in rows if row["said"]]
        return f"{len(rows) - len(wrong)} of {len(rows)} pass" + (f", not {', '.join(wrong)}" if wrong else "")
    if "tokens_per_second" in rows[0]:
        return "; ".join(f"{row['tokens_per_second']:,.0f} tokens/s" for row in rows)
    trials = [f"{row['provider']} {row['ratio']:.3f}" for row in rows if row["case"] == TRIAL]
    if trials:
        return "; ".join(trials)
    return constants(rows) if rows[0]["baseline"] == ASSUMED else ratio(rows)


def constants(rows: list[Row]) -> str:
    """The last value of each case."""
    last = {row["case"]: f"{row['value']:g} {row['unit']}" for row in rows if row["baseline"] == ASSUMED}
    return "; ".join(f"{case} {value}" for case, value in last.items())


def ratio(rows: list[Row]) -> str:
    """The last mean that has a bar, else the last mean, else the first ratio; and how many bars hold."""
    measured = [row for row in rows if not row["case"].startswith("prediction") and "predicted" not in row["provider"]]
    means = [row for row in measured if row["case"] == "geometric mean"] or measured[:1]
    best = next((row for row in reversed(means) if row["bar"] is not None), means[-1])
    bars = [row["ok"] for row in rows if row["bar"] is not None]
    return f"{best['ratio']:.3f} of {best['baseline']}" + (f", {sum(bars)} of {len(bars)} bars" if bars else "")
