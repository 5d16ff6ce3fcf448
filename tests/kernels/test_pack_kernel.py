"""Every bit pattern comes back from its packed form, and what reads values in that form gives the bits of plain values.

Norms on a GPU do not: they are as accurate as norms of plain rows.
"""

from collections.abc import Callable

import pytest
import torch
from gemms import in_interpreter
from row_checks import draw, draw_norm
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tpformer.kernels.activation import kernel as activations
from tpformer.kernels.matmul.kernel import matmul_derivative
from tpformer.kernels.norm import kernel as norms
from tpformer.kernels.norm import reference as norm_reference
from tpformer.kernels.pack import format as packing
from tpformer.kernels.pack import kernel, reference
from tpformer.kernels.pack.format import BLOCK, GROUP, SLOTS, WINDOW, Packed
from tpformer.kernels.pack.reference import pack_cost


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def values(exponents: Tensor, seed: int = 0) -> Tensor:
    """Values with these exponent fields and random signs and mantissas."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randint(256, exponents.shape, generator=generator)
    return from_bits(((rest & 128) << 8) | (exponents.long() << 7) | (rest & 127))


def mixes() -> dict[str, Tensor]:
    """Values of every kind. None but "escapes" overflows."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(3 * GROUP + 77, generator=generator)
    outliers = random.clone()
    outliers[::601] *= 2.0**20
    few = torch.full((GROUP,), 120)
    few[torch.randperm(GROUP, generator=generator)[:SLOTS]] = torch.randint(0, 256, (SLOTS,), generator=generator)
    every = torch.arange(65536)
    each = [first + torch.randint(WINDOW, (2, BLOCK), generator=generator).amax(0) for first in range(256 - WINDOW)]
    return {
        "every pattern": from_bits(every),
        "one": torch.ones(1, dtype=torch.bfloat16),
        "random": random.bfloat16(),
        "outliers": outliers.bfloat16(),
        "as many escapes as slots": values(few),
        "windows of exponents": values(torch.cat(each)),
        "all exponents": values(torch.randint(0, 256, (GROUP,), generator=generator)),
        "every pattern, shuffled": from_bits(every[torch.randperm(65536, generator=generator)]),
        "zeros, denormals, infinities, NaNs": values(torch.randint(0, 2, (300,), generator=generator) * 255),
        "odd": values(110 + torch.randint(12, (2, 13, 7, 11), generator=generator).amax(0)),
        "none": torch.empty(0, 8, dtype=torch.bfloat16),
        "columns": random[:4096].view(64, 64).t().bfloat16().t().contiguous().t(),
        "part of rows": random[:4096].view(64, 64).bfloat16()[:, 3:50],
    }


def bits(results):
    """Nested results, of which each tensor is one of integers."""
    if isinstance(results, Tensor):
        return results.contiguous().view(torch.int16)
    return None if results is None else [bits(each) for each in results]


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


def test_reference_round_trips() -> None:
    """The values come back, or the counts say that they cannot; a tensor that overflowed has a NaN."""
    # 12 bits for each value, 8 for each block, 16 for each slot: 12.078125 bits for each value
    assert 8 * packing.RECORD == 12 * GROUP + 8 * GROUP // BLOCK + 16 * SLOTS == 12.078125 * GROUP
    assert pack_cost(2 * GROUP + 1) == (0, 2 * (2 * GROUP + 1) + 3 * packing.RECORD)
    for name, x in mixes().items():
        with poisoned_memory():
            packed, counts = reference.pack(x)
            back = reference.unpack(packed)
        assert packed.buffer.nbytes == packing.packed_bytes(x.numel()) and packed.shape == x.shape
        overflowed = bool((counts > SLOTS).any())
        assert overflowed == (name in ("all exponents", "every pattern, shuffled")), name
        if overflowed:
            assert back.isnan().any() and back.is_contiguous()
        else:
            assert same_bits(x, back), name


def equals_the_reference(device: str = "cpu") -> None:
    """The same bytes, also of what does not fit."""
    for name, x in mixes().items():
        expected, counts = reference.pack(x)
        with poisoned_memory():
            packed, own_counts = kernel.pack(x.to(device))
            back = kernel.unpack(packed)
        assert torch.equal(packed.buffer.cpu(), expected.buffer) and torch.equal(own_counts.cpu(), counts), name
        assert packed.shape == x.shape and back.is_contiguous() == reference.unpack(expected).is_contiguous()
        assert same_bits(back.cpu(), reference.unpack(expected)), name


