"""Which runs parameter servers refuse, with what is said."""

import pytest

from tpformer.config import build_config, check_config
from tpformer.parallel import Layout, apply_zero, exchange_of
from tpformer.planner.dry_run import plan_config


def served(exchange: str, train: dict | None = None, **parallel: object) -> dict[str, dict]:
    """A run of three workers of a parameter server."""
    train = {"global_batch_size": 12, "microbatch_size": 1, "device": "cpu", **(train or {})}
    return {"parallel": {"exchange": exchange, "data_parallel_replicate": 3, **parallel}, "train": train}


@pytest.mark.parametrize(("values", "words"), [
    (served("sync_server", tensor_parallel=2), "not with tensor_parallel=2: leave one of them out"),
    (served("sync_server", data_parallel_replicate=1), "not with data_parallel_replicate=1"),
    (served("sync_server arrivals=0,1,2"), "sync_server has no options: leave 'arrivals=0,1,2' out"),
    (served("stale_server all_reduce=ring"), "unknown option of stale_server 'all_reduce': known: staleness, arrivals"),
    (served("stale_server", reduce_dtype="bfloat16"), "not with reduce_dtype='bfloat16'"),
    (served("stale_server staleness=1"), "staleness=1 with 3 workers: .* at least 2 are needed"),
    (served("stale_server staleness=-1"), "staleness=-1 must be at least 0"),
    (served("stale_server arrivals=0,1"), "must name each of the 3 workers, 0 to 2"),
    (served("stale_server arrivals=0,1,2,3"), "must name each of the 3 workers, 0 to 2"),
    (served("stale_server staleness=2 arrivals=0,0,0,0,1,2"), "worker 1, whose parameters are 4 updates old"),
    (served("sync_server") | {"log": {"norm_interval": 2}}, "not with log.norm_interval=2: leave that out"),
    (served("sync_server") | {"optimizer": {"name": "muon"}}, "not with optimizer.name=muon: leave that out"),
    (served("sync_server", train={"dtype": "bfloat16"}), "not with train.dtype=bfloat16: leave that out"),
    (served("sync_server", train={"device": "cuda"}), "not with train.device=cuda: leave that out"),
], ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_impossible_servers_are_refused(values, words):
    config = build_config({"model": {"vocab_size": 64, "n_layers": 2, "n_heads": 4, "hidden_size": 32}}, values)
    check_config(config, trains=False)
    with pytest.raises(ValueError, match=words):
        exchange_of(config)


def test_no_one_else_counts_on_a_server():
    with pytest.raises(ValueError, match="exchange='sync_server' is not counted by a dry run"):
        plan_config(build_config({"model": {"preset": "gpt2-124m"}}, served("sync_server")))
    with pytest.raises(ValueError, match="a SyncServer wants whole parameters on each rank"):
        apply_zero(None, [], None, Layout(exchange="sync_server"), None)
