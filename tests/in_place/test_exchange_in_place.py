"""Mixtures of transformers whose ranks exchange tokens: each rank's samples give, together, what one process makes of
all of them, with every gradient; files and checkpoints hold one process's tensors; what cannot be right is refused.

tests/ops/test_exchanged_rows.py has the ways of the rows, whatever their numbers.
"""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from testing import assert_identical, assert_same, differ_on_a_rank, on_every_rank
from tiny import batch, tiny, unchanged
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from turns import FIRST, in_turns, of_turn

from bench.families.training import in_float64
from tpformer import clip_grad_norm_, full_state_dict, load_sharded, parallelize, parameters_on_meta, verify
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place import exchanged
from tpformer.layers import TensorParallel, explain

EXPERTS = {"mixtral": 8, "gptoss": 8, "phimoe": 8, "granitemoe": 8}  # of families that call them num_local_experts


def whole(family: str, **options: Any) -> nn.Module:
    many = {"num_local_experts": EXPERTS[family]} if family in EXPERTS else {}
    return tiny(family, torch.float64, experts_implementation="eager", **many, **options)


def meshes(t: int, ep: int) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks on the axes of a run, and on those of experts."""
    ranks = dist.get_world_size()
    mesh = build_mesh("cpu", tensor_parallel=t, data_parallel_shard=ranks // t)
    return mesh, init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("copies", "ep"))


def of_experts_alone() -> TensorParallel:
    """Two ranks of each two share the experts, and nothing else is divided."""
    return TensorParallel(experts=meshes(1, 2)[1]["ep"])


def mixtures(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def exchanging(model: nn.Module, t: int, ep: int) -> nn.Module:
    """The model on all ranks, with FSDP2 around it."""
    mesh, of_experts = meshes(t, ep)
    tp = TensorParallel(mesh["tp"] if t > 1 else None, t > 1, experts=of_experts["ep"])
    assert parallelize(model, tp) is model
    for module in mixtures(model):
        fully_shard(module, mesh=of_experts["copies"])
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp_shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the operation that averages
    return model


def own(samples: dict[str, Any], t: int) -> dict[str, Any]:
    """This rank's samples."""
    ranks = dist.get_world_size() // t
    return {name: x.chunk(ranks)[dist.get_rank() // t] for name, x in samples.items()}


class Stacked(nn.Module):
    """Experts of one's own, which a number of another name counts. capacity: rows for an expert, of its equal part."""

    def __init__(self, number: int, width: int, capacity: float = torch.inf) -> None:
        super().__init__()
        self.number, self.capacity = number, capacity
        self.up, self.down = (nn.Parameter(torch.randn(number, *each)) for each in ((width, 12), (12, width)))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(self.number):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            most = min(len(row), self.capacity * chosen.numel() / self.number)
            row, place = row[: int(most)], place[: int(most)]
            own = (x[row] @ self.up[expert]).relu() @ self.down[expert]
            y = y.index_add(0, row, weights[row, place, None] * own)
        return y


class Own(nn.Module):
    def __init__(self, capacity: float = torch.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 6), Stacked(6, 8, capacity)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


@on_every_rank(2)
def test_a_mixture_of_ones_own() -> None:
    """An expert's rows come together, so nothing may depend on how many there are."""
    tp, samples = of_experts_alone(), torch.randn(14, 8, dtype=torch.float64)
    model, found = Own(), []
    for each, x in ((deepcopy(model), samples), (parallelize(model, tp, example=samples), own({"x": samples}, 1)["x"])):
        each(x).pow(2).mean().backward()
        found.append([full_tensor(p.grad) for p in each.experts.parameters()])
    assert_same(found[1], found[0])
    with pytest.raises(ValueError, match="Stacked do not give what all of them do if each gets its own rows alone"):
        parallelize(Own(capacity=1.0), tp, example=samples)


@in_float64()
def stepped(model: nn.Module, samples: dict[str, Any], ranks: int = 1) -> dict[str, torch.Tensor]:
    """The mean of the ranks' losses, the norm of the gradients, the gradients."""
    loss = model(**samples).loss
    loss.backward()
    mean = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(mean)
    found = {"loss": mean / ranks, "norm": clip_grad_norm_(model, torch.inf)}
    return found | {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def both(family: str, t: int, ep: int, seq: int, **options: Any) -> tuple[dict, dict]:
    """What the ranks make of their samples, and one process of all of them."""
    ranks = dist.get_world_size()
    samples = batch(seq, 0, size=2 * ranks // t)
    found = stepped(exchanging(whole(family, **options), t, ep), own(samples, t), ranks)
    return found, with_zeros(stepped(whole(family, **options), samples), found)


def with_zeros(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """And gradients of zero, of experts without rows."""
    return {name: torch.zeros_like(x) for name, x in found.items()} | expected


@pytest.mark.parametrize(("family", "seq"), [("mixtral", 7), ("gptoss", 7), *in_turns(
    (each, 8) for each in ("qwen3moe", "qwen2moe", "qwen3next", "phimoe", "granitemoe", "deepseekv3")
)])  # fmt: skip
@on_every_rank(2)
def test_two_ranks_share_the_experts(family: str, seq: int) -> None:
    assert_same(*both(family, 1, 2, seq))


@pytest.mark.parametrize(("family", "t", "ep", "seq"), [
    ("qwen2moe", 2, 4, 8), *in_turns([("mixtral", 1, 2, 8), ("qwen3moe", 1, 4, 8), ("mixtral", 2, 4, 7)], first=0)
])  # fmt: skip
@on_every_rank(4)
def test_four_ranks_share_the_experts(family: str, t: int, ep: int, seq: int) -> None:
    """All four beside tensor-parallel ranks, whose sequences fit, and do not; in twos, of which each has copies."""
    with pytest.warns(UserWarning, match="cannot be shared equally") if seq % t else nullcontext():
        assert_same(*both(family, t, ep, seq))


@of_turn(FIRST)
@on_every_rank(4)
def test_mistakes_are_seen() -> None:
    """Each is made on all ranks."""
    samples = batch(8, 0, size=4)
    expected = stepped(whole("mixtral"), samples)

    def all_tokens(tp: TensorParallel, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return of

    def in_another_order(*args: Any, **more: Any) -> Any:
        visit = original(*args, **more)
        return visit._replace(experts=visit.experts.flip(0))

    original = exchanged.send_rows
    mistakes = {
        "sums": mock.patch.object(exchanged, "send_rows", lambda *args, share, **more: original(*args, **more)),
        "all tokens from each rank": mock.patch.object(exchanged, "_own_part", all_tokens),
        "experts in another order": mock.patch.object(exchanged, "send_rows", in_another_order),
    }  # fmt: skip
    for what, mistake in mistakes.items():
        model = exchanging(whole("mixtral"), 2, 4)
        with mistake:
            assert differ_on_a_rank(stepped(model, own(samples, 2), 4), expected), what


@on_every_rank(2)
def test_what_is_frozen_has_no_gradient() -> None:
    """Experts, whose rows come back all the same; all but experts; all but routers, whose weights' gradients come."""
    samples = batch(7, 0, size=4)
    for trained in ({"experts": False}, {"experts": True}, {"mlp.gate": True}):
        ((part, wanted),) = trained.items()
        model, plain = whole("qwen2moe"), whole("qwen2moe")
        for name, p in (*model.named_parameters(), *plain.named_parameters()):
            p.requires_grad_((part in name) == wanted)
        found = stepped(exchanging(model, 1, 2), own(samples, 1), 2)
        assert_same(found, with_zeros(stepped(plain, samples), found), part)


@on_every_rank(2)
def test_all_tokens_go_to_one_rank() -> None:
    """Experts of the other one get no rows, and a gradient of zero."""
    samples, found = batch(7, 0, size=4), []
    for ranks in (2, 1):
        model = whole("mixtral")
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight)  # of equal scores the first experts win
        model = exchanging(model, 1, 2) if ranks == 2 else model
        found.append(stepped(model, own(samples, 1) if ranks == 2 else samples, ranks))
    assert_same(*found)


@on_every_rank(2)
def test_a_loop_without_fsdp2_and_what_verify_says() -> None:
    """Experts need nothing, as each rank has its own; the rest is averaged by the loop."""
    tp, samples = of_experts_alone(), batch(7, 0, size=4)
    expected = stepped(whole("qwen2moe"), samples)
    model = parallelize(whole("qwen2moe"), tp)
    with in_float64():
        model(**own(samples, 1)).loss.backward()
    frozen = {id(p) for module in mixtures(model) for p in module.parameters()}
    for p in model.parameters():
        if id(p) not in frozen and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2
    found = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found["loss"], found["norm"] = expected["loss"], clip_grad_norm_(model, torch.inf)
    assert_same(found, expected)
    with pytest.raises(RuntimeError, match="call tpformer.clip_grad_norm_, which takes both together"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    verify(whole("mixtral"), partial(parallelize, tp=tp), {"input_ids": samples["input_ids"]}).check()
    told = "model.layers.0-1.mlp.experts exchange tokens over 2 expert-parallel ranks, with 2 experts on each: a token "
    assert told + "goes to 0.83 other ranks" in explain(model, 64)


@on_every_rank(4)
def test_files_and_checkpoints_hold_one_process(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model, expected = exchanging(whole("mixtral"), 1, 2), whole("mixtral")
    values = {name: x.detach().clone() for name, x in expected.state_dict().items()}
    if dist.get_rank() == 0:
        assert_identical(full_state_dict(model), values)
    else:
        full_state_dict(model)
    model.save_pretrained(folder[0])
    again = type(model).from_pretrained(folder[0], dtype=torch.float64)
    assert_identical(dict(again.state_dict()), values)
    with parameters_on_meta():
        empty = whole("mixtral")
    parallelize(empty.double(), of_experts_alone())
    load_sharded(empty, folder[0])
    assert_identical({name: full_tensor(x) for name, x in empty.state_dict().items()}, values)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder[0]}/dcp")
    other = exchanging(whole("mixtral"), 2, 4)
    for p in other.parameters():
        nn.init.zeros_(p)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder[0]}/dcp")
    assert_identical({name: full_tensor(x) for name, x in state["model"].items()}, values)
    plain = {"model": {name: torch.zeros_like(x) for name, x in values.items()}}
    dcp.load(plain, checkpoint_id=f"{folder[0]}/dcp")
    assert_identical(plain["model"], values)


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    # a backward recomputes outside of the mode that `stepped` has set
    again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), in_float64())} | options
    model.train().gradient_checkpointing_enable(again if again["use_reentrant"] is False else options)
    return model


@on_every_rank(2)
def test_a_layer_that_runs_again_keeps_its_decision_or_is_refused() -> None:
    samples = batch(8, 0, size=4)
    model = checkpointed(exchanging(whole("mixtral"), 1, 2))
    assert_same(stepped(model, own(samples, 1), 2), stepped(whole("mixtral").train(), samples))
    model = checkpointed(parallelize(whole("mixtral"), of_experts_alone()))
    loss = model(**own(samples, 1)).loss
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.neg_()  # what was computed is now another decision
    with pytest.raises(
        RuntimeError, match="layers.1.mlp.experts runs again in the backward, and its router chose other"
    ):
        loss.backward()
    model = checkpointed(parallelize(whole("mixtral"), of_experts_alone()), use_reentrant=True)
    with pytest.raises(
        RuntimeError, match="nobody knows which experts its router chose: checkpoint with use_reentrant=F"
    ):
        model(**batch(8, dist.get_rank())).loss.backward()


@on_every_rank(4)
def test_refusals_say_why() -> None:
    mesh, ep = meshes(2, 2)[0], of_experts_alone()
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))["ep"]
    four = TensorParallel(experts=init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
    for words, model, tp in (
        ("2 ranks that exchange tokens, without rank . of 2 tensor-parallel", whole("mixtral"),
         TensorParallel(mesh["tp"], True, experts=across)),
        ("LlamaForCausalLM has no module that holds its experts as parameters", tiny("llama"), ep),
        ("layers.0.mlp.experts cannot exchange tokens over 4 ranks: 4 ranks cannot share its 6 experts",
         tiny("qwen3moe", num_experts=6), four),
    ):  # fmt: skip
        with unchanged(model), pytest.raises(ValueError, match=words):
            parallelize(model, tp)
    with pytest.raises(ValueError, match="give experts in the first call of parallelize"):
        parallelize(parallelize(whole("mixtral"), mesh["tp"]), ep)
    model = parallelize(whole("mixtral"), ep)
    assert parallelize(model, ep) is model  # as after adapters have been added
    with pytest.raises(ValueError, match="call it on all of them with synced_gpus=True"):
        model.generate(batch(4, 0)["input_ids"])
    with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
        fully_shard(model.model.layers[0], mesh=meshes(1, 2)[0]["dp_shard"])  # without a unit of the experts alone
