"""With data.separate_documents attention stays within a document: a sample's loss and gradients are those of its
documents by themselves, in every layout, through a run and its resumption, which logs context_balance."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from small_runs import build, run_config, take_step, taken_gradients
from testing import assert_identical, assert_same, on_every_rank
from tiny_runs import flip, rows, values_with, write_run
from turns import of_turn

from tpformer import ops
from tpformer.config import Layout, RunConfig, build_config, check_config, to_toml
from tpformer.inference.settings import prepare
from tpformer.models import GPT
from tpformer.training.data import IndexedWriter
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.resolve import open_dataset, resolve
from tpformer.training.separation import busiest_pairs, context_balance, document_positions
from tpformer.training.setup import open_data
from tpformer.training.step import batch, take_steps
from tpformer.training.summary import notices
from tpformer.training.verify import RANDOM, one_process, token_samples, verify_config

END = 50
MODEL = {"vocab_size": 60, "seq_length": 24, "n_layers": 2, "hidden_size": 24, "n_heads": 4, "n_kv_heads": 2}
NEWER = {**MODEL, "position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "sliding_window": 5}
LAYOUTS: tuple[dict, ...] = (
    {"context_parallel": 2},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2, "pipeline_schedule": "1F1B"},
    {"data_parallel_shard": 2, "zero_stage": 2},
)


def samples(count: int = 4, seed: int = 0, length: int = MODEL["seq_length"]) -> torch.Tensor:
    """Documents of a few tokens, some of one; the first of the second sample goes on in the third. Two tokens are no
    target, and one of them ends a document."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(END, (count, length + 1), generator=generator)
    found[torch.rand(found.shape, generator=generator) < 0.2] = END
    found[1, -6:], found[0, 3], found[0, 8] = 7, ~found[0, 3], ~END
    return found


def by_themselves(model: GPT, sample: torch.Tensor) -> torch.Tensor:
    """The summed loss of a sample's documents, each alone. Its last token has the sample's next one for a target."""
    total = torch.zeros((), dtype=torch.float64)
    ids = torch.where(sample < 0, ~sample, sample)
    targets = sample.masked_fill(sample < 0, -100)
    ends = [*(ids[:-1] == END).nonzero()[:, 0].tolist(), len(ids) - 2]
    first = 0
    for end in dict.fromkeys(ends):
        inside = slice(first, end + 1)
        total = total + model(ids[None, inside], targets=targets[None, first + 1 : end + 2])
        first = end + 1
    return total


@pytest.mark.parametrize("model", [MODEL, NEWER], ids=["learned", "rope"])
def test_a_sample_is_its_documents_by_themselves(model):
    rows = samples()
    part = GPT(build_config({"model": model}).model.architecture, seed=3, dtype=torch.float64)
    separate = ModelParts([part], microbatch_size=2, dtype=torch.float64, end_of_document=END)
    found = [separate.gradients(rows, first_sample=0), taken_gradients(separate), separate.summed_loss(rows)]
    targets = (rows[:, 1:] >= 0).sum()
    loss = sum(by_themselves(part, row) for row in rows)
    (loss / targets).backward()
    assert_same(found, [loss / targets, taken_gradients(separate), torch.stack([loss, targets])])
    with mock.patch.object(separate.exchange, "steps", lambda *arguments: arguments[-1]):
        of_servers = take_steps(separate, [])(part, rows, 0)  # the loss that an exchange with steps of its own is given
    assert_same(of_servers, loss)
    whole = ModelParts([part], microbatch_size=2, dtype=torch.float64)
    assert abs(float(whole.summed_loss(rows)[0]) - loss.item()) > 1e-3


def separated(parallel: dict) -> RunConfig:
    config = run_config(parallel, NEWER, dtype="float64", microbatch_size=1)
    data = dataclasses.replace(config.data, separate_documents=True, end_of_document=END)
    return dataclasses.replace(config, data=data)


@on_every_rank(2)
def test_every_layout_trains_as_one_process_does():
    def trained(model, optimizers) -> list:
        results = [take_step(model, optimizers, samples(seed=step), 4 * step) for step in range(2)]
        own, share = model.own_samples(0, 4)
        validated = model.summed_loss(samples(seed=9)[own : own + share])
        return [*((result.loss, result.norm) for result in results), validated]

    one = one_process(separated({}), "cpu")
    expected = trained(one, build_optimizers(one, separated({}).optimizer))
    for parallel in LAYOUTS:
        assert_same(trained(*build(separated(parallel))), expected, f"{parallel}")


def test_the_balance_is_that_of_each_microbatch():
    """By ops.context_balance, of the documents' beginnings. Of one document it is 1."""
    ids = samples(count=6, length=32)[:, :-1].abs()
    positions = document_positions(ids, END)
    starts = [(row == 0).nonzero()[:, 0].tolist() for row in positions]
    assert max(map(len, starts)) > 4 and all(row[0] == 0 for row in starts)
    for ranks in (2, 4):
        for window in (None, 3):
            found = busiest_pairs(positions, ranks, 2, window)
            every = [busiest_pairs(positions[i : i + 2], ranks, 2, window) for i in (0, 2, 4)]
            assert_identical(found, sum(every[1:], every[0]))
            alone = [context_balance(one.tolist(), ranks) for one in every]
            assert alone == [ops.context_balance(starts[i : i + 2], 32, ranks, window) for i in (0, 2, 4)]
            assert 1 < context_balance(found.tolist(), ranks) <= max(alone)
        one_document = document_positions(ids, 59)
        assert context_balance(busiest_pairs(one_document, ranks, 2, None).tolist(), ranks) == 1


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> str:
    """The prefix of a dataset of 200 documents of 1 to 12 bytes and an end."""
    prefix = tmp_path_factory.mktemp("short") / "data"
    generator = torch.Generator().manual_seed(1)
    with IndexedWriter(prefix, torch.zeros(0, dtype=torch.uint16).numpy().dtype) as writer:
        for _ in range(200):
            length = int(torch.randint(1, 13, (), generator=generator))
            writer.add_document([*torch.randint(97, 123, (length,), generator=generator).tolist(), 256])
    return str(prefix)


