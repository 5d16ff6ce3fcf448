"""What replicas that train by themselves have in common, in fragments that they make equal one after the other.

Belongs here: the tensors of that, the sum over replicas and the outer step, on each rank's parts. When a fragment's
turn comes is in diloco.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tpformer.distributed.agreement import digests
from tpformer.distributed.collectives import all_gather, combine, start_all_gather, start_all_reduce
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.encodings import Encoding


@dataclass
class Held:
    """A parameter, or a buffer that steps move, by its global name.

    start: its value in all replicas. momentum: the outer one; None for a buffer, which takes the mean. Both are laid
    out as the tensor is. copies: which other ranks hold the same part of it. twins: this rank's copies of it, in other
    parts.
    """

    name: str
    tensor: Tensor
    start: Tensor
    momentum: Tensor | None
    copies: str
    twins: list[Tensor] = field(default_factory=list)

    @property
    def own(self) -> Tensor:
        """This rank's part of its value in this replica."""
        return local_part(self.tensor)

    def write(self, value: Tensor) -> None:
        """Give this replica's copies a value."""
        for each in (self.tensor, *self.twins):
            local_part(each).copy_(value)

    def moved(self) -> Tensor:
        """How far the replica has come, downhill: (elements,)."""
        return (local_part(self.start) - self.own).reshape(-1)

    def swap(self) -> None:
        """Exchange its value in this replica with that in all replicas."""
        own = self.own.clone()
        self.write(local_part(self.start))
        local_part(self.start).copy_(own)


def held_by(parts: Sequence[nn.Module], tied: Sequence[nn.Parameter]) -> list[Held]:
    """All that steps change of a rank's parts, as it is now: what is frozen is equal anyway."""
    copied, found = {id(each) for each in tied}, dict[str, Held]()
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            trained = tensor.requires_grad
            if not (trained or (not isinstance(tensor, nn.Parameter) and tensor.is_floating_point())):
                continue
            if name in found:
                found[name].twins.append(tensor)
                continue
            start = tensor.detach().clone()
            copies = "stages" if id(tensor) in copied else "" if _cut(tensor) else "tensor-parallel ranks"
            found[name] = Held(name, tensor, start, torch.zeros_like(start) if trained else None, copies)
    return list(found.values())


def _cut(tensor: Tensor) -> bool:
    """Whether tensor-parallel ranks hold other parts of it."""
    if not isinstance(tensor, DTensor) or "tp" not in (names := tensor.device_mesh.mesh_dim_names or ()):
        return False
    return tensor.placements[names.index("tp")].is_shard()


