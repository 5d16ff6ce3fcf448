"""Offloading keeps every bit of the gradients, copies each storage once and no parameter, and fetches ahead."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kept import kept
from testing import assert_identical
from torch import Tensor, nn
from turns import in_turns

from tpformer import ops
from tpformer.config import kept_layers
from tpformer.layers import DropoutKey, transformer_block
from tpformer.models import GPT, GPTConfig
from tpformer.ops import offload as module
from tpformer.planner.storages import Saved

HIDDEN, BATCH, SEQ = 32, 2, 8


def blocks(**options) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kept(transformer_block, HIDDEN, 4, dropout=0.1, **options) for _ in range(3))


def forward(layers: nn.ModuleList, x: Tensor, offload: ops.Offload | None) -> Tensor:
    key = DropoutKey(0, 1, torch.arange(len(x), device=x.device), layers)
    for layer in layers:
        with nullcontext() if offload is None else offload.layer(layer):
            x = layer(x, dropout_key=key)
    return x


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x.to(device, dtype).requires_grad_()


@pytest.mark.parametrize("device, options", [
    ("cpu", {}), ("cpu", {"recompute": "mlp"}), ("cpu", {"recompute": "full"}), ("cpu", {"activation": "swiglu"}),
    *(pytest.param("cuda", {"recompute": each}, marks=pytest.mark.gpu) for each in ("none", "mlp", "full")),
])  # fmt: skip
def test_offloading_changes_no_bit(device, options):
    """Of two backwards of a graph. On a GPU several times over, because reused memory shows only then."""
    times, dtype = (1, torch.float32) if device == "cpu" else (5, torch.bfloat16)
    layers = blocks(**options, device=device, dtype=dtype)
    for _ in range(times):
        results = []
        for offload in (None, ops.Offload(smallest=1)):
            x = inputs(device, dtype)
            y = forward(layers, x, offload)
            loss, leaves = y.square().sum(), [x, *layers.parameters()]
            gradients = [torch.autograd.grad(loss, leaves, retain_graph=retained) for retained in (True, False)]
            results.append([y, *gradients])
        assert_identical(results[1], results[0])


@pytest.fixture
def log(monkeypatch) -> SimpleNamespace:
    """Of all storages that a test offloads: they themselves, the bytes of each copy, and which layer is fetched."""
    found = SimpleNamespace(storages=[], copied=[], order=[], names={})

    def spy(owner: type, name: str, note) -> None:
        call = getattr(owner, name)

        def noted(self, *arguments):
            note(self, *arguments)
            return call(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    spy(module._Storage, "__init__", lambda self, x: found.storages.append(self))
    spy(module._Storage, "_copy", lambda self, source, target: found.copied.append(source.nbytes))
    spy(module._Layer, "pack", lambda self, x: found.names.setdefault(id(self), str(len(found.names))))
    spy(module._Layer, "fetch", lambda self: self.fetched or found.order.append("fetch " + found.names[id(self)]))
    return found


def test_storages_are_copied_once_and_parameters_never(log):
    layers = blocks()
    with Saved(*layers[0].parameters()).recording() as saved:
        forward(layers[:1], inputs(), None)
    sizes = saved.sizes().values()
    large = sorted(nbytes for nbytes in sizes if nbytes >= 256)
    assert len(large) < len(sizes)  # row statistics are too small to be offloaded
    y = forward(layers[:2], inputs(), ops.Offload(smallest=256))
    assert sorted(log.copied) == sorted(2 * large)
    y.sum().backward()
    assert sorted(log.copied) == sorted(3 * large)  # the last layer's storages are not offloaded


def test_a_layer_fetches_the_one_before_and_gives_device_memory_back(log):
    """After the forward only the last layer's storages hold device bytes; after the backward none do."""
    layers, offload = blocks(), ops.Offload(smallest=1)
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, i=i: log.order.append(f"end {i}"))
    y = forward(layers, inputs(), offload)
    per_layer = len(log.storages) // len(layers)
    held = [storage.device is not None for storage in log.storages]
    assert held == [False] * 2 * per_layer + [True] * per_layer and per_layer == 12
    y.sum().backward()
    assert log.order == ["fetch 2", "fetch 1", "end 2", "fetch 0", "end 1", "end 0"]
    assert all(storage.device is None and storage.uses == 0 for storage in log.storages)
    assert offload._last.before is None and not offload._last.storages  # nothing of a finished step is held


def gpt(n_layers: int, **options) -> tuple[GPT, list[Tensor], Callable]:
    """A GPT that keeps its activations in this way, its gradients, and its evaluation."""
    config = GPTConfig(vocab_size=40, seq_length=64, n_layers=n_layers, hidden_size=64, n_heads=4, dropout=0.1)
    model, ids = kept(GPT, config, **options), torch.randint(40, (64, 64), generator=torch.Generator().manual_seed(0))
    run = partial(model, ids, sample_index=torch.arange(64), step=1)
    run(targets=ids).backward()
    return model, [p.grad for p in model.parameters()], torch.no_grad()(run)


def test_gpt_with_offload_and_recomputed_layers(log):
    """A residual has 1 MiB, enough for the default threshold. A layer offloads 2 residuals, q, k, v, o and fc1's
    output, which a recomputed MLP does not keep. Evaluation offloads nothing."""
    _, plain, _ = gpt(3)
    assert not log.storages
    _, found, evaluate = gpt(3, offload_activations=True, recompute="mlp", recompute_layers="1:")
    assert_identical(found, plain)
    assert len(log.storages) == 19
    evaluate()
    assert len(log.storages) == 19


