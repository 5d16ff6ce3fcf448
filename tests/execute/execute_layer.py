"""A TransformerBlock's forward and backward on two processes, executed as compiled code through operations and the
fused transport as they are: loss and gradients are those of the sequential transport.

Each process executes its own rank's launches, which wait for the other one's stores and flags in real shared memory.
So what is not ordered within a rank is found here, and between ranks in execute_groups.py. Norms, activations and rope
are kernels, too. `make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from execution import executing, small_tiles
from kept import kept
from steps import gradients
from testing import assert_kernel_close, on_every_rank
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from checks.execute import schedule
from tpformer import ops
from tpformer.distributed import build_mesh, groups, kernel_workspace
from tpformer.layers import Positions, TensorParallel, TransformerBlock, transformer_block
from tpformer.ops import implementation

BATCH, SEQ, HIDDEN, HEADS, FFN = 1, 16, 64, 2, 96
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "rope_base": 1e4, "bias": False, "ffn_hidden_size": FFN,
}  # fmt: skip
SHARED = {"bump", "norm_forward", "norm_backward", "sum_partials", "activation_forward"}
# kind -> (options, whether rows are sequence shards, the kernels that are executed beside SHARED)
KINDS: dict[str, tuple[dict[str, Any], bool, set[str]]] = {
    "sequence shards, as Llama": (LLAMA, True,
        {"all_gather_matmul", "await_gathered", "matmul_reduce_scatter", "rope"}),
    "whole sequences, as GPT": ({"ffn_hidden_size": FFN}, False,
        {"matmul_all_reduce", "activation_backward", "finish_backward"}),
}  # fmt: skip


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
            execution.memory.add(memory.peer(0, (memory.nbytes,), torch.uint8))
            return memory

        with mock.patch.object(kernel_workspace, "allocate", shared):
            yield


def make_block(kind: str, dtype: torch.dtype, mesh: DeviceMesh, transport: str) -> TransformerBlock:
    """Its weights are the same with every dtype and transport: they are rounded to bfloat16. Norms and biases are moved
    off 1 and 0, so that every term shows."""
    torch.manual_seed(0)
    options, sequence_parallel, _ = KINDS[kind]
    tp = TensorParallel(mesh, sequence_parallel, transport)
    block = kept(transformer_block, HIDDEN, HEADS, tp=tp, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in block.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            if p.ndim == 1:
                local += 0.3 * torch.randn(local.shape, generator=torch.Generator().manual_seed(1), dtype=local.dtype)
            local.copy_(local.bfloat16())
    return block.to(dtype)


def step(kind: str, dtype: torch.dtype, mesh: DeviceMesh, transport: str) -> dict[str, Tensor | None]:
    """This rank's loss and gradients."""
    block = make_block(kind, dtype, mesh, transport)
    generator = torch.Generator().manual_seed(2)
    x, target = (torch.randn(BATCH * SEQ, HIDDEN, generator=generator).bfloat16().to(dtype) for _ in range(2))
    if block.tp.sharded:
        x, target = (rows.chunk(mesh.size())[mesh.get_local_rank()].clone() for rows in (x, target))
    x.requires_grad_()
    with ops.record_transports() as carried:
        loss = F.mse_loss(block(x, positions=Positions(BATCH, SEQ)), target)
        loss.backward()
    assert {name for _, name in carried} == {transport}
    return {"loss": loss.detach(), "dx": x.grad} | gradients(block)


@pytest.mark.parametrize("kind", KINDS)
@on_every_rank(2)
def test_a_layer_by_compiled_code_equals_the_sequential_transport(kind: str) -> None:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    launched: set[str] = set()
    with compiled(launched):
        found = step(kind, torch.bfloat16, mesh, "fused")
    oracle, baseline = (step(kind, dtype, mesh, "sequential") for dtype in (torch.float64, torch.bfloat16))
    assert found.keys() == oracle.keys() == baseline.keys()
    for name, value in found.items():
        assert_kernel_close(value, oracle[name], baseline[name], name)  # type: ignore[arg-type]
    assert launched == SHARED | KINDS[kind][2]
