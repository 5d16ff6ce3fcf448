"""A model that is loaded to answer tasks has the precision of its configuration, as one that scores data has."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from testing import on_every_rank

from tpformer.config import build_config
from tpformer.inference import generate
from tpformer.inference.evaluate import show
from tpformer.ops.transports.quantized import record_blocks

MODEL = {"vocab_size": 100, "seq_length": 8, "n_layers": 1, "hidden_size": 128, "n_heads": 2, "head_dim": 128}


@on_every_rank(2)
def test_a_loaded_model_has_the_precision_that_is_asked_for() -> None:
    """Two linears' inputs and weights in attention, two in the MLP: four inputs and six weights, or nothing."""
    for precision, blocks in (("16", 0), ("fp8", 10)):
        train = {"precision": precision, "dtype": "float64", "device": "cpu"}
        sections: dict[str, Any] = {"model": MODEL, "train": train, "parallel": {"tensor_parallel": 2}}
        config = build_config(sections)
        source = SimpleNamespace(architecture=config.model.architecture, load=lambda parts: parts[0].reset_parameters())
        with mock.patch.object(generate, "open_source", return_value=source):
            model, _ = generate.load_model(config)
        with torch.no_grad(), record_blocks() as made:
            model(torch.zeros(1, 3, dtype=torch.long))
        assert len(made) == blocks, precision


def test_a_result_says_that_its_linears_were_quantised() -> None:
    for precision, words in (("16", "float64, 8 tokens"), ("fp8", "float64, linears in FP8, 8 tokens")):
        console = mock.Mock()
        found = {"model": "run", "dtype": "float64", "precision": precision, "seq_length": 8}
        show({**found, "data": [], "tasks": [], "notes": []}, console)
        assert words in console.print.call_args_list[0].args[0]
