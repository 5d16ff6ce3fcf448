"""The dropout key that travels with a microbatch: which elements a site drops, whatever the layout."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpformer import ops
from tpformer.kernels.philox.reference import philox_key
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import WRAPPERS

from .module import ParallelModule
from .positions import Positions

_NAMES: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()


def module_name(model: nn.Module, module: nn.Module) -> str:
    """The name of a module in the tree of `model`, wrappers left out, so that it does not depend on the layout.

    Names are read off once, and again when the tree has a module that they do not know.
    """
    if module not in _NAMES.get(model, ()):
        _NAMES[model] = WeakKeyDictionary(
            (each, ".".join(part for part in path.split(".") if part not in WRAPPERS))
            for path, each in model.named_modules()
        )
    name = _NAMES[model].get(module)
    if name is None:
        raise ValueError(
            f"this {type(module).__name__} is not in the {type(model).__name__} that its DropoutKey got as model: "
            f"give the module that holds all layers, in which each has a name of its own"
        )
    return name


class DropoutKey:
    """What fixes a step's dropout in any layout: the run's seed, the step, a sample's global index (batch,) int64, and
    the model, in whose tree each layer has its own name.

    model: the module that holds all layers, or a pipeline part of it with their global names. A layer that is called
    twice with one key drops the same elements twice.
    Not a dataclass, as Positions is none: FSDP2 would take it apart and make another one for every layer.
    """

    def __init__(self, seed: int, step: int, sample_index: Tensor, model: nn.Module) -> None:
        self.seed, self.step, self.sample_index = seed, step, sample_index
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._starts: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    @uncompiled
    def drawn(cls, model: ParallelModule, p: float, x: Tensor, batch: int, *, instead: str) -> DropoutKey:
        """For one forward without a key, as nn.Dropout has it: the seed is drawn from torch's generator of the CPU.

        What restores that generator, as torch.utils.checkpoint does, repeats the bits; nothing waits for x's device.
        Errors: ValueError on several ranks, where `instead` is to be given.
        """
        if model.tp.size > 1:
            raise ValueError(
                f"dropout={p} in training on {model.tp.size} tensor-parallel ranks needs {instead}: drawn from each "
                f"rank's own generator, masks of the same values might differ"
            )
        seed = int(torch.randint(2**62, (), device="cpu"))
        return cls(seed, 0, torch.arange(batch, device=x.device), model)

    @uncompiled
    def site(self, p: float, layer: nn.Module, name: str, x: Tensor, positions: Positions, shard: int) -> ops.Dropout:
        """The dropout of one site of a layer for rows x (rows, hidden), the shard-th such slice of the batch's tokens.

        Sites of rows of one shape share the starts: 8 bytes a row, once for a model.
        Errors: ValueError for a layer that is not in the model, and for a sample_index of another batch.
        """
        rows, hidden = x.shape
        key = (rows, hidden, positions.seq_length, positions.sequence_shards, shard)
        if key not in self._starts:
            if self.sample_index.shape != (positions.batch,):
                raise ValueError(
                    f"sample_index of shape {tuple(self.sample_index.shape)} for a batch of {positions.batch} samples: "
                    f"give the global index of each, ({positions.batch},)"
                )
            with torch.inference_mode(False):  # a key that is kept serves training, too
                index = self.sample_index.to(x.device, torch.int64)
                tokens = slice(0, positions.batch * positions.seq_length)
                starts = positions.to_rows(ops.dropout_starts(index, positions.seq_length, hidden, tokens))
                self._starts[key] = starts[shard * rows : (shard + 1) * rows].clone()
        # starts count elements of samples of one length: each length has its own stream, so that none meet
        length, layer_name = positions.seq_length, module_name(self.model, layer)
        return ops.Dropout(self._starts[key], philox_key(self.seed, self.step, length, layer_name, name), p)
