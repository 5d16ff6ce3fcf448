"""What people do to modules, and the layers that they do it to: the rows and the columns of docs/layers.md.

Belongs here: each layer beside its like of torch.nn; habits that mean the same to both (edits of a module, ways to call
it). The modules of torch.nn and the edits of one part are in theirs.py; test_habits.py compares.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import theirs
import torch
import torch.nn.functional as F
from kept import kept
from steps import Results, gradients
from theirs import FFN, HEADS, HIDDEN
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tpformer import layers
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import (
    ColumnParallelLinear,
    LMHead,
    RowParallelLinear,
    TensorParallel,
    TransformerBlock,
    transformer_block,
)
from tpformer.models import GPT, GPTConfig

BATCH, SEQ, VOCAB = 2, 6, 30
WIDE: dict[str, Any] = {"ffn_hidden_size": FFN}
GATED, PADDED = WIDE | {"activation": "swiglu"}, {"vocab_multiple": 2}
SIZES = {"vocab_size": VOCAB, "seq_length": SEQ, "hidden_size": HIDDEN, "n_heads": HEADS, **WIDE, **PADDED}
CONFIG = GPTConfig(n_layers=2, tie_embeddings=False, **SIZES)
LLAMA = replace(CONFIG, position="rope", **theirs.LLAMA)
AUTOCAST = {"autocast, bfloat16": torch.bfloat16, "autocast, float16": torch.float16}


class Layer(NamedTuple):
    """A layer of ours (made with the options tp and dtype) and its like of torch.nn.
    width: of x; None if x is token ids. x_sharded, y_sharded: whether a rank has a slice of the features."""

    ours: Callable[..., nn.Module]
    theirs: Callable[[], nn.Module]
    width: int | None = HIDDEN
    x_sharded: bool = False
    y_sharded: bool = False

    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        if self.width is None:
            return torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        return torch.randn(BATCH, SEQ, self.width, generator=generator, dtype=torch.float64)

    def pair(self, tp=None) -> tuple[nn.Module, nn.Module]:
        """Ours and theirs with the same values, each in a Sequential, where a habit may put another in its place."""
        torch.manual_seed(0)
        other, ours = self.theirs().double(), self.ours(tp=tp, dtype=torch.float64)
        fill(ours, other.state_dict())
        return nn.Sequential(ours), nn.Sequential(other)


LAYERS = {
    "ColumnParallelLinear": Layer(
        partial(ColumnParallelLinear, HIDDEN, FFN), partial(nn.Linear, HIDDEN, FFN), y_sharded=True),
    "RowParallelLinear": Layer(
        partial(RowParallelLinear, FFN, HIDDEN), partial(nn.Linear, FFN, HIDDEN), width=FFN, x_sharded=True),
    "LayerNorm": Layer(partial(layers.LayerNorm, HIDDEN), partial(nn.LayerNorm, HIDDEN)),
    "RMSNorm": Layer(partial(layers.RMSNorm, HIDDEN), partial(nn.RMSNorm, HIDDEN)),
    "VocabParallelEmbedding": Layer(
        partial(layers.VocabParallelEmbedding, VOCAB, HIDDEN, **PADDED), partial(nn.Embedding, VOCAB, HIDDEN), None),
    "SelfAttention": Layer(
        partial(layers.SelfAttention, HIDDEN, HEADS, qk_norm=True), partial(theirs.Attention, qk_norm=True)),
    "MLP": Layer(partial(layers.MLP, HIDDEN, **GATED), partial(theirs.MLP, HIDDEN, **GATED)),
    "TransformerBlock": Layer(partial(transformer_block, HIDDEN, HEADS, **WIDE), partial(theirs.Block, **WIDE)),
    "LMHead": Layer(
        partial(LMHead, VOCAB, HIDDEN, **PADDED), partial(nn.Linear, HIDDEN, VOCAB, bias=False), y_sharded=True),
    "GPT": Layer(partial(GPT, replace(CONFIG, n_layers=1)), partial(theirs.GPT, VOCAB, SEQ, 1), None, y_sharded=True),
}  # fmt: skip


def parts(model: nn.Module) -> list[str]:
    """All modules in the Sequential but containers: a habit can be applied to each."""
    return [name for name, part in model.named_modules() if name and not isinstance(part, nn.ModuleDict)]


def linears(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear, LMHead)
    return [name for name, part in model.named_modules() if isinstance(part, kinds)]


def weighted(model: nn.Module) -> list[str]:
    return [name for name in parts(model) if "weight" in model.get_submodule(name)._parameters]


def everywhere(edit: Callable[[nn.Module, str], None], where: Callable[[nn.Module], list[str]] = parts):
    def apply(model: nn.Module) -> nn.Module:
        for path in where(model):
            edit(model, path)
        return model

    return apply


def fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy whole values into a module's parameters, which may be sharded; rows of padding become zero."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            value = values[name]
            value = F.pad(value, [0, 0] * (value.ndim - 1) + [0, len(p) - len(value)])
            if isinstance(p, DTensor):  # all ranks have the values: nothing is sent
                value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(value)


def block(heads: int, like: dict, tp: TensorParallel | None = None, **options) -> TransformerBlock:
    """Ours with the values of theirs.Block. like: the options of both."""
    made = kept(transformer_block, HIDDEN, heads, tp=tp, **{"dtype": torch.float64, **like, **options})
    fill(made, theirs.Block(HIDDEN, heads, **like).state_dict())
    return made


def adapter(base: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The two halves of a linear's LoRA. Of a sharded linear, the half that meets its shards is a layer of ours."""
    sizes = (base.hidden_size, base.vocab_size) if isinstance(base, LMHead) else (base.in_features, base.out_features)
    a, b = theirs.linear(sizes[0], 4, 1), theirs.linear(4, sizes[1], 2)
    if isinstance(base, nn.Linear) or base.tp.size == 1:
        return a, b
    if isinstance(base, RowParallelLinear):
        return RowParallelLinear.from_linear(a, tp=base.tp), b
    if not isinstance(base, LMHead):
        return a, ColumnParallelLinear.from_linear(b, tp=base.tp)
    sharded = LMHead(base.vocab_size, 4, vocab_multiple=base.rows, tp=base.tp, dtype=torch.float64)
    fill(sharded, b.state_dict())
    return a, sharded


