"""Every layer under every habit equals modules of torch.nn on one rank and on two, or is refused in one sentence.

`python tests/layers/test_habits.py` writes the outcomes to docs/layers.md. Belongs here: the comparison, what is
refused, the page. Layers and habits are in habits.py.
"""

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from habits import AUTOCAST, EDITS, HABITS, LAYERS, PARTS, SHARDINGS, WAYS, fsdp, run, step
from steps import Results
from testing import assert_identical, assert_kernel_close, assert_same
from torch import nn
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
INTRODUCTION = """# Layers that people change

Layers are modules ([drop_in.md](drop_in.md)), and people do to modules what they like. A block computes several of its
parts in one kernel. If a part has a hook, an adapter, a parametrization or a class of your own, it is called by itself,
as a module. Result and gradients are then those that torch.nn would give, and `explain` lists the part with the reason.

The table shows ten layers under such habits. Each row is a habit, which is done to a layer and to all modules in it at
once.

- `=` means that the result and every gradient equal those of torch.nn's modules: in float64 but for rounding, under
  autocast within twice torch.nn's own error.
- `[n]` means that an error refuses the habit; note n below the table says why, or what to do instead.
- `= [n]` means that it equals torch.nn on one rank and is refused on several tensor-parallel ranks.
- An empty place means that the layer has no linear to do this to, or no two.

`.venv/bin/python -m pytest tests/layers/test_habits.py` compares it on one process and on two tensor-parallel ranks,
and with `--proof` parts of a GPT each by itself, too. tests/layers/habits.py has the layers and the habits.
tests/layers/test_habits_of_children.py does the same for recomputation, sequence parallelism and habits of single
children.
"""
NOTES = {
    "functional_call, whole tensors": "Give DTensors, as `distribute_tensor` makes them.",
    "two batch dims": "Attention has to tell samples from tokens: give (batch, seq, hidden), or `positions`.",
    "second derivatives": "Operations have none: where one is needed, as for a gradient penalty, use torch.nn.",
    "torch.func.grad": "torch's transforms (grad, vmap, jvp) do not enter operations: use torch.autograd, or torch.nn.",
    "weight_norm": "torch's DTensor has no backward for it, and raises there.",
    "spectral_norm": "torch's DTensor refuses it of a sharded weight, when it is registered.",
    "prune": "torch's DTensor refuses to order the values of a sharded weight.",
}
# (layer, tensor-parallel ranks, data-parallel ranks). A GPT has each habit in all of its modules at once: proofs have
# it, its parts, and layers on one tensor-parallel rank. Of blocks the suite has test_habits_of_children.py.
OF_GPT = ("SelfAttention", "MLP", "TransformerBlock", "GPT")
CASES = [*product(LAYERS, (1, 2), (1, 2))]
SUITE = [case for case in CASES if case[0] not in OF_GPT and case[1] == 2]


