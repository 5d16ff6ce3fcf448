"""What people do to modules does to the children of a block what it does to those of torch.nn: hooks, subclasses,
wrappers, adapters, parametrizations, modules of their own; on one rank and on two, with every gradient, in float64."""

import pytest
import theirs
import torch
import torch.distributed as dist
from habits import fill, lora
from theirs import ANYWHERE, FFN, HEADS, HIDDEN, ON_LINEARS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpformer.config import RECOMPUTE
from tpformer.distributed import build_mesh
from tpformer.layers import (
    LayerNorm,
    Positions,
    RMSNorm,
    TensorParallel,
    TransformerBlock,
    explain,
)
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients

BATCH, SEQ = 2, 6
NORMS = ("layernorm", "rmsnorm")
CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LINEARS = {
    "layernorm": ("self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"),
    "rmsnorm": ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def ours(norm: str, tp: TensorParallel | None = None, recompute: str = "none") -> TransformerBlock:
    """A block with the values of theirs.Block."""
    activation = "gelu_tanh" if norm == "layernorm" else "swiglu"
    options = {"norm": norm, "activation": activation, "recompute": recompute, "dtype": torch.float64}
    block = TransformerBlock(HIDDEN, HEADS, ffn_hidden_size=FFN, tp=tp, **options)
    if norm == "rmsnorm":
        assert block.input_layernorm.eps == 1e-5
    fill(block, theirs.Block(norm).state_dict())
    return block


def step(block: nn.Module, shard: slice | None = None, **options) -> dict[str, Tensor | None]:
    """Result and gradients of one forward and backward; shard: this rank's rows."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    if shard is not None:
        x, dy = (each.flatten(0, 1)[shard].clone() for each in (x, dy))
    x.requires_grad_()
    torch.manual_seed(9)
    y = block(x, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in block.named_parameters()}


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert value is found[name], (what, name)
        else:
            torch.testing.assert_close(
                found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{what}, {n}: {m}"
            )


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("habit", [*ANYWHERE, *ON_LINEARS])
def test_on_one_rank(habit, norm, recompute):
    linears = LINEARS[norm]
    for path in linears if habit in ON_LINEARS else (*CHILDREN, *linears):
        results = []
        for block in (theirs.Block(norm), ours(norm, recompute=recompute)):
            (ANYWHERE | ON_LINEARS)[habit](block, path)
            results.append(step(block))
        assert_same(results[1], results[0], f"{habit} on {path}")


def test_explain_names_what_is_called():
    block = ours("layernorm")
    assert "called" not in explain(block, 8)
    theirs.put(block, "self_attn.q_proj", nn.Sequential(block.self_attn.q_proj, nn.Tanh()))
    theirs.forward_hook(block, "mlp.fc2")
    theirs.replace_forward(block, "input_layernorm")
    theirs.subclass(block, "mlp")
    called = [line for line in explain(block, 8).splitlines() if " is called as a module, not fused: " in line]
    assert [(line.split()[0], line.split(": ")[1]) for line in called] == [
        ("input_layernorm", "its forward has been replaced"),
        ("mlp", "it is a Scaled"),
        ("self_attn.q_proj", "it is a Sequential"),
        ("mlp.fc2", "it has hooks"),
    ]


def put_with_values(block: nn.Module, path: str, made: nn.Module) -> None:
    """A module of torch.nn in place of ours, whole on every rank, with the values of ours."""
    with torch.no_grad():
        for name, p in block.get_submodule(path).named_parameters():
            made.get_parameter(name).copy_(p.full_tensor() if isinstance(p, DTensor) else p)
    theirs.put(block, path, made)


def replace_linear(block: nn.Module, path: str) -> None:
    child = block.get_submodule(path)
    made = nn.Linear(child.in_features, child.out_features, dtype=torch.float64)
    put_with_values(block, path, made)


def replace_norm(block: nn.Module, path: str) -> None:
    child = block.get_submodule(path)
    made = nn.LayerNorm(HIDDEN) if getattr(child, "bias", None) is not None else nn.RMSNorm(HIDDEN, eps=1e-5)
    made = made.double()
    put_with_values(block, path, made)


def bare_norm(block: nn.Module, path: str) -> None:
    """A norm without weight, of ours in ours: it stays in the fused pass."""
    norm = block.get_submodule(path)
    kind = type(norm)
    options = {"tp": norm.tp} if isinstance(norm, LayerNorm | RMSNorm) else {}
    theirs.put(block, path, kind(HIDDEN, 1e-5, elementwise_affine=False, **options))


def replace_branch(block: nn.Module, path: str) -> None:
    """A whole attention or MLP of torch.nn modules in place of ours."""
    child = block.get_submodule(path)
    made = (theirs.Attention() if path == "self_attn" else theirs.MLP(child.gated)).double()
    put_with_values(block, path, made)


def gathered_output(block: nn.Module, path: str) -> None:
    """A hook sees all features, of which the block goes on with this rank's."""
    block.get_submodule(path).gather_output = True
    theirs.scaling_hook(block, path)


# what means the same to a shard and to the whole
SHARDED = {name: ANYWHERE[name] for name in ("forward pre-hook", "backward hook", "subclass", "forward replaced")} | {
    "forward hook": theirs.scaling_hook,
    "LoRA": lora,
    "output gathered": gathered_output,
    "linear of torch.nn": replace_linear,
    "norm of torch.nn": replace_norm,
    "norm without weight": bare_norm,
    "branch of torch.nn": replace_branch,
}


def places(habit: str, norm: str) -> tuple[str, ...]:
    if habit.startswith("norm"):
        return CHILDREN[::2]
    if habit == "branch of torch.nn":
        return CHILDREN[1::2]
    if habit == "output gathered":
        return tuple(path for path in LINEARS[norm] if own(path) == "a")
    return LINEARS[norm] if habit in ("LoRA", "linear of torch.nn") else (*CHILDREN, *LINEARS[norm])


def on_rank(habit: str, norm: str, sequence_parallel: bool, recompute: str) -> list[dict[str, Tensor | None]]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    results = []
    for path in places(habit, norm):
        block = ours(norm, TensorParallel(mesh, sequence_parallel), recompute)
        SHARDED[habit](block, path)
        rows = BATCH * SEQ // mesh.size()
        shard = slice(rows * mesh.get_local_rank(), rows * (mesh.get_local_rank() + 1)) if sequence_parallel else None
        found = step(block, shard, positions=Positions(BATCH, SEQ))
        reduce_partial_gradients(block, partial=["*.a.weight", "*.b.weight"])  # of adapters on sequence shards
        results.append({name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()})
    return results


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("norm", "recompute"), [("layernorm", "none"), ("rmsnorm", "full"), ("layernorm", "mlp")])
@pytest.mark.parametrize("habit", SHARDED)
def test_on_two_ranks(ranks, habit, norm, recompute, sequence_parallel):
    results = ranks(2).run(on_rank, habit, norm, sequence_parallel, recompute)
    for index, path in enumerate(places(habit, norm)):
        block = theirs.Block(norm)
        SHARDED[habit](block, path)
        expected = step(block)
        found = [result[index] for result in results]
        if sequence_parallel:
            whole = {name: torch.cat([each[name] for each in found]).view(BATCH, SEQ, HIDDEN) for name in ("y", "dx")}
            found = [{**each, **whole} for each in found]
        for each in found:
            assert_same(each, expected, f"{habit} on {path}")


