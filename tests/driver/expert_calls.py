"""Calls of the launchers of experts: grouped GEMMs, and the passes that multiply nothing."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from shelf import Call, Shelf, Variant

from tpformer.kernels.combine.kernel import combine
from tpformer.kernels.grouped_matmul.kernel import grouped_matmul, grouped_weight_gradient
from tpformer.kernels.route.kernel import route_backward, route_forward
from tpformer.kernels.route.reference import Policy
from tpformer.kernels.weighted_activation.kernel import weighted_activation_backward, weighted_activation_forward


def grouped(shelf: Shelf) -> Iterator[Variant]:
    """(name, whether a plan is kept, the call by its key) of grouped GEMMs, of 8 groups."""

    def call(launcher: Callable, sizes: tuple, indexed: tuple, **options) -> Callable[..., Call]:
        def make(key: int) -> Call:
            numbers = [shelf(n, dtype=torch.int32) if n else None for n in (9, *(256 * each for each in indexed))]
            return launcher, (shelf(256, 64), shelf(*sizes), *numbers), options

        return make

    for i in (False, True):
        yield f"groups, index {i}", True, call(grouped_matmul, (8, 128, 64), (i,))
        yield f"groups, transposed, index {i}", True, call(grouped_matmul, (8, 64, 96), (i,), transposed=True)
        yield f"gradient of groups, index {i}", True, call(grouped_weight_gradient, (256, 96), (i, not i))


def of_experts(shelf: Shelf) -> Iterator[Variant]:
    """The same of the passes of experts that multiply nothing."""
    floats, integers = partial(shelf, dtype=torch.float32), partial(shelf, dtype=torch.int32)
    for launcher, arguments in (
        (weighted_activation_forward, lambda: (shelf(64, 512), "silu", floats(64))),
        (weighted_activation_backward, lambda: (shelf(64, 256), shelf(64, 512), "silu", floats(64))),
        (combine, lambda: (shelf(128, 512), integers(128), integers(64, 2))),
        (route_forward, lambda: (floats(64, 16), Policy(2), floats(16))),
        (route_backward, lambda: (floats(64, 2), integers(64, 2), floats(64, 16), Policy(2), floats(64, 16))),
    ):
        yield launcher.__name__, True, lambda key, call=(launcher, arguments): (call[0], call[1](), {})
