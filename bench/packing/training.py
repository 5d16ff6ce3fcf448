"""Runs of three architectures in bfloat16, and copies of what their layers keep for the backward, by name.

Belongs here: the shapes, the loop, the names. Names and sizes of a layer's items are those of layer_memory.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.models import GPTConfig
from tpformer.planner.storages import Saved, local
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, open_data
from tpformer.training.step import batch, train_step

from ..layer_memory import (
    DTYPE,
    ITEM,
    ORDER,
    UNPACKED,
    Layer,
    expected_items,
    leftover,
    named_operations,
)

GPT = GPTConfig(vocab_size=257, seq_length=256, n_layers=4, hidden_size=256, n_heads=4)
LLAMA = dataclasses.replace(GPT, norm="rmsnorm", activation="swiglu", position="rope", bias=False)
MOE = dataclasses.replace(
    LLAMA,
    n_experts=8,
    expert_ffn_size=256,
    shared_expert_size=256,
    router_score="sigmoid",
    router_scale=2.0,
    router_bias=True,
)
SHAPES = {"GPT": GPT, "Llama": LLAMA, "MoE": MOE}
RATE, WARM_UP, BIAS_RATE = 2e-3, 1 / 12, 0.01  # peak learning rate, share of steps, of a router's bias
WATCHED = 60
Tensors = Mapping[str, Sequence[Tensor]]


class Size(NamedTuple):
    """How long a run is: its optimizer steps, and the samples of each. `make train` has 600 steps of 8 samples."""

    steps: int = 600
    samples: int = 6

    @property
    def recorded(self) -> list[int]:
        """The steps whose saved tensors are looked at: the first, 1/12, 1/3 and the last."""
        return sorted({1, max(1, self.steps // 12), max(1, self.steps // 3), self.steps})

    @property
    def watched(self) -> list[int]:
        """The steps in which only the worst group is looked for: WATCHED of them, at equal distances."""
        return list(range(self.steps, 0, -max(1, self.steps // WATCHED)))[::-1]


class Copies(Saved):
    """What autograd keeps, and a copy of each bfloat16 storage as it is when it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[torch.UntypedStorage, Tensor] = {}
        self.closed = False

    def close(self) -> None:
        """The last layer's forward is over: what is kept from now on is the head's."""
        self.closed = True

    def pack(self, x: Tensor) -> Tensor:
        """Note a tensor, and copy the whole storage that it lies in, in the order of memory."""
        inner = local(x)
        storage = inner.untyped_storage()
        if not (inner.dtype != DTYPE or self.closed or storage in self.left_out or storage in self.copies):
            self.copies[storage] = inner.new_empty(0).set_(storage).clone()
        return super().pack(x)

    def by_name(self, layer: Layer) -> dict[str, list[Tensor]]:
        """The copies of every item of such a layer, (values,) bfloat16, one for each layer of the model."""
        found: dict[str, list[Tensor]] = {}
        for storage, copy in self.copies.items():
            name = self.names.get(storage) or leftover(layer, self.kept[storage])
            found.setdefault(name, []).append(copy)
        return dict(sorted(found.items(), key=lambda item: ORDER.index(item[0])))


def layer_of(name: str, config: GPTConfig, samples: int) -> Layer:
    """One layer with as many tokens as a batch of so many samples: its items do not depend on where samples end."""
    return Layer(name, dataclasses.replace(config, seq_length=samples * config.seq_length), 1)


def missing(layer: Layer, tensors: Tensors) -> list[str]:
    """Where the copies are not n_layers times what docs/memory.md says that a layer keeps."""
    expected = {name: size for name, size in expected_items(layer).items() if name not in UNPACKED}
    found = []
    for name in dict.fromkeys([*expected, *tensors]):
        values = sum(x.numel() for x in tensors.get(name, ()))
        wanted = layer.config.n_layers * expected.get(name, 0) // ITEM
        if values != wanted:
            found.append(f"{layer.model}: {values} values of {name} were saved, not {wanted}")
    return found


def recorded_steps(
    name: str, config: GPTConfig, size: Size, data: tuple[Path, Path], mesh: DeviceMesh
) -> Iterator[tuple[int, float, dict[str, list[Tensor]]]]:
    """Train, and give (step, loss in nats a token, saved tensors by name) of each step that is recorded or watched.

    The run is the library's own in bfloat16: FSDP2 on one rank, parameters and AdamW in float32, a bfloat16 copy of the
    parameters for forward and backward. Such a step is one of the run, and its forward keeps these tensors.
    """
    run = RunConfig(
        model=ModelSection(**dataclasses.asdict(config)),
        data=DataSection(train=(str(data[0]),), valid=(str(data[1]),)),
        optimizer=OptimizerSection(lr=RATE, warmup_steps=round(WARM_UP * size.steps)),
        train=TrainSection(
            steps=size.steps, global_batch_size=size.samples, dtype="bfloat16", device="cpu", router_bias_rate=BIAS_RATE
        ),
    )
    samples, model, layer = open_data(run).train, build_model(run, mesh), layer_of(name, config, size.samples)
    optimizers = build_optimizers(model, run.optimizer)
    wanted = {*size.recorded, *size.watched}
    last = model.parts[0].layers[str(config.n_layers - 1)]

    def step_of(step: int) -> float:
        first = (step - 1) * size.samples
        rows, rate = batch(samples, first, size.samples), learning_rate(step, size.steps, run.optimizer)
        clip_norm = run.optimizer.clip_norm
        return float(train_step(model, optimizers, rows, first_sample=first, lr=rate, clip_norm=clip_norm).loss)

    for step in range(1, size.steps + 1):
        if step not in wanted:
            step_of(step)
            continue
        saved = Copies()
        hook = last.register_forward_hook(lambda *_, saved=saved: saved.close())
        with saved.recording(model.parts[0]), named_operations(saved, layer):
            loss = step_of(step)
        hook.remove()
        yield step, loss, saved.by_name(layer)