def own(path: str) -> str:
    """Which half of a parallel adapter is a plain linear."""
    return "b" if path.endswith(("o_proj", "fc2", "down_proj")) else "a"


def dropout_in_a_foreign_child() -> None:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    block = ours("layernorm", TensorParallel(mesh))
    block.self_attn.q_proj = nn.Sequential(nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"Sequential draws dropout \(p=0.1\) from this rank's generator, and others would"
    ):
        block(torch.zeros(BATCH, SEQ, HIDDEN, dtype=torch.float64))
    block.self_attn.q_proj = nn.Linear(HIDDEN, HIDDEN // 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="Linear computes 12 features of 24: a module that is not built"):
        block(torch.zeros(BATCH, SEQ, HIDDEN, dtype=torch.float64))


def test_a_foreign_child_that_ranks_would_disagree_on(ranks):
    ranks(2).run(dropout_in_a_foreign_child)


def child_on_other_ranks(sequence_parallel: bool) -> None:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    block = ours("layernorm", TensorParallel(mesh, sequence_parallel))
    for tp in (None, TensorParallel(mesh, not sequence_parallel)):
        other = ours("layernorm", tp)
        for path in (*CHILDREN, *LINEARS["layernorm"]):
            made = other.get_submodule(path)
            for child in (made,) if tp is None else (made, nn.Sequential(made)):
                with pytest.raises(ValueError, match=f"{path[-3:]}: a .* rank.* cannot be part of a .*: build it with"):
                    theirs.put(block, path, child)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_child_that_lies_on_ranks_in_another_way(ranks, sequence_parallel):
    ranks(2).run(child_on_other_ranks, sequence_parallel)


def fully_sharded(norm: str, every: str, tp: bool) -> tuple[dict[str, Tensor | None], int]:
    """(result and gradients, first row) of this rank, for a block. FSDP2 shards single parts of it, as recipes do."""
    mesh = build_mesh("cpu", tensor_parallel=2 if tp else 1, data_parallel_shard=2)
    block = ours(norm, TensorParallel(mesh["tp"], sequence_parallel=True) if tp else None)
    parts = {"norm": CHILDREN[::2], "linear": LINEARS[norm], "branch": CHILDREN[1::2]}[every]
    for path in parts:
        fully_shard(block.get_submodule(path), mesh=mesh["dp_shard"])
    fully_shard(block, mesh=mesh["dp_shard"])
    tokens = BATCH * SEQ // 2  # data parallel: a sample each
    number, size = mesh["dp_shard"].get_local_rank(), tokens // mesh["tp"].size()
    first = tokens * number + size * mesh["tp"].get_local_rank()
    found = step(block, slice(first, first + size), positions=Positions(1, SEQ))
    reduce_partial_gradients(block)
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}, first


