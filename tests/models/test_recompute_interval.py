"""A recomputed region of several layers keeps only its first input. Its recomputation leaves out the last GEMM, and all
results have the bits that they have without recomputation."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from kept import kept
from steps import Results, each_case, gradients
from testing import assert_identical
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from turns import in_turns

from tpformer.distributed import record_collectives
from tpformer.layers import TensorParallel, keep
from tpformer.layers.children import others_hook, unwrapped
from tpformer.layers.keep import KeepLayers
from tpformer.layers.keep_block import Keep
from tpformer.models import GPT, GPTConfig
from tpformer.planner.storages import Saved

BATCH, SEQ, HIDDEN, LAYERS = 2, 6, 24, 5
CONFIG = {"vocab_size": 40, "seq_length": SEQ, "n_layers": LAYERS, "hidden_size": HIDDEN, "n_heads": 6, "dropout": 0.1}
SWIGLU = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "n_kv_heads": 3, "bias": False}


def hook(index: int):
    """Return an edit that adds a hook to a layer. The hook's gradient needs the layer's output."""

    def add(model: GPT) -> None:
        model.gain = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))
        model.layers[str(index)].register_forward_hook(lambda _, inputs, y: model.gain * y)

    return add


def adapt(model: GPT) -> None:
    """Put modules that draw from torch's generator before fc1 of every layer."""
    for layer in model.layers.values():
        layer.mlp.fc1 = nn.Sequential(nn.Dropout(0.5), layer.mlp.fc1)


def drop_between(model: GPT) -> None:
    model.layers["0"].register_forward_hook(lambda _, inputs, y: nn.functional.dropout(y, 0.5))


EDITS = {"hooked first": hook(0), "hooked last": hook(LAYERS - 1), "adapters": adapt, "dropout between": drop_between}


def run(edit=None, *, swiglu: bool = False, sequence_parallel: bool = True, **options) -> tuple[Results, int]:
    """Return loss and gradients, and how many collectives the backward has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    config = GPTConfig(**CONFIG, **(SWIGLU if swiglu else {}))
    model = kept(GPT, config, tp=TensorParallel(mesh, sequence_parallel), dtype=torch.float64, **options)
    if edit is not None:
        edit(model)
    torch.manual_seed(1)
    ids = torch.randint(40, (BATCH, SEQ))
    loss = model(ids, targets=ids, sample_index=torch.arange(BATCH), step=3)
    with record_collectives() as collectives:
        loss.backward()
    return {"loss": loss.detach()} | gradients(model), len(collectives)


FULL = {"recompute": "full"}
# an edit of the model, and options of its recomputation
CASES = {
    **{f"of {k}": (None, {"recompute_interval": k}) for k in (3, 99)},
    "selected": (None, {"recompute_interval": 2, "recompute_layers": "0,1,3:"}),
    "offloaded": (None, {"recompute_interval": 2, "offload_activations": True}),
    "swiglu": (None, {"recompute_interval": 2, "swiglu": True}),
    **{f"{edit} of {k}": (EDITS[edit], {"recompute_interval": k}) for edit in EDITS for k in (1, 2, LAYERS)},
}
without_recomputation = functools.cache(run)


# of one layer, which tests/layers/test_habits_of_children.py has with hooks and adapters
SINGLE = [name for name in CASES if name.endswith(" of 1")]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SINGLE), *in_turns(SINGLE)])
def test_bits_are_those_without_recomputation(name, monkeypatch):
    """Hooks and adapters in a region change nothing either."""
    monkeypatch.setattr("tpformer.ops.Offload.__init__.__defaults__", (1,))
    edit, options = CASES[name]
    plain, _ = without_recomputation(edit, swiglu=options.get("swiglu", False))
    assert_identical(run(edit, **FULL, **options)[0], plain)


def of_regions(interval: int) -> dict:
    """Options of recomputation in regions of so many layers; 0 is none."""
    return {**FULL, "recompute_interval": interval} if interval else {}


def on_rank(mesh, sequence_parallel: bool, interval: int) -> tuple[Results, int]:
    return run(sequence_parallel=sequence_parallel, **of_regions(interval))


@pytest.mark.parametrize("sequence_parallel", [True, *in_turns([False], first=0)])
def test_on_two_ranks_one_reduction_of_a_region_is_left_out(ranks, sequence_parallel):
    cases = [(sequence_parallel, interval) for interval in (0, 1, 2, LAYERS)]
    (plain, calls), *others = (found for _, (found, _) in each_case(ranks, 2, on_rank, cases))
    # a recomputed layer repeats 2 reductions and, with sequence shards, 2 gathers; a region's last layer repeats 1 less
    again = 4 if sequence_parallel else 2
    for (found, with_again), regions in zip(others, (LAYERS, 3, 1), strict=True):
        assert_identical(found, plain)
        assert with_again - calls == again * LAYERS - regions


SHARDED = 3


def sharded(mesh, dtype: torch.dtype, options: dict) -> Results:
    """FSDP2 shards each layer and frees its parameters after a forward, so a region's second run gathers them again. By
    torch's own policy it also casts what a layer is called with."""
    model = kept(GPT, GPTConfig(**{**CONFIG, "n_layers": SHARDED}), dtype=dtype, **options)
    place = {"mesh": mesh} | ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if dtype == torch.float32 else {})
    for layer in model.layers.values():
        fully_shard(layer, **place)
        assert not others_hook(layer._forward_hooks), "FSDP2's own hooks let a region leave out its last GEMM"
    fully_shard(model, **place)
    results: Results = {}
    for step in (1, 2):
        ids = torch.randint(40, (BATCH, SEQ), generator=torch.Generator().manual_seed(dist.get_rank()))
        index = torch.arange(BATCH) + 2 * dist.get_rank()
        model(ids, targets=ids, sample_index=index, step=step).backward()
        results |= {f"{step} {name}": g for name, g in gradients(model).items()}
        model.zero_grad()
    return results