@pytest.fixture
def values(tiny_values, short) -> dict:
    data = {"train": [short], "valid": [short], "separate_documents": True, "tokenizer": "bytes"}
    train = {"dtype": "float64", "steps": 5}
    return values_with(tiny_values, data=data, train=train, model={"dropout": 0.1}, log={"interval": 2})


@of_turn(0)
def test_a_run_logs_the_balance_and_goes_on_with_the_same_bits(done, tmp_path, values):
    """The command: with context parallelism, with replicas, and again from a checkpoint. Validation separates, too."""
    toml, directory = write_run(tmp_path, values, parallel={"context_parallel": 2}), tmp_path / "run"
    assert "gathers keys and values over 2 context-parallel ranks" in done("pretrain", toml)
    found, config = rows(directory), resolve(build_config(values))
    assert config.data.end_of_document == 256 and [row["step"] for row in found if "loss" in row] == [2, 4, 5]
    for row in found[:-1]:
        positions = document_positions(batch(open_data(config).train, 4 * row["step"] - 4, 4)[:, :-1], 256)
        starts = [(each == 0).nonzero()[:, 0].tolist() for each in positions]
        assert row["context_balance"] == ops.context_balance(starts, 16, 2) > 1
    flip(next((directory / "checkpoints" / "step-5").glob("*.distcp")))
    assert "from step 4" in done("pretrain", toml, "--run.resume", "True")
    assert_identical(rows(directory), found)

    write_run(tmp_path, values, parallel={"data_parallel_replicate": 2}, run={"dir": str(tmp_path / "replicas")})
    assert "transport" not in done("pretrain", toml)
    replicas = rows(tmp_path / "replicas")
    assert_same([{k: v for k, v in row.items() if k != "context_balance"} for row in found], replicas)


def test_what_a_run_says_and_how_it_is_evaluated(tmp_path, values):
    config = resolve(build_config(values, {"parallel": {"context_parallel": 2}}))
    assert "which the id 256 ends; context_balance is how much the busiest of 2 " in notices(config)[0]
    alone = dataclasses.replace(config, parallel=Layout())
    assert notices(alone)[0].endswith("which the id 256 ends") and not notices(build_config())
    directory = Path(config.run.dir)
    directory.mkdir()
    (directory / "config.toml").write_text(to_toml(config))
    for overrides, end in (({}, 256), ({"data": {"separate_documents": False}}, None)):
        assert prepare(directory, overrides).config.data.end_of_document == end


def test_verify_separates_random_tokens_too():
    values = {"model": MODEL, "data": {"train": ["missing/data"], "separate_documents": True, "mask": True}}
    config = verify_config(build_config(values))
    assert config.data.train == (RANDOM,) and config.data.end_of_document == 59
    drawn = token_samples(config)(0, 8)
    ends = (drawn == 59).sum() / drawn.numel()
    assert 1 / 16 < ends < 1 / 4 and bool((drawn < 0).any())


def test_what_is_refused(short):
    """One sentence each, before anything starts."""
    plain = {"data": {"train": [short]}, "model": {"vocab_size": 300}}
    with pytest.raises(ValueError, match="data.end_of_document=3 would do nothing: set data.separate_documents = true"):
        check_config(build_config(plain, {"data": {"end_of_document": 3}}))
    for data, words in (
        ({}, "nothing says which id ends a document: set data.end_of_document, or data.tokenizer"),
        ({"end_of_document": 300}, r"=300 is outside of the model's ids 0 to 299"),
    ):
        with pytest.raises(ValueError, match=words):
            resolve(build_config(plain, {"data": {"separate_documents": True, **data}}))
    with pytest.raises(ValueError, match="without data.end_of_document: resolve the configuration first"):
        one_process(build_config(plain, {"data": {"separate_documents": True}}), "meta")


def test_a_dataset_whose_documents_do_not_end_so_is_refused(tmp_path, short):
    assert open_dataset(short, 257, end_of_document=256).n_documents == 200
    with pytest.raises(ValueError, match=r"ends at token \d+ with the id 256 and not with 3, so that the next one"):
        open_dataset(short, 257, end_of_document=3)
    prefix, ids = str(tmp_path / "late"), [1, 2, 256]
    with IndexedWriter(prefix, open_dataset(short, 257).dtype, masked=True) as writer:
        writer.add_document([], [])  # documents without tokens end nothing
        for _ in range(3):
            writer.add_document(ids, [True, True, False])
        writer.add_document([], [])
        writer.add_document([5], [True])  # the last one's end divides nothing
    assert open_dataset(prefix, 257, masked=True, end_of_document=256).n_documents == 6
    alone = str(tmp_path / "alone")
    with IndexedWriter(alone, open_dataset(short, 257).dtype) as writer:
        writer.add_document([5, 6])
    assert open_dataset(alone, 257, end_of_document=256).n_documents == 1
