"""What pretends that there is a GPU: nothing is computed of large tensors, and no test is judged."""

import torch
from pretending import Unjudging

from checks.driver.pretend import Pretence, Untouched


def test_nothing_is_computed_of_large_tensors() -> None:
    """Neither forward nor backward, which would take hours; results have sizes and strides, and small ones values."""
    with Untouched():
        x = torch.randn(1 << 16, 1 << 14, dtype=torch.bfloat16, generator=torch.Generator())
        w = torch.ones(1 << 14, 1 << 14, dtype=torch.bfloat16, requires_grad=True)
        y = (x @ w.t()).relu_().mul(3)
        torch.nn.functional.scaled_dot_product_attention(*3 * [y.view(1, 128, 512, 1 << 14)]).sum().backward()
        assert y.shape == x.shape and w.grad is not None and w.grad.shape == w.shape
        assert (x.t() + 1).stride() == (1, 1 << 14) and x.topk(2).values.shape == (1 << 16, 2)
        assert torch.zeros(1 << 14, 1 << 16, dtype=torch.bfloat16).addmm_(w, x.t()).is_contiguous()
        assert torch.arange(3.0).square().sum() == 5


def test_products_that_no_cpu_has_leave_what_they_would_write() -> None:
    """Of torch 2.11 a CPU has none of 16 bits with a sum in float32."""
    with Pretence():
        total, x = torch.ones(2, 3, device="cuda"), torch.ones(2, 2, dtype=torch.bfloat16)
        torch.mm(x, x.new_ones(2, 3), out_dtype=total.dtype, out=total)
        torch.addmm(total, x, x.new_ones(2, 3), out_dtype=total.dtype, out=total)
    assert total.eq(1).all()


def test_what_no_kernel_has_written_is_zero() -> None:
    """Else an index might be any number, and other calls would follow in each run."""
    like = torch.ones(3, 5, dtype=torch.bfloat16)
    for _ in range(100):  # memory that was in use before
        with Pretence():
            made = [torch.empty(3, 5, dtype=torch.int32), torch.empty_like(like), like.new_empty(7, device="cuda")]
            made.append(like.new_empty_strided((2, 3), (8, 1), dtype=torch.float8_e4m3fn).float())
        assert not any(each.any() for each in made)
        for each in made:
            each.fill_(1)


def test_a_test_is_not_judged(tmp_path) -> None:
    """The calls of a condition are made, and so is what follows; no bytecode is left to a run that judges."""
    (tmp_path / "asking.py").write_text("made = []\nassert made.append(1), 'judged'\nmade.append(2)\n")
    names: dict = {}
    exec(Unjudging("asking", str(tmp_path / "asking.py")).get_code("asking"), names)
    assert names["made"] == [1, 2] and [each.name for each in tmp_path.iterdir()] == ["asking.py"]
