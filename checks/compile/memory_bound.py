"""The compile check's cases of the kernels that multiply no matrices: norm, dropout, activation, rope, cross entropy,
those of experts, packing, quantisation, and the optimizers' updates.

Belongs here: one function per folder of kernels, listed in MEMORY_BOUND. shipped.py has the other kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tpformer.kernels.activation.kernel import activation_backward, activation_forward
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.combine.kernel import combine
from tpformer.kernels.cross_entropy.kernel import combine_statistics, slice_gradient, slice_statistics
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice
from tpformer.kernels.dropout.kernel import finish_backward, finish_forward
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.kernel import WIDEST_BACKWARD, finish_norm_forward, norm_backward, norm_forward
from tpformer.kernels.pack.kernel import pack, unpack
from tpformer.kernels.rope.kernel import rope_rotate
from tpformer.kernels.route.kernel import route_backward, route_forward
from tpformer.kernels.route.reference import Policy
from tpformer.kernels.update.kernel import adamw_, sgd_
from tpformer.kernels.weighted_activation.kernel import weighted_activation_backward, weighted_activation_forward

from .cases import CAPABILITIES, DTYPES, Case, meta, meta_packed

PROGRAMS = 264
SHORT_STORES = frozenset({"wide_stores"})  # a record's bases, and an escape's slot, are short
NUMBERS = partial(meta, dtype=torch.float32)


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
            for n in (128, 4096, 8192, 16384, 32768, 4001, 30001):
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
    for capability in CAPABILITIES:
        for name, terms in {"plain": LossTerms(), "smooth": LossTerms(label_smoothing=0.1, z_loss=1e-4)}.items():
            for dtype in DTYPES:
                for v in (262144, 6288, 1008, 50257, 1):
                    x, vocab = meta(8192, v, dtype=dtype), VocabSlice(0, max(1, v - 7), 8 * v)
                    gradient = partial(slice_gradient, x, NUMBERS(2, 8192), targets)
                    scale, where = (NUMBERS(8192), "apart") if name == "plain" else (None, "in place")
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
                launch=partial(combine_statistics, NUMBERS(8, terms.rows, 8192), targets, VocabSlice(0, 4, 32), terms),
            )  # fmt: skip


def weighted_activation_cases() -> Iterator[Case]:
    """Widths of an expert: one tile and several of them, and one that is not vectorised."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            for f in (768, 14336, 1001):
                gate_up, da, weights = meta(8192, 2 * f, dtype=dtype), meta(8192, f, dtype=dtype), NUMBERS(8192)
                for name in ACTIVATIONS if f == 768 else ("silu",):
                    launches = {
                        "weighted_activation_forward_kernel": partial(
                            weighted_activation_forward, gate_up, name, weights
                        ),
                        "weighted_activation_backward_kernel": partial(
                            weighted_activation_backward, da, gate_up, name, weights
                        ),
                    }
                    for kernel, launch in launches.items():
                        yield Case(
                            name=f"{name} {f}", kernel=kernel, dtype=dtype, capability=capability, launch=launch
                        )  # fmt: skip


