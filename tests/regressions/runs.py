"""A step of a small model in a layout, as a configuration describes them, beside the same step of one process.

Belongs here: what several files of this folder build and compare. No test logic.
"""

from collections.abc import Mapping
from typing import Any

import torch
from testing import assert_same
from torch.distributed.tensor import DTensor

from tpformer.config import RunConfig, build_config, check_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.training.model import ModelParts
from tpformer.training.setup import build_model, run_mesh

BATCH = 4
MODEL = {"vocab_size": 60, "seq_length": 8, "n_layers": 2, "hidden_size": 16, "n_heads": 4}
LLAMA = {**MODEL, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}


def run_config(model: Mapping, parallel: Mapping, **train: Any) -> RunConfig:
    section = {"global_batch_size": BATCH, "microbatch_size": 1, "dtype": "float64", "device": "cpu"}
    sections = {"model": dict(model), "parallel": dict(parallel), "train": section | train}
    config = build_config({**sections, "data": {"train": ["none"]}})
    check_config(config)
    return config


def built(config: RunConfig) -> ModelParts:
    return build_model(config, run_mesh(config, "cpu"))


def own_batch(model: ModelParts, targets: float = 1.0) -> tuple[torch.Tensor, int]:
    """This rank's samples, of whose tokens this share are targets, and the number of the first one."""
    size = (BATCH, model.config.seq_length + 1)
    batch = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(1))
    share = BATCH // model.layout.data_parallel
    first = model.data_rank * share
    return torch.where(drawn < targets, batch, ~batch)[first : first + share], first


def full(x: torch.Tensor) -> torch.Tensor:
    return full_tensor(x).detach().clone()


def step(model: Mapping, parallel: Mapping, train: Mapping) -> dict[str, Any]:
    """Run a step; return its loss and norm. Of this rank's parts: initial values, whole gradients, its
    copies of those that tensor-parallel ranks share, and the shares of parameters that it keeps."""
    whole = built(run_config(model, parallel, **train))
    parameters = [pair for part in whole.parts for pair in part.named_parameters()]
    result: dict[str, Any] = {"initial": {name: full(p) for name, p in parameters}}
    rows, first = own_batch(whole)
    result["loss"] = float(whole.gradients(rows, first_sample=first))
    result["shares"] = {name: p.to_local().numel() / p.numel() for name, p in parameters if isinstance(p, DTensor)}
    result["meshes"] = len({p.device_mesh for _, p in parameters if isinstance(p, DTensor)})
    result["norm"] = float(whole.gradient_norm())
    laid_out = {name: p.grad for name, p in parameters if isinstance(p.grad, DTensor)}  # not on one rank
    result["shared"] = {name: g.to_local().clone() for name, g in laid_out.items() if g.placements[-1].is_replicate()}
    result["gradients"] = {name: full(p.grad) for name, p in parameters}
    return result


def alone(ranks, model: Mapping, **train: Any) -> dict[str, Any]:
    return ranks(1).run(step, model, {}, train)[0]


def as_alone(ranks, expected: dict[str, Any], model: Mapping, parallel: Mapping) -> list[dict]:
    """What the ranks of a layout find, after their loss, norm and gradients were compared with those of one process."""
    results = ranks(run_config(model, parallel).parallel.world_size).run(step, model, parallel, {})
    for result in results:
        assert_same([result["loss"], result["norm"]], [expected["loss"], expected["norm"]])
        assert_same(result["gradients"], {name: expected["gradients"][name] for name in result["gradients"]})
    assert {name for result in results for name in result["gradients"]} == expected["gradients"].keys()
    return results
