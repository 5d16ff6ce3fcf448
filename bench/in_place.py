"""How fast is a model that is parallel in place, beside transformers' own tensor parallelism?

Belongs here: the model, what is timed beside what, what must agree, the required ratio.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from importlib import util

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpformer
from harness.ranks import Calls, Ranks
from harness.ratios import Row, compared, ratio_bench
from harness.timing import interleave, timed
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor

from .families.cells import quiet
from .plain import require_close

SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1024}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
BATCH, SEQ, QUICK_SEQ = 4, 128, 16
RANKS = 2
OURS, THEIRS = "tpformer.parallelize", "transformers"
REQUIRED = 1.2
TOLERANCE = 1e-4  # float32, of the largest gradient
NOTE = "Two ranks with one core each. Forward with the loss, and backward, float32, as each library does it by default."


def write_model(directory: str) -> None:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(directory)


def models(directory: str) -> dict[str, nn.Module]:
    """The model of the directory, parallel in both ways."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    load = partial(LlamaForCausalLM.from_pretrained, directory)
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    theirs = load(distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto"))
    return {OURS: tpformer.parallelize(load(), mesh["tp"]).train(), THEIRS: theirs.train()}


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """Forward and backward; the loss."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def compare(made: dict[str, nn.Module], ids: Tensor) -> None:
    """AssertionError unless both give one loss, and one gradient for each parameter."""
    require_close("loss", step(made[OURS], ids), step(made[THEIRS], ids), TOLERANCE)

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in model.named_parameters()}
        return {name: full_tensor(g) for name, g in found.items()}

    ours, theirs = gradients(made[OURS]), gradients(made[THEIRS])
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        require_close(f"gradient of {name}", ours[name], gradient, TOLERANCE * largest)


def calls(directory: str, seq: int, repetitions: int) -> Calls:
    """A rank's timed steps, and their comparison."""
    quiet()
    made = models(directory)
    ids = torch.randint(SIZES["vocab_size"], (BATCH, seq), generator=torch.Generator().manual_seed(0))
    found: dict[str, Callable] = {name: timed(partial(step, each, ids), repetitions) for name, each in made.items()}
    return {**found, "gate": partial(compare, made, ids)}


def rows(quick: bool) -> list[Row]:
    """The gate is here, because the models that are timed are those that are compared."""
    quiet()
    rounds, repetitions, seq = (2, 1, QUICK_SEQ) if quick else (7, 5, SEQ)
    shape = f"{SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}, {BATCH} x {seq}"
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        write_model(directory)
        with Ranks(RANKS, 1, calls, directory, seq, repetitions) as ranks:
            ranks.call("gate")
            seconds = interleave({name: partial(ranks.sample, name) for name in (OURS, THEIRS)}, rounds)
    options: dict = {"unit": "tokens/s", "amount": BATCH * seq}
    return compared("forward and backward of a Llama", shape, seconds, [(OURS, THEIRS, REQUIRED)], **options)


BENCH = ratio_bench(
    rows,
    name="in_place",
    description="a model that is parallel in place against transformers' own tensor parallelism, on 2 CPU ranks",
    obstacle=lambda: None if util.find_spec("transformers") else "transformers (pip install transformers)",
    note=NOTE,
)
