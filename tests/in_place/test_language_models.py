"""Families of transformers, parallel in place, train and speak as in one process, with sequence shards and without."""

import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from commands import ROOT, python
from testing import assert_same
from tiny import batch, tiny, train
from torch import nn
from torch.distributed.tensor import DTensor
from turns import PARTS, in_parts, in_turns

from bench.families.models import FAMILIES
from bench.families.training import in_float64
from tpformer import auto_plan, parallelize
from tpformer.distributed import build_mesh

RESULTS = ROOT / "bench/results/cpu/families.json"


def texts(model: nn.Module) -> list[torch.Tensor]:
    """Greedy texts after a length that ranks can share and one that they cannot; with a static cache; a drawn text."""
    options = {"max_new_tokens": 3, "eos_token_id": None}
    calls = [(8, {}), (7, {}), (8, {"cache_implementation": "static"}), (8, {"do_sample": True})]
    found = []
    for seq, more in calls if model.can_generate() else ():
        torch.manual_seed(0)
        found.append(model.eval().generate(batch(seq, 0)["input_ids"], **{"do_sample": False, **options, **more}))
    return found


def on_rank(family: str, t: int, plan: Mapping, sequence_parallel: bool, steps: list[dict], checkpointed: bool):
    """What trained model and texts are; the warnings; what is said of layers that run on the whole sequence."""
    model = tiny(family, torch.float64).train()
    before = {key: x.shape for key, x in model.state_dict().items()}
    tp = build_mesh("cpu", tensor_parallel=t)["tp"]
    assert parallelize(model, tp, plan, sequence_parallel=sequence_parallel) is model
    assert {key: x.shape for key, x in model.state_dict().items()} == before
    cut, whole = (sum(p.numel() for p in model.parameters() if isinstance(p, kind)) for kind in (DTensor, nn.Parameter))
    assert family == "mixtral" or cut > 0.3 * whole, "a large part, but for Mixtral's many experts"
    if checkpointed:
        # a backward recomputes outside of the mode that train has set
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), in_float64())}
        model.gradient_checkpointing_enable(again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(model, steps, kind=torch.optim.SGD)
    if checkpointed:
        model.gradient_checkpointing_disable()
    said = [str(each.message) for each in caught if "sequence shards" in str(each.message)]
    kept = [reason for reason in model._tpformer.plan.kept.values() if "whole sequence" in reason]
    return (found, texts(model)), said, kept


EVEN, UNEVEN, STATES = batch(8, 0), batch(7, 1), batch(8, 2, output_hidden_states=True)
PLAIN, SHARDED = (False, [EVEN, UNEVEN], False), (True, [EVEN, UNEVEN, STATES], False)
RECOMPUTED = (True, [EVEN, batch(8, 2)], True)
# family, ranks, whether with sequence shards, the steps, whether layers are recomputed. Among them are fewer key-value
# heads than ranks, a vocabulary that 4 ranks share unequally, fused projections, parallel blocks, experts, latent keys
RUNS = [
    ("qwen2", 4, *SHARDED), ("falcon", 2, *PLAIN), ("llama", 2, *RECOMPUTED),
    ("deepseekv3", 2, *SHARDED),
]  # fmt: skip
OTHERS = [
    ("qwen2", 4, *PLAIN), ("llama", 4, *SHARDED), ("falcon", 2, *SHARDED),
    *((family, 2, *PLAIN) for family in ("qwen3", "mistral")),
    *((family, 4, *PLAIN) for family in ("llama", "gptneox", "gptoss")), ("bart", 2, *RECOMPUTED),
    *((family, 2, *SHARDED) for family in ("opt", "t5", "bert", "gemma2", "gpt2", "albert", "mixtral", "bart")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "t", "sequence_parallel", "steps", "checkpointed"), [*RUNS, *in_turns(OTHERS)])
def test_steps_and_texts_are_those_of_one_process(ranks, family, t, sequence_parallel, steps, checkpointed):
    """Every chain of layers says once that a length does not fit: an encoder and a decoder are two. The plan is
    measured once, for all ranks."""
    model = tiny(family, torch.float64).train()
    whole = {"model.layers.*.mlp.router", "model.layers.*.mlp.gate"}  # of tokens
    plan = auto_plan(model, t)
    assert sequence_parallel or not plan.kept.keys() - whole
    expected = train(model, steps, kind=torch.optim.SGD), texts(model)
    text = f"7 tokens a sequence cannot be shared equally by {t} tensor-parallel ranks: such batches run without "
    text += "sequence shards; pad them to a multiple"
    times = (steps is SHARDED[1]) * (2 if family in ("bart", "t5") else 1)
    for found, said, kept in ranks(t).run(on_rank, family, t, plan, sequence_parallel, steps, checkpointed):
        assert (said, kept) == ([text] * times, [])
        assert_same(found, expected)


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_parts())
def test_the_matrix_of_families(tmp_path, part):
    """Its column with sequence parallelism on two ranks: the bench has four, ours without it, whose plans are the same,
    and transformers' own way, which does not change with our code."""
    run = "import json, sys; from pathlib import Path; from bench.families import cells, matrix; "
    run += "ours = {name: each for name, each in matrix.COLUMNS.items() if each == (cells.SEQUENCE, 2)}; "
    run += "matrix.COLUMNS, families = ours, matrix.FAMILIES[int(sys.argv[2])::int(sys.argv[3])]; "
    run += "Path(sys.argv[1]).write_text(json.dumps(matrix.rows(families)))"
    path = tmp_path / "families.json"
    python("-c", run, path, part, PARTS)

    def verdicts(rows: list) -> dict:
        return {(row["family"], column): cell["verdict"] for row in rows for column, cell in row["cells"].items()}

    found, committed = verdicts(json.loads(path.read_text())), verdicts(json.loads(RESULTS.read_text())["rows"])
    assert len(found) == len(FAMILIES[part::PARTS]) and found.items() <= committed.items()
