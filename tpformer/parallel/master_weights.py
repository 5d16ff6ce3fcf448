"""Float32 master weights beside the 16-bit copies that a rank computes with, where it shares no parameters.

Belongs here: which of the two a module holds when. FSDP2 does the same for ranks that share or offload (zero.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpformer.distributed.dtensor import local_part
from tpformer.torch_private import foreach_copy_, version_of


class MasterWeights:
    """The parameters of a rank's parts, and the copies that their modules hold while they compute.

    Between steps the parts hold their masters, so that optimizers, checkpoints and norms see them alone. Gradients are
    made for the copies, add up in the masters' dtype, and are the masters' `.grad` afterwards.

    An optimizer that reads gradients of the copies' dtype sets `narrow`, and they stay as they are made where nothing
    is added to them: half the memory, and a pass less.

        masters = MasterWeights([part], torch.bfloat16)
        with masters.computing():
            part(ids, targets=targets).backward()   # part.parameters() are bfloat16
        optimizer.step()                            # part.parameters() are float32, and so are their gradients

    parts: on their device, with their last parameters. Their values may still change, in place: a write that autograd
    does not count, as to `.data`, needs refresh(everything=True). dtype: the copies'. used_twice: parameters of which a
    forward makes two gradients; their sum is made in the masters' dtype.
    Memory: dtype's bytes for each element. No communication.
    Source: Micikevicius et al., arXiv:1710.03740, section 3.1.
    """

    narrow = False
    """Whether a gradient that is not added to, of a parameter that is whole here, stays in the copies' dtype."""

    def __init__(self, parts: Iterable[nn.Module], dtype: torch.dtype, used_twice: Iterable[nn.Parameter] = ()) -> None:
        pairs: dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places = []
        for module in (each for part in parts for each in part.modules()):
            for name, master in module.named_parameters(recurse=False):
                if master not in pairs:
                    copy = nn.Parameter(_like(master, dtype))
                    copy.grad_dtype, master.grad_dtype = master.dtype, None
                    pairs[master] = master, copy
                self._places.append((module, name, *pairs[master]))
        self._pairs = list(pairs.values())
        self._copies = {master: local_part(copy.detach()) for master, copy in self._pairs}
        self._versions = [-1] * len(self._pairs)
        twice = set(used_twice)
        # ranks add up their parts of other gradients
        self._may_be_narrow = [not isinstance(master, DTensor) and master not in twice for master in pairs]
        self._stale: set[int] = set()
        """The ids of masters that an optimizer may have changed, without a count, since they were rounded."""

    def copies_of(self, masters: Iterable[nn.Parameter]) -> list[Tensor]:
        """This rank's parts of the copies of these masters. Who writes both, and nothing else, calls `follow`."""
        return [self._copies[master] for master in masters]

    def follow(self, masters: Iterable[nn.Parameter]) -> None:
        """These masters have been rounded to their copies, by whoever has changed them."""
        self._stale.difference_update(map(id, masters))

    @contextmanager
    def computing(self, *, adds_up: bool = True) -> Iterator[None]:
        """Within, the parts hold the copies, and they the gradients. RuntimeError if a parameter has been replaced.

        adds_up: whether several backwards run within.
        """
        for module, name, master, _ in self._places:
            if getattr(module, name) is not master:
                raise RuntimeError(
                    f"parameter {name} of a {type(module).__name__} has been replaced since its copy was made: change "
                    f"its values in place, or build ModelParts and optimizers after it"
                )
        self.refresh()
        for (master, copy), may_be in zip(self._pairs, self._may_be_narrow, strict=True):
            narrow = self.narrow and may_be and not adds_up and master.grad is None
            copy.grad_dtype = copy.dtype if narrow else master.dtype
            copy.requires_grad_(master.requires_grad)
            copy.grad = None if master.grad is None else master.grad.to(copy.grad_dtype)
        try:
            for module, name, _, copy in self._places:
                module.register_parameter(name, copy)
            yield
        finally:
            for module, name, master, _ in self._places:
                module.register_parameter(name, master)
            for master, copy in self._pairs:
                master.grad, copy.grad = copy.grad, None
                if master.grad is not None:  # an optimizer may follow, and torch's fused ones count no writes
                    self._stale.add(id(master))

    @torch.no_grad()
    def refresh(self, *, everything: bool = False) -> None:
        """Round each master that has changed, since it was last rounded, to its copy.

        everything: whether to round all of them. So it does by itself after gradients, unless `follow` was called.
        """
        versions = [version_of(local_part(master)) for master, _ in self._pairs]
        changed = [
            pair
            for pair, seen, now in zip(self._pairs, self._versions, versions, strict=True)
            if everything or seen != now or id(pair[0]) in self._stale
        ]
        if changed:
            foreach_copy_([local_part(copy) for _, copy in changed], [local_part(master) for master, _ in changed])
        self._versions = versions
        self._stale.clear()


def _like(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a copy of a parameter, laid out as it is."""
    local = torch.empty_like(local_part(master.detach()), dtype=dtype)
    if isinstance(master, DTensor):
        layout = master.device_mesh, master.placements
        return DTensor.from_local(local, *layout, shape=master.shape, stride=master.stride(), run_check=False)
    return local


def needs_masters(part: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a part computes in 16 bits, its parameters have more, and FSDP2 does not see to it."""
    wider = next(part.parameters()).dtype.itemsize > dtype.itemsize
    return dtype.itemsize < 4 and wider and not isinstance(part, FSDPModule)
