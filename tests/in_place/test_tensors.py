"""Parameters of a cut model are one process's to optimizers, to clipping, to users' arithmetic and to files."""

import pickle
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from steps import tp_mesh
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer import parallelize
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.linears import make_column
from tpformer.layers import ColumnParallelLinear

X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ENTRIES = {"up": "colwise", "down": "rowwise"}
PLANS: dict = {}  # of this process: a use's measured plan, as the same model need not be measured again


class Body(nn.Module):
    """Two linears that are cut, and parameters that stay whole, of which a test makes what it likes."""

    def __init__(self, use):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 22), nn.Linear(22, 8), nn.LayerNorm(8)
        self.scale, self.table = nn.Parameter(torch.rand(8) + 0.5), nn.Embedding(8, 8)
        self.parts = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(2))
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.use = use

    def forward(self, x):
        return self.use(self, self.norm(self.down(torch.tanh(self.up(x))) + x))


def pair(use=lambda m, x: m.lstm(F.linear(x, m.table.weight))[0] * m.scale + sum(m.parts)):
    """A model in one process, and cut; FSDP2 divides the latter over the ranks that are more than two."""
    made = []
    for cut in (False, True):
        torch.manual_seed(0)
        model = Body(use).double()
        if cut:
            world = torch.distributed.get_world_size()
            mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=world // 2)
            parallelize(model, mesh["tp"], PLANS.get(use, ENTRIES), example=X)
            PLANS[use] = model._tpformer.plan
            if world > 2:
                fully_shard(model, mesh=mesh["dp_shard"])
        made.append(model)
    return made


def loss_of(model):
    return model(X).pow(2).mean()


def trained(model, make, scaler=None, clip=None, times=2):
    optimizer = make(model.parameters())
    for _ in range(times):
        optimizer.zero_grad()
        (loss_of(model) if scaler is None else scaler.scale(loss_of(model))).backward()
        found = clip(model.parameters()) if clip else None
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
    return found


