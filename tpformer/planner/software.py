"""What a training stack's kernels move besides GEMMs, what it computes again, and which communication it hides.

Belongs here: the settings that distinguish stacks, and this project's own. Those of published runs are data
(published_tables/*.toml). How they turn into seconds is in layer_time.py and step_time.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tpformer.config import Layout

from .devices import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
    """One training stack. Bytes are those that its kernels read and write in main memory, in 16 bits."""

    stream: tuple[float, float] = (20.0, 32.0)
    """Bytes of a token's residual feature in the forward and in the backward of a layer: norms, biases, dropout and
    residual additions. Divided by tensor parallelism only with sequence parallelism."""
    hidden: tuple[float, float] = (4.0, 8.0)
    """Bytes of each feature that the MLP's activation reads."""
    heads: tuple[float, float] = (0.0, 0.0)
    """Bytes of each feature of queries, keys and values: copies, transpositions, biases."""
    rotary: tuple[float, float] = (4.0, 4.0)
    """Bytes of each feature of queries and keys if the model has RoPE."""
    scores: tuple[float, float] | None = None
    """Bytes of each attention score beside its products: attention whose scores are in main memory. None: flash."""
    held_parameters: float = 0.0
    """Bytes of each parameter that a rank holds besides what the memory model counts."""
    keeps_sent: bool = True
    """What a rank with several stages has sent stays until the step ends, as in torch's pipeline engine."""
    held_scores: float = 0.0
    """Bytes of each attention score that a layer holds in its backward, besides what the memory model counts."""
    held_logits: float = 0.0
    """Bytes of each logit of a microbatch that the loss holds, besides what the memory model counts."""
    logits: float = 8.0
    """Bytes of each logit in forward and backward of the loss, beside its GEMMs' operands."""
    accumulation: float = 6.0
    """Bytes of each weight that the sum of its gradients adds to the GEMM's store: a float32 read and write, less the
    16 bits that it replaces."""
    optimizer: float = 30.0
    """Bytes of each parameter in a step of the optimizer, its gradient norm and the cast of the parameters."""
    speed: float = 1.0
    """FLOP/s of the layers' GEMMs over those of 16 bits."""
    shared_attention: float = 1.0
    """FLOP/s of attention on context-parallel ranks over those on one."""
    repeats_keys: bool = False
    """Context-parallel ranks send keys and values once for each head of queries that they serve."""
    key_gradient_bytes: int | None = None
    """Bytes of an element of the gradients of keys and values that these ranks send. None: as many as others have."""
    cast: float = 0.0
    """Bytes of each element of a GEMM's operands that are cast for it."""
    repeats: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """recompute -> {part of a layer: share of its forward that the backward computes again}."""
    forward_transport: str = "sequential"
    """sequential, pipelined, fused, or auto: what carries the linears' tensor-parallel communication."""
    backward_transport: str = "sequential"
    """The backward's transport, by the same names; or beside: reductions run beside the weight gradients' GEMMs."""
    gathered_bytes: int | None = None
    """Bytes of an element that the forward gathers over tensor-parallel ranks. None: as many as others have."""
    regathers: bool = True
    """The backward gathers a column linear's input again, beside the GEMM of the input's gradient."""
    blocking_pipeline: bool = False
    """Ranks compute nothing while they send to the next stage."""
    scattered_pipeline: bool = True
    """Without sequence parallelism a rank sends its share of the rows, and the receivers gather them."""
    data_overlap: str = "backward"
    """When the gradients' reduction runs: "backward", beside the last backwards, or "none"."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient's element that is reduced over data-parallel ranks."""
    host_kernel: float = 0.0
    """Seconds until the host has launched one kernel. 0: it is always ahead."""
    kernels: tuple[int, int] = (0, 0)
    """Kernels of a layer's forward and backward, for host_kernel."""
    expert_kernels: tuple[int, int] = (0, 0)
    """Kernels that a layer with experts has besides."""


FULL = {"qkv": 1.0, "o": 1.0, "fc1": 1.0, "attention": 1.0, "elementwise": 1.0}
# This project's kernels (docs/kernels.md). Residual stream, forward: two norms read and write 4 each, two finishing
# passes read a sum and the residual and write it, 6 each; backward: two norms read 6 and write 2 and rebuild their
# output, 4; dropout's gradients 4 each. Hidden features: activation 4 forward; backward reads x and dy, writes dx and
# the rebuilt activation. RoPE reads and writes. The loss writes logits, reads them, writes their gradient, which both
# GEMMs read as operands. AdamW in float32 (docs/zero.md): parameter, gradient and moments read, all but the gradient
# written, 28, and the gradient norm 4, the cast to 16 bits 6. Experts: torch's operations of ops/route.py and
# ops/dispatch.py, counted to within a few.
OURS = Software(
    stream=(20.0, 32.0),
    hidden=(4.0, 8.0),
    logits=6.0,
    accumulation=0.0,
    optimizer=38.0,
    repeats={"none": {}, "mlp": {"fc1": 1.0, "activation": 1.0}, "full": FULL},
    forward_transport="auto",
    backward_transport="auto",
    host_kernel=20e-6,
    kernels=(14, 26),
    expert_kernels=(35, 20),
)
# The same on a CPU, in float32. Nothing is cast. A core computes and launches its kernels by turns (Device.launch), and
# communication hides behind nothing, because it needs the core, too.
ON_CPU = dataclasses.replace(OURS, optimizer=32.0, host_kernel=0.0, data_overlap="none")


def ours(layout: Layout, device: Device) -> Software:
    """This project's stack on a device, with a layout's transport and the dtype in which it reduces gradients."""
    nbytes = 2.0 if layout.reduce_dtype == "bfloat16" else 4.0
    transport = layout.transport if device.capability else "sequential"
    stack = OURS if device.capability else ON_CPU
    return dataclasses.replace(stack, forward_transport=transport, backward_transport=transport, gradient_bytes=nbytes)
