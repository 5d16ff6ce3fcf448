"""A TransformerBlock's forward and backward on two processes, executed as compiled code through operations and the
fused transport as they are: loss and gradients are those of the sequential transport.

Each process executes its own rank's launches, which wait for the other one's stores and flags in real shared memory.
So what is not ordered within a rank is found here, and between ranks in execute_groups.py. Norms, activations and rope
are kernels, too. `make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from execution import executing, small_tiles
from pool import WorkerPool
from steps import gradients
from testing import assert_kernel_close
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from checks.execute import schedule
from tpformer import ops
from tpformer.distributed import build_mesh, groups, kernel_workspace
from tpformer.layers import Positions, TensorParallel, TransformerBlock
from tpformer.ops import implementation

BATCH, SEQ, HIDDEN, HEADS, FFN = 1, 16, 64, 2, 96
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "rope_base": 1e4, "bias": False, "ffn_hidden_size": FFN,
}  # fmt: skip
# kind -> (options, whether rows are sequence shards, the kernels that communicate)
KINDS: dict[str, tuple[dict[str, Any], bool, set[str]]] = {
    "sequence shards, as Llama": (LLAMA, True, {"all_gather_matmul", "await_gathered", "matmul_reduce_scatter"}),
    "whole sequences, as GPT": ({"ffn_hidden_size": FFN}, False, {"matmul_all_reduce"}),
}
LAUNCHED: dict[str, set[str]] = {
    "sequence shards, as Llama": {"bump", "copy_slot", "rope", "norm_forward", "norm_backward"},
    "whole sequences, as GPT": {"bump", "norm_forward", "norm_backward"},
}


@contextlib.contextmanager
def compiled(launched: set[str]) -> Iterator[None]:
    """Within, CPU tensors get what CUDA tensors get: kernels and the fused transport. The kernels' names are added to
    `launched`."""

    def note(name: str, ptx: str) -> str:
        launched.add(name.removesuffix("_kernel"))
        return ptx

    module_of, allocate = implementation._module, kernel_workspace.allocate
    with (
        small_tiles(),
        executing(mutate=note) as execution,
        mock.patch.object(groups, "_why_not_here", lambda device: None),
        mock.patch.object(implementation, "_module", lambda op, name: module_of(op, "kernel")),
        mock.patch.object(schedule, "PATIENCE", 10**9),  # the other process may take any time
        mock.patch.object(kernel_workspace, "slot_bytes", lambda nbytes: 1 << 14),  # the executor remembers each cell
        mock.patch.object(kernel_workspace, "WRITER_FLAGS_MINIMUM", 16),
    ):

        def shared(*arguments: Any) -> Any:
            memory = allocate(*arguments)
            execution.share(memory.peer(0, (memory.nbytes,), torch.uint8))
            return memory

        with mock.patch.object(kernel_workspace, "allocate", shared):
            yield


def step(transport: str, kind: str, dtype: torch.dtype, mesh: DeviceMesh) -> dict[str, Tensor]:
    """This rank's loss and gradients. The values are the same in every dtype: they are rounded to bfloat16."""
    options, sequence_parallel, _ = KINDS[kind]
    tp = TensorParallel(mesh, sequence_parallel, transport)
    block = TransformerBlock(HIDDEN, HEADS, tp=tp, dtype=dtype, **options)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = {name: draw(p.shape).mul(HIDDEN**-0.5).add(p.ndim == 1) for name, p in block.named_parameters()}
    block.load_state_dict(distributed({name: value.bfloat16() for name, value in values.items()}, block))
    rows = slice(None)
    if sequence_parallel:
        rows = slice(mesh.get_local_rank() * SEQ // mesh.size(), (mesh.get_local_rank() + 1) * SEQ // mesh.size())
    x, target = (draw(BATCH * SEQ, HIDDEN).bfloat16().to(dtype)[rows] for _ in range(2))
    x.requires_grad_()
    with ops.record_transports() as carried:
        loss = F.mse_loss(block(x, positions=Positions(BATCH, SEQ)), target)
        loss.backward()
    assert {name for _, name in carried} == {transport}
    return {"loss": loss.detach(), "dx": x.grad} | gradients(block)
