"""A launcher and its reference take the same operands: an operand that is longer or shorter, of another dtype or on
another device is refused by both, or both give the same; one whose elements lie apart gives the same bits. So with
names. Every launcher has a row here."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import gemms
import pytest
import torch
from channels import virtual_channel
from row_checks import LAYOUTS
from testing import assert_identical, assert_kernel_close
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from wrong_operands import call, changed, variants

import tpformer.kernels
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.reference import norm_forward
from tpformer.kernels.pack.reference import pack
from tpformer.kernels.protocol import Channel
from tpformer.kernels.quantize.format import Blocks
from tpformer.kernels.quantize.reference import quantize_rows, quantize_weight
from tpformer.kernels.replay import Recording
from tpformer.kernels.rope.reference import rope_table
from tpformer.kernels.route.reference import Policy, route_forward

FOLDER = Path(tpformer.kernels.__path__[0])
OPERATIONS = sorted(path.parent.name for path in FOLDER.glob("*/kernel.py"))
# What launchers have in common, and what works on bits for `pack` and `unpack`.
PARTS = {"launch_forward", "launch_gather", "check", "pack_bits", "unpack_bits", "unpacked"}
PARTS |= {"launch_weight", "launch_dequantize", "launch_blocks", "launch_backward_blocks"}
PARTS |= {"launch_scatter", "launch_all_reduce"}
# What references take from autograd or from an operation, which have compared it; their launchers refuse it still.
COMPARED = {"norm_rebuilt", "norm_backward", "activation_backward", "finish_forward", "finish_norm_forward"}
LAUNCH = {"launch", *(name for name in PARTS if name.startswith("launch_"))}
T, N = 4, 8
VOCAB, TERMS = VocabSlice(0, N, 7), LossTerms()


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def norm(kind: str = "layernorm") -> Norm:
    return Norm(kind, floats(N), floats(N), None)


def drop() -> Dropout:
    return Dropout(integers(0, 8, 16, 24, dtype=torch.int64), 7, 0.5)


def finish() -> Finish:
    return Finish(floats(N), drop(), floats(T, N))


def targets() -> Tensor:
    return integers(0, 6, -100, 3, dtype=torch.int64)


def statistics(kind: str) -> tuple:
    return norm_forward(floats(T, N), norm(kind))[1]


def backward(kind: str) -> tuple:
    return floats(T, N), floats(T, N), statistics(kind), norm(kind), floats(T, N)


def updated(states: int) -> tuple:
    tensors = [[floats(3, 5).abs(), floats(7).abs()] for _ in range(2 + states)]
    return *tensors, *([[torch.zeros(()), torch.zeros(())]] if states == 2 else []), None


NUMBERS = {"lr": 0.1, "scale": 1.0, "weight_decay": 0.1}
GROUPED = (floats(5, N), floats(2, 6, N), integers(0, 1, 4), integers(4, 0, 2, 2))
COUNTS = integers([1, 1], [0, 1], [1, 0], [1, 1])
# Into how many equal parts the first operand's rows are divided: those of two virtual ranks, and each one's chunks.
SHARES = {"matmul_reduce_scatter": 4, "quantized_matmul_reduce_scatter": 4}
SHARES |= dict.fromkeys(("matmul", "matmul_derivative", "gathered_copy"), 1)
OWN = {("all_gather_grouped_matmul", 1): 1}  # the dim of an operand whose size no other has: any size is right
SUMS: dict = {"tile": gemms.TILE}


def channel(capacity: int = 1 << 14) -> Any:
    return virtual_channel(2, capacity, 64)


def shards() -> Tensor:
    return torch.cat([packed_shard(quantize_rows(floats(2, 256) + rank)) for rank in range(2)])


def blocks(rows: int) -> tuple:
    """One input and one weight of two virtual ranks."""
    return [quantize_rows(floats(rows, 256))], [quantize_weight(floats(256, 256))]


# (operation, launcher) -> (its arguments, its options), new ones in each call
ROWS: dict[tuple[str, str], Callable[[], tuple]] = {
    ("activation", "activation_forward"): lambda: ((floats(T, N), "gelu", floats(T, N)), {}),
    ("activation", "activation_backward"): lambda: ((floats(T, N), floats(T, N), "silu", floats(T, N)), {}),
    ("weighted_activation", "weighted_activation_forward"): lambda: ((floats(T, N), "silu", floats(T)), {}),
    ("weighted_activation", "weighted_activation_backward"): lambda: (
        (floats(T, 4), floats(T, N), "silu", floats(T)), {}
    ),
    ("norm", "norm_forward"): lambda: ((floats(T, N), norm()), {}),
    ("norm", "norm_rebuilt"): lambda: ((floats(T, N), statistics("rmsnorm"), norm("rmsnorm")), {}),
    ("norm", "norm_backward"): lambda: (backward("layernorm"), {}),
    ("norm", "finish_norm_forward"): lambda: ((floats(T, N), finish()._replace(norm=norm("rmsnorm"))), {}),
    ("dropout", "finish_forward"): lambda: ((floats(T, N), finish()), {}),
    ("dropout", "finish_backward"): lambda: ((floats(T, N), drop(), True), {}),
    ("dropout", "dropout_apply"): lambda: ((floats(T, N), *drop()), {}),
    ("rope", "rope_rotate"): lambda: (
        (floats(T, 2, N), floats(T, 1, N), rope_table(9, N, 1e4, torch.float32, "cpu"), integers(0, 8, 3, 3)), {}
    ),
    ("cross_entropy", "slice_statistics"): lambda: ((floats(T, N), targets(), VOCAB, TERMS), {}),
    ("cross_entropy", "combine_statistics"): lambda: ((floats(2, 3, T).exp(), targets(), VOCAB, TERMS), {}),
    ("cross_entropy", "slice_gradient"): lambda: (
        (floats(T, N), floats(2, T).exp(), targets(), floats(T), VOCAB, TERMS), {}
    ),
    ("combine", "combine"): lambda: ((floats(3, N), integers(0, 0, 1), integers([0, 1], [2, -1], [-1, -1])), {}),
    ("route", "route_forward"): lambda: ((floats(T, N), Policy(2), floats(N)), {}),
    ("route", "route_backward"): lambda: (
        (floats(T, 2), *route_forward(floats(T, N), Policy(2))[::2], Policy(2), floats(T, N)), {}
    ),
    ("grouped_matmul", "grouped_matmul"): lambda: (GROUPED, {}),
    ("grouped_matmul", "grouped_weight_gradient"): lambda: (
        (floats(4, 6), floats(5, N), GROUPED[2], None, GROUPED[3]), {}
    ),
    ("pack", "pack"): lambda: ((floats(3, 8).bfloat16(),), {}),
    ("pack", "unpack"): lambda: ((pack(floats(3, 8).bfloat16())[0],), {}),
    ("quantize", "quantize_rows"): lambda: ((floats(3, 256),), {}),
    ("quantize", "quantize_weight"): lambda: ((floats(256, 128),), {}),
    ("quantize", "quantize_weight_twice"): lambda: ((floats(128, 256),), {}),
    ("quantize", "dequantize"): lambda: ((quantize_rows(floats(3, 256)), torch.bfloat16), {}),
    ("quantized_matmul", "quantized_matmul"): lambda: (
        (quantize_rows(floats(3, 256)), quantize_weight(floats(128, 256)), floats(128)), {"dtype": torch.float32}
    ),
    ("quantized_grouped_matmul", "quantized_grouped_matmul"): lambda: (
        (quantize_rows(floats(5, 384)), quantize_weight(floats(512, 384)), *GROUPED[2:]), {"dtype": torch.float32}
    ),
    ("quantize", "dequantize_weight"): lambda: ((quantize_weight(floats(128, 256)), torch.float16), {}),
    ("quantize", "dequantize_shards"): lambda: (
        (Blocks(*(each[None] for each in quantize_weight(floats(128, 256)))), floats(1, 128, 256)), {}
    ),
    ("update", "adamw_"): lambda: (
        updated(2), {**NUMBERS, "skipped": torch.zeros(()), "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    ),
    ("update", "sgd_"): lambda: (
        updated(1), {**NUMBERS, "skipped": torch.zeros(()), "momentum": 0.9, "nesterov": False}
    ),
    ("matmul", "matmul"): lambda: (
        (floats(T, N), [floats(3, N), floats(5, N)], [floats(3), floats(5)]), {**SUMS, "activation": "gelu"}
    ),
    ("matmul", "matmul_derivative"): lambda: (
        (floats(T, 3), floats(3, N), floats(T, N), "silu", floats(T, N)), SUMS
    ),
    # two virtual ranks, whose tensors are stacked
    ("all_gather_matmul", "all_gather_matmul"): lambda: (
        (floats(T, N), [floats(6, N)], channel(), [floats(6)]), {**SUMS, "activation": "silu"}
    ),
    ("all_gather_matmul", "all_gather_matmul_derivative"): lambda: (
        (floats(T, 3), floats(6, N), channel(), floats(2 * T, N), "silu", floats(2 * T, N)), SUMS
    ),
    ("all_gather_quantized_matmul", "all_gather_quantized_matmul"): lambda: (
        (shards(), [quantize_weight(floats(256, 256))], channel(64 * shards().shape[1]), [floats(256)]),
        {**SUMS, "dtype": torch.float32},
    ),
    ("all_gather_quantized_matmul", "all_gather_quantized_matmul_derivative"): lambda: (
        (shards(), quantize_weight(floats(256, 256)), channel(64 * shards().shape[1]), floats(8, 128), "silu",
         floats(8, 128)), SUMS
    ),
    ("all_gather_matmul", "await_gathered"): lambda: ((channel(), floats(T, N), True), {}),
    ("all_gather_matmul", "gathered_copy"): lambda: ((virtual_channel(1, 1 << 14, 64), floats(T, N)), {}),
    ("all_gather_grouped_matmul", "all_gather_grouped_matmul"): lambda: (
        (floats(T, N), floats(4, 6, N), channel(), COUNTS, integers(0, 1, 2, 0, 2, 3)), SUMS
    ),
    ("all_gather_grouped_matmul", "all_gather_quantized_grouped_matmul"): lambda: (
        (shards(), quantize_weight(floats(512, 256)), channel(64 * shards().shape[1]), COUNTS,
         integers(0, 1, 2, 0, 2, 3)), {**SUMS, "dtype": torch.float32}
    ),
    ("matmul_reduce_scatter", "matmul_reduce_scatter"): lambda: (
        ([floats(8, 3)], [floats(2 * N, 3)], channel(), Finish(floats(2 * N), drop(), floats(T, N))), SUMS
    ),
    ("matmul_all_reduce", "matmul_all_reduce"): lambda: (
        ([floats(T, 3)], [floats(2 * N, 3)], channel(), Finish(floats(2 * N), drop(), floats(T, N))), SUMS
    ),
    ("matmul_reduce_scatter", "quantized_matmul_reduce_scatter"): lambda: (
        (*blocks(8), channel(), Finish(floats(256), drop(), floats(T, 128))), {**SUMS, "dtype": torch.float32}
    ),
    ("matmul_all_reduce", "quantized_matmul_all_reduce"): lambda: (
        (*blocks(T), channel(), Finish(floats(256), drop(), floats(T, 128))), {**SUMS, "dtype": torch.float32}
    ),
}  # fmt: skip


def launchers() -> Iterator[tuple[str, str]]:
    """Every public function of a kernel.py that launches a kernel, or that the reference has, too."""
    for operation in OPERATIONS:
        module, reference = (import_module(f"tpformer.kernels.{operation}.{part}") for part in ("kernel", "reference"))
        for name, function in inspect.getmembers(module, inspect.isfunction):
            names = inspect.unwrap(function).__code__.co_names
            if function.__module__ == module.__name__ and (LAUNCH & {*names} or hasattr(reference, name)):
                yield operation, name


def test_every_launcher_has_a_row() -> None:
    pytest.importorskip("triton")
    assert {each for each in launchers() if each[1] not in PARTS} == set(ROWS)


def parts_of(operation: str, name: str) -> tuple[Callable, Callable | None]:
    """The launcher and its reference, if it has one."""
    module, reference = (import_module(f"tpformer.kernels.{operation}.{part}") for part in ("kernel", "reference"))
    return getattr(module, name), getattr(reference, name, None)


@pytest.mark.parametrize("operation", OPERATIONS)
@gemms.in_interpreter(1)
def test_other_operands_are_refused_or_right(operation: str) -> None:
    for name in (name for where, name in ROWS if where == operation):
        (launcher, reference), row = parts_of(operation, name), ROWS[operation, name]
        original = tree_flatten(row())[0]
        tensors = [index for index, x in enumerate(original) if isinstance(x, Tensor)]
        for index, make in variants(row, changed):
            other = tree_flatten(make())[0][index]
            what = f"{name}: operand {index}, {getattr(other, 'shape', other)} {getattr(other, 'dtype', '')}"
            if len(tensors) == 1 and reference is not None and isinstance(other, Tensor) and other.is_meta:
                continue  # there is nothing on another device than this
            found = call(launcher, make())
            if reference is None and isinstance(other, str):
                assert found is None, what
            elif reference is None:  # sizes follow from the first operand; the rest may have another floating dtype
                of_floats = other.dtype.is_floating_point and not other.is_meta
                sizes = [size for dim, size in enumerate(other.shape) if dim != OWN.get((name, index))]
                kept = [size for dim, size in enumerate(original[index].shape) if dim != OWN.get((name, index))]
                whole = other.dim() > 0 and other.shape[0] % SHARES.get(name, 2) == 0
                right = whole if index == tensors[0] else of_floats and sizes == kept
                assert found is None or right, what
            elif found is not None or name not in COMPARED:
                compare(found, call(reference, make()), what)


@gemms.in_interpreter(1)
def test_float64_is_refused_by_all() -> None:
    """Kernels compute in float32: their results in float64 would be those of float32, or of bits taken for others."""
    for operation, name in ROWS:
        leaves, spec = tree_flatten(ROWS[operation, name]())
        wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() else x for x in leaves]
        of_floats = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in wide)
        assert not of_floats or call(parts_of(operation, name)[0], tree_unflatten(wide, spec)) is None, name


@gemms.in_interpreter(1)
def test_blocks_are_multiplied_where_a_tile_ships() -> None:
    """Each launcher of GEMMs of blocks looks at the GPU's capability, before it launches."""
    lacking = ValueError("sm_80")
    for operation, name in (each for each in ROWS if "quantized" in each[1]):
        (launcher, _), (arguments, options) = parts_of(operation, name), ROWS[operation, name]()
        asked = f"tpformer.kernels.{operation}.kernel.require_capability"
        with mock.patch(asked, side_effect=lacking), pytest.raises(ValueError, match="sm_80"):
            launcher(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
@gemms.in_interpreter(1)
def test_numbers_that_do_not_float_are_refused_by_all(dtype: torch.dtype) -> None:
    """In all floating operands at once: none is compared with another that floats."""
    for operation, name in ROWS:
        leaves, spec = tree_flatten(ROWS[operation, name]())
        floating = [index for index, x in enumerate(leaves) if isinstance(x, Tensor) and x.dtype == torch.float32]
        other = [x.to(dtype) if index in floating else x for index, x in enumerate(leaves)]
        for each in parts_of(operation, name)[: 1 if name in COMPARED else 2]:
            assert not floating or each is None or call(each, tree_unflatten(other, spec)) is None, name


def test_a_shard_that_int32_does_not_count_is_not_pushed() -> None:
    """Kernels count a shard's elements as rows times their distance. Copies count none."""
    gather_of = import_module("tpformer.kernels.all_gather_matmul.kernel").gather_of
    below, above = (torch.empty(2 * rows, 2**14 - 7, dtype=torch.float16, device="meta") for rows in (2**17 - 1, 2**17))
    assert gather_of(channel(), below, True, True).push and not gather_of(channel(), above, False, True).push
    with pytest.raises(ValueError, match="less than 2147483648 elements, not 2147483648: use smaller"):
        gather_of(channel(), above, True, True)


@gemms.in_interpreter(1)
def test_momentum_and_its_buffers_come_together() -> None:
    """SGD without buffers has no momentum to keep, and buffers without momentum would stay as they are, or not. No
    copies may be an empty list, too."""
    for function in parts_of("update", "sgd_"):
        assert function is not None
        for momentum, states, right in ((0.9, 0, False), (0.0, 1, False), (0.9, 1, True), (0.0, 0, True)):
            (*lists, _), options = ROWS["update", "sgd_"]()
            given = (*lists[:2], lists[2][: 2 * states], []), {**options, "momentum": momentum}
            before = [x.clone() for x in lists[0]]
            assert (call(function, given) is not None) == right
            assert right or all(map(torch.equal, lists[0], before))


def compare(found: list[Tensor] | None, expected: list[Tensor] | None, what: str) -> None:
    """Both have refused the call, or both give the same."""
    assert (found is None) == (expected is None), f"{what} {found} {expected}"
    for x, y in zip(found or [], expected or [], strict=False):  # the reference also keeps its work
        if y.is_floating_point() and y.element_size() > 1:  # of 8 bits the same bytes are promised
            assert_kernel_close(x, y.double(), y, what)
        else:
            assert_identical(x, y, what)


def apart(row: Callable[[], tuple], shift: int) -> tuple:
    """The row, whose tensors lie as they are, between NaNs and one column after the other, in turn."""
    (leaves, spec), ways, turn = tree_flatten(row()), (lambda x: x, *LAYOUTS), itertools.count(shift)
    moved = [ways[next(turn) % len(ways)](x) if isinstance(x, Tensor) and x.dim() else x for x in leaves]
    return tree_unflatten(moved, spec)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "update"])  # which refuses such tensors