def layer_of(name: str) -> int | None:
    """The global index of the layer that a parameter belongs to; None for the rest of a model."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return None if found is None else int(found[1])


class Sum(NamedTuple):
    """deltas: for each tensor of a fragment its part of the mean over replicas of how far they have come, (elements,).
    counts: a scalar, above 0 if any replica is in that mean."""

    deltas: list[Tensor]
    counts: Tensor


class Fragment:
    """Tensors that replicas make equal at the same time.

    replicas: the group of the ranks that hold the same parts in all replicas. encoding: of what is sent; None: values
    as they are. device: where the group's collectives run.
    Memory: 8 bytes for each float32 element of a shard, and while it is sent 8 more.
    """

    def __init__(
        self, held: Sequence[Held], replicas: ProcessGroup, encoding: Encoding | None, device: torch.device
    ) -> None:
        self.replicas, self.encoding, self.device = replicas, encoding, device
        # ranks with copies of a tensor have to get the same bits of it, so that it goes with others of which the same
        # ranks have copies: at the same place of a sum, and in the same blocks of an encoding
        buckets: dict[tuple, list[Held]] = defaultdict(list)
        for each in held:
            buckets[each.copies, each.tensor.dtype].append(each)
        self.buckets = [buckets[key] for key in sorted(buckets, key=str)]

    def __iter__(self) -> Iterator[Held]:
        for bucket in self.buckets:
            yield from bucket

    @torch.no_grad()
    def send(self, weight: Tensor) -> Callable[[], Sum]:
        """Begin the mean over replicas, of which this one has the weight: a float64 scalar. What is returned waits.

        A replica of no weight sends zeros, whatever it holds.
        Communicates over replicas: for each bucket an all-reduce of its elements, or an all-gather of them encoded; an
        all-reduce of 8 bytes.
        """
        waits = []
        for bucket in self.buckets:
            moved = torch.cat([each.moved() for each in bucket]).to(self.device)
            share = weight.to(moved)
            waits.append(self._start_sum(torch.where(share > 0, moved * share, torch.zeros_like(moved))))
        everyone = start_all_reduce(weight.to(self.device).reshape(1), self.replicas)
        arrived: list[Sum] = []

        def mean() -> Sum:
            if not arrived:
                counts, deltas = everyone()[0], list[Tensor]()
                for bucket, wait in zip(self.buckets, waits, strict=True):
                    total = wait()
                    mean = total / counts.clamp(min=1.0).to(total.dtype)
                    deltas += mean.split([each.own.numel() for each in bucket])
                arrived.append(Sum(deltas, counts))
                waits.clear()
            return arrived[0]

        return mean

    @torch.no_grad()
    def rejoin(self, weight: Tensor) -> None:
        """Give a replica of no weight the common values, from which it goes on while others' means travel."""
        for each in self:
            inside = weight.to(each.own.device) > 0
            each.write(torch.where(inside, each.own, local_part(each.start)))

    def _start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin a sum over replicas of (elements,)."""
        if self.encoding is None:
            return start_all_reduce(x, self.replicas)
        padded = x.new_zeros(-(-len(x) // self.encoding.block) * self.encoding.block, dtype=torch.float32)
        padded[: len(x)] = x
        sent = self.encoding.encode(padded[None])
        waits = [start_all_gather(each.contiguous().view(torch.uint8), self.replicas) for each in sent]

        def total() -> Tensor:
            codes = [wait().view(each.dtype) for wait, each in zip(waits, sent, strict=True)]
            return combine(list(self.encoding.decode(codes)), torch.add)[: len(x)].to(x.dtype)  # type: ignore[union-attr]

        return total

    @torch.no_grad()
    def take(self, found: Sum, *, lr: float, momentum: float, mix: float) -> None:
        """The outer step by Nesterov's momentum, of all replicas alike. mix: the share that this replica keeps of its
        own value, with what it has learned since it sent. Nothing changes if no replica had a weight.

        Source: Douillard et al., DiLoCo, arXiv:2311.08105, algorithm 1; streaming: arXiv:2501.18512, algorithm 2.
        """
        for each, mean in zip(self, found.deltas, strict=True):
            start, own = local_part(each.start), each.own
            delta, counted = mean.view_as(own).to(own.device), found.counts.to(own.device) > 0
            new = start - delta
            if each.momentum is not None:
                velocity = local_part(each.momentum)
                velocity.copy_(torch.where(counted, momentum * velocity + delta, velocity))
                new = start - lr * (delta + momentum * velocity)
            start.copy_(torch.where(counted, new, start))
            each.write(start if mix == 0 else torch.lerp(start, own, mix))


def check_equal(held: Sequence[Held], replicas: ProcessGroup, device: torch.device) -> None:
    """RuntimeError with a name, on the ranks that hold it, if replicas have other values of something.

    Communication: an all-gather over replicas of 16 bytes a tensor. Waits for the device.
    """
    if not held:
        return
    first, *others = all_gather(digests([each.own for each in held])[None].to(device), replicas)
    for other in others:
        for each, equal in zip(held, (other == first).all(1).tolist(), strict=True):
            if not equal:
                raise RuntimeError(
                    f"replicas begin with other values of {each.name}, so that the mean of what they learn is of no "
                    "use: build them with one seed, or load one checkpoint into all"
                )
