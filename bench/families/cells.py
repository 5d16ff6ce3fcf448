"""What a rank does for one cell of the matrix: load, parallelize, train, save; and its verdict.

Belongs here: both ways to parallelize a model, what counts as right, refused, wrong, or an error. No table.
"""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import tpformer
from harness.ranks import Calls
from tpformer.distributed import build_mesh
from tpformer.layers import RowParallelLinear

from .models import FAMILIES, Family
from .training import Difference, Trained, compare_runs, forward, in_float64, train, whole, worst_of

RIGHT, NO_PLAN, REFUSED, WRONG, ERROR = VERDICTS = ("right", "no plan", "refused", "WRONG", "error")
OURS = Path(tpformer.__file__).parent
EXPECTED = "expected.pt"
TIMEOUT = 20.0  # seconds, of a collective that another rank has left with an error


class Cell(NamedTuple):
    """What came of a family in one layout.

    reason: of a verdict other than right; of a right one, a warning. share: what `divided` says, with sequence
    parallelism what `on_shards` says. error: the largest, in units of a tensor's largest value.
    """

    verdict: str
    reason: str = ""
    share: float = 0.0
    error: float = 0.0
    seconds: float = 0.0


def prepare(family: Family, directory: Path) -> None:
    """Write a family's model, and what comes of it in one process."""
    with in_float64():
        family.save(directory)
        torch.save(train(family.load(directory), family.batch()), directory / EXPECTED)


def divided(model: nn.Module) -> float:
    """The share of the parameters that the ranks divide."""
    parameters = list(model.parameters())
    sharded = (p for p in parameters if isinstance(p, DTensor) and p.placements != (Replicate(),))
    return sum(p.numel() for p in sharded) / sum(p.numel() for p in parameters)


def on_shards(model: nn.Module) -> float:
    """The share of the row-parallel linears that give this rank's shard of the sequence."""
    linears = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
    return sum(module.sequence_dim is not None for module in linears) / len(linears)


def parallelized(family: Family, directory: Path, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """The model as this project parallelizes it."""
    return tpformer.parallelize(family.load(directory), mesh, sequence_parallel=sequence_parallel)


def by_transformers(family: Family, directory: Path, mesh: DeviceMesh) -> nn.Module:
    """The model as transformers loads it on several ranks. It makes its own mesh of all ranks."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
    return family.load(directory, distributed_config=config)


PLAIN, SEQUENCE, THEIRS = "ours", "ours, sequence parallel", "transformers"
WAYS: Mapping[str, Callable[[Family, Path, DeviceMesh], nn.Module]] = {
    PLAIN: partial(parallelized, sequence_parallel=False),
    SEQUENCE: partial(parallelized, sequence_parallel=True),
    THEIRS: by_transformers,
}


def saved(model: nn.Module, family: Family, directory: Path, expected: Trained) -> list[Difference]:
    """Save on all ranks; what the first rank finds in the files with an unparallelized model, the others nothing."""
    model.save_pretrained(directory)
    dist.barrier()
    if dist.get_rank() > 0:
        return []
    again = family.load(directory)
    parameters = {name: whole(p) for name, p in again.named_parameters()}
    with torch.no_grad():
        last = {name: whole(x) for name, x in forward(again, family.batch()).items()}
    return [
        worst_of(parameters, expected.parameters, "saved and loaded,", noise=1e-11),
        worst_of(last, expected.last, "saved and loaded,"),
    ]


def judge(family: Family, directory: Path, mesh: DeviceMesh, way: str) -> Cell:
    """This rank's verdict: train the model as the way gives it, save it, and compare both with one process."""
    expected: Trained = torch.load(directory / EXPECTED, weights_only=False)
    start = time.perf_counter()
    model = WAYS[way](family, directory, mesh)
    share = on_shards(model) if way == SEQUENCE else divided(model)
    differences = compare_runs(train(model, family.batch()), expected)
    differences += saved(model, family, directory / f"{way} on {mesh.size()}", expected)
    seconds = time.perf_counter() - start
    wrong = next((each for each in differences if each.wrong), None)
    return Cell(WRONG if wrong else RIGHT, str(wrong or ""), share, max(each.error for each in differences), seconds)


def attempt(family: Family, directory: Path, mesh: DeviceMesh, way: str) -> Cell:
    """The verdict of this rank; a ValueError of this project's own is a refusal, any other exception an error."""
    try:
        with in_float64(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cell = judge(family, directory, mesh, way)
        ours = [str(each.message) for each in caught if Path(each.filename).is_relative_to(OURS)]
        return cell._replace(reason=ours[0]) if ours and cell.verdict == RIGHT else cell
    except Exception as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        text = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, ValueError) and raised_in.is_relative_to(OURS):
            return Cell(REFUSED, text)
        if "has no `tp_plan`" in text:
            return Cell(NO_PLAN)
        return Cell(ERROR, f"{type(error).__name__}: {text}")


def joined(cells: Sequence[Cell]) -> Cell:
    """The verdict of all ranks: the worst of any; a refusal that not all share is an error."""
    worst = max(cells, key=lambda cell: VERDICTS.index(cell.verdict))
    if worst.verdict == REFUSED and any(cell.verdict != REFUSED for cell in cells):
        worst = worst._replace(verdict=ERROR, reason=f"only some ranks refuse: {worst.reason}")
    return worst._replace(seconds=max(cell.seconds for cell in cells), error=max(cell.error for cell in cells))


def quiet() -> None:
    """Switch off progress bars and warnings of libraries, which every rank would print in every cell."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def setup(directory: Path) -> Calls:
    """A rank's calls: every cell, by family and way. One mesh serves all, because each opens process groups."""
    quiet()
    timeout = timedelta(seconds=TIMEOUT)
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size(), timeout=timeout)["tp"]
    return {
        f"{family.name}, {way}": partial(attempt, family, directory / family.name, mesh, way)
        for family in FAMILIES
        for way in WAYS
    }