def combine_cases() -> Iterator[Case]:
    """Few and many rows for each token, and a width that is not vectorised."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            for h, k in ((4096, 2), (2048, 8), (2048, 16), (1001, 8)):
                index = (meta(8192 * k, dtype=torch.int32), meta(8192, k, dtype=torch.int32))
                yield Case(
                    name=f"{k} of {h}", kernel="combine_kernel", dtype=dtype, capability=capability,
                    launch=partial(combine, meta(8192 * k, h, dtype=dtype), *index),
                )  # fmt: skip


def pack_cases() -> Iterator[Case]:
    """Both passes, and the passes that unpack in registers: norms of each width, and activations."""
    for capability in CAPABILITIES:
        same = {"dtype": torch.bfloat16, "capability": capability}
        x = meta(8192, 4096, dtype=torch.bfloat16)
        yield Case(name="", kernel="pack_kernel", launch=partial(pack, x), waived=SHORT_STORES, **same)
        yield Case(name="", kernel="unpack_kernel", launch=partial(unpack, meta_packed(8192, 4096)), **same)
        for name, gate in (("gelu", None), ("gelu_tanh", None), ("silu", x), ("relu2", None)):
            values = meta_packed(8192, 4096)
            launch = partial(activation_backward, x, values, name, None if gate is None else values)
            yield Case(name=f"packed {name}", kernel="activation_backward_kernel", launch=launch, **same)
        for n in (128, 4096, 8192, 16384, 32768, 4008):
            rows, kept = meta(8192, n, dtype=torch.bfloat16), meta_packed(8192, n)
            norm = Norm("layernorm", meta(n, dtype=torch.bfloat16), meta(n, dtype=torch.bfloat16), 1e-5)
            name, statistics = f"packed layernorm {n}", (NUMBERS(8192, 1),) * 2
            yield Case(name=name, kernel="norm_forward_kernel", launch=partial(norm_forward, kept, norm), **same)
            backward = partial(norm_backward, rows, kept, statistics, norm, rows, programs=PROGRAMS)
            kernels = ["wide_norm_backward_kernel", "norm_weight_gradient_kernel"]
            for kernel in kernels if n > WIDEST_BACKWARD else ["norm_backward_kernel"]:
                yield Case(name=name, kernel=kernel, launch=backward, **same)


def update_cases() -> Iterator[Case]:
    """Gradients of each dtype. With copies, without them, and where memory begins anywhere, which is not vectorised."""
    scalar, elements = NUMBERS(), 1 << 20
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            half = torch.float16 if dtype == torch.float16 else torch.bfloat16
            for where, skew, decay in (("", 0, 0.1), (" without copies", 0, 0.0), (" anywhere", 1, 0.1)):
                masters, gradients, copies = (
                    [meta(elements + skew, dtype=kind)[skew:]] * 2 for kind in (torch.float32, dtype, half)
                )
                given = None if where == " without copies" else copies
                adamw = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
                shared = {"lr": 1e-3, "scale": scalar, "skipped": scalar, "weight_decay": decay}
                launches = {
                    "adamw": partial(adamw_, masters, gradients, masters, masters, [scalar] * 2, given, **adamw),
                    "sgd": partial(sgd_, masters, gradients, [], given, momentum=0.0, nesterov=False),
                    "momentum": partial(sgd_, masters, gradients, masters, given, momentum=0.9, nesterov=skew == 0),
                }
                for name, launch in launches.items():
                    kernel = "adamw_kernel" if name == "adamw" else "sgd_kernel"
                    yield Case(
                        name=f"{name}{where}", kernel=kernel, dtype=dtype, capability=capability,
                        launch=partial(launch, **shared),
                    )  # fmt: skip


POLICIES = {
    8: Policy(2),
    128: Policy(8),
    256: Policy(8, "sigmoid", scale=2.5, groups=8, top_groups=4),
    160: Policy(6, normalised=False, scale=16.0, groups=8, top_groups=3),
    512: Policy(16, "sigmoid"),
    60: Policy(4, normalised=False),
}


def route_cases() -> Iterator[Case]:
    """The routers of Mixtral, Qwen3, DeepSeek-V3 and V2, the largest one, and one whose rows are not vectorised."""
    for capability in CAPABILITIES:
        for experts, policy in POLICIES.items():
            scores, chosen = NUMBERS(8192, experts), NUMBERS(8192, policy.k)
            index = meta(8192, policy.k, dtype=torch.int32)
            for aids in (False, True):
                launches = {
                    "route_forward_kernel": (
                        " bias" * aids, partial(route_forward, scores, policy, NUMBERS(experts) if aids else None),
                    ),
                    "route_backward_kernel": (
                        " shares" * aids,
                        partial(route_backward, chosen, index, scores, policy, scores if aids else None),
                    ),
                }  # fmt: skip
                for kernel, (variant, launch) in launches.items():
                    yield Case(
                        name=f"{policy.k} of {experts}{variant}", kernel=kernel, dtype=torch.float32,
                        capability=capability, launch=launch,
                    )  # fmt: skip


MEMORY_BOUND: tuple[Callable[[], Iterator[Case]], ...] = (
    activation_cases,
    rope_cases,
    norm_cases,
    dropout_cases,
    cross_entropy_cases,
    weighted_activation_cases,
    combine_cases,
    route_cases,
    pack_cases,
    update_cases,
)
