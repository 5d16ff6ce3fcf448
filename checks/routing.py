"""Which experts every token of a run goes to, recorded by step, layer and sample, and compared between layouts.

Belongs here: recording on a rank, the hash of a whole run, and the tokens that two runs route differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tpformer import ops
from tpformer.layers import TensorParallel
from tpformer.ops.route import Decided, record_routing
from tpformer.training.model import ModelParts

Key = tuple[int, int, int]  # step, layer, global sample


class Routed(NamedTuple):
    """A sample's tokens in one layer and step. experts: (seq, K), -1 for tokens that other ranks decide about. gaps:
    (seq,), how near another choice was; on one rank only, which has all scores."""

    experts: np.ndarray
    gaps: np.ndarray | None


class _Forward(NamedTuple):
    """A forward of a part begins: its samples, and the layers that have experts."""

    samples: list[int]
    layers: list[int]


@contextmanager
def recording(model: ModelParts, batch: int) -> Iterator[dict[Key, Routed]]:
    """Yield a dictionary that has, when the context is left, where this rank's layers sent each token.

    batch: samples of a step, by whose numbers a step is known.
    """
    found: dict[Key, Routed] = {}
    with record_routing() as events:
        hooks = [part.register_forward_pre_hook(_begin(events), with_kwargs=True) for part in model.parts]
        yield found
    for hook in hooks:
        hook.remove()
    begun, tp = None, model.parts[0].tp
    left: list[int] = []
    for event in events:
        if isinstance(event, _Forward):
            if left:
                raise ValueError(f"layers {left} routed nothing in {begun}")
            begun, left = event, list(event.layers)
            continue
        assert begun is not None
        _add(found, begun, batch, left.pop(0), tp, *event)
    if left:
        raise ValueError(f"layers {left} routed nothing in {begun}")


def _begin(events: list[Any]) -> Any:
    def hook(part: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        layers = [int(name) for name in part.layers if part.config.has_experts(int(name))]
        events.append(_Forward(options["sample_index"].tolist(), layers))

    return hook


def _add(
    found: dict[Key, Routed],
    begun: _Forward,
    batch: int,
    layer: int,
    tp: TensorParallel,
    router: ops.Router,
    decided: Decided,
) -> None:
    assert decided.routing is not None
    experts = decided.routing.experts
    gaps = None
    if len(decided.scores) == len(experts):
        chosen_by = decided.scores if router.bias is None else decided.scores + router.bias
        gaps = _gaps(chosen_by, experts, router.policy).numpy()
    part, parts = (tp.rank, tp.size) if tp.experts is not None and tp.sharded else (0, 1)
    rows = np.arange(part * len(experts), (part + 1) * len(experts))
    length = len(experts) * parts // len(begun.samples)
    size, rank = (1, 0) if (context := tp.shares_tokens) is None else context[1:]
    own = ops.own_tokens(length * size, size, rank).numpy()
    for place in range(rows[0] // length, rows[-1] // length + 1):
        sample, mine = begun.samples[place], rows // length == place
        key = (sample // batch + 1, layer, sample)
        if key in found:
            raise ValueError(f"step, layer and sample {key} were routed twice")
        whole = np.full((length * size, experts.shape[1]), -1, np.int32)
        whole[own[rows[mine] % length]] = experts.numpy()[mine]
        found[key] = Routed(whole, None if gaps is None or size * parts > 1 else gaps[mine].copy())


def _gaps(values: Tensor, experts: Tensor, policy: ops.Policy) -> Tensor:
    """How much larger a token's last expert is than the best that was left out; of its groups likewise, if nearer."""
    grouped = values.unflatten(1, (policy.groups, -1))
    best = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2).sort(1, descending=True).values
    used = torch.zeros_like(values, dtype=torch.bool).scatter_(1, experts.long(), True)
    groups = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2)
    allowed = groups >= best[:, policy.top_groups - 1 : policy.top_groups]
    open_ = allowed[..., None].expand_as(grouped).flatten(1)
    last = values.masked_fill(~used, torch.inf).amin(1)
    left_out = values.masked_fill(used | ~open_, -torch.inf).amax(1)
    gaps = last - left_out
    if policy.top_groups < policy.groups:
        gaps = torch.minimum(gaps, best[:, policy.top_groups - 1] - best[:, policy.top_groups])
    return gaps


def joined(ranks: Sequence[Mapping[Key, Routed]]) -> dict[Key, Routed]:
    """All ranks' records together. ValueError where two ranks disagree."""
    whole: dict[Key, Routed] = {}
    for rank in ranks:
        for key, routed in rank.items():
            before = whole.setdefault(key, Routed(routed.experts.copy(), routed.gaps)).experts
            both = (before >= 0) & (routed.experts >= 0)
            if not np.array_equal(before[both], routed.experts[both]):
                raise ValueError(f"ranks disagree on the experts of step, layer and sample {key}")
            np.maximum(before, routed.experts, out=before)
    return whole


def run_hash(routed: Mapping[Key, Routed]) -> str:
    """The first 16 digits of the SHA-256 of every (step, layer, sample, token) -> experts."""
    digest = hashlib.sha256()
    for key in sorted(routed):
        digest.update(repr(key).encode() + routed[key].experts.astype(np.int32).tobytes())
    return digest.hexdigest()[:16]


def flips(routed: Mapping[Key, Routed], expected: Mapping[Key, Routed]) -> list[tuple[int, int, int, int, float]]:
    """(step, layer, sample, token, gap) of each token that went to other experts; gap: that of `expected`, one rank's.

    ValueError unless both have the same steps, layers and samples.
    """
    if routed.keys() != expected.keys():
        raise ValueError(f"{len(routed)} samples were routed in place of {len(expected)}")
    found = []
    for key, one in expected.items():
        for token in np.flatnonzero((routed[key].experts != one.experts).any(1)):
            gap = float("nan") if one.gaps is None else float(one.gaps[token])
            found.append((*key, int(token), gap))
    return found
