"""Packed activations give the bits of those that are kept as they are, and everything that can be packed is packed."""

import gc
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from kept import kept
from testing import all_exponents, assert_identical
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer import ops
from tpformer.kernels.pack import reference
from tpformer.kernels.pack.format import Packed, packed_bytes
from tpformer.layers import TransformerBlock, transformer_block
from tpformer.models import GPT, GPTConfig
from tpformer.ops import packing

PLAIN = {"n_heads": 4, "hidden_size": 128, "seq_length": 128, "n_layers": 3, "vocab_size": 60}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
MODELS = {
    "gpt": {"dropout": 0.1},
    "llama": {**LLAMA, "qk_norm": True, "n_kv_heads": 2},
    "experts": {**LLAMA, "n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64, "shared_expert_size": 64},
}
UNIT = 2 * PLAIN["seq_length"] * PLAIN["hidden_size"]  # values of the residual stream
VALUES = {"gpt": 10, "llama": 12.5, "experts": 9}  # that a layer keeps, in units


def model(name: str, **options: Any) -> GPT:
    return kept(GPT, GPTConfig(**{**PLAIN, **MODELS[name]}), dtype=torch.bfloat16, seed=1, **options)


def step(net: GPT, device: str = "cpu", pool: ThreadPoolExecutor | None = None) -> list[Tensor]:
    """Loss and gradients; what dropout draws is the same each time. pool: whose thread runs the backward."""
    ids = torch.randint(60, (2, 129), generator=torch.Generator().manual_seed(3)).to(device)
    index = torch.arange(2, device=device)
    loss = net(ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), sample_index=index, step=1)
    loss.backward() if pool is None else pool.submit(loss.backward).result()
    return [loss.detach(), *(parameter.grad for parameter in net.parameters())]


@cache
def unpacked(name: str) -> list[Tensor]:
    return step(model(name))


def packing_block(size: int = 128, **options: Any) -> TransformerBlock:
    return kept(transformer_block, size, 4, **{"dtype": torch.bfloat16, "pack_activations": True} | options)


def report(device: str = "cpu") -> packing.PackingReport:
    return ops.packing_report(device)


@pytest.fixture(autouse=True)
def new_report():
    report()


# (options, the units of a layer that are packed, the models)
WAYS: list[tuple[dict, Callable[[str], float], tuple[str, ...]]] = [
    ({}, lambda name: 3 * VALUES[name], ("llama", "experts")), ({"recompute": "mlp"}, lambda _: 18, ("gpt",)),
    ({"recompute": "full", "recompute_interval": 2}, lambda _: 2, ("llama",)),
]  # fmt: skip
OTHERS: list[tuple[dict, Callable[[str], float], tuple[str, ...]]] = [
    ({}, lambda name: 3 * VALUES[name], ("gpt",)), ({"recompute": "mlp"}, lambda _: 19.5, ("llama",)),
    ({"pack_layers": "0,-1"}, lambda name: 2 * VALUES[name], ("gpt", "experts")),
    ({"recompute": "full"}, lambda _: 3, ("gpt",)), ({"offload_activations": True}, lambda _: 30, ("gpt",)),
    ({"recompute": "full", "recompute_layers": "1"}, lambda name: 2 * VALUES[name] + 1, ("experts",)),
]  # fmt: skip


@pytest.mark.parametrize("options, units, names", [*WAYS, *in_turns(OTHERS)])
def test_a_step_has_the_same_bits(options, units, names) -> None:
    plain = {key: value for key, value in options.items() if key != "pack_layers"}
    for name in names:
        expected = step(model(name, **plain)) if plain else unpacked(name)
        assert report().values == 0
        assert_identical(step(model(name, pack_activations=True, **options)), expected, name)
        packed = report()
        assert packed.kept == packed.overflows == 0 < packed.escapes
        assert packed.values == units(name) * UNIT


