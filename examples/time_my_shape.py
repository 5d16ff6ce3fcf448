"""How long does an MLP of your shape, a column and a row linear, take forward and backward with each transport?

    torchrun --nproc-per-node 2 examples/time_my_shape.py
    torchrun --nproc-per-node 2 examples/time_my_shape.py 1024 768 3072   # tokens, hidden size, width of the MLP

It takes GPUs if every rank has one, else the CPU. Beside each time stands what the library's model predicts: from its
figures of a GPU that it knows, else from one product and one all-gather of these shapes, which are timed first.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from tpformer.distributed import all_gather, build_mesh, initialize
from tpformer.kernels.cost import Machine, communication_bytes, gemm_seconds, machine_for, overlapped_seconds
from tpformer.layers import MLP, TensorParallel, explain


def seconds(run, device, repeats=7):
    """The median over repetitions, each of which lasts until its slowest rank is done."""
    times = []
    for _ in range(2 + repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[2:], device=device)  # the first two warm up
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.median().item()


def this_machine(x, width, moved, mesh):
    """The library's figures of this GPU; on other devices how fast a product and an all-gather are."""
    if x.is_cuda and (known := machine_for(torch.cuda.get_device_name())):
        return known
    weight, rows = x.new_ones(width, x.shape[1]), x.chunk(mesh.size())[mesh.get_local_rank()]
    flops = 2 * x.numel() * width / seconds(lambda: x @ weight.t(), x.device)
    link = moved / seconds(lambda: all_gather(rows, mesh.get_group()), x.device)
    return Machine("measured", flops, flops, link, memory=float("inf"))


def main(tokens=2048, hidden=512, ffn=2048):
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # torchrun sets it
    kind, dtype = ("cuda", torch.bfloat16) if gpus else ("cpu", torch.float32)
    initialize(kind)
    mesh = build_mesh(kind, tensor_parallel=dist.get_world_size())["tp"]
    t, width, say = mesh.size(), ffn // mesh.size(), print if dist.get_rank() == 0 else lambda *_: None
    x = torch.randn(tokens, hidden, device=kind, dtype=dtype)
    rows = x.chunk(t)[mesh.get_local_rank()].requires_grad_()
    moved = communication_bytes("all_gather_matmul", tokens, width, hidden, t, dtype.itemsize)
    machine = this_machine(x, width, moved, mesh)
    # six products, five of them with a collective of (tokens, hidden): after one another, or at the same time
    product, collective = gemm_seconds(tokens, width, hidden, dtype.itemsize, machine), moved / machine.link
    apart, together = 6 * product + 5 * collective, product + 5 * overlapped_seconds(product, collective, t)
    say(f"{'transport':12} {'ms':>8} {'predicted':>10}   ({t} ranks on {kind}, {dtype}, {machine.name})")
    for transport in ("sequential", "pipelined", "fused"):
        pair = MLP(hidden, ffn_hidden_size=ffn, tp=TensorParallel(mesh, True, transport), device=kind, dtype=dtype)
        try:
            taken = seconds(lambda pair=pair: pair(rows).sum().backward(), x.device)
        except ValueError as error:  # on all ranks alike
            say(f"{transport:12} does not run here: {error}")
            continue
        predicted = apart if transport == "sequential" else together
        say(f"{transport:12} {1e3 * taken:8.2f} {1e3 * predicted:10.2f}")
    say(explain(MLP(hidden, ffn_hidden_size=ffn, tp=TensorParallel(mesh, True), device=kind, dtype=dtype), tokens))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
