"""Norms by layer are those of the whole model, equal in every layout, and the noise scale is its formula."""

import json
import math

import pytest
import torch
from testing import assert_same

from tpformer.config import build_config
from tpformer.training.metrics import read_metrics
from tpformer.training.norms import NoiseScale
from tpformer.training.resolve import resolve
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch
from tpformer.training.trainer import Trainer

MODEL = {"seq_length": 16, "n_layers": 4, "hidden_size": 32, "n_heads": 4, "dropout": 0.1}
TRAIN = {"steps": 3, "global_batch_size": 8, "microbatch_size": 1, "dtype": "float64"}


def settings(values: dict, parallel: dict) -> dict:
    log = {"interval": 4, "norm_interval": 2, "noise_interval": 2, "plot": False, "tensorboard": False}
    data = {**values["data"], "valid": []}
    return {**values, "model": MODEL, "train": TRAIN, "log": log, "parallel": parallel, "data": data}


def run(values: dict, parallel: dict) -> list[dict]:
    trainer = Trainer(build_config(settings(values, parallel)))
    trainer.run()
    return read_metrics(trainer.directory / "norms.jsonl")


def plain(values: dict) -> dict[str, float]:
    """What the row of step 2 should be, by torch alone, at the first weights, which a learning rate of 0 keeps."""
    config = resolve(build_config(settings(values, {})))
    (model,) = build_model(config, run_mesh(config, "cpu")).parts
    rows, found = batch(open_data(config).train, 8, 8), {}
    for name, layer in model.layers.items():
        layer.register_forward_hook(
            lambda module, args, y, name=name: found.update({f"output.layers.{name}": float(y.square().mean().sqrt())})
        )
    squares = []
    for size in (4, 8):
        model.zero_grad()
        index = torch.arange(8, 8 + size)
        model(rows[:size, :-1], targets=rows[:size, 1:], sample_index=index, step=2, reduction="mean").backward()
        squares.append(sum(float(parameter.grad.full_tensor().square().sum()) for parameter in model.parameters()))
    for name, parameter in model.named_parameters():
        key = "gradient." + (".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0])
        found[key] = math.hypot(found.get(key, 0.0), float(parameter.grad.full_tensor().norm()))
    half, whole = squares
    noise = 8 * (half - whole) / (2 * whole - half)
    return found | {"step": 2, "noise_scale": noise if noise > 0 else math.nan}


@pytest.fixture(scope="module")
def alone(ranks, tiny_values_in, tmp_path_factory):
    values = {**tiny_values_in(tmp_path_factory.mktemp("norms")), "optimizer": {"lr": 0.0}}
    return ranks(1).run(run, values, {})[0], ranks(1).run(plain, values)[0]


def assert_same_numbers(found: dict[str, float], expected: dict[str, float]) -> None:
    """Each is judged by itself, as one may be a millionth of another."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value, name)


def test_norms_are_those_that_torch_computes(alone):
    rows, expected = alone
    assert [row["step"] for row in rows] == [2]
    assert len([name for name in expected if "layers." in name]) == 2 * MODEL["n_layers"]
    assert_same_numbers(rows[0], expected)


TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2}
ZBV = {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2}
RECOMPUTED = {"tensor_parallel": 2, "sequence_parallel": False, "recompute": "full", "recompute_interval": 2}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(TP_PP, marks=pytest.mark.proof),
        pytest.param({"data_parallel_shard": 2, "zero_stage": 3}, marks=pytest.mark.proof),
        pytest.param(RECOMPUTED, marks=pytest.mark.proof),
        ZBV,
    ],
)
def test_norms_are_equal_in_every_layout(ranks, tiny_values, alone, parallel):
    size = build_config({"parallel": parallel}).parallel.world_size
    rows = ranks(size).run(run, {**tiny_values, "optimizer": {"lr": 0.0}}, parallel)[0]
    for mine, expected in zip(rows, alone[0], strict=True):
        assert_same_numbers(mine, expected)


def test_the_noise_scale_is_the_trace_over_the_square_and_survives_a_checkpoint():
    square, trace, noise = 3.0, 60.0, NoiseScale()
    for samples in (8, 16, 16):
        whole, half = (math.sqrt(square + trace / size) for size in (samples, samples / 2))
        assert_same(noise.add(samples, whole, half), trace / square)
        state = json.loads(json.dumps(noise.state_dict()))
        noise = NoiseScale()
        noise.load_state_dict(state)
    assert_same(noise.add(8, math.nan, 1.0), trace / square, "a step that is not finite adds nothing")
    assert math.isnan(NoiseScale().add(8, 1.0, 0.5)), "a negative estimate of the trace"
