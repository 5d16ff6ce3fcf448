"""A pipeline of your own nn.Sequential: a small CNN on two (or more) ranks learns to find the bright quadrant.

    torchrun --nproc-per-node 2 examples/pipeline_cnn.py [--schedule ZBVZeroBubble]

Every rank builds the same model from the same seed and keeps the stages that are its own.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tpformer.distributed import build_mesh, initialize
from tpformer.parallel import SCHEDULES, Layout, pipeline_sequential

STEPS, BATCH, MICROBATCHES, SIZE = 40, 64, 8, 16


def block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    # GroupNorm instead of BatchNorm, whose statistics would be those of a microbatch, not of the batch
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(4, channels_out), nn.ReLU())


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    body = [block(1, 16), block(16, 32, 2), block(32, 32), block(32, 64, 2), block(64, 64), block(64, 64)]
    return nn.Sequential(*body, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), nn.Linear(256, 4))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise images (BATCH, 1, SIZE, SIZE) with one brighter quadrant, and its number (BATCH,), equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 1, SIZE, SIZE, generator=generator)
    labels = torch.randint(4, (BATCH,), generator=generator)
    half = SIZE // 2
    for image, label in zip(x, labels.tolist(), strict=True):
        row, column = half * (label // 2), half * (label % 2)
        image[:, row : row + half, column : column + half] += 0.5
    return x, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1F1B", choices=SCHEDULES)
    schedule = parser.parse_args().schedule
    initialize("cpu")
    world = dist.get_world_size()
    layout = Layout(pipeline_parallel=world, pipeline_schedule=schedule, pipeline_split="time")
    mesh = build_mesh("cpu", tensor_parallel=1, pipeline_parallel=world)
    microbatches = 1 if schedule == "naive" else MICROBATCHES
    pipeline = pipeline_sequential(
        cnn(),
        layout,
        mesh,
        example=images(0)[0][: BATCH // microbatches],
        n_microbatches=microbatches,
        loss_fn=lambda output, target: F.cross_entropy(output, target, reduction="sum") / BATCH,
    )
    mine = [name for part in pipeline.parts for name, _ in part.named_children()]
    print(f"rank {dist.get_rank()} of {world}: layers {', '.join(mine)}", flush=True)
    optimizer = torch.optim.AdamW([p for part in pipeline.parts for p in part.parameters()], lr=3e-3)
    for step in range(1, STEPS + 1):
        loss = pipeline.step(*images(step))
        optimizer.step()
        optimizer.zero_grad()
        if pipeline.is_last and step % 10 == 0:
            print(f"step {step:3}  loss {float(loss):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