@in_interpreter(1)
def test_kernel_equals_the_reference() -> None:
    equals_the_reference()


def kept(rows: int, columns: int, seed: int, device: str) -> tuple[Tensor, Packed]:
    """bfloat16 values with some escapes, plain and packed."""
    (x,) = draw(seed, torch.bfloat16, device, (rows, columns))
    x[0, :64:8] *= 2.0**-30  # in any group fewer than it has slots for
    packed, counts = kernel.pack(x)
    assert 0 < counts.max() <= SLOTS
    return x, packed


def norms_of_packed(rows: int, columns: int, kind: str, device: str = "cpu", **options) -> None:
    x, packed = kept(rows, columns, columns, device)
    dy, dresidual = draw(columns + 1, torch.bfloat16, device, *[(rows, columns)] * 2)
    norm = draw_norm(columns, columns, kind, torch.bfloat16, device)
    _, statistics = norms.norm_forward(x, norm, **options)
    around: dict = {"norm_forward": ([], [norm]), "norm_backward": ([dy], [statistics, norm, dresidual])}
    for name, (before, after) in around.items():
        packed_result, plain = (getattr(norms, name)(*before, each, *after, **options) for each in (packed, x))
        if device == "cpu":
            assert_identical(bits(packed_result), bits(plain))
        else:  # on a GPU the registers of a packed tile lie in another order, in which its row is summed
            oracle = getattr(norm_reference, name)(*tree_map_only(Tensor, Tensor.double, [*before, x, *after]))
            for parts in zip(*map(tree_leaves, (packed_result, oracle, plain)), strict=True):
                if parts != (None, None, None):
                    assert_kernel_close(*parts, f"{kind} {columns} {name}")


def check_packed(launch: Callable, rows: int, columns: int, device: str) -> None:
    """launch(x, gate) gives the same bits of packed values, with a gate and without one."""
    (x, packed_x), (gate, packed_gate) = (kept(rows, columns, seed, device) for seed in (1, 2))
    assert_identical(bits(launch(packed_x, None)), bits(launch(x, None)))
    assert_identical(bits(launch(packed_x, packed_gate)), bits(launch(x, gate)))


def activations_of_packed(rows: int, columns: int, name: str, device: str = "cpu") -> None:
    (da,) = draw(3, torch.bfloat16, device, (rows, columns))
    check_packed(lambda x, gate: activations.activation_backward(da.clone(), x, name, gate), rows, columns, device)


def derivatives_of_packed(m: int, n: int, k: int, tile, device: str = "cpu") -> None:
    a, b = draw(3, torch.bfloat16, device, (m, k), (k, n))
    check_packed(lambda x, gate: matmul_derivative(a, b, x, "silu", gate, tile=tile), m, n, device)


def test_rows_that_do_not_begin_with_a_run_are_refused() -> None:
    x = torch.ones(3, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows of 12 values, no multiple of 8"):
        kernel.kept_source(reference.pack(x)[0])


@pytest.mark.gpu
def test_on_gpu() -> None:
    equals_the_reference("cuda")
    for kind in ("layernorm", "rmsnorm"):
        for columns in (64, 1000, 4096, 8192, 16384):
            norms_of_packed(70, columns, kind, "cuda")
    for name in ("gelu", "silu"):
        activations_of_packed(37, 1000, name, "cuda")
    for n in (72, 4096):
        derivatives_of_packed(130, n, 64, None, "cuda")


def test_the_example_of_the_format():
    x = torch.ones(GROUP, dtype=torch.bfloat16)
    x[:5] = torch.tensor([1000, 3, -0.75, 0, 2.0**-20])
    record = reference.pack(x)[0].buffer[0]
    codes = [code for byte in record[packing.CODES : packing.CODES + 3].tolist() for code in (byte & 15, byte >> 4)]
    assert codes == [packing.ESCAPE, 4, 6, packing.ZERO, packing.ESCAPE, 5]
    assert record[:6].tolist() == [0, 64, 192, 0, 1, 0] and record[packing.BASES] == 132
    assert torch.equal(record[packing.ESCAPES :][:4].view(torch.bfloat16), x[[0, 4]])
    assert packing.RECORD == 16384 + 8192 + 64 + 96 and f"{8 * packing.RECORD / GROUP:.2f}" == "12.08"