def test_what_a_block_keeps_is_packed() -> None:
    """Nothing of bfloat16 is kept but parameters; nothing of an original is alive after the forward."""
    block, kept = packing_block(), []
    parameters = {x.untyped_storage().data_ptr() for x in block.parameters()}
    with saved_tensors_hooks(lambda x: kept.append(x.detach()) or x, lambda x: x):
        y = block(torch.randn(2, 128, 128).bfloat16().requires_grad_().clone())
    by_place = {x.untyped_storage().data_ptr(): x for x in kept}
    others = [each for place, each in by_place.items() if place not in parameters]
    assert all(each.dtype in (torch.uint8, torch.float32) for each in others)
    assert sum(each.nbytes for each in others if each.dtype == torch.uint8) == 10 * packed_bytes(UNIT)
    gc.collect()
    tensors = (x for x in gc.get_objects() if isinstance(x, Tensor))
    alive = [x for x in tensors if x.dtype == torch.bfloat16 and x.shape == (256, 512)]
    assert all(isinstance(each, nn.Parameter) or each.untyped_storage().data_ptr() in parameters for each in alive)
    y.sum().backward()


def test_what_others_hold_is_not_packed() -> None:
    """A leaf whose gradient is wanted is its owner's, as is what a pipeline stage has received; views of it, too."""
    block = packing_block()
    for shape in ((2, 128, 128), (256, 128)):
        held = torch.randn(shape).bfloat16().requires_grad_()
        block(held.view(2, 128, 128)).sum().backward()
        assert report().values == 9 * UNIT
    block(torch.randn(2, 128, 128).bfloat16()).sum().backward()  # nobody wants its gradient, and nobody holds it
    assert report().values == 10 * UNIT


@pytest.mark.parametrize("rows, is_packed", [(128, False), (129, True), (256, True)])
def test_half_of_a_storage_is_not_packed(rows: int, is_packed: bool) -> None:
    """Each of two halves would unpack the whole."""
    with packing.packed_activations():
        part = torch.randn(256, 128).bfloat16()[:rows]
        torch.ones(rows, 128, dtype=torch.bfloat16, requires_grad=True).mul(part)
    assert (report().values > 0) is is_packed


@contextmanager
def overflowing(chosen: int, *, known: bool):
    """The tensor of this number overflows, and the host knows it, or does not, as with a GPU."""
    pack, numbers = reference.pack, itertools.count()

    def broken(x: Tensor) -> tuple[Packed, Tensor]:
        return pack(all_exponents(x) if next(numbers) == chosen else x)

    with mock.patch.object(reference, "pack", broken), mock.patch.object(packing, "host_knows", lambda counts: known):
        yield


@pytest.mark.parametrize("known", [True, False])
def test_a_tensor_that_overflows_stays_as_it_is_or_gradients_are_nan_and_the_report_says_so(known) -> None:
    expected, net = unpacked("gpt"), model("gpt", pack_activations=True)
    for number in (0, 3, 11):
        net.zero_grad()
        with overflowing(number, known=known):
            found, packed = step(net), report()
        if known:
            assert_identical(found, expected)
            assert packed.kept == 1 and packed.overflows == 0
            continue
        assert packed.overflows > 0 == packed.kept
        assert any(x.isnan().any() for x in found) and found[0] == expected[0]
        net.zero_grad()
        with ops.unpacked_activations():
            assert_identical(step(net), expected)
        assert report().values == 0


@pytest.mark.parametrize("inside, reentrant, thread", [
    (False,) * 3, (True,) * 3, *in_turns([*itertools.product([False, True], repeat=3)][1:-1])
])  # fmt: skip
def test_checkpoints_around_and_inside_a_block(inside, reentrant, thread) -> None:
    """They keep their inputs alone, and pack nothing in either run, whatever is allowed when the second one comes.
    thread: as on a GPU, where the backward's thread has no context variables."""

    def checkpointed(forward, x: Tensor, **options: Any) -> Tensor:
        return checkpoint(lambda x: forward(x, **options), x, use_reentrant=reentrant)

    results = []
    for packs in (False, True):
        net = model("gpt", pack_activations=packs)
        for layer in net.layers.values():
            part = layer.mlp if inside else layer
            part.forward = partial(checkpointed, part.forward)
        with ops.unpacked_activations() if not inside else nullcontext(), ThreadPoolExecutor(1) as pool:
            results.append(step(net, pool=pool if thread else None))
        assert (report().values > 0) == (inside and packs)
    assert_identical(*results)


