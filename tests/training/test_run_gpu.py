"""On one GPU: training in bfloat16 lowers the loss, a captured step is the eager one, packed documents attend apart."""

import pytest
import torch
from testing import assert_kernel_close, on_every_rank
from tiny_runs import losses, values_with
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpformer import ops
from tpformer.config import build_config
from tpformer.training.trainer import Trainer, pretrain

pytestmark = pytest.mark.gpu

DENSE = {"n_heads": 1, "dropout": 0.1}
EXPERTS = {"activation": "swiglu", "bias": False, "n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64}
CAPTURED = {"dense": DENSE, "experts": {**DENSE, **EXPERTS}}


@on_every_rank(1)
def test_a_step_is_queued_without_a_wait(tiny_values):
    """torch refuses what makes the host wait for the GPU."""
    changes = {"train": {"device": "cuda", "steps": 6}, "model": {"n_heads": 1}, "data": {"valid": []}}
    trainer = Trainer(build_config(tiny_values, {**changes, "checkpoint": {"interval": 0}}))
    launch = trainer._launch

    def launched(*arguments):
        torch.cuda.set_sync_debug_mode("error" if trainer.step else "default")  # the first step may compile kernels
        try:
            return launch(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer._launch = launched
    trainer.run()
    assert trainer.step == 6


@on_every_rank(1)
def test_bfloat16_run(tmp_path, tiny_values):
    pretrain(build_config(tiny_values, {"train": {"device": "cuda", "steps": 20}, "model": {"n_heads": 1}}))
    found = losses(tmp_path / "run")
    assert len(found) == 20 and found[-1][1] < found[0][1]


def trained_on_cuda(values: dict, name: str, cuda_graph: str, model: dict) -> Tensor:
    """Loss and norm of each step. Attention is torch's that always gives the same bits."""
    sections = {"train": {"device": "cuda", "steps": 8, "cuda_graph": cuda_graph}, "data": {"valid": []}}
    run = {"dir": f"{values['run']['dir']}-{name}"}
    trainer = Trainer(build_config(values_with(values, model=model, run=run, checkpoint={"interval": 0}, **sections)))
    with sdpa_kernel(SDPBackend.MATH):
        trainer.run()
    return torch.tensor(losses(run["dir"]), dtype=torch.float64)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_run_is_the_eager_one(ranks, tiny_values, name):
    model = CAPTURED[name]
    graphs, eager, again = (
        ranks(1).run(trained_on_cuda, tiny_values, f"{number}-{way}", way, model)[0]
        for number, way in enumerate(("on", "off", "off"))
    )
    assert graphs.shape == (8, 3)
    # the difference of two eager runs: 0 where torch's kernels repeat their bits
    assert (graphs - eager).abs().max() <= (again - eager).abs().max()


def attend(q, k, v, upstream, lengths, packed, **options):
    """Output and gradients of attention over documents of these lengths, packed in one call or one by one."""
    leaves = [x.detach()[None].requires_grad_() for x in (q, k, v)]
    if packed:
        boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
        y = ops.attention(*leaves, (boundaries, max(lengths)), **options)
    else:
        parts = zip(*(x.split(lengths, 1) for x in leaves), strict=True)
        y = torch.cat([ops.attention(*part, **options) for part in parts], 1)
    return [y, *torch.autograd.grad(y, leaves, upstream[None])]


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"window": 16}])
def test_packed_documents_equal_separate_ones(kv_heads, options):
    lengths = [100, 1, 27, 128]
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(256, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
    inputs = [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]
    packed, apart = attend(*inputs, lengths, True, **options), attend(*inputs, lengths, False, **options)
    oracle = attend(*(x.double() for x in inputs), lengths, True, **options)
    for name, actual, exact, baseline in zip("yqkv", packed, oracle, apart, strict=True):
        assert_kernel_close(actual.detach(), exact.detach(), baseline.detach(), f"{name} of {kv_heads} kv heads")
