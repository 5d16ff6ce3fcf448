"""A step that is recorded once and replayed gives what train_step gives, to the bit, in every step of a run; where that
cannot be, the run says why. Recorded on a CPU by a graph's rules (graphs.py); on a GPU in test_run_gpu.py."""

from functools import partial
from unittest import mock

import pytest
import torch
from graphs import recorded
from kept import kept
from test_run_gpu import CAPTURED
from tiny_runs import rows, values_with
from torch import Tensor
from turns import in_turns, of_turn

from tpformer.config import OptimizerSection, build_config, check_config
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import local_part
from tpformer.training import graph
from tpformer.training.graph import WARM_UP, StepGraph, build_steps, check_graph, in_words, why_no_graph
from tpformer.training.model import ModelParts
from tpformer.training.norms import NormWatch
from tpformer.training.optimizer import build_optimizers
from tpformer.training.step import LossScaler, StepResult, train_step
from tpformer.training.trainer import Trainer

LENGTH = 12
GPT2 = GPTConfig(vocab_size=50, seq_length=LENGTH, n_layers=2, hidden_size=32, n_heads=4, dropout=0.1)
LLAMA = GPTConfig(
    vocab_size=50, seq_length=LENGTH, n_layers=2, hidden_size=32, n_heads=4, n_kv_heads=2, norm="rmsnorm",
    activation="swiglu", position="rope", tie_embeddings=False, bias=False,
)  # fmt: skip


