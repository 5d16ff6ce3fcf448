"""The bench of packed activations: its counts against loops, names of what is saved, and the page of its results."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from commands import Commands, execute

from bench.packing import bench, outliers, page
from bench.packing.forms import (
    LARGEST_GROUP,
    Form,
    Tally,
    compared,
    entropy,
    escapes,
    exponent_fields,
    grouped,
    tallied,
)
from bench.provenance import RESULTS
from tpformer.kernels.pack import reference
from tpformer.kernels.pack.format import BLOCK, GROUP, SLOTS

COMMITTED = json.loads((RESULTS / "cpu" / "packing.json").read_text())

# Runs in a process of its own, as it joins and leaves a process group.
RUN = """
import dataclasses
from bench.packing import bench, outliers
from bench.packing.training import GPT, LLAMA, MOE, Size
from bench.runner import main
from testing import build_small_split

bench.build_stdlib = build_small_split
small = {"n_layers": 2, "seq_length": 16, "hidden_size": 16, "n_heads": 2, "ffn_hidden_size": 48}
moe = small | {"expert_ffn_size": 16, "shared_expert_size": 16}
shapes = {"GPT": (GPT, small), "Llama": (LLAMA, small), "MoE": (MOE, moe)}
bench.SHAPES = {name: dataclasses.replace(config, **sizes) for name, (config, sizes) in shapes.items()}
bench.Size = lambda: Size(4, 2)
outliers.ROWS, outliers.HIDDEN = 16, 512
sys.exit(main(["packing"], [bench.BENCH], Path(sys.argv[1])))
"""


def values(count: int = LARGEST_GROUP + 200) -> torch.Tensor:
    """bfloat16 values of all magnitudes: a narrow spread, a wide one, zeros, denormals, infinities."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator)
    x[:8192] *= torch.exp2(8 * torch.randn(8192, generator=generator))
    x[9000:9200], x[9300:9303], x[9400] = 0, 1e-39, math.inf
    return x.bfloat16()


