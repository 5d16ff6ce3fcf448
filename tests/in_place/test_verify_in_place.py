"""verify passes right models in every dtype, and names the right tensor for each planted fault."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block import Model, in_place
from testing import on_every_rank
from tiny import batch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.in_place.verify import Report, verify
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig

IDS = batch(6, 0)["input_ids"]


def alone(linear: nn.Module) -> None:
    """Compute with this rank's part of the weight, and communicate nothing, forward or backward."""
    linear.forward = lambda x: F.linear(x, linear.weight.to_local(), linear.bias.to_local())


def wrong_rows(model: Model) -> None:
    with torch.no_grad():
        model.column.weight.to_local().copy_(model.column.weight.to_local().roll(1, 0))


# each fault: (the first tensor that departs, what is done to the model, if in_place does not do it)
FAULTS: dict[str, tuple[str, Callable[[Model], Any] | None]] = {
    "a norm's gradient is not summed": ("gradient of heads.weight", None),
    "heads are permuted": ("input 0 of row", None),
    "a row bias is added twice": (
        "output of row", lambda m: m.row.register_forward_hook(lambda row, _, y: y + row.bias.to_local()),
    ),
    "a column is cut at the wrong rows": ("parameter column.weight", wrong_rows),
    "a row's forward is not reduced": ("output of row", lambda model: alone(model.row)),
    "a column's backward is not reduced": ("gradient of norm.weight", lambda model: alone(model.column)),
    "a tied table is cut loose": (
        "parameter head.weight", lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
    ),
}  # fmt: skip
COMPARED = {"output logits", "input 0 of row", "gradient of table.weight", "output of fused"}
# of all faults, one of a forward and one of a backward
FEW = ("a row's forward is not reduced", "a norm's gradient is not summed")


def faulty(model: Model, tp: TensorParallel, fault: str | None) -> Model:
    in_place(model, tp, fault)
    if fault is not None and (change := FAULTS[fault][1]):
        change(model)
    return model


def in_place_on_rank(t: int, dtype: torch.dtype, faults: tuple[str, ...]) -> dict[str | None, Report]:
    made = partial(faulty, tp=TensorParallel(build_mesh("cpu", tensor_parallel=t)["tp"], False))
    return {fault: verify(Model().to(dtype), partial(made, fault=fault), IDS) for fault in (None, *faults)}


@pytest.mark.parametrize(("t", "dtype", "faults"), [
    (2, torch.float64, (*FAULTS,)), (2, torch.bfloat16, FEW),
    *in_turns([(2, torch.bfloat16, (*FAULTS,)), (4, torch.float32, (*FAULTS,))]),
])  # fmt: skip
def test_right_models_pass_and_each_fault_is_found_at_its_tensor(ranks, t, dtype, faults):
    found = ranks(t).run(in_place_on_rank, t, dtype, faults)
    for fault, report in found[0].items():
        assert len({reports[fault].sentence for reports in found}) == 1, "all ranks say the same"
        if fault is None:
            assert report.ok and {tensor.what for tensor in report.tensors} >= COMPARED, str(report)
            assert not report.skipped and f"tensors on {t} ranks are those of one process" in str(report)
            report.check()
            continue
        first, _ = FAULTS[fault]
        if dtype == torch.bfloat16:  # it may hide the first tensor, but not all of them
            first = report.sentence.split(" is ")[0]
        assert report.sentence.startswith(f"{first} is the first tensor that departs"), (fault, str(report))
    if faults is not FEW:
        with pytest.raises(RuntimeError, match="head.weight is the first tensor .* is apart from table.weight"):
            found[0]["a tied table is cut loose"].check()


def layers_on_rank(zero: bool) -> Report:
    """A GPT of this library's layers: with sequence shards and fused layers, or with FSDP2 on top."""
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=1 + zero)
    config = GPTConfig(vocab_size=50, vocab_multiple=8, seq_length=6, n_layers=2, hidden_size=16, n_heads=4)

    def parallel(whole: GPT) -> GPT:
        model = GPT(config, tp=mesh["tp"], dtype=torch.float64)
        model.load_state_dict(whole.state_dict())
        for part in (*model.layers.values(), model) if zero else ():
            fully_shard(part, mesh=mesh["dp_shard"])
        return model

    return verify(GPT(config, seed=1, dtype=torch.float64), parallel, {"inputs": IDS, "targets": IDS})


@pytest.mark.parametrize("zero", [True, *in_turns([False], first=0)])
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


def test_what_cannot_be_verified_is_refused():
    for reason, said in {
        "meta": "linear.weight is on meta and has no values to verify: load the model first",
        "random": "the model draws random numbers, .* call model.eval",
        "nan": "output has values in one process that are not numbers",
        "text": "no output of the model has a gradient",
    }.items():
        with pytest.raises(ValueError, match=said):
            verify(Odd(reason), lambda whole: whole, torch.randn(3, 4))
    with pytest.raises(TypeError, match="parallel returned a NoneType"):
        verify(Odd(""), lambda whole: None, torch.randn(3, 4))


class Twice(nn.Module):
    """A model that calls one module two times. wrong: the second result is."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.linear, self.wrong = nn.Linear(4, 4), wrong
        self.linear.register_forward_hook(self.after)

    def after(self, linear: nn.Module, _: tuple, y: Tensor) -> Tensor:
        self.calls += 1
        return y + 1 if self.wrong and self.calls == 2 else y

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 0
        return self.linear(self.linear(x).relu())


@pytest.mark.parametrize("wrong", [False, True])
def test_calls_of_one_module_are_compared_each(wrong):
    def again(whole: nn.Module) -> nn.Module:
        model = Twice(wrong)
        model.load_state_dict(whole.state_dict())
        return model

    report = verify(Twice(False), again, torch.randn(3, 4))
    departs = report.sentence.startswith("output of linear in call 2 is the first tensor that departs")
    assert (report.ok, departs) == (not wrong, wrong), report


@on_every_rank(2)
def test_models_that_differ_between_ranks_are_refused() -> None:
    torch.manual_seed(build_mesh("cpu", tensor_parallel=2)["tp"].get_local_rank())
    with pytest.raises(ValueError, match="linear.weight has other values on rank"):
        verify(Odd(""), lambda whole: whole, torch.ones(3, 4))