def test_offload_moves_packed_bytes(monkeypatch) -> None:
    net, moved = model("llama", pack_activations=True, offload_activations=True), []
    storage, smallest = ops.offload._Storage, packed_bytes(UNIT // 2)

    def counted(x: Tensor) -> ops.offload._Storage:
        made = storage(x)
        moved.append(made.host.nbytes)
        return made

    monkeypatch.setattr(ops.offload, "_Storage", counted)
    net.keep = replace(net.keep, offload=lambda: ops.Offload(smallest=smallest))
    assert_identical(step(net), unpacked("llama"))
    assert set(moved) == {packed_bytes(size) for size in (UNIT, UNIT // 2)} | {max(moved)}
    assert max(moved) < 2 * 3 * UNIT


def test_memory_that_is_written_again_is_packed_again() -> None:
    """What is packed has the values of its saving. Memory that is not packed and was written to is torch's error."""
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(64, 256).to(dtype), torch.ones(256, dtype=dtype, requires_grad=True)
        before = x.clone()
        with packing.packed_activations():
            first = (x * weight).sum()
            x.mul_(2)
            second = (x * weight).sum()
        if dtype == torch.float32:
            with pytest.raises(RuntimeError, match="by an inplace operation: .* version 1, and was saved at 0"):
                first.backward()
            continue
        totals = first + second, (before * weight).sum() + (x * weight).sum()
        assert torch.equal(*(torch.autograd.grad(total, weight)[0] for total in totals))
        assert report().values == 2 * x.numel()


def test_what_is_left_as_it_is() -> None:
    """Parts of a storage, a parameter and a buffer, empty and negated tensors, tensors on meta; all with right bits."""
    x, table = torch.randn(3, 64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    holder = nn.Module()
    holder.register_buffer("table", table)
    holder.weight = nn.Parameter(torch.randn(64, 256).bfloat16(), requires_grad=False)
    wide = torch.complex(torch.randn(64, 256), torch.randn(64, 256)).conj().imag.neg()
    given = [x[0], x[1].t(), x[:, :16], table, holder.weight, holder.weight.t(), torch.empty(0, 256).bfloat16(), wide]
    weights = [torch.ones(each.shape[-1], dtype=each.dtype, requires_grad=True) for each in given]

    def gradients() -> list[Tensor]:
        total = sum((each * w).sum().float() for each, w in zip(given, weights, strict=True))
        return list(torch.autograd.grad(total, weights))

    expected = gradients()
    with packing.packed_activations(holder):
        assert_identical(gradients(), expected)
    assert report().values == 0
    on_meta = torch.empty(2, 128, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    packing_block(device="meta")(on_meta).sum().backward()
    assert packing_block()(torch.empty(0, 128, 128).bfloat16()).shape == (0, 128, 128)
    with torch.no_grad():  # nothing is kept, so that any dtype will do
        packing_block(dtype=torch.float32)(torch.ones(1, 8, 128))


def test_a_graph_without_a_backward_is_freed() -> None:
    with packing.packed_activations():
        y = torch.randn(1000, requires_grad=True).exp()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_compiled_blocks_and_two_backwards() -> None:
    block, (x, dy), gradients = packing_block(), torch.randn(2, 2, 128, 128).bfloat16(), []
    for each in (block, torch.compile(block, backend="eager")):
        y = each(given := x.clone().requires_grad_())
        gradients += [torch.autograd.grad(y, given, dy, retain_graph=again)[0] for again in (True, False)]
    assert all(torch.equal(each, gradients[0]) for each in gradients)


def test_layers_that_pack_are_named() -> None:
    text = model("gpt", pack_activations=True, pack_layers="0:2").explain()
    assert "layers.0-1 keep activations packed until the backward: 12." in text
    assert "packed" not in model("gpt").explain()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_gpu(name) -> None:
    """The same bits; a tensor that overflows makes gradients NaN, the report says so, and nothing waits for it."""
    for options in ({}, {"recompute": "mlp"}, {"recompute": "full"}, {"offload_activations": True}):
        nets = [model(name, device="cuda", pack_activations=packs, **options) for packs in (False, True)]
        assert_identical(*(step(net, "cuda") for net in nets), what=f"{options}")
        assert report("cuda").overflows == 0
    block = packing_block(256, device="cuda")
    x = all_exponents(torch.randn(64, 256).bfloat16()).nan_to_num(1.0).clamp(-1e4, 1e4).cuda()
    block(x[None] + 0, positions=None).sum().backward()
    assert report("cuda").overflows > 0 and any(each.grad.isnan().any() for each in block.parameters())
