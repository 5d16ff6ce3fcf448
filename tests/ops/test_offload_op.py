"""Offloading keeps every bit of the gradients, copies each storage once and no parameter, and fetches ahead."""

import pytest
import torch
from torch import Tensor, nn

from tpformer import ops
from tpformer.layers import DropoutKey, TransformerBlock
from tpformer.models import GPT, GPTConfig
from tpformer.ops import offload as module
from tpformer.planner.storages import Saved

HIDDEN, BATCH, SEQ = 32, 2, 8


def blocks(**options) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(TransformerBlock(HIDDEN, 4, dropout=0.1, **options) for _ in range(3))


def run(layers: nn.ModuleList, offload: ops.Offload | None, device: str = "cpu") -> list[Tensor]:
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = x.to(device, next(layers.parameters()).dtype).requires_grad_()
    y, key = x, DropoutKey(0, 1, torch.arange(BATCH, device=device), layers)
    for layer in layers:
        if offload is None:
            y = layer(y, dropout_key=key)
        else:
            with offload.layer(layer):
                y = layer(y, dropout_key=key)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("options", [{}, {"recompute": "mlp"}, {"recompute": "full"}, {"activation": "swiglu"}])
def test_offloading_changes_no_bit(options):
    expected = run(blocks(**options), None)
    assert all(
        torch.equal(a, b) for a, b in zip(run(blocks(**options), ops.Offload(smallest=1)), expected, strict=True)
    )


def test_storages_are_copied_once_and_parameters_never(monkeypatch):
    copied: list[int] = []
    copy = module._Storage._copy

    def spy(self, source: Tensor, target: Tensor) -> None:
        copied.append(source.nbytes)
        copy(self, source, target)

    monkeypatch.setattr(module._Storage, "_copy", spy)
    layers = blocks()
    x, key = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True), DropoutKey(0, 1, torch.arange(BATCH), layers)
    with Saved(*layers[0].parameters()).recording() as saved:
        layers[0](x, dropout_key=key)
    sizes = saved.sizes().values()
    large = sorted(nbytes for nbytes in sizes if nbytes >= 256)
    assert len(large) < len(sizes)  # row statistics are too small to be offloaded
    offload = ops.Offload(smallest=256)
    for layer in layers[:2]:
        with offload.layer(layer):
            x = layer(x, dropout_key=key)
    assert sorted(copied) == sorted(2 * large)
    x.sum().backward()
    assert sorted(copied) == sorted(3 * large)  # the last layer's storages are not offloaded


def test_a_layer_fetches_the_one_before(monkeypatch):
    order: list[str] = []
    names: dict[int, str] = {}
    fetch, pack = module._Layer.fetch, module._Layer.pack

    def spy_fetch(self) -> None:
        if not self.fetched:
            order.append("fetch " + names[id(self)])
        fetch(self)

    def spy_pack(self, x: Tensor):
        names.setdefault(id(self), str(len(names)))
        return pack(self, x)

    monkeypatch.setattr(module._Layer, "fetch", spy_fetch)
    monkeypatch.setattr(module._Layer, "pack", spy_pack)
    layers = blocks()
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, i=i: order.append(f"end {i}"))
    run(layers, ops.Offload(smallest=1))
    assert order == ["fetch 2", "fetch 1", "end 2", "fetch 0", "end 1", "end 0"]


@pytest.fixture
def storages(monkeypatch) -> list[module._Storage]:
    """All storages that a test offloads."""
    found: list[module._Storage] = []
    create = module._Storage.__init__

    def spy(self, x: Tensor) -> None:
        create(self, x)
        found.append(self)

    monkeypatch.setattr(module._Storage, "__init__", spy)
    return found


def test_device_memory_is_given_back(storages):
    """After the forward only the last layer's storages hold device bytes; after the backward none do."""
    layers, offload = blocks(), ops.Offload(smallest=1)
    x, key = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True), DropoutKey(0, 1, torch.arange(BATCH), layers)
    for layer in layers:
        with offload.layer(layer):
            x = layer(x, dropout_key=key)
    per_layer = len(storages) // len(layers)
    held = [storage.device is not None for storage in storages]
    assert held == [False] * 2 * per_layer + [True] * per_layer and per_layer == 12
    x.sum().backward()
    assert all(storage.device is None and storage.uses == 0 for storage in storages)
    assert offload._last.before is None and not offload._last.storages  # nothing of a finished step is held


def test_second_backward_of_a_kept_graph():
    layer = blocks()[0]
    x = torch.randn(1, SEQ, HIDDEN, requires_grad=True)
    layer.eval()
    with ops.Offload(smallest=1).layer(layer):
        y = layer(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


def test_gpt_with_offload_and_recomputed_layers(storages):
    """A residual has 1 MiB, enough for the default threshold. A layer offloads 2 residuals, q, k, v, o and fc1's
    output, which a recomputed MLP does not keep. Evaluation offloads nothing."""
    config = GPTConfig(vocab_size=40, seq_length=64, n_layers=3, hidden_size=64, n_heads=4, dropout=0.1)
    ids = torch.randint(40, (64, 64), generator=torch.Generator().manual_seed(0))
    gradients = []
    for options, count in (({}, 0), ({"offload_activations": True, "recompute": "mlp", "recompute_layers": "1:"}, 19)):
        model = GPT(config, **options)
        model(ids, targets=ids, sample_index=torch.arange(64), step=1).backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(storages) == count
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        model(ids, sample_index=torch.arange(64), step=1)
    assert len(storages) == 19


def wide_forward(offload: ops.Offload | None) -> tuple[Tensor, list[TransformerBlock]]:
    """A forward of 8 layers that keep 320 MiB each. A sequence is one block of keys: with more, flash attention adds up
    gradients in no fixed order."""
    torch.manual_seed(0)
    options: dict = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [TransformerBlock(1024, 16, **options) for _ in range(8)]
    x = torch.randn(128, 128, 1024, **options).requires_grad_()
    for layer in layers:
        if offload is None:
            x = layer(x)
        else:
            with offload.layer(layer):
                x = layer(x)
    return x, layers


@pytest.mark.gpu
def test_memory_and_late_copies_on_gpu():
    """The forward ends with about two layers' bytes instead of eight's. Late copies change no bit."""
    results = []
    for offload in (None, ops.Offload()):
        before = torch.cuda.memory_allocated()
        if offload is not None:
            with torch.cuda.stream(module._copy_stream(torch.device("cuda", torch.cuda.current_device()))):
                torch.cuda._sleep(10**9)
        x, layers = wide_forward(offload)
        held = torch.cuda.memory_allocated() - before
        x.square().sum().backward()
        results.append((held, [p.grad for layer in layers for p in layer.parameters()]))
        del x, layers
    assert results[1][0] < 0.4 * results[0][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
def test_on_gpu(recompute):
    """Bits are compared several times over, because reused memory shows only then."""
    options = {"recompute": recompute, "device": "cuda", "dtype": torch.bfloat16}
    layers = blocks(**options)
    for _ in range(5):
        expected = run(layers, None, "cuda")
        for p in layers.parameters():
            p.grad = None
        actual = run(layers, ops.Offload(smallest=1), "cuda")
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        for p in layers.parameters():
            p.grad = None