class Run:
    """A model on one rank, and what takes its steps: train_step, or a graph of it."""

    def __init__(self, captures: bool, config=GPT2, dtype=torch.float32, optimizer="adamw", micro=2, **options) -> None:
        part = kept(GPT, config, dtype=torch.float32, **options)
        part.init_weights()
        self.model = ModelParts([part], microbatch_size=micro, n_microbatches=4 // micro, dtype=dtype)
        momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
        self.optimizers = build_optimizers(self.model, OptimizerSection(name=optimizer, **momentum))
        self.said: list[str] = []
        self.step = partial(train_step, self.model, self.optimizers)
        if captures:
            self.step = StepGraph(
                self.step, self.model, self.optimizers, strict=True, report=self.said.append, capture=recorded
            )

    def take(self, number: int, samples: int = 4, **options) -> StepResult:
        rows = torch.randint(50, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(number))
        rows[0, 3:5] = -1  # no targets
        self.model.set_samples(samples)
        return self.step(rows, first_sample=10 * number, lr=1e-3 * number, **({"clip_norm": 0.5} | options))

    def bits(self) -> list[Tensor]:
        """Parameters, and what the optimizers keep."""
        states = [state[name] for each in self.optimizers for state in each.state.values() for name in sorted(state)]
        return [x.detach().clone() for x in (*self.model.parameters(), *states)]


def assert_same_run(take, steps=5, **options) -> None:
    """take(run, number) takes a step; its results, and what is left in the end, have the same bits both ways."""
    runs = [Run(captures, **options) for captures in (False, True)]
    for number in range(1, steps + 1):
        results = [take(run, number) for run in runs]
        for name, plain, replayed in zip(StepResult._fields, *results, strict=True):
            same = plain is replayed is None or torch.equal(plain.nan_to_num(7), replayed.nan_to_num(7))
            assert same, f"{name} of step {number}: {plain} and {replayed}"
        rates = [[group["lr"] for each in run.optimizers for group in each.param_groups] for run in runs]
        assert rates[0] == rates[1] and {type(rate) for rate in rates[1]} == {float}, "as checkpoints have it"
    assert all(torch.equal(a, b) for a, b in zip(*(run.bits() for run in runs), strict=True))


@pytest.mark.parametrize("options", [
    {"optimizer": "muon", "dtype": torch.bfloat16},
    *in_turns([{"optimizer": "sgd", "recompute": "mlp"}], first=1),
    *in_turns([{"config": LLAMA, "dtype": torch.bfloat16, "recompute": "full"}], first=2),
])  # fmt: skip
def test_a_replayed_step_is_the_step(options):
    """AdamW in float32, and a step of one microbatch, are in the tests below."""
    assert_same_run(Run.take, **options)


def test_a_loss_scale_and_skipped_steps_are_the_devices():
    scalers, scales = {}, []

    def take(run: Run, number: int) -> StepResult:
        result = run.take(number, scaler=scalers.setdefault(id(run), LossScaler(2.0**40, interval=2)))
        scales.append((result.scale, float(result.scale)))
        return result

    assert_same_run(take, dtype=torch.float16)
    first, second = (scaler.state_dict() for scaler in scalers.values())
    assert first == second and first["scale"] < 2.0**40, "some steps were skipped"
    assert all(float(scale) == then for scale, then in scales), "results stay"


def test_other_batches_clips_and_watched_steps():
    """A growing batch has graphs of its own; a watched step, and one with another clip, are right between them."""
    watches: dict[int, NormWatch] = {}

    def take(run: Run, number: int) -> StepResult:
        watch = watches.setdefault(id(run), NormWatch(run.model)) if number == 4 else None
        return run.take(number, 2 if number < 5 else 4, clip_norm=0.5 if number < 8 else 0.0, watch=watch)

    assert_same_run(take, steps=8)


def test_what_somebody_writes_between_steps_is_seen():
    def take(run: Run, number: int) -> StepResult:
        with torch.no_grad():
            run.model.parameters()[0].mul_(1.5 if number == 4 else 1.0)
        return run.take(number)

    assert_same_run(take, dtype=torch.bfloat16, micro=4)


def test_results_are_copies():
    run = Run(True)
    results = [run.take(number) for number in range(1, 6)]
    assert len({float(result.loss) for result in results}) == 5
    assert len({result.local.data_ptr() for result in results[WARM_UP:]}) == 3


@pytest.mark.parametrize("reading", [
    lambda rows, first, lr: float(lr), lambda rows, first, lr: rows[rows > 0],
    lambda rows, first, lr: rows.nonzero() if first > 0 else 0,
])  # fmt: skip
def test_a_recording_refuses_what_a_capture_refuses(reading):
    run = Run(True)
    inner = run.step.step
    run.step.step = lambda rows, **options: (
        isinstance(options["lr"], Tensor) and reading(rows, options["first_sample"], options["lr"]),
        inner(rows, **options),
    )[1]
    run.take(1), run.take(2)
    with pytest.raises(AssertionError, match="a capture refuses"):
        run.take(3)


@pytest.mark.parametrize("strict", [True, *in_turns([False], first=0)])
def test_a_capture_that_fails_leaves_the_run_as_it_was(strict):
    plain, run = Run(False), Run(True)
    refusal = RuntimeError("operation not permitted when stream is capturing\nmore")

    def refused(step):
        with mock.patch.object(run.optimizers[0], "update", side_effect=refusal):
            return recorded(step)  # gradients are there by then

    run.step.strict, run.step.capture = strict, refused
    for number in range(1, WARM_UP + 1):
        run.take(number), plain.take(number)
    if strict:
        with pytest.raises(RuntimeError, match="not permitted"):
            run.take(3)
    else:
        assert run.take(3).loss == plain.take(3).loss and run.take(4).loss == plain.take(4).loss
        (said,) = run.said
        assert "without a CUDA graph" in said and said.count("not permitted when stream is capturing") == 1
    assert all(torch.equal(a, b) for a, b in zip(run.bits(), plain.bits(), strict=True))


def trained(values: dict, captures: bool) -> tuple[list[str], list[Tensor]]:
    """Rows of a run that grows its batch and skips a step, and its parameters."""
    train = {"batch_size_start": 2, "batch_size_ramp_steps": 4, "steps": 9, "dtype": "float16"}
    values = values_with(values, train=train, model={"dropout": 0.1}, run={"dir": f"{values['run']['dir']}-{captures}"})
    with mock.patch.object(graph, "why_no_graph", lambda *_: None if captures else "not asked"):
        with mock.patch.dict(StepGraph.__init__.__kwdefaults__, capture=recorded):
            trainer = Trainer(build_config(values))
            trainer.run()
    assert isinstance(trainer.take_step, StepGraph) == captures
    return list(map(str, rows(values["run"]["dir"]))), [
        local_part(x).detach().clone() for x in trainer.model.parameters()
    ]


@of_turn(0)
def test_a_run_of_graphs_is_the_run(ranks, tiny_values):
    (found, parameters), (plain, expected) = (ranks(1).run(trained, tiny_values, each)[0] for each in (True, False))
    assert found == plain and len(found) >= 9
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


REASONS = {
    "there is no GPU": {"train": {"device": "cpu"}},
    'train.cuda_graph = "off"': {"train": {"cuda_graph": "off"}},
    "a pipeline's schedule": {"parallel": {"pipeline_parallel": 2}},
    "FSDP2 gathers": {"parallel": {"data_parallel_shard": 2}},
    "the host asks": {"parallel": {"pack_activations": True}},
    "the host owns memory": {"parallel": {"offload_activations": True}},
    "the host asks where documents begin": {"data": {"separate_documents": True}},
    "the host asks how many rows experts get": {
        "model": {"preset": "qwen3-30b-a3b"},
        "parallel": {"tensor_parallel": 2, "transport": "fused"},
    },
    "counts its epochs": {"parallel": {"tensor_parallel": 2}},
    "copy engines cannot gather": {"parallel": {"tensor_parallel": 2, "transport": "fused"}},
    "in FP8 a collective, which counts on the host": {
        "model": {"preset": "llama3-8b", "n_kv_heads": 1},
        "parallel": {"tensor_parallel": 2, "transport": "fused"},
        "train": {"precision": "fp8"},
    },
    "need as much memory": {"log": {"norm_interval": 5}},
}


@pytest.mark.parametrize(("reason", "sections"), REASONS.items(), ids=str)
def test_a_run_says_why_its_steps_are_no_graphs(reason, sections):
    def config(asked: str):
        train = {"global_batch_size": 4, "device": "cuda", "cuda_graph": asked} | sections.get("train", {})
        return build_config({"model": {"preset": "gpt2-124m"}} | sections | {"train": train})

    check_config(config("auto"), trains=False)
    words = in_words(config("auto"), config("auto").train.device)
    assert words.startswith("a step is not a CUDA graph: ") and reason in words
    only_slower = reason in ("copy engines cannot gather", "need as much memory")
    if only_slower or "off" in reason:
        check_graph(config("on"), "cuda")
        assert (why_no_graph(config("on"), "cuda") is None) == only_slower
    else:
        with pytest.raises(ValueError, match=f'cuda_graph = "on", but .*{reason}.*: set "auto"'):
            check_graph(config("on"), config("on").train.device)


@pytest.mark.parametrize("name", CAPTURED)
def test_runs_that_a_gpu_captures_are_configured(name, tiny_values):
    """The test that needs a GPU is not the first to ask whether there is such a model."""
    changes = {"train": {"device": "cuda", "cuda_graph": "on"}, "model": CAPTURED[name], "data": {"valid": []}}
    config = build_config(values_with(tiny_values, **changes))
    check_config(config, trains=False)
    check_graph(config, "cuda")


def test_a_run_on_one_gpu_takes_graphs():
    config = build_config({"model": {"preset": "gpt2-124m"}, "train": {"device": "cuda"}})
    model = ModelParts([GPT(GPT2)], microbatch_size=1)
    assert in_words(config, "cuda") == "a step is one CUDA graph"
    assert isinstance(build_steps(config, "cuda", model, build_optimizers(model, config.optimizer)), StepGraph)
    off = build_config({"model": {"preset": "gpt2-124m"}, "train": {"device": "cuda", "cuda_graph": "off"}})
    assert not isinstance(build_steps(off, "cuda", model, build_optimizers(model, off.optimizer)), StepGraph)
    with pytest.raises(ValueError, match="cuda_graph='yes': choose one of auto, on, off"):
        check_config(build_config({"train": {"cuda_graph": "yes"}}), trains=False)