@pytest.mark.parametrize("tp", [False, True])
@pytest.mark.parametrize("every", ["norm", "linear", "branch"])
@pytest.mark.parametrize("norm", NORMS)
def test_fsdp_of_single_parts(ranks, norm, every, tp):
    results = ranks(4 if tp else 2).run(fully_sharded, norm, every, tp)
    expected = step(theirs.Block(norm))
    for found, first in results:
        for name in ("y", "dx"):
            expected_rows = expected[name].flatten(0, 1)[first : first + len(found[name])]
            torch.testing.assert_close(found[name], expected_rows, rtol=1e-12, atol=1e-12)
        gradients = {name: 2 * g for name, g in found.items() if name not in ("y", "dx")}  # FSDP2 takes the mean
        assert_same(gradients, {name: expected[name] for name in gradients}, f"FSDP2 of every {every}")


GPT_CONFIG = GPTConfig(
    vocab_size=30, vocab_multiple=2, seq_length=SEQ, n_layers=2, hidden_size=HIDDEN, n_heads=HEADS, tie_embeddings=False
)  # fmt: skip


def gpt_step(sharded: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a GPT, whole or as torchtitan shards one: each block, then norm and head together."""
    model = GPT(GPT_CONFIG, seed=1, dtype=torch.float64)
    ids = torch.randint(30, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    if sharded:
        mesh = build_mesh("cpu", tensor_parallel=1, data_parallel_shard=2)["dp_shard"]
        ids = ids[mesh.get_local_rank()][None]
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard([model.norm, model.lm_head], mesh=mesh)
        fully_shard(model, mesh=mesh)
    loss = model(ids[:, :-1], targets=ids[:, 1:])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return loss.detach(), whole


def test_fsdp_of_norm_and_head_together(ranks):
    loss, gradients = gpt_step(sharded=False)
    results = ranks(2).run(gpt_step, True)
    torch.testing.assert_close(sum(found for found, _ in results), loss, rtol=1e-12, atol=0)
    for _, found in results:
        assert_same({name: 2 * g for name, g in found.items()}, gradients, "FSDP2 takes the mean")
