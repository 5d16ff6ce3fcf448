"""Models that people write themselves are divided, and train as in one process."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from testing import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from turns import in_turns

from tpformer import auto_plan, parallelize
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor

WIDTH, HEADS, SEQ, WORDS = 24, 4, 6, 60


class Fused(nn.Module):
    """Attention that takes the size of a head from its input's shape. score: what becomes of (module, scores)."""

    def __init__(self, score: Callable = lambda m, a: a, **held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.mix, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.ones(SEQ, SEQ).tril()[None, None])
        self.score = score
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        q, k, v = self.mix(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, s, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        scores = self.score(self, q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        return self.back((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, s, c))


class Rotary(nn.Module):
    """Heads whose numbers have no telling names, that share keys and values, and turn by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.nq, self.nkv, self.d = HEADS, HEADS // 2, WIDTH // HEADS
        self.wq, self.wkv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(SEQ).double(), 0.1 ** torch.arange(self.d // 2).double())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[None, :, None]).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        k, v = self.wkv(x).chunk(2, -1)
        k, v = (each.view(b, s, self.nkv, self.d) for each in (k, v))
        q, k = self.turned(self.wq(x).view(b, s, self.nq, self.d)), self.turned(k)
        k, v = (each.repeat_interleave(self.nq // self.nkv, 2) for each in (k, v))
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class Between(nn.Module):
    """Two linears with something between."""

    def __init__(self, between: Callable, wide: int = 48, **held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, wide), nn.Linear(48, WIDTH), between
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(x)))


class Bare(nn.Module):
    """Linears whose weights are parameters of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Parameter(torch.zeros(40, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 40))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up, self.a)), self.down, self.c)


class Einsum(nn.Module):
    """Experts of which every token uses all, by a router beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Parameter(torch.zeros(3, WIDTH, 16)), nn.Parameter(torch.zeros(3, 16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bsc,ech->bseh", x, self.up).relu()
        return torch.einsum("bseh,ehc,bse->bsc", hidden, self.down, self.router(x).softmax(-1))


class Chosen(nn.Module):
    """Experts in a list, most of which get no tokens."""

    def __init__(self, number: int = 20) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, number)
        self.experts = nn.ModuleList(Between(lambda m, h: h.relu()) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number in index.unique().tolist():
            rows = index == number
            y[rows] = weight[rows, None] * self.experts[number](x[rows])
        return y


class Own(nn.Module):
    """A language model of these parts."""

    def __init__(self, attention: Callable, mlp: Callable, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), attention(), mlp()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for norm, attention, mlp in self.blocks:
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x)


def per_head(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(HEADS, *shape))


DISTANCES = (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs()
ATTENTION = {
    "shapes": Fused,
    "rotary": Rotary,
    "a temperature of each head": lambda: Fused(lambda m, a: a * m.heat, heat=per_head(1, 1)),
    "a bias of each head": lambda: Fused(lambda m, a: a + m.added, added=per_head(SEQ, SEQ)),
    "a table of distances": lambda: Fused(
        lambda m, a: a + m.far(DISTANCES).permute(2, 0, 1), far=nn.Embedding(SEQ, HEADS)),
}  # fmt: skip
MLPS = {
    "a scalar": lambda: Between(lambda m, h: F.gelu(h) * m.scale, scale=nn.Parameter(torch.tensor(2.0))),
    "packed": lambda: Between(lambda m, h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], wide=96),
    "a convolution of each feature": lambda: Between(
        lambda m, h: m.near(h.transpose(1, 2))[..., :SEQ].transpose(1, 2).relu(),
        near=nn.Conv1d(48, 48, 3, padding=2, groups=48),
    ),
    "a norm of all features": lambda: Between(lambda m, h: m.norm(h).relu(), norm=nn.LayerNorm(48)),
    "a norm of groups under two names": lambda: Between(
        lambda m, h: m.again(m.norm(h.unflatten(-1, (-1, 8))).relu()).flatten(-2),
        **dict.fromkeys(("norm", "again"), nn.RMSNorm(8)),
    ),
    "parameters": Bare,
    "einsum": Einsum,
    "a list of experts": Chosen,
}
# a way of attention and one of an MLP in each model, because each is measured by itself; "rotary, packed" is tied
KINDS = [
    *zip(ATTENTION, ["a scalar", "packed", *list(MLPS)[2:5]], strict=True),
    *(("shapes", each) for each in list(MLPS)[5:]),
]


def own(attention: str, mlp: str) -> nn.Module:
    torch.manual_seed(0)
    model = Own(ATTENTION[attention], MLPS[mlp], tied=mlp == "packed").double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Results and gradients of two steps, and the parameters after them."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), {}
    ids = torch.randint(0, WORDS, (2, SEQ), generator=torch.Generator().manual_seed(1))
    for step in range(2):
        y = model(ids)
        optimizer.zero_grad()
        F.cross_entropy(y.flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        found[f"y {step}"] = y.detach()
        found |= {f"{n} {step}": full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def on_rank(t: int, kind: tuple[str, str]) -> tuple[dict[str, Tensor], float]:
    """What comes of training, and the share of the parameters that are divided."""
    model = own(*kind)
    parallelize(model, build_mesh("cpu", tensor_parallel=t)["tp"], example=torch.zeros(1, SEQ, dtype=torch.int64))
    assert model._tpformer.plan.regions.keys() & {"blocks.0.1.back", "blocks.0.1.wo"}, "each rank has its own heads"
    sharded = [isinstance(p, DTensor) and p.placements != (Replicate(),) for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]
    return trained(model), sum(n for n, cut in zip(sizes, sharded, strict=True) if cut) / sum(sizes)


@pytest.mark.parametrize("kind", [*KINDS[1::3], *in_turns((kind,) for kind in KINDS[::3] + KINDS[2::3])], ids=", ".join)
def test_models_of_ones_own_train_as_in_one_process(ranks, kind):
    """Nine of ten parameters are divided."""
    expected = trained(own(*kind))
    for found, share in ranks(2).run(on_rank, 2, kind):
        assert share > 0.9
        assert_same(found, expected)


def test_what_is_used_outside_of_its_module_stays_whole():
    class Outside(Own):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(super().forward(ids) @ self.head.weight, self.words.weight)

    model = Outside(ATTENTION["shapes"], MLPS["packed"], tied=False)
    plan = auto_plan(model, 2, example=torch.zeros(1, SEQ, dtype=torch.int64))
    assert all("used outside of its own forward" in plan.kept[name] for name in ("words", "head")), str(plan)
