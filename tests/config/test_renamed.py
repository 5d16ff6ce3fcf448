"""Files of earlier versions go on, or are told in one sentence what to write."""

import pytest

from tpformer.config import build_config, to_toml
from tpformer.config.renamed import with_exchange
from tpformer.parallel import exchange_named

UNUSED = {
    **{"all_reduce": "library", "compression": "none", "error_feedback": True, "compression_share": 0.01},
    **{"compression_rank": 4, "parameter_server": "none", "staleness": 16, "arrivals": ""},
}


@pytest.mark.parametrize(("used", "exchange"), [
    ({}, "library"),
    ({"all_reduce": "halving_doubling"}, "halving_doubling"),
    ({"compression": "bfloat16", "error_feedback": False}, "bfloat16 feedback=false"),
    ({"compression": "topk", "compression_share": 0.05}, "topk share=0.05"),
    ({"compression": "powersgd", "compression_rank": 1}, "powersgd rank=1"),
    ({"parameter_server": "sync"}, "sync_server"),
    ({"parameter_server": "stale", "staleness": 5, "arrivals": "0, 1,1"}, "stale_server staleness=5 arrivals=0,1,1"),
])  # fmt: skip
def test_a_run_of_an_earlier_version_has_its_exchange(used, exchange):
    """Its config.toml has every key, those too that it does not use."""
    found = build_config({"parallel": {"tensor_parallel": 2, **UNUSED, **used}})
    assert found.parallel.exchange == exchange and found.parallel.tensor_parallel == 2
    assert "compression" not in to_toml(found)
    exchange_named(exchange)
    later = build_config({"parallel": {**UNUSED, **used}}, {"parallel": {"exchange": "ring"}})
    assert later.parallel.exchange == "ring"


@pytest.mark.parametrize(("values", "words"), [
    ({"compression_share": 0.5}, r'compression_share is one key now, .* write exchange = "NAME share=0.5" under'),
    ({"compression": "int8", "all_reduce": "ring"}, 'compression are one key now, .* exchange = "ring or int8"'),
    ({"all_reduce": "int8"}, "parallel.all_reduce='int8': choose one of library, driver, all_pairs"),
    ({"compression": "ring"}, "parallel.compression='ring': choose one of none, bfloat16, int8"),
    ({"compression": "topk", "compression_rank": 2}, 'write exchange = "topk rank=2"'),
    ({"parameter_server": "stale", "exchange": "ring"}, 'write exchange = "stale_server"'),
    ({"error_feedback": False}, 'write exchange = "NAME feedback=false"'),
])  # fmt: skip
def test_keys_that_contradict_each_other_say_what_to_write(values, words):
    with pytest.raises(ValueError, match=words):
        with_exchange(values)
