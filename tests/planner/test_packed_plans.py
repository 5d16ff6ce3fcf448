"""Plans with packed activations: bytes that passes move by hand, the search, the text of a layout."""

import random

import pytest
from test_search import SMALL, question

from tpformer.kernels.pack.format import packed_bytes
from tpformer.planner.devices import load_device
from tpformer.planner.kept import kept_by_kind
from tpformer.planner.layer_time import LayerModel
from tpformer.planner.layouts import layout_text, parse_layout, with_layout
from tpformer.planner.search import Space, brute_force, search
from tpformer.planner.software import OURS

UNIT = 2 * 256 * 512 * 2  # bytes of two samples' residual stream
PACKED = packed_bytes(UNIT // 2)
BOTH, LESS = UNIT + PACKED, UNIT - PACKED  # of a pass that packs or unpacks; what a kernel reads less
# units that the forward packs; that passes unpack; that kernels read in packed form
MOVED = {
    "none": (10, 5, 8),  # q, k, v, attention's result twice; two norms and their backwards, fc1's output
    "mlp": (6, 6, 2),  # the region's input, too
    "full": (1, 1, 0),
}


@pytest.mark.parametrize("recompute", MOVED)
def test_bytes_that_packing_moves_by_hand(recompute) -> None:
    asked = question(parallel={"pack_activations": True, "recompute": recompute}, train={"microbatch_size": 2})
    packs, passes, inside = MOVED[recompute]
    expected = packs * BOTH, passes * BOTH - inside * LESS
    assert kept_by_kind(asked.config)[False].packing(recompute) == pytest.approx(expected)
    layer = LayerModel(asked.config, asked.device, OURS)
    plain, packed = layer.work(), layer.work(packs=True)
    seconds = [packed.forward["packing"], packed.inputs["packing"]]
    assert sum(seconds) == pytest.approx(sum(expected) / asked.device.machine.memory, rel=0.05)
    assert sum(t.seconds for t in packed) == pytest.approx(sum(t.seconds for t in plain) + sum(seconds))


@pytest.mark.parametrize("seed", [0, 1, 5])  # of another memory each
def test_search_with_both_is_as_good_as_brute_force(seed) -> None:
    draw = random.Random(seed)
    device = load_device("a100-40", gpus_per_node=4)
    device = type(device)(**{**vars(device), "memory": draw.choice([1.3e9, 1.6e9, 40e9])})
    space = Space(
        microbatch=(1, 4), schedule=("1F1B",), offload=("none", "activations"), most_stages=4, pack=("none", "all")
    )
    asked = question({**SMALL, "seq_length": 1024}, 4, 16, device, space)
    found, every = search(asked, 8), brute_force(asked, 8)
    assert [choice.key for choice in found.choices] == [choice.key for choice in every]
    assert {choice.config.parallel.pack_activations for choice in every} <= {False, True}


def test_a_layouts_text_says_whether_it_packs() -> None:
    config = question(parallel={"pack_activations": True, "pack_layers": "0"}).config
    assert layout_text(config).endswith("pack=all")
    assert with_layout(config, parse_layout("tp=2")).parallel.pack_activations
    without = with_layout(config, parse_layout("tp=2,pack=none"))
    assert not without.parallel.pack_activations and "pack" not in layout_text(without)
    with pytest.raises(ValueError, match="pack='some': choose one of none, all"):
        parse_layout("tp=2,pack=some")
