"""Styles for torch.distributed.tensor.parallel.parallelize_module, carried by this library's layers.

Belongs here: torch's own arguments and their meaning, turned into layers in place. A plan may mix these styles with
torch's. What only torch's styles do is refused by name.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpformer.layers import TensorParallel
from tpformer.layers.children import DROPOUTS

from .linears import make_column, make_embedding, make_row
from .summing import sum_gradients
from .tensors import parameter_from

NORM = re.compile("(RMSNorm|LayerNorm)$")  # classes of norms over the last dim, wherever they are from


# what a layout may be, as the messages name it
WHOLE, FEATURES, SEQUENCE = "Replicate()", "Shard(-1)", "Shard(dim) of a sequence"
_LAYOUTS: dict[str, Placement] = {WHOLE: Replicate(), FEATURES: Shard(-1)}


class _Fused(ParallelStyle):
    """What the styles have in common: layouts of a module's first input and of its output, as in torch's styles."""

    of_torch: str  # the name of torch's style with this meaning
    inputs: tuple[str, ...]  # what input_layouts may be, the default first
    outputs: tuple[str, ...]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        transport: str = "auto",
    ) -> None:
        super().__init__()
        self.input_layout = self._known("input_layouts", input_layouts, self.inputs)
        self.output_layout = self._known("output_layouts", output_layouts, self.outputs)
        self.use_local_output, self.transport = use_local_output, transport

    def _known(self, what: str, layout: Placement | None, known: tuple[str, ...]) -> Placement:
        if layout is None:
            return _LAYOUTS[known[0]]
        if (SEQUENCE in known and _is_sequence(layout)) or any(layout == _LAYOUTS.get(each) for each in known):
            return layout
        raise ValueError(
            f"{type(self).__name__} has no {what}={layout}: it takes {' and '.join(known)}; torch's own "
            f"{self.of_torch} may stand in its place in the plan"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = (self.input_layout, self.output_layout)
        sequence_dim = next((each.dim for each in layouts if _is_sequence(each)), None)
        self._whole_parameters(module, device_mesh)
        self._make(module, TensorParallel(device_mesh, sequence_dim is not None, self.transport), sequence_dim)
        return self._adapt(module, device_mesh)

    @abstractmethod
    def _make(self, module: nn.Module, tp: TensorParallel, sequence_dim: int | None) -> None:
        """Turn the module into the layer of this style, in place."""

    def _whole_parameters(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Give all ranks the parameters of one of them, as torch's styles do (parallelize_module's src_data_rank)."""
        if self.src_data_rank is None:
            return
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta and not isinstance(parameter, DTensor):
                dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=self.src_data_rank)

    def _adapt(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Let the module take DTensors, and return one unless use_local_output is set."""
        where, layouts, back = mesh, (self.input_layout,), (self.output_layout,)

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return _local(inputs[0], where, layouts), *inputs[1:]

        def leave(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> DTensor:
            sizes = list(output.shape)
            if isinstance(self.output_layout, Shard):
                dim = self.output_layout.dim
                last = dim % output.ndim == output.ndim - 1
                sizes[dim] = layer.out_features if last else sizes[dim] * where.size()
            strides = output.new_empty(sizes, device="meta").stride()
            return DTensor.from_local(
                output, where, back, run_check=False, shape=output.shape[:0] + tuple(sizes), stride=strides
            )

        module.register_forward_pre_hook(enter)
        if not self.use_local_output:
            module.register_forward_hook(leave)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layout}, output_layouts={self.output_layout}, "
            f"use_local_output={self.use_local_output})"
        )


def _local(x: Any, mesh: DeviceMesh, layouts: tuple[Placement, ...]) -> Tensor:
    """This rank's part of x in these layouts; a plain tensor is taken for that part."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh:
        raise ValueError(f"the input lies on {x.device_mesh}, and the module on {mesh}: give it on the module's mesh")
    return (x if x.placements == layouts else x.redistribute(placements=layouts)).to_local()


def _is_sequence(layout: Placement) -> bool:
    """Whether a layout shards another dim than the last, as far as it says so: negative dims count from the end."""
    return isinstance(layout, Shard) and layout.dim != -1


class FusedColwiseParallel(_Fused):
    """torch's ColwiseParallel for nn.Linear, fused: the output features are sharded.

    input_layouts: Replicate() (default), or Shard(dim) for sequence shards along dim: these are gathered in one pass
             with the GEMM. output_layouts: Shard(-1) (default), or Replicate().
    use_local_output: whether the output is a plain tensor (default), or a DTensor.
    transport: what carries it (ops.choose_transport).
    Communication: that of make_column. Parameters, gradients and errors: as there; ValueError for other layouts.
    """

    of_torch = "ColwiseParallel"
    inputs, outputs = (WHOLE, SEQUENCE), (FEATURES, WHOLE)

    def _make(self, module: nn.Module, tp: TensorParallel, sequence_dim: int | None) -> None:
        make_column(module, tp, gather_output=self.output_layout.is_replicate(), sequence_dim=sequence_dim)


class FusedRowwiseParallel(_Fused):
    """torch's RowwiseParallel for nn.Linear, fused: the input features are sharded.

    input_layouts: Shard(-1) (default), or Replicate(), of which each rank takes its part. output_layouts: Replicate()
             (default), or Shard(dim) for sequence shards along dim: the GEMM is then fused with a reduce-scatter.
    use_local_output, transport: as in FusedColwiseParallel. For an nn.Embedding there is FusedVocabParallel.
    Communication: that of make_row. Parameters, gradients and errors: as there; ValueError for other layouts.
    """

    of_torch = "RowwiseParallel"
    inputs, outputs = (FEATURES, WHOLE), (WHOLE, SEQUENCE)

    def _make(self, module: nn.Module, tp: TensorParallel, sequence_dim: int | None) -> None:
        make_row(module, tp, split_input=self.input_layout.is_replicate(), sequence_dim=sequence_dim)


class FusedVocabParallel(_Fused):
    """torch's RowwiseParallel for nn.Embedding: the vocabulary is sharded, also where the ranks do not divide it.

    input_layouts: Replicate() (default). output_layouts: Replicate() (default), or Shard(dim) for sequence shards.
    use_local_output, transport: as in FusedColwiseParallel.
    Communication: that of make_embedding. Errors: as there; ValueError for other layouts.
    """

    of_torch = "RowwiseParallel"
    inputs, outputs = (WHOLE,), (WHOLE, SEQUENCE)

    def _make(self, module: nn.Module, tp: TensorParallel, sequence_dim: int | None) -> None:
        make_embedding(module, tp, sequence_dim=sequence_dim)


class FusedSequenceParallel(_Fused):
    """torch's SequenceParallel for norms over the last dim: they run on this rank's rows, without DTensor's dispatch.

    The parameters become DTensors, Replicate; their gradients are whole after the backward.
    sequence_dim: the sharded dim of input and output. use_local_output: whether the output is a plain tensor, or a
             DTensor (default).
    Communication, per rank: backward an all-reduce for each parameter.
    Errors:  TypeError for modules other than norms over one dim.
    """

    of_torch = "SequenceParallel"
    inputs = outputs = (FEATURES, SEQUENCE)  # the dim is not looked at

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        shards = Shard(sequence_dim)
        super().__init__(input_layouts=shards, output_layouts=shards, use_local_output=use_local_output)

    def _make(self, module: nn.Module, tp: TensorParallel, sequence_dim: int | None) -> None:
        mesh = tp.mesh
        own = dict(module.named_parameters())
        drops = [part for part in module.modules() if isinstance(part, DROPOUTS)]
        if (
            drops
            or not NORM.search(type(module).__name__)
            or any(each.ndim != 1 or "." in n for n, each in own.items())
        ):
            raise TypeError(
                f"FusedSequenceParallel is for norms over the last dim, and this is {module}: torch's own "
                f"SequenceParallel may stand in its place in the plan"
            )
        for name, parameter in own.items():
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            module.register_parameter(name, parameter_from(whole, parameter))
        sum_gradients(module, mesh)
