"""What linears in FP8 launch on an H100: norms, activations and what is behind a row linear write blocks, and no pass
quantises what they wrote."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from turns import of_turn

from checks.driver.stub import missing

PROGRAM = """
import torch
from tpformer.kernels import replay

launched = []

def told(kernel, *arguments, launch=replay.launch, **options):
    launched.append(kernel.fn.__name__.removesuffix("_kernel"))
    return launch(kernel, *arguments, **options)

replay.launch = told  # before a module of a kernel takes it

from tpformer import ops
from tpformer.kernels.finish import Norm
from tpformer.layers import TensorParallel

def empty(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

tp, x, norm = TensorParallel(precision="fp8"), empty(64, 256), Norm("rmsnorm", empty(256), None, 1e-5)
y = ops.column_linear(x, empty(384, 256), norm=norm, transport=tp.column_transport(x, 384))
z = ops.row_linear(y, empty(256, 384), activation="silu", transport=tp.row_transport(y, 384, 256), private=True)
print(launched)
launched.clear()
z.backward(torch.empty_like(z))
print(launched)
for dropout in (None, ops.Dropout(torch.empty(64, device="cuda", dtype=torch.int64), 5, 0.1)):
    given = {"bias": empty(256), "residual": empty(64, 256), "dropout": dropout}
    z = ops.row_linear(empty(64, 384), empty(256, 384), **given, transport=tp.row_transport(y, 384, 256))
    launched.clear()
    z.backward(torch.empty_like(z))
    print(launched)
for rows, private in ((40, False), (48, True)):  # calls that are unlike
    y = empty(rows, 384)
    y = ops.row_linear(y, empty(256, 384), residual=empty(rows, 256), transport=tp.row_transport(y, 384, 256))
    options = {"transport": tp.column_transport(y, 384), "carry": True, "private": private}
    z, carried = ops.column_linear(y, empty(384, 256), norm=norm, **options)
    launched.clear()
    torch.autograd.backward([z, carried], [torch.empty_like(z), torch.empty_like(carried)])
    print(launched)
"""


@of_turn(5)
@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_no_pass_quantises_what_norms_and_activations_wrote(tmp_path: Path) -> None:
    file = tmp_path / "linears.py"
    file.write_text(PROGRAM)
    call = [sys.executable, "-m", "checks.driver.pretend", str(file)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, backward, *behind = map(ast.literal_eval, done.stdout.splitlines())
    weight = "quantize_weight"
    assert forward == ["norm_forward", weight, "activation_blocks", weight]
    # a call that is like an earlier one launches without this function: the norm again
    assert [each for each in backward if each.startswith(("quantize", "norm", "activation"))] == [
        "quantize_rows", weight, "activation_backward_blocks", weight, "norm_backward",
    ]  # fmt: skip
    *behind, seen, private = behind
    # the one pass quantises x again
    assert behind == [["finish_backward", "sum_partials", "quantize_rows"], ["finish_backward", "sum_partials"]]
    # of the output's gradient, which x again is like, and of the row linear's, unless a norm has written its blocks
    assert [launched.count("quantize_rows") for launched in (seen, private)] == [2, 1] and "norm_backward" in private
