"""The cases of the benches route, weighted_activation and combine: the passes of a mixture of experts that multiply no
matrices.

Belongs here: their sizes and bytes, and who can do them. Each case has the experts of one layer on one GPU.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.config import preset_config
from tpformer.kernels.combine.reference import combine_cost
from tpformer.kernels.route.reference import Policy, route_cost
from tpformer.kernels.weighted_activation.reference import weighted_activation_cost
from tpformer.ops.dispatch import Dispatch, dispatch
from tpformer.ops.implementation import implementation
from tpformer.ops.route import Routing

from . import formulas
from .case import COMPILED, Case, Function, Work, compiled

ITEMSIZE = 2
PRESETS = {"Mixtral 8x7B": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
TOKENS, ROUTED_TOKENS = 8192, 32768  # a router's scores are small, and a kernel on fewer of them is mostly a launch
SHARE = 0.5  # of a copy's speed that a router has to reach: its comparisons take as long as its bytes, or longer


class ExpertSizes(NamedTuple):
    """The experts of a layer, and how many tokens they are for."""

    model: str
    tokens: int
    experts: int
    k: int
    hidden: int
    ffn: int

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.k

    def scores(self, device: str, dtype: torch.dtype) -> Tensor:
        """(tokens, experts) numbers, those of a token apart by more than rounding, so that all choose alike."""
        order = torch.rand(self.tokens, self.experts, device=device).argsort(1)
        return order.to(dtype) * (4 / self.experts) - 2


def layers(tokens: int, quick: bool) -> list[ExpertSizes]:
    """A layer of each model."""
    found = []
    for model, preset in PRESETS.items():
        c = preset_config(preset)
        found.append(ExpertSizes(model, tokens, c.n_experts, c.experts_per_token, c.hidden_size, c.expert_size))
    return found[:1] if quick else found


def work(op: str, function: str, inputs: tuple) -> Work:
    """An operation's function, and the formula of the same name."""
    ours: Function = getattr(implementation(op, inputs[0]), function)
    plain: Function = getattr(formulas, function)
    return Work(inputs, ours, plain, {COMPILED: compiled(plain)})


def route(backward: bool, layer: ExpertSizes, device: str, dtype: torch.dtype) -> Work:
    """Routers compute in float32, whatever the dtype of rows is."""
    dtype = torch.promote_types(dtype, torch.float32)
    policy, logits = Policy(layer.k), layer.scores(device, dtype)
    if not backward:
        return work("route", "route_forward", (logits, policy))
    experts, weights, scores = formulas.route_forward(logits, policy)
    return work("route", "route_backward", (torch.randn_like(weights), experts, scores, policy))


def weighted_activation(backward: bool, layer: ExpertSizes, device: str, dtype: torch.dtype) -> Work:
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    gate_up = torch.randn(layer.rows, 2 * layer.ffn, **options)
    weights = torch.rand(layer.rows, device=device, dtype=torch.promote_types(dtype, torch.float32))
    if not backward:
        return work("weighted_activation", "weighted_activation_forward", (gate_up, "silu", weights))
    da = torch.randn(layer.rows, layer.ffn, **options)
    return work("weighted_activation", "weighted_activation_backward", (da, gate_up, "silu", weights))


def combine(layer: ExpertSizes, device: str, dtype: torch.dtype) -> Work:
    """Rows lie as they are dispatched: sorted by expert, then by token."""
    experts, weights, _ = formulas.route_forward(layer.scores(device, torch.float32), Policy(layer.k))
    sent = Dispatch(dispatch(Routing(experts, weights), 0, layer.experts, layer.experts, 1))
    rows = torch.randn(layer.rows, layer.hidden, device=device, dtype=dtype)
    return work("combine", "combine", (rows, sent.tokens, sent.positions))


def route_cases(quick: bool) -> list[Case]:
    cases = []
    for layer in layers(ROUTED_TOKENS, quick):
        for backward in (False, True):
            nbytes = route_cost(layer.tokens, layer.experts, layer.k, backward).bytes
            label, shape = f"route {'backward' if backward else 'forward'}", f"{layer.tokens}x{layer.experts}"
            build = partial(route, backward, layer)
            cases.append(Case(label, f"{layer.model} {shape}, {layer.k} of them", nbytes, build, share=SHARE))
    return cases


def weighted_activation_cases(quick: bool) -> list[Case]:
    cases = []
    for layer in layers(TOKENS, quick):
        for backward in (False, True):
            nbytes = weighted_activation_cost(layer.rows, layer.ffn, ITEMSIZE, backward).bytes
            label, shape = f"weighted silu {'backward' if backward else 'forward'}", f"{layer.rows}x{layer.ffn}"
            cases.append(Case(label, f"{layer.model} {shape}", nbytes, partial(weighted_activation, backward, layer)))
    return cases


def combine_cases(quick: bool) -> list[Case]:
    cases = []
    for layer in layers(TOKENS, quick):
        nbytes = combine_cost(layer.rows, layer.tokens, layer.k, layer.hidden, ITEMSIZE).bytes
        shape = f"{layer.model} {layer.tokens}x{layer.hidden}, {layer.k} rows each"
        cases.append(Case("combine", shape, nbytes, partial(combine, layer)))
    return cases