def on_rank(name: str, tp: int, habits: list[str]) -> list[Results | str]:
    """What each habit gives on this rank, or the sentence that refuses it."""
    mesh = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=dist.get_world_size() // tp)
    layer, results = LAYERS[name], []
    rank, sample = mesh["tp"].get_local_rank(), mesh["dp_shard"].get_local_rank()
    column = rank if layer.y_sharded else 0
    for habit in habits:
        model, _ = layer.pair(TensorParallel(mesh["tp"]) if tp > 1 else None)
        x = layer.x().chunk(tp, -1)[rank] if layer.x_sharded else layer.x()
        try:
            if habit in SHARDINGS:
                fsdp(model, mesh["dp_shard"], habit)
                results.append(step(model, x[sample : sample + 1], column, sample=sample))
            else:
                results.append(run(habit, model, x, column))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def joined(name: str, tp: int, found: list[Results]) -> Results:
    """Put the results of all ranks together; tensor-parallel ranks are neighbours."""
    layer, parts = LAYERS[name], dict(found[0])
    for part, sharded in (("y", layer.y_sharded), ("dx", layer.x_sharded)):
        values = [each[part] for each in found]
        if values[0] is not None:
            rows = [torch.cat(values[i : i + tp], -1) if sharded else values[i] for i in range(0, len(values), tp)]
            assert sharded or all(torch.equal(values[i], values[i // tp * tp]) for i in range(len(values)))
            parts[part] = torch.cat(rows)
    return parts


@cache
def expected(name: str, habit: str) -> Results:
    """What modules of torch.nn give under the habit."""
    layer, (_, other) = LAYERS[name], LAYERS[name].pair()
    return run(habit, other, layer.x()) if habit in EDITS or habit in WAYS else step(other, layer.x())


SHARDED = [name for name in LAYERS if not name.endswith("Norm")]
OF_FUNCTIONS = {**dict.fromkeys(LAYERS, (1, 2)), "VocabParallelEmbedding": (2,)}
PLACEMENT = "in-place operations that require placement changes"
# how torch refuses to prune a DTensor; before 2.13, which has no rule for it, in any layer
PRUNING = (
    (PLACEMENT, SHARDED) if torch.__version__ >= (2, 13) else ("have a sharding strategy|propagation failed", LAYERS)
)

# habit -> (the sentence that refuses it, {layer: tensor-parallel sizes where it is refused}); all else equals torch.nn
REFUSED: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "functional_call, whole tensors": (
        "plain tensor .* on 2 tensor-parallel ranks: give it as distribute_tensor", dict.fromkeys(LAYERS, (2,))),
    "two batch dims": (
        r"does not tell batch from sequence here|give an int64 tensor \(batch, seq\)",
        dict.fromkeys(("SelfAttention", "TransformerBlock", "GPT"), (1, 2))),
    "second derivatives": ("has no second derivative", OF_FUNCTIONS),
    "torch.func.grad": (
        "torch.func's grad, .* do not enter tpformer.ops|or one inside of torch.func", OF_FUNCTIONS),
    "weight_norm": ("does not have a sharding strategy registered", dict.fromkeys(LAYERS, (2,))),
    "spectral_norm": (PLACEMENT, dict.fromkeys(SHARDED, (2,))),
    "prune": (PRUNING[0], dict.fromkeys(PRUNING[1], (2,))),
}  # fmt: skip


def assert_as_expected(name: str, habit: str, tp: int, found: list[Results | str]) -> None:
    what = f"{habit}, {name} on {tp}"
    sentence, where = REFUSED.get(habit, ("", {}))
    if tp in where.get(name, ()):
        for each in found:
            assert isinstance(each, str) and re.search(sentence, each), (what, each)
        return
    assert not any(isinstance(each, str) for each in found), (what, found)
    actual, oracle = joined(name, tp, found), expected(name, habit if habit not in AUTOCAST else "")
    if low := AUTOCAST.get(habit):
        baseline = expected(name, habit)
        parts = [part for part in oracle if oracle[part] is not None]
        assert all(actual[part].dtype == baseline[part].dtype for part in parts), what
        # All values are compared as one, because some gradients are zero but for noise, as those of key biases.
        x, exact, by_torch = (torch.cat([of[part].flatten() for part in parts]) for of in (actual, oracle, baseline))
        assert_kernel_close(x.to(low), exact, by_torch.to(low), what)
        return
    assert_same(actual, oracle, what)


@pytest.mark.parametrize("name, tp, dp", [*SUITE, *in_turns(case for case in CASES if case not in SUITE)])
def test_every_habit_equals_torch_or_is_refused(ranks, name, tp, dp):
    habits = [*EDITS, *WAYS] if dp == 1 else [*SHARDINGS]
    for habit, *found in zip(habits, *ranks(tp * dp).run(on_rank, name, tp, habits), strict=True):
        assert_as_expected(name, habit, tp, found)


def test_every_layer_works_without_a_process_group():
    """Inside a module of somebody else; its parameters are plain, and load into another one."""
    for name, layer in LAYERS.items():
        model, again = layer.pair()[0], nn.Sequential(layer.ours(dtype=torch.float64))
        assert all(type(p) is nn.Parameter for p in model.parameters())
        found = step(model, layer.x())
        assert_same(found, expected(name, ""), name)
        again.load_state_dict(model.state_dict())
        assert_identical(step(again, layer.x()), found, name)
    assert not dist.is_initialized()


def page() -> str:
    notes = {habit: f"[{index}]" for index, habit in enumerate(REFUSED, 1)}
    lines = [INTRODUCTION, "| | " + " | ".join(LAYERS) + " |", "|---" * (len(LAYERS) + 1) + "|"]
    for habit in HABITS:
        where = REFUSED.get(habit, ("", {}))[1]
        cells = []
        for name, layer in LAYERS.items():
            refused, fits = where.get(name, ()), habit not in PARTS or PARTS[habit](layer.pair()[1])
            cells.append(" ".join(["="] * (1 not in refused) + [notes.get(habit, "")] * (2 in refused)) if fits else "")
        lines.append(f"| {habit} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{note} {NOTES[habit]}  " for habit, note in notes.items()), ""]
    return "\n".join(lines)


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run: python tests/layers/test_habits.py"


if __name__ == "__main__":
    PAGE.write_text(page())
