"""A batch that grows takes the samples that follow those of all steps before. Losses and norms by layer are those of
the whole model, in every layout and after a resume, and the noise scale is its formula."""

import itertools
import json
import math

import pytest
import torch
from small_runs import LAYOUTS, world_size
from testing import assert_same
from tiny_runs import values_with
from turns import in_turns

from tpformer.config import build_config
from tpformer.training.metrics import read_metrics
from tpformer.training.norms import NoiseScale
from tpformer.training.resolve import resolve
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch
from tpformer.training.trainer import Trainer

LAYERS, STEPS, SIZES = 4, 3, [8, 16, 24]
FIRST = {"optimizer": {"lr": 0.0}}  # the weights stay those that the run begins with


def settings(values: dict, parallel: dict) -> dict:
    """A run of growing batches, whose norms are logged at its second step. One process takes larger microbatches."""
    batches = {"global_batch_size": SIZES[-1], "batch_size_start": SIZES[0], "batch_size_ramp_steps": 2}
    train = {**batches, "microbatch_size": 1 if parallel else 4, "steps": STEPS, "dtype": "float64"}
    more = {"model": {"n_layers": LAYERS, "dropout": 0.1}, "optimizer": {"schedule": "constant"}, "data": {"valid": []}}
    return values_with(values, parallel=parallel, train=train, log={"norm_interval": 2, "noise_interval": 2}, **more)


def run(values: dict, parallel: dict, stop: int = 0) -> tuple[list[dict], list[dict], list[tuple[int, int]]]:
    """Rows of metrics and of norms, and the samples that this rank took; with `stop`, of a run that ends there and is
    resumed."""
    taken: list[tuple[int, int]] = []
    for steps in (stop, STEPS) if stop else (STEPS,):
        more = {"train": {"steps": steps}, "run": {"resume": steps == STEPS and stop > 0}}
        trainer = Trainer(build_config(settings(values, parallel), more))
        take = trainer.take_step
        trainer.take_step = lambda rows, take=take, **options: (
            taken.append((options["first_sample"], len(rows))) or take(rows, **options)
        )
        trainer.run()
    return *(read_metrics(trainer.directory / f"{name}.jsonl") for name in ("metrics", "norms")), taken


def plain(values: dict) -> dict[str, float]:
    """What the norms of step 2 should be, by torch alone, at the first weights, which a learning rate of 0 keeps."""
    config = resolve(build_config(settings(values, {})))
    (model,) = build_model(config, run_mesh(config, "cpu")).parts
    rows, found = batch(open_data(config).train, *SIZES[:2]), {}
    for name, layer in model.layers.items():
        layer.register_forward_hook(
            lambda module, args, y, name=name: found.update({f"output.layers.{name}": float(y.square().mean().sqrt())})
        )
    squares = []
    for size in SIZES[:2]:
        model.zero_grad()
        index = torch.arange(SIZES[0], SIZES[0] + size)
        model(rows[:size, :-1], targets=rows[:size, 1:], sample_index=index, step=0, reduction="mean").backward()
        squares.append(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    for name, parameter in model.named_parameters():
        key = "gradient." + (".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0])
        found[key] = math.hypot(found.get(key, 0.0), float(parameter.grad.norm()))
    half, whole = squares
    noise = SIZES[1] * (half - whole) / (2 * whole - half)
    return found | {"step": 2, "noise_scale": noise if noise > 0 else math.nan}


@pytest.fixture(scope="module")
def alone(ranks, tiny_values_in, tmp_path_factory):
    return ranks(1).run(run, values_with(tiny_values_in(tmp_path_factory.mktemp("norms")), **FIRST), {})[0]


def assert_same_numbers(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Each is judged by itself, as one may be a millionth of another."""
    for mine, row in zip(found, expected, strict=True):
        assert mine.keys() == row.keys()
        for name in row.keys() - {"tokens_per_second"}:
            assert_same(mine[name], row[name], name)


def test_norms_are_those_that_torch_computes_and_samples_follow_those_of_the_steps_before(ranks, tiny_values, alone):
    rows, norms, taken = alone
    assert taken == list(zip([0, 8, 24], SIZES, strict=True))
    assert [row["tokens"] for row in rows] == [16 * total for total in itertools.accumulate(SIZES)]
    (expected,) = ranks(1).run(plain, values_with(tiny_values, **FIRST))
    assert len([name for name in expected if "layers." in name]) == 2 * LAYERS
    assert_same_numbers(norms, [expected])


RECOMPUTED = {"tensor_parallel": 2, "sequence_parallel": False, "recompute": "full", "recompute_interval": 2}
OTHERS = LAYOUTS["v-schedule"], LAYOUTS["tp2-pp2"], {"data_parallel_shard": 2, "zero_stage": 3}, RECOMPUTED


@pytest.mark.parametrize("parallel", [{"pipeline_parallel": 2}, *in_turns(OTHERS, first=2)])
def test_losses_and_norms_are_equal_in_every_layout(ranks, tiny_values, alone, parallel):
    rows, norms, _ = ranks(world_size(parallel)).run(run, values_with(tiny_values, **FIRST), parallel)[0]
    assert_same_numbers(rows, alone[0])
    assert_same_numbers(norms, alone[1])


def test_a_resumed_run_has_the_same_losses_and_norms(ranks, tiny_values):
    whole = values_with(tiny_values, run={"dir": tiny_values["run"]["dir"] + "-whole"})
    (expected,), (found,) = ranks(1).run(run, whole, {}), ranks(1).run(run, tiny_values, {}, 2)
    assert_same_numbers(found[0], expected[0])
    assert_same_numbers(found[1], expected[1])
    assert found[2] == expected[2]


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