def escapes_by_hand(x: torch.Tensor, form: Form) -> list[int]:
    """As forms.escapes, value by value."""
    fields = [(int(bits) >> 7) & 255 for bits in x.view(torch.int16).tolist()]
    counts = [0] * (-(-len(fields) // LARGEST_GROUP) * LARGEST_GROUP // form.group)
    for start in range(0, len(fields), form.block):
        own = [each for each in fields[start : start + form.block] if each]
        if own:
            base = max(own)
            if form.headroom is not None:
                base = min(base, sum(own) // len(own) + form.headroom)
            counts[start // form.group] += sum(not 0 <= base - each < 2**form.bits - 2 for each in own)
    return counts


def test_escapes_are_those_of_a_loop_and_of_the_form_that_ships() -> None:
    x = values()
    for form in (*compared(), *grouped(), *outliers.RULES):
        assert escapes(exponent_fields(x), form).tolist() == escapes_by_hand(x, form), form
    counts = reference.pack(x)[1]
    assert escapes(exponent_fields(x), Form()).tolist()[: len(counts)] == counts.tolist()
    assert counts[0] > SLOTS and len(counts) == -(-len(x) // GROUP)
    assert Form() in compared() and Form().bits_without_slots == 12 + 8 / BLOCK


def test_entropy_by_hand() -> None:
    x = torch.tensor([1.0, -1.5, 2.0, 3.0, 4.0, 8.0, 0.0, 0.0]).bfloat16().repeat(LARGEST_GROUP // 8)
    assert entropy(exponent_fields(x)) == pytest.approx(3 * 0.25 * 2 + 2 * 0.125 * 3)
    assert entropy(exponent_fields(torch.ones(LARGEST_GROUP).bfloat16())) == 0


def test_a_row_has_the_bits_of_its_slots_and_of_its_rate() -> None:
    form = Form(block=128, group=4096)
    x = torch.ones(LARGEST_GROUP).bfloat16()
    x[4096 : 4096 + 640 : 128] = 2.0**-20  # five blocks of the second group have an escape each
    (row,) = tallied([x], [form])
    assert (row["worst"], row["slots"], row["rate"]) == (5, 8, 5 / LARGEST_GROUP)
    assert row["bits_of_slots"] == 12.0625 + 16 * 8 / 4096 and row["bits_of_rate"] == 12.0625 + 16 * 5 / LARGEST_GROUP
    assert (Tally(form).slots, Tally(form, 1, 1, 1).slots, Tally(form, 1, 1, 33).slots) == (0, 1, 64)


def test_a_mean_keeps_outliers_from_driving_the_others_out() -> None:
    plain = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = outliers.with_outliers(plain)
    (channel,) = (made != plain).any(0).nonzero().flatten().tolist()
    assert torch.equal(made[:, channel], plain[:, channel] * 1000)
    assert outliers.with_outliers(torch.ones(2, 4096)).gt(1).sum() == 2 * 4
    largest, mean = tallied([made], [Form(headroom=None), Form()])
    assert largest["worst"] > 2 * mean["worst"] and largest["rate"] > 2 * mean["rate"]
    made = outliers.distributions([[plain, plain], [plain[:, :512], plain[:, :512]]])
    assert [x.shape[1] for x in made[outliers.MADE]] == [2000, 1024]
    assert [x.shape[1] for x in made[outliers.DENSER]] == [1000, 1000, 512, 512]


@pytest.mark.timeout(300)
def test_a_run_names_what_layers_keep(commands: Commands, tmp_path: Path) -> None:
    code, out, err = commands.call(execute, RUN, str(tmp_path)).finish()
    assert code == 1 and "it did not learn" in out, err
    assert "were saved, not" not in out, out  # all that layers keep has the name and the size that docs/memory.md says
    path = tmp_path / "cpu" / "packing.json"
    result = json.loads(path.read_text())
    assert [(each["shape"], each["step"]) for each in result["steps_recorded"]] == [
        (shape, step) for shape in ("GPT", "Llama", "MoE") for step in (1, 4)
    ]
    sizes = {(row["shape"], row["tensor"]): row["values"] for row in result["rows"] if row["step"] == 4}
    assert len(sizes) == 7 + 8 + 8 and sizes["Llama", "gate pre-activation"] == 2 * LARGEST_GROUP  # filled up
    ElementTree.parse(path.with_suffix(".svg"))
    assert [line[0] for line in page.tensor_cells(result)][:3] == ["saved tensor", "all of step 1", "all of step 4"]
    assert len(page.tensor_cells(result)) == 1 + 2 + 11
    watched = {row["shape"]: row for row in result["watched"] if row["group"] == 8192}
    assert len(watched["MoE"]["worst"]) == 4 and all(", " in where for where in watched["MoE"]["where"])


def test_the_choices_beside_packing() -> None:
    rows = {row["recompute"]: (row["kept"], round(72 * row["gemms"], 9)) for row in bench.recompute_rows()}
    assert rows == {"none": (20, 0), "qkv": (14, 6), "mlp": (12, 8), "full": (2, 16)}  # h^2 FLOPs of a token, of 72


def test_the_page_has_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text()
    assert page.page(text, COMMITTED) == text, "run python -m bench packing"
    with pytest.raises(ValueError, match="docs/memory.md has no mark '<!-- table: packing_forms -->'"):
        page.page(text.replace("<!-- table: packing_forms -->", ""), COMMITTED)


def test_runs_that_did_not_learn_are_problems() -> None:
    assert bench.problems_of(COMMITTED) == []
    steps = [{"shape": "GPT", "step": step, "loss": 3.0} for step in (1, COMMITTED["steps"])]
    (said,) = bench.problems_of({**COMMITTED, "steps_recorded": steps, "unigram_entropy": 3.5})
    assert said == "GPT ends at a loss of 3.0000, not below 2.8000: it did not learn"


def test_steps_that_overflow_are_those_with_more_escapes_than_slots() -> None:
    sizes = dict.fromkeys((form.block, form.group) for form in grouped())
    watched = [{"shape": "GPT", "block": block, "group": group, "worst": [0, 24, 25, 33, 65]} for block, group in sizes]
    cells = page.group_cells({**COMMITTED, "watched": watched})
    found = {(line[1], line[2]): line[3:5] for line in cells[1:]}
    assert found["8192", "24"] == ("12.08", "3 of 5 steps") and found["8192", "64"] == ("12.16", "1 of 5 steps")
    assert found["4096", "32"] == ("12.19", "2 of 5 steps") and found["16384", "48"][1] == "1 of 5 steps"


def test_the_drawing_has_a_bar_for_each_form(tmp_path: Path) -> None:
    (tmp_path / "packing.json").write_text(json.dumps(COMMITTED))
    root = ElementTree.parse(bench.draw(tmp_path / "packing.json")).getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("4 bits, blocks of 128") == 2 and {page.TRAINED, outliers.OUTLIERS} <= set(words)
