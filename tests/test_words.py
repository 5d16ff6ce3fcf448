"""A value in a message is short and printable, whatever it is; a stranger's text obeys nothing in a terminal."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpformer.config import build_config, check_config
from tpformer.words import harmless, listed, message, printable, shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200) | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=100), inner, max_size=6),
)


@given(VALUES)
def test_a_value_is_short_and_printable(value):
    text = shown(value)
    assert len(text) <= 10 * 80 and text.isprintable()  # an escape has up to 10 characters


def test_of_a_huge_value_there_is_the_beginning():
    nested = json.loads("[" * 900 + "]" * 900)
    keys = {f"k{n}": n for n in range(10**5)}
    for value in (b"x" * 10**7, ["x" * 10**6] * 10**5, keys, 10**6000, "\x1b" * 10**6, nested):
        test_a_value_is_short_and_printable.hypothesis.inner_test(value)


def test_texts_names_and_messages():
    assert shown("it's") == '"it\'s"' and shown(3) == "3" and shown(2**300) == "a whole number of 301 bits"
    assert printable("a\x1b[2J\n\udcff\u202eé b") == "a\\x1b[2J\\n\\udcff\\u202eé b"
    assert message("one\ntwo\x07") == "one\ntwo\\x07" and len(message("x" * 10**6)) == 4000
    assert listed({"b", "a"}) == "a, b" and listed("dcba", 2) == "a, b and 2 more"
    assert listed(["x" * 1000 + "/b", "\x1b"]) == f"\\x1b, {'x' * 38}...{'x' * 37}/b"
    assert harmless("a\tb\n\r\x1b]0;x\x07\x9b1m\ud800é") == "a\tb\n\ufffd\ufffd]0;x\ufffd\ufffd1m\ufffdé"


SETTINGS = [
    ("model", "vocab_size", 2**60, "vocab_size=1152921504606846976 must be in "),
    ("model", "vocab_size", 10**5000, "vocab_size=a whole number of 16610 bits must be in "),
    ("optimizer", "lr", 10**400, "optimizer.lr = a whole number of 1329 bits: expected a number"),
    ("data", "train", "data/prose", "data.train = 'data/prose': expected a list in brackets"),
    ("run", "dir", "a\x1b[31m", r"run.dir = 'a\\x1b\[31m': control characters"),
    ("model", "n_heads", 2**40, r"n_heads=1099511627776 must be in \[1, 1e6\]"),
    ("optimizer", "eps", 1e-50, "optimizer.eps=1e-50 must be at least 1e-37 and finite"),
    ("train", "global_batch_size", 2**40, r"train.global_batch_size=1099511627776 must be in \[1, 1e8\]"),
    ("model", "activation", "x" * 10**6, "choose one of"),
    ("model", "hidden_size", 2**60, "a layer with hidden_size=1152921504606846976 has .* parameters, more than"),
    ("model", "ffn_hidden_size", 2**62, "a layer with hidden_size=768 has 7.09e.21 parameters"),
    ("model", "seq_length", 2**60, "seq_length, with learned positions, with hidden_size=768 has"),
    ("model", "\x1b", 1, r"unknown key in \[model\] '\\x1b'"),
]


@pytest.mark.parametrize("section, key, value, words", SETTINGS, ids=range(len(SETTINGS)))
def test_a_setting_that_cannot_be_is_refused_in_few_words(section, key, value, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_config(build_config({section: {key: value}}))
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()