def lora(model: nn.Module, path: str, p: float = 0.0) -> None:
    base = model.get_submodule(path)
    theirs.put(model, path, theirs.LoRA(base, *adapter(base), p))


ON_LINEARS = theirs.ON_LINEARS | {"LoRA": lora, "LoRA with dropout": partial(lora, p=0.5)}


def lora_by_hook(model: nn.Module, path: str) -> None:
    base = model.get_submodule(path)
    base.adapter = nn.Sequential(*adapter(base))
    base.register_forward_hook(lambda base, inputs, y: y + base.adapter(inputs[0]))


def lora_by_subclass(model: nn.Module, path: str) -> None:
    base = model.get_submodule(path)
    base.adapter = nn.Sequential(*adapter(base))

    class Adapted(type(base)):  # type: ignore[misc]
        def forward(self, x, **options):
            return super().forward(x, **options) + self.adapter(x)

    base.__class__ = Adapted


def frozen(model: nn.Module) -> nn.Module:
    for index, name in enumerate(sorted(name for name, _ in model.named_parameters())):
        model.get_parameter(name).requires_grad_(index % 2 == 0)
    return model


def pickled(model: nn.Module) -> nn.Module:
    torch.save(model, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def from_meta(model: nn.Module) -> nn.Module:
    values = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    fill(model.to("meta").to_empty(device="cpu"), values)
    return model


def with_new_data(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data = p.data * 0.5
    return model


def sharers(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if hasattr(part, "k_proj") or hasattr(part, "gate_proj")]


def shared(model: nn.Module, path: str) -> None:
    """Keys are values, or a gate is what it gates."""
    part = model.get_submodule(path)
    if hasattr(part, "k_proj"):
        part.k_proj = part.v_proj
    else:
        part.gate_proj = part.up_proj


EDITS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "forward hooks": everywhere(theirs.scaling_hook),
    "forward pre-hooks": everywhere(theirs.ANYWHERE["forward pre-hook"]),
    "backward hooks": everywhere(theirs.ANYWHERE["backward hook"]),
    "backward pre-hooks": everywhere(theirs.ANYWHERE["backward pre-hook"]),
    "subclassed forward": everywhere(theirs.subclass),
    "replaced forward": everywhere(theirs.replace_forward),
    "LoRA by wrapper": everywhere(lora, linears),
    "LoRA by hook": everywhere(lora_by_hook, linears),
    "LoRA by subclass": everywhere(lora_by_subclass, linears),
    "weight_norm": everywhere(ON_LINEARS["weight_norm"], weighted),
    "spectral_norm": everywhere(theirs.spectral_norm, weighted),
    "prune": everywhere(ON_LINEARS["prune"], weighted),
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "to meta and back": from_meta,
    "frozen parameters": frozen,
    "parameters with new .data": with_new_data,
    "one linear in two places": everywhere(shared, sharers),
}


# habits of parts that not every layer has
PARTS = {habit: linears for habit in EDITS if "LoRA" in habit} | {"one linear in two places": sharers}


def norms(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if type(part).__name__.endswith("Norm")]


# habit -> the parts that FSDP2 shards one by one, before the whole
SHARDINGS: dict[str, Callable[[nn.Module], list[str]]] = {
    "FSDP2": lambda model: [],
    "FSDP2 of norms": norms,
    "FSDP2 of linears": linears,
    "FSDP2 of every part": parts,
}


def fsdp(model: nn.Module, mesh: DeviceMesh, habit: str) -> None:
    """Shard the parts that the habit names, then the whole; children come before what holds them."""
    for path in [*SHARDINGS[habit](model)[::-1], ""]:
        fully_shard(model.get_submodule(path), mesh=mesh).set_gradient_divide_factor(1.0)


def incoming(y: Tensor, rank: int, sample: int = 0) -> Tensor:
    """A gradient of y. rank: y is the rank-th slice of the columns. sample: y begins with this sample."""
    columns = torch.arange(y.shape[-1]) + rank * y.shape[-1]
    rows = torch.arange(y[..., 0].numel()).view(*y.shape[:-1], 1) + sample * SEQ
    return torch.cos(7.0 * rows + columns).to(y.dtype)


def step(module: nn.Module, x: Tensor, rank: int = 0, *, sample: int = 0, used=slice(None), call=None) -> Results:
    """Return y, dx and the whole gradients of the parameters. used: the samples of y that the loss depends on."""
    x = x.detach().clone(memory_format=torch.preserve_format)
    x.requires_grad_(x.is_floating_point())
    y = (call or module)(x)
    y[used].backward(incoming(y, rank, sample)[used])
    return {"y": y.detach(), "dx": x.grad} | gradients(module)


def after_inference(module: nn.Module, x: Tensor, rank: int) -> Results:
    with torch.inference_mode():
        module(x)
    return step(module, x, rank)


def functional_call(module: nn.Module, x: Tensor, rank: int, *, of_wholes: bool = False) -> Results:
    values = {name: 0.5 * p.detach() for name, p in module.named_parameters()}
    values = {name: (full_tensor(p) if of_wholes else p).requires_grad_() for name, p in values.items()}
    found = step(module, x, rank, call=lambda x: torch.func.functional_call(module, values, (x,)))
    return found | {name: full_tensor(p.grad) for name, p in values.items()}


def func_grad(module: nn.Module, x: Tensor, rank: int) -> Results:
    def loss(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = torch.func.functional_call(module, values, (x,))
        return (y * incoming(y, rank)).sum(), y

    values = {name: p.detach() for name, p in module.named_parameters()}
    found, y = torch.func.grad(loss, has_aux=True)(values)
    return {"y": y, "dx": None} | found


def second_derivative(module: nn.Module, x: Tensor, rank: int) -> Results:
    y = module(x)
    parameter = next(module.parameters())
    (gradient,) = torch.autograd.grad((y.square() * incoming(y, rank)).sum(), parameter, create_graph=True)
    gradient.square().sum().backward()
    return {"y": y.detach(), "dx": None}


def autocast(module: nn.Module, x: Tensor, rank: int, *, dtype: torch.dtype) -> Results:
    module.float()
    with torch.autocast("cpu", dtype):
        return step(module, x.float() if x.is_floating_point() else x, rank)


WAYS: dict[str, Callable[[nn.Module, Tensor, int], Results]] = {
    "inference_mode, then training": after_inference,
    "functional_call": functional_call,
    "functional_call, whole tensors": partial(functional_call, of_wholes=True),
    **{habit: partial(autocast, dtype=dtype) for habit, dtype in AUTOCAST.items()},
    "no samples": lambda module, x, rank: step(module, x[:0], rank),
    "one token": lambda module, x, rank: step(module, x[:1, :1], rank),
    "two batch dims": lambda module, x, rank: step(module, x[None], rank),
    "not contiguous": lambda module, x, rank: step(module, x.transpose(0, 1).contiguous().transpose(0, 1), rank),
    "a sample of the output unused": lambda module, x, rank: step(module, x, rank, used=slice(1)),
    "second derivatives": second_derivative,
    "torch.func.grad": func_grad,
}
HABITS = (*EDITS, *WAYS, *SHARDINGS)


def run(habit: str, model: nn.Module, x: Tensor, rank: int = 0) -> Results:
    return WAYS[habit](model, x, rank) if habit in WAYS else step(EDITS[habit](model), x, rank)
