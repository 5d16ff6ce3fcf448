"""`tpformer verify` passes layouts that train as one process does, names defects, and refuses models too large for the
machine."""

import contextlib
import io
import math
import shutil
from pathlib import Path

import pytest
from commands import main
from small_runs import LAYOUTS
from tiny_runs import write_run
from turns import in_turns

from tpformer.config import RunConfig, build_config, check_config, read_toml
from tpformer.parallel import TiedParameter
from tpformer.training import verify as verifying
from tpformer.training.verify import RANDOM, Difference, Verified, check_memory, verify_config, verify_rank

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = {"vocab_size": 250, "seq_length": 16, "n_layers": 4, "hidden_size": 32, "n_heads": 4, "dropout": 0.1}
VALUES = {"model": MODEL, "train": {"global_batch_size": 8}, "data": {"train": ["missing/data"]}}
TP_DP = LAYOUTS["tp2-zero3"] | {"cpu_offload": True, "recompute": "full", "recompute_interval": 3}


def config_of(**sections: dict) -> RunConfig:
    config = verify_config(build_config(VALUES, sections))
    check_config(config)
    return config


def verified(config: RunConfig) -> tuple[int, str]:
    """Return the exit code and output of one rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return verify_rank(config), out.getvalue()


def untied(*arguments: str) -> None:
    """Run `tpformer`, whose ranks then do not add up the gradients of a tied embedding."""
    TiedParameter.reduce = lambda self: None
    main(*arguments)


def test_the_command_fails_where_tied_gradients_are_not_added_up(commands, tmp_path):
    file = write_run(tmp_path, VALUES, parallel={"pipeline_parallel": 2})
    code, out, err = commands.call(untied, "verify", file).finish()
    assert code == 1, out + err
    assert "THIS LAYOUT DOES NOT TRAIN AS ONE PROCESS DOES" in out
    (gradients,) = [line for line in out.splitlines() if line.startswith("gradients, step 1")]
    assert gradients.split()[-1] == "embed_tokens.weight"
    assert "rank 0 of 2 failed with exit code 1" in err and "rank 1" not in err


@pytest.mark.parametrize("layout", in_turns([LAYOUTS["v-schedule"], TP_DP], first=1), ids=["v-shaped", "tp-dp"])
def test_layouts_pass(ranks, layout):
    config = config_of(parallel=layout, train={"label_smoothing": 0.1, "z_loss": 1e-4})
    results = ranks(4).run(verified, config)
    assert [code for code, _ in results] == [0] * 4
    out = results[0][1]
    assert all(f"{key} {value}" in out for key, value in layout.items()), out
    assert f": 4 ranks, microbatches {config.n_microbatches} x {config.microbatch_size}," in out, out
    assert f"data: {RANDOM}" in out and "this layout trains as one process does" in out
    assert not any(out for _, out in results[1:]), "one rank prints"


def test_data_that_exist_are_used_and_a_vocabulary_that_nothing_tells_is_asked_for(ranks, tiny_values, tiny_data):
    config = verify_config(build_config(tiny_values, {"parallel": {"data_parallel_replicate": 2}}))
    assert config.data.train == (str(tiny_data),) and config.model.vocab_size == 257
    (code, out), _ = ranks(2).run(verified, config)
    assert code == 0 and f"data: {tiny_data}" in out
    values = {**tiny_values, "data": {"train": ["missing/data"]}}
    with pytest.raises(ValueError, match="missing/data.bin and .idx do not exist.*set model.vocab_size"):
        verify_config(build_config(values))
    config = verify_config(build_config(values, {"model": {"vocab_size": 100}}))
    assert config.data.train == (RANDOM,) and config.train.dtype == "float64" and config.train.device == "cpu"


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    config = verify_config(build_config(read_toml(EXAMPLES / "gpt_1t.toml")))
    with pytest.raises(ValueError, match=r"1008\d+\.\dM parameters in one process.*3072 ranks.*n-layers 64 is the"):
        check_memory(config)
    small = config_of()
    check_memory(small)
    one, of_ranks = verifying.needed_bytes(small)
    assert 32 * small.model.n_parameters < one < 2**28 and of_ranks >= verifying.PROCESS_BYTES
    monkeypatch.setattr(verifying, "available_bytes", lambda device: one + of_ranks - 1)
    with pytest.raises(ValueError, match="make the model smaller"):
        check_memory(small)


def test_a_learning_rate_of_0_and_brackets_of_a_path_are_no_defects(ranks, tiny_data, tmp_path):
    """Biases that stay 0 differed infinitely from themselves, and a dataset's path was taken for markup."""
    prefix = tmp_path / "data[" / "it]"
    prefix.parent.mkdir()
    for ending in ("bin", "idx", "json"):
        shutil.copyfile(f"{tiny_data}.{ending}", f"{prefix}.{ending}")
    values = {**VALUES, "model": {**MODEL, "vocab_size": 257}, "data": {"train": [str(prefix)]}}
    config = verify_config(build_config(values, {"parallel": {"tensor_parallel": 2}, "optimizer": {"lr": 0.0}}))
    (code, out), _ = ranks(2).run(verified, config)
    assert code == 0 and "this layout trains as one process does" in out, out
    assert f"data: {prefix}" in out


def test_the_verdict_needs_every_difference_to_be_small():
    good = Verified([(2.0, 2.0)], [(1.0, 1.0 + 5e-10)], Difference(9e-10, "a"), Difference(0.0, ""))
    assert good.ok
    for bad in (
        good._replace(losses=[(2.0, 2.0), (2.0 * (1 + 2e-9), 2.0)]), good._replace(norms=[(math.nan, 1.0)]),
        good._replace(gradients=Difference(2e-9, "a")), good._replace(parameters=Difference(math.inf, "a")),
    ):  # fmt: skip
        assert not bad.ok
