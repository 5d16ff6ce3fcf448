"""Whether all ranks are about to do the same: they compare what decides a run as they join.

Each rank reads a configuration, a command line, an environment and files of its own. On several machines these are
several copies, and a copy that differs gives replicas that drift apart, or ranks that wait for one another for ever.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.version import __version__
from tpformer.words import listed, shown

# variables that change what numbers come out, or which collectives and kernels are chosen
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY CUBLAS_WORKSPACE_CONFIG DISABLE_ADDMM_CUDA_LT DNNL_DEFAULT_FPMATH_MODE "
    "ONEDNN_DEFAULT_FPMATH_MODE MKL_CBWR NVIDIA_TF32_OVERRIDE NCCL_ALGO NCCL_MAX_CTAS NCCL_PROTO "
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES "
    "TRITON_F32_DEFAULT TRITON_INTERPRET"
).split()
WHOLE = 2 * 10**9  # bytes of a file that are all compared; of a larger one parts
PARTS, PART = 1024, 1 << 16
PIECE = 1 << 24  # numbers of a tensor that are added up at a time
UNSET = "unset"


@dataclass(frozen=True)
class Decides:
    """What decides what the ranks compute together. command: what they do. values: {key: value}.

    files: {key: path} of files whose contents count, and not where they lie.
    """

    command: str
    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """(len(tensors), 2) int64 of what ranks compare instead of values: sums of bits, weighted by row and by column.

    Equal bits have equal ones, whatever their strides, threads and devices, because integers are added up. One number
    that differs has others, whatever stands beside it, and so have values in another order. On the first tensor's
    device; a meta tensor has zeros. Memory: copies of PIECE numbers, or of a row.
    Errors: ValueError for a tensor that is neither dense nor one of torch.sparse_coo.
    """
    found = [_sums(each.detach()) for each in tensors]
    return torch.stack([each.to(found[0].device) for each in found])


def _sums(x: Tensor) -> Tensor:
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return _sums(x.indices()) + 3 * _sums(x.values())
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "is nested" if x.is_nested else f"has layout {x.layout} and dtype {x.dtype}"
        raise ValueError(f"a tensor {kind}, and ranks cannot compare theirs: make it dense, or torch.sparse_coo")
    if x.is_meta or x.numel() == 0:
        return torch.zeros(2, dtype=torch.int64)
    x = x if x.dim() else x[None]
    total, of_columns = torch.zeros(2, 1, dtype=torch.int64, device=x.device)
    size = max(1, PIECE // x[0].numel())
    for first, part in zip(range(0, len(x), size), x.split(size), strict=True):
        rows = part.resolve_conj().resolve_neg().contiguous()
        rows = rows.flatten(1) if x.dim() > 1 else rows[:, None]
        # 8 bytes as two numbers: a sign alone would count 2**63, and nothing in the difference of two weights
        bits = rows.view({1: torch.int8, 2: torch.int16}.get(x.itemsize, torch.int32))
        total = total + _weighted(bits.sum(1, dtype=torch.int64), first)
        of_columns = of_columns + bits.sum(0, dtype=torch.int64)
    return torch.stack([total[0], _weighted(of_columns)])


def _weighted(sums: Tensor, first: int = 0) -> Tensor:
    """The sum by odd weights, so that no bit of a single number vanishes modulo 2**64."""
    return (sums * (2 * torch.arange(first, first + len(sums), device=sums.device) + 1)).sum()


def agree(own: Decides) -> None:
    """ValueError on all ranks, with the key and two ranks' values, if they are about to do different things.

    Collective over the world. Communication: one all-gather of 32 bytes. Where files are not the same one, as on
    machines with disks of their own, two more of small objects, and one rank of each machine reads its copy once: of
    more than WHOLE bytes PARTS parts. Versions of tpformer and torch and ENVIRONMENT are compared, too.
    """
    if dist.get_world_size() == 1:
        return
    values = {key: _text(value) for key, value in (_surroundings() | {"command": own.command, **own.values}).items()}
    stamps = {key: _stamp(path) for key, path in own.files.items()}
    digest = hashlib.sha256(repr((sorted(values.items()), sorted(stamps.items()))).encode()).digest()
    if len({*_gathered(digest)}) == 1:
        return
    everyone = _gathered((values, stamps))
    _check([values for values, _ in everyone])
    keys = sorted({key for _, stamps in everyone for key in stamps})
    firsts = {key: [_first(stamps.get(key), key, everyone) for _, stamps in everyone] for key in keys}
    rank = dist.get_rank()
    mine = {key: _content(own.files[key]) for key in stamps if rank in firsts[key] and len({*firsts[key]}) > 1}
    read = _gathered(mine)
    _check([{key: read[firsts[key][rank]].get(key, UNSET) for key in keys} for rank in range(len(everyone))])


def _first(stamp: Any, key: str, everyone: Sequence[tuple[Any, Mapping[str, Any]]]) -> int:
    """The first rank whose file has this stamp, which reads it for all that have the same file."""
    return next(rank for rank, (_, stamps) in enumerate(everyone) if stamps.get(key) == stamp)


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _check(everyone: Sequence[Mapping[str, str]]) -> None:
    """ValueError unless all ranks' texts are those of rank 0."""
    for rank, theirs in enumerate(everyone):
        keys = [key for key in {**everyone[0], **theirs} if theirs.get(key, UNSET) != everyone[0].get(key, UNSET)]
        if keys:
            here, there = (each.get(keys[0], UNSET) for each in (everyone[0], theirs))
            more = f"; they also differ in {listed(keys[1:])}" if keys[1:] else ""
            raise ValueError(
                f"ranks must do the same, and rank {rank} has {keys[0]} = {there} where rank 0 has {here}{more}: give "
                f"all ranks the same TOML file, command line, data, software and environment"
            )


def _text(value: Any) -> str:
    """A value as a text that is equal for equal values. A long one is cut, and its digest tells the rest."""
    if value is None:
        return UNSET
    whole, brief = repr(value), shown(value)
    return brief if brief == whole else f"{brief} (SHA-256 {hashlib.sha256(whole.encode()).hexdigest()[:12]})"


def _surroundings() -> dict[str, Any]:
    """The software and the part of the environment that decide numbers."""
    software = {"tpformer": f"{__version__}, sources {_sources()}", "torch": torch.__version__}
    return {**software, **{name: os.environ.get(name) for name in ENVIRONMENT}}


@functools.cache
def _sources() -> str:
    """A digest of the package's own source, because a working tree changes without its version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({*root.rglob("*.py"), *(root / "kernels").rglob("*.py")}):  # kernels may be a link
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What tells the same file, seen from several machines; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _content(path: Path) -> str:
    """The size and a digest of a file's content; what is wrong if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                digest = hashlib.file_digest(file, "sha256")
            else:
                digest = hashlib.sha256()
                for index in range(PARTS):
                    file.seek((size - PART) * index // (PARTS - 1))
                    digest.update(file.read(PART))
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    return f"{size} bytes with SHA-256 {digest.hexdigest()[:12]}"
