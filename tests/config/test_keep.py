"""What each layer keeps, as keys of [parallel] and as one text: the same ways, and what is refused."""

import pytest

from tpformer.config import LayerKeep, Layout, budget_bytes, keep_text, kept_layers
from tpformer.config.keep import parsed_keep

ALL, FULL = LayerKeep(), LayerKeep("full")


@pytest.mark.parametrize("keys, text", [
    ({}, "keep"),
    ({"recompute": "mlp"}, "mlp"),
    ({"recompute": "full", "recompute_layers": "0:2"}, "2*full,2*keep"),
    ({"recompute": "mlp", "recompute_layers": "::2", "pack_activations": True, "pack_layers": "0,1"},
     "1*mlp+pack,1*pack,1*mlp,1*keep"),
    ({"offload_activations": True, "recompute": "full", "recompute_layers": "-1"}, "3*offload,1*offload+full"),
])  # fmt: skip
def test_keys_and_text_say_the_same(keys, text):
    ways = kept_layers(4, **keys)
    assert keep_text(ways) == text and kept_layers(4, keep=text) == ways == Layout(**keys).kept(4)
    assert Layout(keep=text).kept(4) == ways
    assert Layout(keep=text).packs == any(way.pack for way in ways)
    assert Layout(keep=text).offloads == any(way.offload for way in ways)


def test_a_text_is_read_with_spaces_and_in_any_order_of_words():
    assert parsed_keep(" 2 * pack + mlp , keep, 1*offload", 4) == (
        *[LayerKeep("mlp", pack=True)] * 2, ALL, LayerKeep(offload=True),
    )  # fmt: skip
    assert parsed_keep("full", 3) == (FULL,) * 3


@pytest.mark.parametrize("text, message", [
    ("3*mlp", "is of 3 layers, and the model has 4"),
    ("5*mlp", "'5\\*mlp' is of no number of layers from 1 to 4"),
    ("0*mlp,4*keep", "is of no number"),
    ("x*mlp", "is of no number"),
    ("mlp+full", "'mlp\\+full' is no way to keep a layer"),
    ("keep+pack", "is no way"),
    ("pack+pack", "is no way"),
    ("4*none", "'none' is no way"),
    ("2*mlp,,2*keep", "is no way"),
])  # fmt: skip
def test_a_text_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        kept_layers(4, keep=text)


@pytest.mark.parametrize("other", [
    {"recompute": "mlp"}, {"recompute_interval": 2}, {"pack_activations": True}, {"offload_activations": True},
])  # fmt: skip
def test_keep_and_a_budget_exclude_the_other_keys(other):
    with pytest.raises(ValueError, match="says what every layer keeps, and so do"):
        kept_layers(4, keep="mlp", **other)
    with pytest.raises(ValueError, match=r"parallel.memory_budget='40GiB' chooses what layers keep, and parallel"):
        Layout(memory_budget="40GiB", **other).check()
    Layout(memory_budget="40GiB", keep="mlp").check()  # what was chosen stands beside what was asked for


def test_a_budget_is_bytes_or_a_share():
    found = [budget_bytes(text, 80e9) for text in ("40GiB", "40 gb", "4.5e10", "1000", "50%", "1.5MiB")]
    assert found == [40 * 2**30, 40e9, 4.5e10, 1000.0, 40e9, 1.5 * 2**20]
    with pytest.raises(ValueError, match="is a share of a GPU's memory, and there is none"):
        budget_bytes("80%")
    for text in ("", "GiB", "-1GiB", "0", "120%", "40 parsecs", "1e400", "\uff14\uff10GiB"):
        with pytest.raises(ValueError, match="is no amount of memory"):
            budget_bytes(text, 80e9)
    with pytest.raises(ValueError, match=r"'0.5' is 0.5 bytes: write 50% for a share"):
        budget_bytes("0.5", 80e9)
