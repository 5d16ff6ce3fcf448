"""The compile check's cases of the kernels that multiply no matrices: norm, dropout, activation, rope, cross entropy.

Belongs here: one function per folder of kernels, listed in MEMORY_BOUND. shipped.py has the other kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tpformer.kernels.activation.kernel import activation_backward, activation_forward
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.cross_entropy.kernel import combine_statistics, slice_gradient, slice_statistics
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice
from tpformer.kernels.dropout.kernel import finish_backward, finish_forward
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.kernel import WIDEST_BACKWARD, finish_norm_forward, norm_backward, norm_forward
from tpformer.kernels.rope.kernel import rope_rotate

from .cases import CAPABILITIES, DTYPES, Case, meta

PROGRAMS = 264


def activation_cases() -> Iterator[Case]:
    """Each activation, plain and gated, forward and backward."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            x = meta(8192, 4096, dtype=dtype)
            for name in ACTIVATIONS:
                for gate in (None, x):
                    launches = {
                        "activation_forward_kernel": partial(activation_forward, x, name, gate),
                        "activation_backward_kernel": partial(activation_backward, x, x, name, gate),
                    }
                    for kernel, launch in launches.items():
                        variant = name if gate is None else f"gated {name}"
                        yield Case(name=variant, kernel=kernel, dtype=dtype, capability=capability, launch=launch)


def rope_cases() -> Iterator[Case]:
    """Three sizes of heads, both conventions of pairs, forward and inverse."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            for head_dim in (64, 80, 128):
                q, k = meta(8192, 32, head_dim, dtype=dtype), meta(8192, 8, head_dim, dtype=dtype)
                table = (meta(8192, head_dim // 2, dtype=torch.float32),) * 2
                positions = meta(8192, dtype=torch.int64)
                for interleaved in (False, True):
                    for inverse in (False, True):
                        pairs = "interleaved" if interleaved else "half"
                        yield Case(
                            name=f"{pairs} {head_dim}{' inverse' * inverse}", kernel="rope_kernel", dtype=dtype,
                            capability=capability,
                            launch=partial(rope_rotate, q, k, table, positions, interleaved, inverse),
                        )  # fmt: skip


def row_finish(dtype: torch.dtype, n: int, norm: Norm | None = None) -> Finish:
    """A finish of rows of n elements with all of its parts; with a norm if one is given."""
    dropout = Dropout(meta(8192, dtype=torch.int64), 1 << 63, 0.1)
    return Finish(meta(n, dtype=dtype), dropout, meta(8192, n, dtype=dtype), norm)


def norm_cases() -> Iterator[Case]:
    """Widths of rows: several rows per program, one row, the widest in registers, wider, and two not vectorised."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            same = {"dtype": dtype, "capability": capability}
            for n in (64, 4096, 8192, 16384, 32768, 4001, 30001):
                x = meta(8192, n, dtype=dtype)
                statistics = (meta(8192, 1, dtype=torch.float32),) * 2
                layernorm = Norm("layernorm", meta(n, dtype=dtype), meta(n, dtype=dtype), 1e-5)
                # rmsnorm keeps fewer values than layernorm: two widths are enough
                rmsnorm = layernorm._replace(kind="rmsnorm", bias=None)
                for norm in (layernorm, rmsnorm) if n in (4096, 32768) else (layernorm,):
                    forward: dict[str, Callable[[], object]] = {
                        "": partial(norm_forward, x, norm),
                        " finish": partial(finish_norm_forward, x, row_finish(dtype, n, norm)),
                    }
                    for name, launch in forward.items():
                        name = f"{norm.kind}{name} {n}"
                        yield Case(name=name, kernel="norm_forward_kernel", launch=launch, **same)
                    backward = partial(norm_backward, x, x, statistics, norm, x, programs=PROGRAMS)
                    kernels = ["wide_norm_backward_kernel", "norm_weight_gradient_kernel"]
                    for kernel in kernels if n > WIDEST_BACKWARD else ["norm_backward_kernel"]:
                        yield Case(name=f"{norm.kind} {n}", kernel=kernel, launch=backward, **same)
            yield Case(name="two", kernel="sum_partials_kernel", launch=backward, **same)


def dropout_cases() -> Iterator[Case]:
    """A width that is vectorised and one that is not, with all parts and with dropout alone."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            for n in (4096, 4001):
                x, finish = meta(8192, n, dtype=dtype), row_finish(dtype, n)
                launches = {
                    "finish_forward_kernel": {
                        "bias, dropout, residual": partial(finish_forward, x, finish),
                        "dropout": partial(finish_forward, x, Finish(dropout=finish.dropout)),
                    },
                    "finish_backward_kernel": {
                        "dropout": partial(finish_backward, x, finish.dropout, True, programs=PROGRAMS),
                        "no dropout": partial(finish_backward, x, None, True, programs=PROGRAMS),
                    },
                }
                for kernel, variants in launches.items():
                    for name, launch in variants.items():
                        yield Case(
                            name=f"{name} {n}", kernel=kernel, dtype=dtype, capability=capability, launch=launch
                        )  # fmt: skip


def cross_entropy_cases() -> Iterator[Case]:
    """Widths of rows, with padding: for 8, 4 and 1 warps, and two that are not vectorised."""
    targets = meta(8192, dtype=torch.int64)
    numbers = partial(meta, dtype=torch.float32)
    for capability in CAPABILITIES:
        for name, terms in {"plain": LossTerms(), "smooth": LossTerms(label_smoothing=0.1, z_loss=1e-4)}.items():
            for dtype in DTYPES:
                for v in (262144, 6288, 1008, 50257, 1):
                    x, vocab = meta(8192, v, dtype=dtype), VocabSlice(0, max(1, v - 7), 8 * v)
                    gradient = partial(slice_gradient, x, numbers(2, 8192), targets)
                    scale, where = (numbers(8192), "apart") if name == "plain" else (None, "in place")
                    launches = {
                        "slice_statistics_kernel": (name, partial(slice_statistics, x, targets, vocab, terms)),
                        "slice_gradient_kernel": (
                            where,
                            partial(gradient, scale, vocab, terms, in_place=scale is None),
                        ),
                    }
                    for kernel, (variant, launch) in launches.items():
                        yield Case(
                            name=f"{variant} {v}", kernel=kernel, dtype=dtype, capability=capability, launch=launch
                        )  # fmt: skip
            yield Case(
                name=name, kernel="combine_statistics_kernel", dtype=torch.float32, capability=capability,
                launch=partial(combine_statistics, numbers(8, terms.rows, 8192), targets, VocabSlice(0, 4, 32), terms),
            )  # fmt: skip


MEMORY_BOUND: tuple[Callable[[], Iterator[Case]], ...] = (
    activation_cases,
    rope_cases,
    norm_cases,
    dropout_cases,
    cross_entropy_cases,
)
