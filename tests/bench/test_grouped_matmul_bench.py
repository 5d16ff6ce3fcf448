"""The benches of grouped GEMMs without a GPU: sizes of the models, what torch's two ways compute, and the gates."""

from unittest import mock

import pytest
import torch
from testing import assert_kernel_close

from bench import gathered_experts
from bench import grouped_matmul as bench
from bench.grouped_matmul import DGRAD, DOWN, FORWARD, UP, WGRAD, Grouped
from tpformer.kernels.grouped_matmul import reference
from tpformer.models import GPTConfig

TINY = GPTConfig(
    hidden_size=16, n_heads=2, n_experts=8, experts_per_token=2, expert_ffn_size=24, activation="swiglu", bias=False
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    monkeypatch.setattr(bench, "MODELS", {"tiny": TINY})
    torch.manual_seed(0)


def test_products_are_the_models() -> None:
    sizes = {(p.model, p.layer, p.t): (p.groups, p.n, p.k) for p in bench.products(quick=False)}
    assert sizes["Mixtral", UP, 1] == (8, 28672, 4096) and sizes["Mixtral", DOWN, 8] == (1, 4096, 14336)
    assert sizes["30B", UP, 8] == (16, 1536, 2048) and sizes["30B", DOWN, 1] == (128, 2048, 768)
    assert sizes["235B", UP, 1] == (128, 3072, 4096) and sizes["235B", DOWN, 8] == (16, 4096, 1536)
    assert Grouped(FORWARD, "235B", UP, 8192, 8).rows == 8192
    assert len(bench.products(quick=False)) == 72 and len(bench.products(quick=True)) == 6


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("layer", [UP, DOWN])
@pytest.mark.parametrize("case", [FORWARD, DGRAD, WGRAD])
def test_torch_computes_the_product(case: str, layer: str, t: int, on_cpu: None) -> None:
    """Both of torch's ways give what the reference does. The gate passes, and a wrong result does not pass it."""
    grouped = Grouped(case, "tiny", layer, 13, t)
    o = bench.draw(grouped)
    oracle, expected = (
        reference.grouped_weight_gradient(left, right, o.offsets, o.left_index, o.right_index)
        if case == WGRAD
        else reference.grouped_matmul(left, right, o.offsets, o.left_index, transposed=case == DGRAD)
        for left, right in ((o.left.double(), o.right.double()), (o.left, o.right))
    )
    assert (o.right_index if case == WGRAD else o.left_index) is not None or layer == (UP if case == DGRAD else DOWN)
    for provider in (bench.library, bench.loop):
        actual = provider(case, o)
        assert_kernel_close(actual, oracle, expected, provider.__name__)
        bench.check_groups("", case, o, actual, expected)
    with pytest.raises(AssertionError, match=r"group \d: error"):
        bench.check_groups("of ours", case, o, expected + 1, expected)


def test_predictions_by_hand() -> None:
    found = {(row["case"].split(",")[0], row["shape"]): row["value"] for row in bench.predictions()}
    # 16 groups of 8192 rows in all, and half of a large tile's 128 rows for each: 8192 / 9216 of what GEMMs sustain
    assert found["prediction: forward", "30B gate+up 16 x 1536 x 2048 8192"] == pytest.approx(700 * 8192 / 9216, abs=1)


def gate_of_a_gather(case: str, layer: str) -> str:
    """What the gate of the fused kernel says of a result that is right, and then of a wrong one."""
    torch.manual_seed(0)
    small = {"DEVICE": "cpu", "DTYPE": torch.float32, "MODELS": {"tiny": TINY}}
    with mock.patch.multiple(bench, **small):
        found = gathered_experts.build(Grouped(case, "tiny", layer, 40, 8))
        gathered_experts.check_gathered(found)
        found.channel.gathered(1, found.shard).add_(1)  # what the peers have sent
        try:
            gathered_experts.check_gathered(found)
        except AssertionError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("case, layer", [(FORWARD, UP), (DGRAD, DOWN)])
def test_the_gate_of_a_fused_gather(case: str, layer: str, interpreted) -> None:
    (said,) = interpreted(1).run(gate_of_a_gather, case, layer)
    assert "push=False, group" in said and "error" in said