@gemms.in_interpreter(1)
def test_elements_may_lie_apart(operation: str) -> None:
    """Each operand lies in each way once, beside others that lie in other ways."""
    for name in (name for where, name in ROWS if where == operation):
        (launcher, _), row = parts_of(operation, name), ROWS[operation, name]
        expected = call(launcher, row())
        for shift in range(1 + len(LAYOUTS)):
            assert_identical(call(launcher, apart(row, shift)), expected, f"{name}: shift {shift}")


@gemms.in_interpreter(1)
def test_checks_leave_plans_possible() -> None:
    """A launcher's checks do nothing that a replay could not leave out, as torch.promote_types would be."""
    for operation, name in ROWS:
        module, (launcher, _) = import_module(f"tpformer.kernels.{operation}.kernel"), parts_of(operation, name)
        leaves, spec = tree_flatten(ROWS[operation, name]())
        moved = [x.to("meta") if isinstance(x, Tensor) else x for x in leaves]  # as on a GPU, values are not looked at
        if not hasattr(launcher, "__wrapped__") or any(isinstance(x, Channel) for x in leaves):
            continue
        arguments, options = tree_unflatten(moved, spec)
        recording = Recording([x for x in moved if isinstance(x, Tensor)], None)
        with mock.patch.object(module, "launch"), mock.patch("tpformer.kernels.rows.launch"), recording:
            launcher.__wrapped__(*arguments, **options)
        assert not recording.obstacle, (name, recording.obstacle)