def averaged(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average.update_parameters(model)
    trained(model, partial(torch.optim.SGD, lr=0.1))
    average.update_parameters(model)
    return {name: full_tensor(each).clone() for name, each in average.module.named_parameters()}


def with_lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return optimizer.step(closure)


def with_decay(model):
    loss = loss_of(model) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    (loss + 0.1 * torch.stack([p.norm() for p in model.parameters()]).sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return loss


def through_vector(model):
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() * 0.5, model.parameters())
    return vector


def norms_in_python(model):
    loss_of(model).backward()
    return [(p.grad.norm().item(), float(p.max()), p.sum().tolist(), bool(p.mean() > 0)) for p in model.parameters()]


WAYS = {
    "clip": lambda m: trained(m, partial(torch.optim.AdamW, eps=0.1), clip=lambda p: clip_grad_norm_(p, 0.1)),
    "clip values": lambda m: trained(
        m, partial(torch.optim.RMSprop, eps=0.1), clip=lambda p: clip_grad_value_(p, 1e-3)
    ),
    "fused": lambda m: trained(m, partial(torch.optim.Adam, eps=0.1, fused=True)),
    "foreach": lambda m: trained(m, partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "scaler": lambda m: trained(m, partial(torch.optim.SGD, lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)),
    "average": averaged,
    "lbfgs": with_lbfgs,
    "decay": with_decay,
    "vector": through_vector,
    "python": norms_in_python,
}
ONLY_PLAIN = {"average", "decay", "vector", "python", "lbfgs"}  # FSDP2 refuses copies, and its parameters are of torch


def as_on_a_gpu():
    """Optimizers and clipping take many tensors at once by default, as they do on a GPU."""
    stack = ExitStack()
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        stack.enter_context(mock.patch(f"{module}._get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]))
    return stack


@on_every_rank(2, *in_turns([4], first=0))
def test_a_list_of_parameters_is_of_one_sort():
    for name, way in WAYS.items():
        if name in ONLY_PLAIN and torch.distributed.get_world_size() > 2:
            continue
        found = []
        with as_on_a_gpu():
            for model in pair():
                result = way(model)
                result = full_tensor(result) if isinstance(result, torch.Tensor) else result
                found.append([result, [full_tensor(each.detach()).clone() for each in model.parameters()]])
        assert_same(found[1], found[0], name)


def in_place(m, x):
    x = x.clone()
    x[:, 0] = m.scale
    x += m.parts[0]
    return x.mul_(m.scale.clone().clamp_(max=1.0))


def renormed(m, x):
    m.scale.data = F.normalize(m.scale.data, dim=0)
    with torch.no_grad():
        m.parts[1].clamp_(0.2, 0.8)
    return x * m.scale * m.parts[1]


USES = [
    lambda m, x: x * (1 + m.scale) / m.scale.norm(),
    lambda m, x: F.linear(m.table(torch.arange(5)) + x, m.table.weight) + F.layer_norm(x, (8,), m.norm.weight),
    lambda m, x: torch.cat([m.scale.expand(len(x), 1, -1), x + sum(m.parts)], 1),
    lambda m, x: torch.where(x > 0, m.scale, x) * m.scale.float().double() if m.scale[0] > 0 else x,
    lambda m, x: checkpoint(lambda t: t @ torch.linalg.inv(m.table.weight + 9 * torch.eye(8)), x, use_reentrant=False),
    lambda m, x: x * m.scale[torch.arange(7, -1, -1)] + torch.stack(list(m.parts)).quantile(0.5) * m.scale.tolist()[0],
    lambda m, x: x * torch.autograd.grad((x * m.scale.exp()).sum(), m.scale, create_graph=True)[0],
    lambda m, x: m.lstm(x)[0] * torch.polar(m.scale, m.parts[0]).real,
    lambda m, x: x + F.embedding(torch.arange(5), m.table.weight, max_norm=0.5),
    lambda m, x: x + F.embedding(torch.arange(5), m.table.weight, sparse=True),
    in_place,
    renormed,
]


@on_every_rank(2, *in_turns([4], first=1))
def test_whole_parameters_mix_with_plain_tensors():
    """Of 4 ranks without the last use: what FSDP2 gathers for a forward is given up after it."""
    for number, use in enumerate(USES if torch.distributed.get_world_size() == 2 else USES[:-1]):
        found = []
        for model in pair(use):
            result = model(X)
            assert type(result) is torch.Tensor
            result.pow(3).sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append([result, {name: full_tensor(each.to_dense()) for name, each in gradients.items()}])
        assert_same(found[1], found[0], f"use {number}")


@on_every_rank(2)
def test_plain_values_for_parameters():
    """Gradients, .data and copies are of the global shape; random values are those of the first rank."""
    found = []
    for model, seed in zip(pair(), (7, 7 + torch.distributed.get_rank()), strict=True):
        torch.manual_seed(seed)
        for fill in (nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_):
            fill(model.up.weight)
            fill(model.table.weight)
        random = [full_tensor(model.get_parameter(name)).clone() for name in ("up.weight", "table.weight")]
        whole = torch.arange(22.0 * 8, dtype=torch.float64).view(22, 8)
        model.up.weight.grad = whole.clone()
        model.scale.grad = whole[0].clone()
        model.scale.register_hook(lambda g: g * 0.5)
        loss_of(model).backward()
        model.down.weight.data = whole.t().clone()
        with torch.no_grad():
            model.table.weight.copy_(whole[:8])
            whole[:8].copy_(model.table.weight)
        found.append([random, {name: full_tensor(p).clone() for name, p in model.named_parameters()}])
        found[-1] += [full_tensor(each.grad) for each in (model.up.weight, model.scale)]
    assert_same(found[1], found[0])
    _, cut = pair()
    with pytest.raises(RuntimeError, match=r"add of a plain tensor \(22, 8\) and a parameter \(22, 8\) that is cut"):
        cut.up.weight + torch.ones(22, 8)
    with pytest.raises(ValueError, match=r"a tensor of \(4,\) for one of \(22, 8\) on ranks: give one of its global"):
        cut.up.weight.data = torch.ones(4)
    cut.up.weight.share_memory_()
    assert cut.up.weight.is_shared() and cut.up.weight.data_ptr() == cut.up.weight.to_local().data_ptr()


def added(m, start):
    for parameter in m.parameters():
        start += parameter.pow(2).sum()
    start *= 0.1
    return start


def normed(m):
    return sum((w / w.norm(dim=dim, keepdim=True)).pow(3).sum() for w in (m.up.weight, m.down.weight) for dim in (0, 1))


REDUCED = [
    lambda m: m.up.weight.norm(dim=0).sum() + m.down.weight.norm(dim=1).sum(),
    lambda m: ((m.up.weight > 0.1).any(0) * m.up.weight.sum(0)).sum() * ((m.up.weight < 9).all(0) * 1.0).mean(),
    lambda m: torch.cat([m.up.weight.norm().view(1), -m.up.weight.amax(0), m.up.weight.amin(0)]).pow(3).sum(),
    lambda m: torch.stack([m.up.weight.amax(0), -m.up.weight.amin(0)]).sum() * m.down.weight.max(1).values.sum(),
    lambda m: (torch.arange(8.0) * m.up.weight.sum(0)).pow(2).sum() / m.down.weight.clone().prod(),
    lambda m: torch.stack(torch._foreach_norm([m.up.weight, m.down.weight])).sum(),
    lambda m: added(m, 0.0),
    lambda m: added(m, torch.zeros(())),
    lambda m: added(m, m.down.bias.norm() * 1) + added(m, m.up.bias.norm() * 1),
    normed,
]


@on_every_rank(2)
def test_results_of_which_each_rank_has_a_term():
    """DTensor adds norms, and counts what is true on two ranks twice; anomaly mode it does not know."""
    for number, use in enumerate(REDUCED):
        found = []
        for model in pair():
            with torch.autograd.set_detect_anomaly(True):
                loss = loss_of(model) + use(model)
                loss.backward()
            found.append([full_tensor(loss), {name: full_tensor(p.grad) for name, p in model.named_parameters()}])
        assert_same(found[1], found[0], f"use {number}")
    _, cut = pair()
    for name, use in {"__getitem__": lambda w: w[[0, 5]], "cumprod": lambda w: w.cumprod(0)}.items():
        with pytest.raises(RuntimeError, match=f"torch cannot take {name} of a parameter .22, 8. that is cut over"):
            use(cut.up.weight)


LOST = [
    lambda w: w[3].zero_(),
    lambda w: w.data[16:].mul_(2),
    lambda w: nn.init.normal_(w[:4]),
    lambda w: w.chunk(2)[1].view(-1)[0].fill_(1),
    lambda w: w.t()[:, 5].copy_(w[1]),
    lambda w: w.__setitem__(slice(2, 4), w[4:6]),
    lambda w: w.__setitem__(7, 0.0),
    lambda w: w.view(11, 2, 8).unbind()[2].add_(1),
]


@on_every_rank(2)
@torch.no_grad()
def test_what_is_written_to_a_part_is_there_or_refused():
    """DTensor gathers a slice of a sharded dim, and takes what is written to the copy without a word."""
    plain, cut = (model.up.weight for model in pair())
    for write in LOST:
        with pytest.raises(RuntimeError, match="of a part of a parameter that is cut over ranks would be lost"):
            write(cut)
    for right in (lambda w: w.t().mul_(2), lambda w: w[:, 2:4].zero_(), lambda w: w.view(-1).add_(1), nn.init.eye_):
        right(plain)
        right(cut)
        assert_same(full_tensor(cut), plain)
    with pytest.raises(
        RuntimeError, match=r"torch cannot take nonzero of a parameter \(22, 8\) that is cut over ranks"
    ):
        cut.nonzero()
    cut.grad = torch.ones(22, 8, dtype=X.dtype)
    with pytest.raises(RuntimeError, match="mul_ of a part"):
        cut.grad[:15].mul_(0)


@on_every_rank(2)
def test_random_values_and_overflows_are_of_the_whole():
    """Shards of other sizes on each rank, and an overflow in the part of one."""
    torch.manual_seed(torch.distributed.get_rank())
    linear = nn.Linear(8, 33).double()
    for parameter in linear.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    make_column(linear, tp_mesh())
    for draw, seed in ((torch.randn_like, 3), (torch.bernoulli, 4)):
        torch.manual_seed(seed)
        expected = draw(full_tensor(linear.weight.detach()).abs().clamp(max=1))
        torch.manual_seed(seed + torch.distributed.get_rank())
        assert_identical(full_tensor(draw(linear.weight.detach().abs().clamp(max=1))), expected)
    torch.manual_seed(5)
    twin = nn.Linear(8, 33, dtype=X.dtype)
    torch.manual_seed(5)
    linear.reset_parameters()
    assert_same([full_tensor(each) for each in linear.parameters()], list(twin.parameters()))
    assert_same(full_tensor(parameters_to_vector(linear.parameters())), parameters_to_vector(twin.parameters()))
    _, cut = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for order in (list(cut.parameters()), list(cut.parameters())[::-1]):
        optimizer = torch.optim.SGD(order, lr=0.1)
        optimizer.zero_grad()
        scaler.scale(loss_of(cut)).backward()
        if torch.distributed.get_rank() == 0:
            cut.up.weight.grad.to_local()[0] = torch.inf
        before = [full_tensor(each.detach()).clone() for each in order]
        scaler.step(optimizer)
        scaler.update()
        assert_identical([full_tensor(each.detach()) for each in order], before)
    assert scaler.get_scale() == 16.0


@on_every_rank(2)
def test_layers_beside_plain_modules():
    """Here a list is of two sorts: optimizers go parameter by parameter, unless they are asked for more."""
    linear = ColumnParallelLinear(8, 22, gather_output=True, tp=tp_mesh(), dtype=X.dtype)
    model = nn.Sequential(linear, nn.LayerNorm(22).double())
    with as_on_a_gpu():
        for asked in ({}, {"foreach": True}, {"fused": True}):
            optimizer = torch.optim.AdamW(model.parameters(), **asked)
            model(X[0]).sum().backward()
            if not asked:
                optimizer.step()
                continue
            with pytest.raises(ValueError, match=f"{next(iter(asked))}=True for plain parameters and DTensors in one"):
                optimizer.step()


@on_every_rank(2)
def test_copies_and_files():
    """A copy, and what is pickled, is the same model; a file of parameters needs torch alone."""
    _, cut = pair(in_place)
    expected = cut(X)
    for made in (deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        assert {type(each) for each in made.parameters()} == {type(cut.scale)}
        assert_identical(made(X), expected)
    assert {type(each) for each in pickle.loads(pickle.dumps(dict(cut.state_dict()))).values()} == {DTensor}


@on_every_rank(2)
def test_a_file_of_rank_0_is_refused_by_the_others():
    """Rank 0 has saved what it has, in each of the ways that people do, and all ranks load it."""
    for model in (pair(in_place)[1], ColumnParallelLinear(8, 22, tp=tp_mesh(), dtype=X.dtype)):
        optimizer = torch.optim.AdamW(model.parameters())
        model(X.flatten(0, -2) if isinstance(model, ColumnParallelLinear) else X).sum().backward()
        optimizer.step()
        files = [pickle.dumps(each) for each in (model.state_dict(), model, optimizer.state_dict())]
        torch.distributed.broadcast_object_list(files)

        def load_and_step(file, optimizer=optimizer):
            optimizer.load_state_dict(pickle.loads(file))
            optimizer.step()

        ways = [lambda file, model=model: model.load_state_dict(pickle.loads(file)), pickle.loads, load_and_step]
        for file, load in zip(files, ways, strict=True):
            if torch.distributed.get_rank() == 0:
                load(file)
                continue
            with pytest.raises(ValueError, match=r"the part of rank 0, which wrote this file, and this is rank 1:"):
                load(file)
