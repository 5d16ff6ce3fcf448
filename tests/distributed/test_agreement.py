"""As ranks join they compare what decides a run: the same is let through, and any difference named, on all ranks."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tpformer.distributed import agreement
from tpformer.distributed.agreement import Decides, agree, digests

SAME = {"command": "pretrain", "lr": 0.1, "file": "a", "version": "1", "environment": {}}


def joined(folder: str, own: list[dict]) -> str:
    """What rank i hears if it joins with own[i] in place of SAME."""
    given = SAME | own[dist.get_rank()]
    files = {"data.train[0].bin": Path(folder, given["file"])}
    decides = Decides(given["command"], {"optimizer.lr": given["lr"]}, files)
    surroundings = mock.patch.object(agreement, "__version__", given["version"])
    with surroundings, mock.patch.dict(os.environ, given["environment"]), mock.patch.object(agreement, "WHOLE", 4000):
        try:
            agree(decides)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("last", "said"), [
    ({}, ""),
    ({"environment": {"PYTHONHASHSEED": "7", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "2"}}, ""),
    ({"file": "copy of a"}, ""),
    ({"file": "large copy"}, ""),
    ({"lr": 0.3}, "rank 2 has optimizer.lr = 0.3 where rank 0 has 0.1"),
    ({"lr": None, "command": "evaluate"}, "has command = 'evaluate' where rank 0 has 'pretrain'; they also differ in"),
    ({"lr": [0.1] * 6 + ["\x1b"]}, "has optimizer.lr = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, ...] (SHA-256 "),
    ({"version": "2"}, "rank 2 has tpformer = '2, sources "),
    ({"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, "rank 2 has NVIDIA_TF32_OVERRIDE = '1' where rank 0 has unset"),
    ({"file": "as large"}, "rank 2 has data.train[0].bin = 3000 bytes with SHA-256 "),
    ({"file": "large other"}, "rank 2 has data.train[0].bin = 9000000 bytes with SHA-256 "),
    ({"file": "none"}, "rank 2 has data.train[0].bin = a file that cannot be read (No such file or directory) where"),
])  # fmt: skip
def test_ranks_that_differ_are_named_with_the_key_and_both_values(ranks, tmp_path, last, said):
    content = {"a": b"1" * 3000, "as large": b"1" * 2999 + b"2", "large": b"1" * 9_000_000}
    for name, data in (content | {"large other": b"1" * 4_000_000 + b"2" * 5_000_000}).items():
        (tmp_path / name).write_bytes(data)
    for name in ("a", "large"):
        shutil.copy2(tmp_path / name, tmp_path / (f"copy of {name}" if name == "a" else f"{name} copy"))
    first = {"file": "large"} if last.get("file", "").startswith("large") else {}
    first |= {"lr": [0.1] * 7} if isinstance(last.get("lr"), list) else {}  # they differ where neither is shown
    heard = ranks(3).run(joined, str(tmp_path), [first, first, last])
    assert len({*heard}) == 1 and (said in heard[0] if said else heard[0] == ""), heard
    assert "\n" not in heard[0] and str(tmp_path) not in heard[0]


def test_digests_tell_values_in_another_order_apart():
    x = torch.randn(3, 4)
    given = [x, x[[1, 0, 2]], x[:, [1, 0, 2, 3]], -x, x.t(), x[0], x[0].roll(1), x[:0], x[0, 0], torch.zeros(())]
    own, again = digests(given), digests([each.clone() for each in given])
    assert torch.equal(own, again) and len(own.unique(dim=0)) == len(given) - 1, "nothing and zero are alike"
    assert torch.equal(digests([x[0, 0], x.to("meta")])[1], torch.zeros(2, dtype=torch.int64))


def changed(x: torch.Tensor, value: complex) -> torch.Tensor:
    """A copy with another number at the end."""
    x = x.clone()
    x.view(-1)[-1] = value
    return x


HUGE, COMPLEX = torch.tensor([[torch.finfo(torch.float32).min, 1], [2, 3]]), torch.ones(2, 2, dtype=torch.complex64)
SIGNS = torch.tensor([[1, 2.0], [-1, 4]], dtype=torch.float64)
OTHERS = {
    "beside a huge number": (HUGE, changed(HUGE, 4)),
    "beside an infinity": (HUGE * 2, changed(HUGE * 2, 4)),
    "beside a NaN": (HUGE * torch.nan, changed(HUGE * torch.nan, 4)),
    "an integer that float64 has not": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    "an imaginary part": (COMPLEX, changed(COMPLEX, 1 + 1j)),
    "a conjugate": (COMPLEX * 1j, (COMPLEX * 1j).conj()),
    "a sign": (SIGNS, -SIGNS),
    "exchanged signs": (SIGNS, SIGNS * torch.tensor([[-1.0], [-1]]).repeat(1, 2).tril()),
    "eight bits": (HUGE.to(torch.float8_e4m3fn), changed(HUGE, 4).to(torch.float8_e4m3fn)),
    "a bit": (torch.tensor([[True, False]]), torch.tensor([[True, True]])),
    "a sparse value": (HUGE.to_sparse(), changed(HUGE, 4).to_sparse()),
    "a sparse place": (torch.eye(3).to_sparse(), torch.eye(3).roll(1, 0).to_sparse()),
}


@pytest.mark.parametrize("one, other", OTHERS.values(), ids=OTHERS)
def test_digests_tell_every_number_apart(one, other):
    own, copy, another = digests([one, one.clone(), other])
    assert torch.equal(own, copy) and not torch.equal(own, another)


def test_digests_do_not_depend_on_threads_strides_or_pieces(monkeypatch):
    """A sum of floats does, and equal ranks would be told apart."""
    x = torch.randn(300, 2, 700)
    own, threads = digests([x]), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(digests([x.transpose(0, 2).contiguous().transpose(0, 2)]), own)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(agreement, "PIECE", 7 * 1400)
    assert torch.equal(digests([x]), own)


def test_what_cannot_be_compared_is_said():
    with pytest.raises(ValueError, match=r"has layout torch\.sparse_csr and dtype torch\.float32, and ranks cannot"):
        digests([torch.eye(3).to_sparse_csr()])
