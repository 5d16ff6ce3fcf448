"""The bench of packed activations: its counts against loops, bits of a form, and made distributions."""

import json
import math

import pytest
import torch

from bench.packing import forms, outliers, page
from bench.packing.forms import LARGEST_GROUP, Form, entropy, escapes, exponent_fields, grouped, tallied
from bench.provenance import RESULTS
from tpformer.kernels.pack import reference
from tpformer.kernels.pack.format import BLOCK, GROUP, SLOTS

COMMITTED = json.loads((RESULTS / "cpu" / "packing.json").read_text())


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


def test_escapes_are_those_of_a_loop_and_of_the_form_that_ships():
    x = values()
    for form in (*forms.compared(), *grouped(), *outliers.RULES):
        assert escapes(exponent_fields(x), form).tolist() == escapes_by_hand(x, form), form
    counts = reference.pack(x)[1]
    assert escapes(exponent_fields(x), Form()).tolist()[: len(counts)] == counts.tolist()
    assert counts[0] > SLOTS and len(counts) == -(-len(x) // GROUP)
    assert Form() in forms.compared() and Form().bits_without_slots == 12 + 8 / BLOCK


def test_entropy_by_hand():
    x = torch.tensor([1.0, -1.5, 2.0, 3.0, 4.0, 8.0, 0.0, 0.0]).bfloat16().repeat(LARGEST_GROUP // 8)
    assert entropy(exponent_fields(x)) == pytest.approx(3 * 0.25 * 2 + 2 * 0.125 * 3)
    assert entropy(exponent_fields(torch.ones(LARGEST_GROUP).bfloat16())) == 0


def test_a_row_has_the_bits_of_its_slots_and_of_its_rate():
    form = Form(block=128, group=4096)
    x = torch.ones(LARGEST_GROUP).bfloat16()
    x[4096 : 4096 + 640 : 128] = 2.0**-20  # five blocks of the second group have an escape each
    (row,) = tallied([x], [form])
    assert (row["worst"], row["slots"], row["rate"]) == (5, 8, 5 / LARGEST_GROUP)
    assert row["bits_of_slots"] == 12.0625 + 16 * 8 / 4096 and row["bits_of_rate"] == 12.0625 + 16 * 5 / LARGEST_GROUP
    assert [forms.Tally(form, *rest).slots for rest in ((), (1, 1, 1), (1, 1, 33))] == [0, 1, 64]


def test_a_mean_keeps_outliers_from_driving_the_others_out():
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


def test_steps_that_overflow_are_those_with_more_escapes_than_slots():
    sizes = dict.fromkeys((form.block, form.group) for form in grouped())
    watched = [{"shape": "GPT", "block": block, "group": group, "worst": [0, 24, 25, 33, 65]} for block, group in sizes]
    cells = page.group_cells({**COMMITTED, "watched": watched})
    found = {(line[1], line[2]): line[3:5] for line in cells[1:]}
    assert found["8192", "24"] == ("12.08", "3 of 5 steps") and found["8192", "64"] == ("12.16", "1 of 5 steps")
