"""AlexNet as two pipelines: each has two stages, on two ranks, and takes half of the batch in 8 microbatches.

    torchrun --nproc-per-node 4 examples/alexnet.py
    torchrun --nproc-per-node 4 examples/alexnet.py naive runs/naive   # another schedule, and where to draw it

One process trains on the whole batch, too, and all losses must be the same. The images are made here, like CIFAR-10's.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tpformer.distributed import build_mesh, initialize
from tpformer.parallel import Layout, gather_actions, pipeline_sequential
from tpformer.planner import draw_timeline

STEPS, BATCH = 15, 64


def alexnet():
    """Five convolutions and three linears, narrow. Dropout is left out: a pipeline would draw other masks."""
    torch.manual_seed(0)  # the same weights on all ranks
    layers = []
    for inputs, outputs, size, halves in (3, 16, 5, 1), (16, 48, 5, 1), (48, 96, 3, 0), (96, 64, 3, 0), (64, 64, 3, 1):
        layers += [nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU(), *halves * [nn.MaxPool2d(2)]]
    layers += [nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).double()  # in float32 Adam makes much of the rounding of tiny gradients


def images(step):
    """(BATCH, 3, 32, 32) noise over coarse squares in the colours of one of ten classes, and the class."""
    colours = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)  # equal on all ranks
    classes = torch.randint(10, (BATCH,), generator=generator)
    x = F.interpolate(colours, size=32)[classes] + torch.randn(BATCH, 3, 32, 32, generator=generator)
    return x.double(), classes


def loss_fn(output, classes):
    return F.cross_entropy(output, classes, reduction="sum") / BATCH  # the losses of a batch's parts add up


def train(parts, forward_backward):
    optimizer, losses = torch.optim.Adam([p for part in parts for p in part.parameters()]), []
    for step in range(STEPS):
        losses.append(forward_backward(*images(step)).detach().double())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def main(schedule="1F1B", folder=None):
    initialize("cpu")
    sizes = {"pipeline_parallel": 2, "data_parallel_replicate": dist.get_world_size() // 2}
    mesh = build_mesh("cpu", tensor_parallel=1, **sizes)
    layout = Layout(**sizes, pipeline_schedule=schedule, pipeline_split="time")
    share, microbatches = BATCH // layout.data_parallel, 1 if schedule == "naive" else 8
    options = {"example": images(0)[0][: share // microbatches], "n_microbatches": microbatches, "loss_fn": loss_fn}
    pipeline, own = pipeline_sequential(alexnet(), layout, mesh, **options), mesh["dp_replicate"].get_local_rank()
    with pipeline.recording() as actions:
        losses = train(pipeline.parts, lambda x, y: pipeline.step(x.split(share)[own], y.split(share)[own]))
    dist.all_reduce(losses)  # the last stages have one for their share of the batch, the others 0
    model = alexnet()
    alone = train([model], lambda x, y: (loss := loss_fn(model(x), y)).backward() or loss)
    torch.testing.assert_close(losses, alone)
    last_step = gather_actions(actions[-len(actions) // STEPS :], mesh.get_group("pp"))
    if dist.get_rank() == 0:
        print(f"{schedule} on {layout.world_size} ranks: loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}")
        if folder:
            draw_timeline(last_step, Path(folder), schedule, microbatches)


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
