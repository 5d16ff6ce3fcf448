"""Whole runs whose replicas take steps by themselves: stops and resumption within and between rounds, other numbers of
replicas, validation and saves of what they have in common; runs by parameter servers, stopped and resumed."""

import shutil
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_runs import everything
from testing import assert_identical
from tiny_runs import losses, rows, sigterm_in, values_with
from turns import in_turns, of_turn

from tpformer.config import build_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.training import step as step_module
from tpformer.training.checkpoint_files import saved_tensors, step_path, steps
from tpformer.training.model import ModelParts
from tpformer.training.trainer import Trainer

MODEL = {"seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 4, "dropout": 0.1}
ROUNDS = {"data_parallel_replicate": 2, "exchange": "diloco every=3 agree=1"}
STREAMED = {"data_parallel_replicate": 2, "exchange": "diloco every=4 fragments=2 delay=1 mix=0.5 agree=1"}


def values_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole parameters, moments and what the exchange keeps, of this rank's replica."""
    kept = {name: full_tensor(value.detach()).clone() for name, value in trainer.model.exchange.state().items()}
    return everything(trainer.model.parts, trainer.optimizers) | kept


def train(values: dict, stop: int = 0, resume: bool = False) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Train; what was said, and what this rank has in the end. stop: the step in which the last rank is asked to."""
    said: list[str] = []
    asked = stop if dist.get_rank() == dist.get_world_size() - 1 else 0  # which is no step
    with mock.patch.object(Trainer, "_notice", lambda self, text: said.append(text)), sigterm_in(asked):
        trainer = Trainer(build_config(values_with(values, run={"resume": resume})))
        trainer.run()
    dist.barrier()
    return said, values_of(trainer)


@pytest.mark.parametrize(("parallel", "stops"), [
    (STREAMED, (3, 4)),  # without a fragment on its way, and with one
    *in_turns([
        (ROUNDS, (3, 5)),  # as a round ends, and within one
        ({**ROUNDS, "data_parallel_shard": 2, "zero_stage": 3}, (4,)),
        ({**STREAMED, "tensor_parallel": 2}, (4,)),
        ({**STREAMED, "pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}, (4,)),
    ]),
])  # fmt: skip
def test_a_run_that_was_stopped_goes_on_with_equal_bits(ranks, tiny_values, parallel, stops):
    """All replicas stop after the same step, though one alone was asked to."""
    layers, batch = (4, 8) if "pipeline_parallel" in parallel else (2, 4)  # four microbatches for a pipeline
    sizes = {"model": {**MODEL, "n_layers": layers}, "train": {"steps": 6, "global_batch_size": batch}}
    values = values_with(tiny_values, **sizes, parallel=parallel, checkpoint={"interval": 0})
    n = build_config(values).parallel.world_size
    whole = ranks(n).run(train, values)
    again = values_with(values, run={"dir": f"{values['run']['dir']}-again"})
    for number, stop in enumerate(stops, 1):
        ranks(n).run(train, again, stop, number > 1)
        folder = Path(again["run"]["dir"]) / "checkpoints"
        assert steps(folder) == [*stops[:number]]
        flies = any("flight." in name for name in saved_tensors(step_path(folder, stop), ""))
        assert flies == ("delay=1" in parallel["exchange"] and stop == 4)
    resumed = ranks(n).run(train, again, 0, True)
    assert rows(again["run"]["dir"]) == rows(values["run"]["dir"])
    for (_, found), (_, wanted) in zip(resumed, whole, strict=True):
        assert_identical(found, wanted)


def test_what_a_run_saves_and_when(ranks, tiny_values):
    """As rounds end in which a save falls due: the common model once, and each replica's moments. The last round ends
    with the run, and all replicas have the model of the last checkpoint."""
    values = values_with(tiny_values, parallel={**ROUNDS, "exchange": "diloco every=3"}, model=MODEL,
                         train={"steps": 8, "validation_interval": 2}, checkpoint={"keep": 9})  # fmt: skip
    (_, one), (_, other) = ranks(2).run(train, values)
    folder = Path(values["run"]["dir"], "checkpoints")
    assert steps(folder) == [3, 6, 8]
    assert [row["step"] for row in rows(values["run"]["dir"]) if "val_loss" in row] == [3, 6, 8]
    assert [row["step"] for row in rows(values["run"]["dir"]) if "replicas_loss" in row] == [3, 6, 8]
    for name, value in one.items():
        if "exp_avg" not in name and not name.startswith("targets"):
            assert_identical(other[name], value, name)
    saved = saved_tensors(step_path(folder, 6), "")
    parameters = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert parameters == {
        name for name in one if " " not in name and "." in name and not name.startswith(("momentum.", "targets."))
    }
    kept = product((0, 1), parameters, ("step", "exp_avg", "exp_avg_sq"))
    moments = {f"replica.{r}.optimizer.{name}.{key}" for r, name, key in kept}
    assert {name for name in saved if name.startswith("replica.")} == moments
    assert not [name for name in saved if name.startswith("optimizer.")]


def validated(values: dict) -> tuple[float, float, float]:
    """After five steps in rounds of four: the validation's loss, that of the model in common and of this replica's."""
    trainer = Trainer(build_config(values))
    trainer.config = build_config(values, {"train": {"steps": 5}})
    take = step_module.train_step
    for step in range(1, 6):
        batch = trainer.batches.take(step)
        take(trainer.model, trainer.optimizers, batch.rows, first_sample=batch.first, lr=3e-3, clip_norm=1.0)
    found = trainer.validate()
    exchange, parts = trainer.model.exchange, trainer.model.parts
    own = {name: x.detach().clone() for name, x in parts[0].state_dict().items()}
    losses = []
    for values_ in (exchange.common(), own):
        with torch.no_grad():
            for name, x in parts[0].state_dict().items():
                x.copy_(values_[name])
        with mock.patch.object(type(exchange), "showing_common", lambda self: mock.MagicMock()):
            losses.append(trainer.validate())
    return found, *losses


def test_validation_is_of_what_replicas_have_in_common(ranks, tiny_values):
    parallel = {"data_parallel_replicate": 2, "exchange": "diloco every=4"}
    for found, common, own in ranks(2).run(validated, values_with(tiny_values, parallel=parallel, model=MODEL)):
        assert found == common != own


@pytest.fixture(scope="module")
def of_two(ranks, tiny_values_in, tmp_path_factory):
    """The values of a run of two replicas that has ended within a round. Tests go on in copies of its directory."""
    more = {"parallel": ROUNDS, "model": MODEL, "train": {"steps": 4, "global_batch_size": 8}}
    values = values_with(tiny_values_in(tmp_path_factory.mktemp("two")), **more)
    ranks(2).run(train, values)
    return values


@pytest.mark.parametrize(("parallel", "words"), [
    ({"exchange": "library"}, "all ranks take that of replica 0"),
    *in_turns([({"data_parallel_replicate": 4}, "replica r of 4 takes that of r modulo 2")], first=0),
])  # fmt: skip
def test_other_numbers_of_replicas_go_on(ranks, of_two, tmp_path, parallel, words):
    """The common model goes on; replica r takes the moments of r modulo the replicas that were, and says so."""
    ran = {"changes": ["parallel.exchange", "parallel.data_parallel_replicate"]}
    copied, parallel = shutil.copytree(of_two["run"]["dir"], tmp_path / "run"), ROUNDS | parallel
    again = values_with(of_two, parallel=parallel, run={"dir": str(copied), **ran}, train={"steps": 6})
    found = ranks(parallel["data_parallel_replicate"]).run(train, again, 0, True)
    assert any(words in line for line in found[0][0]), found[0][0]
    for _, other in found[1:]:
        for key, value in found[0][1].items():
            if " " not in key and not key.startswith("targets"):
                assert_identical(other[key], value, key)


def refused(values: dict, words: str) -> None:
    """Every rank says so itself: ranks that fail end with their whole world, which the next test would start anew."""
    with pytest.raises(Exception, match=words):
        train(values, 0, True)


@of_turn(1)
def test_a_replica_goes_on_in_another_layout(ranks, of_two, tmp_path):
    """Without run.changes, because losses do not depend on it; nor do they on when replicas agree to stop."""
    directory = shutil.copytree(of_two["run"]["dir"], tmp_path / "run")
    other = {**ROUNDS, "data_parallel_shard": 2, "exchange": "diloco every=3"}
    more = {"run": {"dir": str(directory)}, "train": {"steps": 6, "microbatch_size": 1}}
    again = values_with(of_two, parallel=other, **more)
    ranks(4).run(train, again, 0, True)
    assert [row["step"] for row in rows(directory) if "replicas_loss" in row] == [1, 2, 3, 4, 6]
    alone = values_with(again, parallel={"data_parallel_replicate": 1, "exchange": "library"})
    ranks(2).run(refused, alone, "parallel.data_parallel_replicate.*run.changes")


@of_turn(2)
def test_replicas_begin_from_a_run_without_them(ranks, tiny_values):
    """And the moments of that run are each one's own from then on."""
    values = values_with(tiny_values, parallel={"data_parallel_replicate": 2}, model=MODEL, train={"steps": 4})
    ranks(2).run(train, values)
    again = values_with(values, parallel=ROUNDS, run={"changes": ["parallel.exchange"]}, train={"steps": 7})
    (said, one), (_, other) = ranks(2).run(train, again, 0, True)
    assert not any("takes that of" in line for line in said)
    assert one["embed_tokens.weight exp_avg"].ne(other["embed_tokens.weight exp_avg"]).any()
    assert_identical(one["embed_tokens.weight"], other["embed_tokens.weight"])


@of_turn(0)
def test_a_fragment_on_its_way_is_not_lost_to_other_rounds(ranks, tiny_values):
    values = values_with(tiny_values, parallel=STREAMED, model=MODEL, train={"steps": 8}, checkpoint={"interval": 0})
    ranks(2).run(train, values, 4)
    other = {**STREAMED, "exchange": "diloco every=4"}
    again = values_with(values, parallel=other, run={"changes": ["parallel.exchange"]})
    ranks(2).run(refused, again, "on their way between replicas.*go on with the options that saved it")


def skipping(values: dict) -> list[str]:
    """Rank 1's gradients are NaN in steps 2, 3, 5 and 6."""
    gradients, said = ModelParts.gradients, []

    def spoiled(self, batch, *, first_sample, **options):
        loss = gradients(self, batch, first_sample=first_sample, **options)
        if dist.get_rank() == 1 and first_sample // values["train"]["global_batch_size"] + 1 in (2, 3, 5, 6):
            return loss * float("nan")
        return loss

    with mock.patch.object(ModelParts, "gradients", spoiled):
        said, _ = train(values)
    return said


def test_a_replica_that_skips_steps_holds_nobody_up(ranks, tiny_values):
    """A save waits for a round that ends with a good step on every replica, which is said once."""
    values = values_with(tiny_values, parallel={**ROUNDS, "exchange": "diloco every=3"}, model=MODEL,
                         train={"steps": 9}, checkpoint={"interval": 3, "keep": 9})  # fmt: skip
    said, _ = ranks(2).run(skipping, values)
    assert steps(Path(values["run"]["dir"]) / "checkpoints") == [9]
    assert len([line for line in said if "the checkpoint waits" in line]) == 1


def losses_of_runs(values: dict, server: dict) -> list[list[tuple]]:
    """The losses of a whole run of four steps, and of one that stops after two and is resumed."""
    found = []
    for name, ends in (("whole", [4]), ("parts", [2, 4])):
        run = {"dir": f"{values['run']['dir']}-{name}", "resume": True}
        for end in ends:
            Trainer(build_config(values, {"run": run, "parallel": server, "train": {"steps": end}})).run()
        found.append(losses(run["dir"]))
    return found


@pytest.mark.parametrize("exchange", ["stale_server arrivals=0,1,1", *in_turns(["sync_server"], first=2)])
def test_a_run_that_is_resumed_is_one_that_was_not(ranks, done, tiny_values, exchange):
    optimizer = {"schedule": "constant", "warmup_steps": 0, "lr": 3e-3}
    values = values_with(tiny_values, data={"valid": []}, optimizer=optimizer, train={"microbatch_size": 1})
    server = {"data_parallel_replicate": 2, "exchange": exchange}
    whole, parts = ranks(2).run(losses_of_runs, values, server)[0]
    assert whole == parts and len(whole) == 4 and whole[-1][1] < whole[0][1]
    done("generate", f"{tiny_values['run']['dir']}-whole", "--max-new-tokens", "3")  # in one process, without workers
