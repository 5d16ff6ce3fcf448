"""Attention and a GPT on context-parallel ranks, beside one process. No tests.

Belongs here: what tests of operations, of models and of traps compare.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from kept import kept
from torch import Tensor, nn

from tpformer import ops
from tpformer.distributed import all_reduce, build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig

SEQ, WIDTH, HIDDEN = 24, 8, 24
DOCUMENTS = [[0, 5, 6, 7, 20], [0], [0, 12]]  # some have one token, some cross from one rank's chunk to another's
BATCH = len(DOCUMENTS)
GPT2 = {"vocab_size": 50, "seq_length": SEQ, "n_layers": 2, "hidden_size": HIDDEN, "n_heads": 6, "dropout": 0.1}
NEWER = {
    **GPT2, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "n_kv_heads": 3,
    "qk_norm": True, "sliding_window": 5, "rope_scaling_factor": 8.0, "rope_original_length": 8,
}  # fmt: skip
MIXTURE = {**NEWER, "n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8, "sliding_window": None}


def tensors(heads: int, kv: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + kv)
    shapes = [(BATCH, SEQ, n, WIDTH) for n in (heads, kv, kv, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def whole(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, documents: list | None, window: int | None) -> list[Tensor]:
    """One process's result and gradients."""
    packed = None
    if documents is not None:
        starts = [sample * SEQ + start for sample, of in enumerate(documents) for start in of]
        boundaries = torch.tensor([*starts, len(documents) * SEQ], dtype=torch.int32)
        packed = boundaries, int(boundaries.diff().max())
    return with_gradients(lambda *x: ops.attention(*x, packed, True, window), q, k, v, dy=dy)


def shared(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, documents: list | None, window: int | None, group=None
) -> list[Tensor]:
    """This rank's. group: of all ranks; None: the world."""
    group = dist.group.WORLD if group is None else group
    own = ops.own_tokens(SEQ, group.size(), group.rank())
    q, k, v, dy = (x[:, own] for x in (q, k, v, dy))
    return with_gradients(lambda *x: ops.context_attention(*x, documents, window, group=group), q, k, v, dy=dy)


def documents() -> Tensor:
    """DOCUMENTS as position ids."""
    ids = [[token - max(s for s in starts if s <= token) for token in range(SEQ)] for starts in DOCUMENTS]
    return torch.tensor(ids)


def context() -> TensorParallel:
    size = dist.get_world_size()
    return TensorParallel(context=build_mesh("cpu", tensor_parallel=1, context_parallel=size)["cp"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(module: nn.Module, *, summed: bool = False) -> dict[str, Tensor]:
    """summed: over the ranks, each of which has the gradient that its own tokens make."""
    return {n: all_reduce(p.grad, dist.group.WORLD) if summed else p.grad for n, p in module.named_parameters()}


def loss_of(config: dict, tp: TensorParallel | None, position_ids: Tensor | None, **options) -> dict[str, Tensor]:
    said = {name: options.pop(name) for name in ("reduction",) if name in options}
    model = kept(GPT, GPTConfig(**config), tp=tp, seed=3, dtype=torch.float64, balance_loss=0.1, **options)
    ids = torch.randint(50, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].clone()
    targets[1, 2:9] = -100
    key = {"sample_index": torch.tensor([4, 0, 9]), "step": 2}
    loss = model(ids[:, :-1], targets=targets, position_ids=position_ids, **key, **said)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model, summed=tp is not None)}
