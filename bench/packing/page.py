"""The tables of the last section of docs/memory.md, made from the results file.

Belongs here: which numbers stand in which table. The page says what they mean; each table is between two marks in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpformer.kernels.pack.format import GROUP, RECORD

from ..layer_memory import ORDER
from ..marks import filled, markdown, write_page
from ..provenance import ROOT
from .forms import BLOCKS, CANDIDATES, HEADROOMS, NUMBERED, VALUE
from .outliers import OUTLIERS

PAGE = ROOT / "docs" / "memory.md"
TRAINED = "trained"  # the tensors of all runs' recorded steps
BITS = 8 * RECORD / GROUP  # of a value in the form that ships
Row = Mapping[str, Any]
Cells = list[tuple[str, ...]]


def rate_words(rate: float) -> str:
    """A share of values in parts of a million, or from one percent on in percent."""
    return f"{1e2 * rate:.1f} %" if rate >= 0.01 else f"{1e6 * rate:.0f}"


def together(rows: Sequence[Row]) -> dict[str, float]:
    """rate and entropy of several rows, weighted by their values, and the worst group."""
    values = sum(row["values"] for row in rows)
    means = {key: sum(row["values"] * row[key] for row in rows) / values for key in ("rate", "entropy")}
    return {**means, "worst": max(row["worst"] for row in rows)}


def shapes_of(result: Row) -> list[str]:
    """The names of the architectures, in order."""
    return list(dict.fromkeys(row["shape"] for row in result["rows"]))


def words_of(rows: Sequence[Row]) -> str:
    """Escapes, the worst group and the bits of an exponent, of rows together."""
    found = together(rows)
    return f"{rate_words(found['rate'])}, {found['worst']}, {found['entropy']:.2f}"


def tensor_cells(result: Row) -> Cells:
    """A column for each architecture. The first lines are of all tensors of a recorded step. The others are of a saved
    tensor: they have escapes and entropy of the last step, and the worst group of all recorded steps."""
    shapes, last = shapes_of(result), result["steps"]
    cells: Cells = [("saved tensor", *shapes)]
    for step in dict.fromkeys(row["step"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["step"] == step]
        words = (words_of([row for row in rows if row["shape"] == shape]) for shape in shapes)
        cells.append((f"all of step {step}", *words))
    for name in (each for each in ORDER if any(row["tensor"] == each for row in result["rows"])):
        line = [name]
        for shape in shapes:
            rows = [row for row in result["rows"] if (row["shape"], row["tensor"]) == (shape, name)]
            worst = max((row["worst"] for row in rows), default=0)
            at_end = [{**row, "worst": worst} for row in rows if row["step"] == last]
            line.append(words_of(at_end) if at_end else "")
        cells.append(tuple(line))
    return cells


def distributions_of(result: Row) -> list[str]:
    """The names of the kinds of tensors that forms are tried on, in order."""
    return list(dict.fromkeys(row["distribution"] for row in result["rules"]))


def rule_cells(result: Row) -> Cells:
    """A line for each rule for the base; for each distribution escapes, and the worst group."""
    names, rules = distributions_of(result), result["rules"]
    cells: Cells = [("base of a block", *names)]
    for headroom in dict.fromkeys(row["headroom"] for row in rules):
        of_rule = {row["distribution"]: row for row in rules if row["headroom"] == headroom}
        words = (f"{rate_words(of_rule[name]['rate'])}, {of_rule[name]['worst']}" for name in names)
        cells.append(("maximum" if headroom is None else f"at most mean + {headroom}", *words))
    return cells


def group_cells(result: Row) -> Cells:
    """A line for each candidate for block, group and slots: bits, the share of watched steps that overflow, and the
    worst group of the made distributions."""
    shapes, made = shapes_of(result), [name for name in distributions_of(result) if name != TRAINED]
    cells: Cells = [("block", "group", "slots", "bits", *(f"{shape} overflows" for shape in shapes), *made)]
    for block, group, slots in CANDIDATES:
        line = [f"{block}", f"{group}", f"{slots}", f"{12 + 8 / block + VALUE * slots / group:.2f}"]
        size = block, group
        for own in (row["worst"] for row in result["watched"] if (row["block"], row["group"]) == size):
            line.append(f"{sum(each > slots for each in own)} of {len(own)} steps")
        line += [f"{row['worst']}" for row in result["groups"] if (row["block"], row["group"]) == size]
        cells.append(tuple(line))
    return cells


def forms_of(result: Row, distribution: str) -> list[Row]:
    """The rows of a distribution, one for each number of bits and block: with the headroom that had the fewest escapes
    of the trained tensors."""
    trained = [row for row in result["forms"] if row["distribution"] == TRAINED]
    best: dict[tuple[int, int], Row] = {}
    for row in trained:
        key = row["bits"], row["block"]
        best[key] = min(best.get(key, row), row, key=lambda each: each["rate"])
    own = {
        (row["bits"], row["block"], row["headroom"]): row
        for row in result["forms"]
        if row["distribution"] == distribution
    }
    return [own[bits, block, row["headroom"]] for (bits, block), row in best.items()]


def form_words(row: Row) -> str:
    """Escapes, the worst group, bits with slots for that group and at the rate."""
    slots = f"{row['bits_of_slots']:.2f}" if row["slots"] <= NUMBERED else "none"
    return f"{rate_words(row['rate'])}, {row['worst']}, {slots}, {row['bits_of_rate']:.2f}"


def form_cells(result: Row) -> Cells:
    """A line for each size of a block; for each number of bits the trained tensors, then those with outliers."""
    kinds = {name: forms_of(result, name) for name in (TRAINED, OUTLIERS)}
    cells: Cells = [("block", *(f"{bits} bits, {kind}" for kind in kinds for bits in HEADROOMS))]
    for block in BLOCKS:
        found = {(kind, row["bits"]): row for kind, rows in kinds.items() for row in rows if row["block"] == block}
        cells.append((str(block), *(form_words(found[kind, bits]) for kind in kinds for bits in HEADROOMS)))
    return cells


def choice_cells(result: Row) -> Cells:
    """A line for each recompute mode, kept as it is and packed."""
    cells: Cells = [("recompute", "sbh/t", "packed", "GEMM FLOPs more")]
    for row in result["recompute"]:
        packed, more = row["kept"] * BITS / VALUE, 100 * row["gemms"]
        cells.append((row["recompute"], f"{row['kept']}", f"{packed:.1f}", f"{more:.1f} %" if more else "none"))
    return cells


def all_cells(result: Row) -> dict[str, Cells]:
    """The cells of each table, by the name in its mark."""
    return {
        "packing_tensors": tensor_cells(result),
        "packing_rules": rule_cells(result),
        "packing_groups": group_cells(result),
        "packing_forms": form_cells(result),
        "packing_recompute": choice_cells(result),
    }


def tables(result: Row) -> dict[str, str]:
    """The page's tables, by the name in their mark."""
    found = {name: markdown(cells) for name, cells in all_cells(result).items()}
    machine, torch = result["machine"], result["versions"]["torch"]
    found["packing_tensors"] += (
        f"\n\n{machine['cpu']}, {machine['threads']} thread(s), torch {torch}, {result['date']}."
    )
    return found


def page(text: str, result: Row) -> str:
    """docs/memory.md with its tables made again."""
    return filled(text, tables(result), "docs/memory.md")


def write_files(folder: Path) -> None:
    """The page of the repository's own results."""
    write_page(folder / "packing.json", PAGE, page)
