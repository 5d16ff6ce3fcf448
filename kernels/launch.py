"""What launchers share: the type of a tile configuration, launch options, TMA descriptors, padding of operands.

Belongs here: host code. Device code is in tile.py and protocol.py, the tiles that ship are in configurations.py.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MAXIMUM_REGISTERS = 255  # without this limit ptxas spills, to fit more programs on an SM than are launched
REGISTERS = 65536  # 32-bit registers of an SM
ALIGNMENT = 16  # bytes of the widest load or store; a TMA descriptor's address and row stride are multiples of it

DTYPES = {
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
    torch.float32: triton.language.float32,
}


class Tile(NamedTuple):
    """A tile configuration of a GEMM."""

    m: int
    """Rows of the output that a program computes."""
    n: int
    """Columns of the output that a program computes."""
    k: int
    """Elements of the inner dim that one step of the K loop takes."""
    stages: int
    warps: int
    tma: bool
    """Whether operands are loaded through TMA descriptors (sm_90 and later) or by pointers."""


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1 when the kernels were imported)."""
    return bool(triton.knobs.runtime.interpret)


def launch_options(warps: int, stages: int, cooperative: bool = False) -> dict[str, Any]:
    """The options that a launch passes to Triton. cooperative: all programs are resident at once, so that they may wait
    for one another."""
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if not is_interpreted():  # the interpreter knows neither option, and runs one program at a time
        options["maxnreg"] = min(MAXIMUM_REGISTERS, REGISTERS // (32 * warps))  # or a program would fit on no SM
        if cooperative:
            options["launch_cooperative_grid"] = True
    return options


def padded(x: Tensor) -> Tensor:
    """x (R, C) with contiguous rows that start at multiples of ALIGNMENT: x itself, or a view of a padded copy."""
    contiguous = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return x if contiguous and rows_are_aligned(x, x.stride(0)) else padded_copy(x)[:, : x.shape[1]]


def zero_padded(x: Tensor) -> Tensor:
    """As `padded`, with rows that are multiples of ALIGNMENT long: x itself, or a copy that zeros may make wider."""
    whole = x.shape[1] * x.element_size() % ALIGNMENT == 0
    return padded(x) if whole else padded_copy(x)


def packed(x: Tensor) -> Tensor:
    """x (R, C) without gaps between rows, which are multiples of ALIGNMENT long: x itself, or a padded, wider copy."""
    return x if x.is_contiguous() and rows_are_aligned(x, x.shape[1]) else padded_copy(x)


def packed_width(columns: int, itemsize: int) -> int:
    """The least width of rows that hold so many columns and are multiples of ALIGNMENT bytes."""
    multiple = ALIGNMENT // itemsize
    return -(-columns // multiple) * multiple


def rows_are_aligned(x: Tensor, stride: int) -> bool:
    """Whether rows that lie `stride` elements apart all start at multiples of ALIGNMENT bytes."""
    return x.data_ptr() % ALIGNMENT == 0 and stride * x.element_size() % ALIGNMENT == 0


def padded_copy(x: Tensor) -> Tensor:
    """A copy of x (R, C) of packed_width, with zeros in the columns that are added."""
    copy = x.new_zeros(x.shape[0], packed_width(x.shape[1], x.element_size()))
    copy[:, : x.shape[1]] = x
    return copy


def require_matrices(*matrices: Tensor) -> None:
    """ValueError for a matrix without elements, or in float64."""
    for x in matrices:
        if not x.numel():
            raise ValueError(f"the kernels take matrices of at least one row and one column, not {tuple(x.shape)}")
        if x.dtype == torch.float64:
            raise only_float32(f"{tuple(x.shape)} {x.dtype}")


def triton_dtype(dtype: torch.dtype) -> triton.language.dtype:
    """Triton's name of a dtype. Errors: ValueError for one that the kernels do not take."""
    if dtype not in DTYPES:
        raise only_float32(dtype)
    return DTYPES[dtype]


def only_float32(operand: object) -> ValueError:
    """The error for an operand of another dtype, which it describes."""
    return ValueError(
        f"an operand is {operand}, and the kernels compute in float32: give bfloat16, float16 or float32, or call the "
        f"reference of the same name, which computes in float64, too"
    )


def require_no_float64(values: Iterable[Any]) -> None:
    """ValueError for a tensor in float64 among these, or in tuples of them. A single number may be in float64."""
    for x in values:
        if isinstance(x, tuple):
            require_no_float64(x)
        elif isinstance(x, Tensor) and x.dtype == torch.float64 and x.dim():
            raise only_float32(f"{tuple(x.shape)} {x.dtype}")


def operand(x: Tensor, block: tuple[int, int], tile: Tile) -> Any:
    """What a kernel takes for a matrix (rows, columns): a TMA descriptor of this block, or the tensor itself.

    ValueError for a matrix without elements, or in float64.
    """
    require_matrices(x)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], list(block)) if tile.tma else x


def persistent_programs(
    device: torch.device,
    tiles: int,
    tile: Tile,
    programs: int | None = None,
    served: int = 1,
    spare: int = 0,
    itemsize: int = 2,
) -> int:
    """How many programs walk the tiles of one rank: at most one per tile.

    By default the programs fill all SMs but `spare`, which the `served` ranks of the launch share. `programs` replaces
    the default, which is 2 in the interpreter. itemsize: of the operands, as resident_programs takes it.
    """
    if programs is None:
        programs = 2 if is_interpreted() else resident_programs(device, tile, spare, itemsize) // served
    return max(1, min(tiles, programs))


def resident_programs(device: torch.device, tile: Tile, spare: int = 0, itemsize: int = 2) -> int:
    """How many programs with this tile are resident at once on all SMs but `spare`.

    Two things limit them: registers, as each thread may take all that it can address, and the stages' shared memory, of
    operands with itemsize bytes a value.
    """
    properties = torch.cuda.get_device_properties(device)
    shared = (tile.m + tile.n) * tile.k * itemsize * tile.stages
    registers = tile.warps * 32 * (MAXIMUM_REGISTERS + 1)
    per_sm = max(1, min(properties.shared_memory_per_multiprocessor // shared, REGISTERS // registers))
    return per_sm * max(1, properties.multi_processor_count - spare)


def step_rows(tile: Tile, itemsize: int) -> int:
    """How many rows of a tile one step of a reduction adds: each thread takes ALIGNMENT bytes."""
    return min(tile.m, max(1, tile.warps * 32 * ALIGNMENT // itemsize // tile.n))


def piece_columns(columns: int) -> int:
    """Columns that the epilogue of a Derivative takes at a time, of matrices with so many columns.

    Triton knows that rows begin at multiples of 16 bytes if they have a multiple of 16 elements. If it does not know,
    each element needs an address and a predicate of its own, for up to five matrices: 16 columns would spill. Where it
    knows, 8 columns of 16 bits would be stored 8 bytes at a time.
    """
    return 16 if columns % 16 == 0 else 8
