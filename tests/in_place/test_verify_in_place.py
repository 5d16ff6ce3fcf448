"""verify passes right models in every dtype, and names the right tensor for each planted fault."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tpformer.distributed import build_mesh
from tpformer.in_place.linears import make_column, make_embedding, make_row, sum_gradients
from tpformer.in_place.verify import Report, verify
from tpformer.models import GPT, GPTConfig

WIDTH, HEADS, VOCAB = 16, 4, 24
IDS = torch.arange(12).view(2, 6) * 5 % VOCAB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm, self.q_norm = (nn.LayerNorm(n) for n in (WIDTH, WIDTH, WIDTH // HEADS))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        nn.init.normal_(self.o.bias)  # so large that bfloat16 does not hide it
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(h), self.k(h), self.v(h)))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """Two blocks between a table and a head that are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.blocks(self.table(ids))
        return {"logits": self.head(x), "hidden": x}


def others_rows(tp):
    first = (tp.get_local_rank() + 1) % tp.size() * WIDTH // tp.size()
    return [slice(first, first + WIDTH // tp.size())]


def alone(linear: nn.Module) -> None:
    """Compute with this rank's part of the weight, and communicate nothing, forward or backward."""
    linear.forward = lambda x: F.linear(x, linear.weight.to_local(), linear.bias.to_local())


def bias_twice(block: Block) -> None:
    block.o.register_forward_hook(lambda module, _, y: y + module.bias.to_local())


def wrong_rows(block: Block) -> None:
    with torch.no_grad():
        block.up.weight.to_local().copy_(block.up.weight.to_local().roll(1, 0))


# each fault of block 1: (what is done to it, the first tensor that departs)
FAULTS: dict[str, tuple[Callable[[Block], None], str]] = {
    "a row bias is added twice": (bias_twice, "output of blocks.1.o"),
    "a column is cut at the wrong rows": (wrong_rows, "parameter blocks.1.up.weight"),
    "a row's forward is not reduced": (lambda block: alone(block.down), "output of blocks.1.down"),
    "a column's backward is not reduced": (lambda block: alone(block.up), "gradient of blocks.1.mlp_norm.weight"),
}
FIRST = {
    "a norm's gradient is not summed": "gradient of blocks.1.q_norm.weight",
    "heads are permuted": "input 0 of blocks.1.o",
    **{name: first for name, (_, first) in FAULTS.items()},
    "a tied table is cut loose": "parameter head.weight",
}
COMPARED = {"output logits", "input 0 of blocks.0.o", "gradient of table.weight", "output of blocks.1.q"}
DTYPES = {2: (torch.float64, torch.bfloat16), 4: (torch.float32,)}  # by ranks


def in_place(model: Model, tp, fault: str | None = None) -> Model:
    make_embedding(model.table, tp)
    make_column(model.head, tp, gather_output=True)
    for number, block in enumerate(model.blocks):
        for linear in (block.q, block.k, block.v, block.up):
            permuted = fault == "heads are permuted" and linear is block.q and number == 1
            make_column(linear, tp, rows=others_rows(tp) if permuted else None)
        for linear in (block.o, block.down):
            make_row(linear, tp)
        if fault != "a norm's gradient is not summed" or number == 0:
            sum_gradients(block.q_norm, tp)
    if fault in FAULTS:
        FAULTS[fault][0](model.blocks[1])
    if fault == "a tied table is cut loose":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def in_place_on_rank(t: int) -> dict[tuple[torch.dtype, str | None], Report]:
    tp = build_mesh("cpu", tensor_parallel=t)["tp"]
    return {
        (dtype, fault): verify(Model().to(dtype), partial(in_place, tp=tp, fault=fault), IDS)
        for dtype in DTYPES[t]
        for fault in (None, *FIRST)
    }


@pytest.mark.parametrize("t", DTYPES)
def test_right_models_pass_and_each_fault_is_found_at_its_tensor(ranks, t):
    found = ranks(t).run(in_place_on_rank, t)
    for (dtype, fault), report in found[0].items():
        assert len({reports[dtype, fault].sentence for reports in found}) == 1, "all ranks say the same"
        if fault is None:
            assert report.ok and {tensor.what for tensor in report.tensors} >= COMPARED, str(report)
            assert not report.skipped and f"tensors on {t} ranks are those of one process" in str(report)
            report.check()
            continue
        first = FIRST[fault]
        if dtype == torch.bfloat16:  # it may hide the first tensor, but not all of them
            first = report.sentence.split(" is ")[0]
        assert report.sentence.startswith(f"{first} is the first tensor that departs"), (fault, str(report))
    with pytest.raises(RuntimeError, match="head.weight is the first tensor .* is apart from table.weight"):
        found[0][DTYPES[t][0], "a tied table is cut loose"].check()


def layers_on_rank(zero: bool) -> Report:
    """A GPT of this library's layers: with sequence shards and fused layers, or with FSDP2 on top."""
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=1 + zero)
    config = GPTConfig(vocab_size=30, vocab_multiple=8, seq_length=6, n_layers=2, hidden_size=WIDTH, n_heads=HEADS)

    def parallel(whole: GPT) -> GPT:
        model = GPT(config, tp=mesh["tp"], dtype=torch.float64)
        model.load_state_dict(whole.state_dict())
        for part in (*model.layers.values(), model) if zero else ():
            fully_shard(part, mesh=mesh["dp_shard"])
        return model

    return verify(GPT(config, seed=1, dtype=torch.float64), parallel, {"inputs": IDS, "targets": IDS})


@pytest.mark.parametrize("zero", [False, True])
def test_models_of_layers_pass_with_sequence_shards_and_fsdp2(ranks, zero):
    report = ranks(4 if zero else 2).run(layers_on_rank, zero)[0]
    assert report.ok, str(report)


class Odd(nn.Module):
    """A model that verify refuses for one reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason, self.linear = reason, nn.Linear(4, 4, device="meta" if reason == "meta" else None)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor | str:
        y = self.linear(x)
        return {"random": self.drop, "nan": lambda y: y / 0 * 0, "text": str}.get(self.reason, lambda y: y)(y)


REFUSED = {
    "meta": "linear.weight is on meta and has no values to verify: load the model first",
    "random": "the model draws random numbers, .* call model.eval",
    "nan": "output has values in one process that are not numbers",
    "text": "no output of the model has a gradient",
}


def test_what_cannot_be_verified_is_refused():
    for reason, said in REFUSED.items():
        with pytest.raises(ValueError, match=said):
            verify(Odd(reason), lambda whole: whole, torch.randn(3, 4))
    with pytest.raises(TypeError, match="parallel returned a NoneType"):
        verify(Odd(""), lambda whole: None, torch.randn(3, 4))


def unequal_on_rank() -> None:
    torch.manual_seed(build_mesh("cpu", tensor_parallel=2)["tp"].get_local_rank())
    with pytest.raises(ValueError, match="linear.weight has other values on rank"):
        verify(Odd(""), lambda whole: whole, torch.ones(3, 4))


def test_models_that_differ_between_ranks_are_refused(ranks):
    ranks(2).run(unequal_on_rank)