def test_some_layers_offload_and_others_keep(log):
    """Layer 1 stays where it is: layer 0's memory is given back beside its forward, and comes back beside its
    backward. Layer 2 is the last that is offloaded, and layer 3 gives its memory back."""
    layers, offload = [blocks()[0] for _ in range(5)], ops.Offload(smallest=1)
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, i=i: log.order.append(f"end {i}"))
    y = inputs()
    for i, layer in enumerate(layers):
        with offload.layer(layer, moves=i in (0, 2)):
            y = layer(y)
    assert len(log.storages) == 24 and all(storage.device is None for storage in log.storages)
    y.sum().backward()
    ends = [each for each in log.order if each.startswith("end")]
    assert ends == [f"end {i}" for i in (4, 3, 2, 1, 0)]
    fetched = [log.order.index(each) for each in log.order if each.startswith("fetch")]
    # layer 2 is fetched in the backward of layer 3, layer 0 in that of layer 1
    assert len(fetched) >= 2 and log.order.index("end 4") < fetched[0] < log.order.index("end 3")
    assert all(storage.device is None and storage.uses == 0 for storage in log.storages)


@pytest.mark.parametrize("text", [
    "1*offload,1*mlp,1*offload+full,1*keep", *in_turns(["2*full,1*keep,1*offload", "4*offload+mlp"], first=0)
])  # fmt: skip
def test_any_way_of_each_layer_gives_the_same_bits(text, log):
    (model, found, _), (_, plain, _) = gpt(4, keep=text), gpt(4)
    ways = [layer.keep.recompute for layer in model.layers.values()]
    assert ways == [way.recompute for way in kept_layers(4, keep=text)] and log.storages
    assert_identical(found, plain)


def conjugate(x: Tensor) -> Tensor:
    return (torch.view_as_complex(x.detach().view(-1, 2)).conj() * torch.view_as_complex(x.view(-1, 2))).real


@pytest.mark.parametrize("function", [
    conjugate, lambda x: torch.view_as_complex(x.detach().view(-1, 2)).conj().imag * x.view(-1, 2)[:, 0],
    lambda x: torch.sparse.mm(torch.eye(4, dtype=x.dtype).to_sparse(), x.view(4, 2)),
], ids=["conjugate", "negative", "sparse"])  # fmt: skip
def test_what_is_more_than_a_view_of_memory_stays_as_it_is(function):
    """A conjugate and a negative view have the memory of other values, and a sparse tensor has several."""
    found = []
    for context in (nullcontext(), ops.Offload(smallest=1).layer()):
        x = torch.arange(1.0, 9.0, dtype=torch.float64).requires_grad_()
        with context:
            y = function(x)
        y.sum().backward()
        found.append(x.grad)
    assert_identical(found[1], found[0])


def write_between(x: Tensor) -> Tensor:
    y = x * 1
    z = y.sin()
    y.mul_(2)
    return z + y.cos()


@pytest.mark.parametrize("layers_after", [0, 1])
def test_what_was_written_since_it_was_saved_is_refused(layers_after):
    """A storage that waits on the host, one that is still on the device, and what is never offloaded."""
    for smallest in (1, 1 << 20):
        x, weight, offload = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_(), ops.Offload(smallest)
        with offload.layer():
            y, z = write_between(x), x * weight
        for _ in range(layers_after):
            with offload.layer():
                y = y.exp()
        with torch.no_grad():
            weight.mul_(2)
        for each in (y, *[z] * (layers_after == 0 or smallest > 1)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                each.sum().backward(retain_graph=True)


def test_a_write_behind_the_copy_harms_nothing():
    x, weight, offload = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_(), ops.Offload(smallest=1)
    with offload.layer():
        y = x * weight
    with offload.layer():
        y = y * 1
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()
    assert_identical(x.grad, before)


@pytest.mark.parametrize("moves", [True, False])
def test_a_graph_without_a_backward_is_freed(moves):
    """Also of a function that keeps its own result, which is too small, or in a layer that does not move."""
    offload, freed = ops.Offload(), []
    with offload.layer(), offload.layer(moves=moves):
        y = torch.rand(4).requires_grad_().exp()
    weakref.finalize(y, freed.append, True)
    del y
    assert freed


@pytest.mark.gpu
def test_memory_and_late_copies_on_gpu():
    """Of 8 layers that keep 320 MiB each. The forward ends with about two layers' bytes. Late copies change no bit.

    A sequence is one block of keys: with more, flash attention adds up gradients in no fixed order.
    """
    options: dict = {"device": "cuda", "dtype": torch.bfloat16}
    results = []
    for offload in (None, ops.Offload()):
        before = torch.cuda.memory_allocated()
        if offload is not None:
            with torch.cuda.stream(module._copy_stream(torch.device("cuda", torch.cuda.current_device()))):
                torch.cuda._sleep(10**9)
        torch.manual_seed(0)
        layers = nn.ModuleList(kept(transformer_block, 1024, 16, **options) for _ in range(8))
        y = forward(layers, torch.randn(128, 128, 1024, **options).requires_grad_(), offload)
        held = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        results.append((held, [p.grad for p in layers.parameters()]))
        del y, layers
    assert results[1][0] < 0.4 * results[0][0]
    assert_identical(results[1][1], results[0][1])