@pytest.mark.parametrize(("dtype", "ways"), [
    (torch.float64, [{}, of_regions(SHARDED)]),
    *in_turns([(torch.float64, [{}, {"recompute": "mlp"}]), (torch.float32, [*map(of_regions, (0, 1, 2))])], first=1),
])  # fmt: skip
def test_sharded_layers_of_a_region_keep_the_bits(ranks, dtype, ways):
    """As do those of layers that are recomputed one by one. A second run draws the same dropout."""
    (_, plain), *others = each_case(ranks, 2, sharded, [(dtype, options) for options in ways])
    for case, found in others:
        assert_identical(found, plain, f"{case}")


def test_one_input_is_kept_for_each_region():
    def saved_bytes(**options) -> int:
        config = {**CONFIG, "position": "rope", "vocab_size": 1}
        model = kept(GPT, GPTConfig(**config), **FULL, **options)
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
        with Saved(*model.parameters()).recording() as saved:
            model(ids, targets=ids, sample_index=torch.arange(BATCH), step=1)
        return saved.total()

    by_interval = {k: saved_bytes(recompute_interval=k) for k in (1, 2, 3, LAYERS)}
    row_bytes = 4 * BATCH * SEQ * HIDDEN
    differences = {k: (by_interval[1] - nbytes) / row_bytes for k, nbytes in by_interval.items()}
    assert differences == {1: 0, 2: 2, 3: 3, LAYERS: 4}
    # a region has consecutive layers alone: of "0,2,3" it is the last two
    selected = [saved_bytes(recompute_layers="0,2,3", recompute_interval=k) for k in (1, 2)]
    assert selected[0] - selected[1] == row_bytes


def test_what_is_kept_is_said_through_wrappers_and_of_blocks_alone() -> None:
    """What was said before is forgotten, and other people's layers keep their attributes."""
    model = GPT(GPTConfig(**CONFIG))
    keep(torch.compile(model, backend="eager"), **FULL, recompute_interval=2, offload_activations=True)
    assert model.keep.regions == {str(i): i - i % 2 for i in range(LAYERS)} and model.keep.offload is not None
    model.layers["1"], model.layers["2"] = torch.compile(model.layers["1"], backend="eager"), nn.Identity()
    model.layers["2"].keep = "its own"
    keep(model, recompute="mlp", recompute_layers="1")
    assert model.keep == KeepLayers() and model.layers["2"].keep == "its own"
    assert [unwrapped(model.layers[i]).keep for i in "01"] == [Keep(), Keep("mlp")]
    with pytest.raises(AttributeError, match=r"offload_activations of a GPT is said by .*keep\(module, off"):
        model.offload = None
    old = model.__getstate__()
    del old["keep"]
    model = GPT.__new__(GPT)  # of an earlier version
    model.__setstate__(old | {"regions": {"0": 0, "1": 0}, "offload": None})
    assert model.keep == KeepLayers({"0": 0, "1": 0})


def test_a_layer_that_was_added_is_kept_as_the_others():
    model = GPT(GPTConfig(**CONFIG))
    model.layers[str(LAYERS)] = copy.deepcopy(model.layers["0"])
    keep(model, recompute="mlp")
    assert [layer.keep for layer in model.layers.values()] == [Keep("mlp")] * (LAYERS + 1)
