"""The dropout key that travels with a microbatch: it fixes which elements are dropped, in any layout."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpformer import ops
from tpformer.kernels.philox.reference import philox_key
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import plain_name

from .module import ParallelModule
from .positions import Positions

_NAMES: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()


def module_name(model: nn.Module, module: nn.Module) -> str:
    """The name of a module in the tree of `model`, without wrappers' names, so that it is the same in every layout.

    Names are kept. They are read again if `module` is not among them.
    Errors: ValueError if the module is not in the tree.
    """
    if module not in _NAMES.get(model, ()):
        _NAMES[model] = WeakKeyDictionary((each, plain_name(path)) for path, each in model.named_modules())
    name = _NAMES[model].get(module)
    if name is None:
        raise ValueError(
            f"this {type(module).__name__} is not in the {type(model).__name__} that its DropoutKey got as model: "
            f"give the module that holds all layers, in which each has a name of its own"
        )
    return name


class DropoutKey:
    """What fixes a step's dropout in any layout: seed, step, the samples' global indices and the layers' names.

    sample_index: the global index of each sample, (batch,) int64. model: the module that holds all layers, or a
    pipeline part of it with their global names; a layer's name in it makes its dropout its own. A layer that is called
    twice with one key drops the same elements twice.
    It is no dataclass, because FSDP2 would take one apart and build another for every layer; nor is Positions.
    """

    def __init__(self, seed: int, step: int, sample_index: Tensor, model: nn.Module) -> None:
        self.seed, self.step, self.sample_index = seed, step, sample_index
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._starts: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    @uncompiled
    def drawn(cls, model: ParallelModule, p: float, x: Tensor, batch: int, *, instead: str) -> DropoutKey:
        """A key for one forward that was given none. Its seed is drawn from torch's CPU generator.

        If that generator is restored, as torch.utils.checkpoint does, the bits are the same. Nothing waits for x's
        device.
        Errors: ValueError on several ranks; it asks for `instead`.
        """
        context = model.tp.shares_tokens
        if model.tp.size > 1 or context is not None:
            ranks = f"{model.tp.size} tensor-parallel" if context is None else f"{context.size} context-parallel"
            raise ValueError(
                f"dropout={p} in training on {ranks} ranks needs {instead}: drawn from each rank's own generator, "
                f"masks of the same values might differ"
            )
        seed = int(torch.randint(2**62, (), device="cpu"))
        return cls(seed, 0, torch.arange(batch, device=x.device), model)

    @uncompiled
    def site(self, p: float, layer: nn.Module, name: str, x: Tensor, positions: Positions, shard: int) -> ops.Dropout:
        """The dropout of one site of a layer, for rows x (rows, hidden): slice number `shard` of the batch's tokens.

        Sites with rows of one shape share the starts, which take 8 bytes a row, once for a model.
        Errors: ValueError for a layer that is not in the model, and for a sample_index of another batch.
        """
        rows, hidden = x.shape
        batch, length = positions.batch, positions.sample_length
        key = (rows, hidden, length, positions.sequence_shards, shard)
        if key not in self._starts:
            if self.sample_index.shape != (positions.batch,):
                raise ValueError(
                    f"sample_index of shape {tuple(self.sample_index.shape)} for a batch of {positions.batch} samples: "
                    f"give the global index of each, ({positions.batch},)"
                )
            with torch.inference_mode(False):  # a key may be kept, and then used in training
                index = self.sample_index.to(x.device, torch.int64)
                starts = ops.dropout_starts(index, length, hidden, slice(0, batch * length))
                starts = positions.to_rows(positions.own(starts.view(batch, length)).reshape(-1))
                self._starts[key] = starts[shard * rows : (shard + 1) * rows].clone()
        # starts count elements of samples of one length, so each length draws from a stream of its own
        layer_name = module_name(self.model, layer)
        return ops.Dropout(self._starts[key], philox_key(self.seed, self.step, length, layer_name, name), p)
