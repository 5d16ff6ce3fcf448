"""parallel.memory_budget: the bytes that it means, what layers keep under it, and what is said where nothing fits.

Belongs here: from a budget's text to parallel.keep, and the table of several budgets. The choice is keep_choice.py's.
All figures are predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.table import Table

from tpformer.config import FP8, PLAIN, Layout, RunConfig, budget_bytes, build_config, keep_text, read_toml
from tpformer.parallel import exchange_named
from tpformer.training.setup import device_type

from .candidates import MARGIN, check
from .devices import Device, load_device
from .dry_run import plan_config
from .keep_choice import Choice, choose, peak, ways_of
from .rank_memory import predicted_memory
from .software import ours
from .step_time import StepModel
from .units import with_keep

UNKNOWN = "h100"  # whose rates stand in for those of a GPU without a file
FORMULAS = 0.01  # the share of a CPU's budget that formulas leave out: ids, tables of positions, statistics
NAMES = {"H100": "h100", "H200": "h200", "B200": "b200", "A100-SXM4-40GB": "a100-40", "A100": "a100-80"}
GIB = 2**30


def room(nbytes: float, on_cpu: bool) -> float:
    """Bytes that a rank may be predicted to need under a budget of so many: on a GPU fragments take a share."""
    return nbytes * (1 - (FORMULAS if on_cpu else MARGIN))


def size(nbytes: float) -> str:
    """Bytes as the text of a budget, rounded up: "43.6GiB"."""
    unit, name = (GIB, "GiB") if nbytes >= GIB else (2**20, "MiB")
    return f"{-(-10 * nbytes // unit) / 10:g}{name}"


def device_here(config: RunConfig) -> tuple[Device, str | None]:
    """(the device whose rates seconds are computed with, a sentence if it is not the run's own)."""
    if config.train.device == "cpu":
        return load_device("cpu"), None
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    for word, file in NAMES.items():
        if word in name:
            return load_device(file), None
    what = f"the GPU {name!r} has no file of rates" if name else "there is no GPU here"
    return load_device(UNKNOWN), f"parallel.memory_budget: {what}, so times are those of {UNKNOWN}"


def with_budget(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(the configuration with parallel.keep chosen for its budget, sentences for the user); as it is without a budget.

    A run that is resumed under the budget it began with keeps what it kept, unless that no longer fits. A `keep` that
    is given with a budget is only compared with it. Errors: ValueError for a budget that is too small, with the least
    that works and what would lower it; for a share of a device that is not there; and for a run whose memory has no
    formula (FP8 on a CPU, some exchanges).
    """
    text = config.parallel.memory_budget
    if not text:
        return config, []
    _check_modelled(_on_its_device(config))
    began = _began_with(config) if config.run.resume and not config.parallel.keep else ""
    config, asked = (with_keep(config, began) if began else config), config
    planned = _planned(config)
    cuda = planned.train.device != "cpu"
    here = torch.cuda.get_device_properties(0).total_memory if cuda and torch.cuda.is_available() else None
    nbytes = budget_bytes(text, here)
    most = room(nbytes, not cuda)
    again = None
    if config.parallel.keep:
        if (need := peak(planned)) <= most:
            return config, []
        if began:  # in another layout, or with a larger microbatch
            again = (
                f"parallel.memory_budget = {text!r}: the run kept {began}, which needs {size(need / most * nbytes)} "
                f"now; it chooses again, which changes no loss"
            )
            config, planned = asked, with_keep(planned, "")
        else:
            raise ValueError(
                f"parallel.keep={config.parallel.keep!r} is predicted to need {size(need / most * nbytes)}, more than "
                f"parallel.memory_budget={text!r}: leave keep out to choose again, or raise the budget"
            )
    device, note = device_here(planned)
    device = device.scaled(device.factor)
    if (found := choose(planned, device, most)) is None:
        raise ValueError(_refusal(planned, device, text, nbytes, most))
    bare = StepModel(with_keep(planned, PLAIN), device, ours(planned.parallel, device)).step().seconds
    line = (
        f"parallel.memory_budget = {text!r}: layers keep {found.keep}; predicted {size(found.memory)} of a rank at its "
        f"peak, and steps {max(0.0, found.seconds / bare - 1):.1%} longer than with all kept"
    )
    if planned.model.n_experts is not None:
        ranks = range(planned.parallel.pipeline_parallel)
        worst = max(predicted_memory(with_keep(planned, found.keep), rank, worst=True).total for rank in ranks)
        line += f"; experts are taken to get equal numbers of tokens, at worst {size(worst)}"
    return with_keep(config, found.keep), [each for each in (again, note, line) if each is not None]


def _check_modelled(config: RunConfig) -> None:
    """ValueError for a run whose time or memory has no model."""
    layout, exchange, fp8 = config.parallel, exchange_named(config.parallel.exchange), config.train.precision == FP8
    if fp8 and device_here(config)[0].machine.fp8_flops is None:
        what = f"train.precision={FP8!r} has no model of its time on this device"
    elif exchange.changes_losses or exchange.takes_steps:
        what = f"parallel.exchange={layout.exchange!r} has no model of its time"
    else:
        return
    raise ValueError(
        f"parallel.memory_budget={layout.memory_budget!r} is met by predictions, and {what}: leave the budget out, and "
        f"say by parallel.keep what layers keep"
    )


def predicted_bytes(config: RunConfig) -> float:
    """The predicted peak of the rank that needs most, of a run under a budget whose `keep` is chosen."""
    return peak(_planned(config))


def _planned(config: RunConfig) -> RunConfig:
    """The configuration to count, which has no budget."""
    layout = dataclasses.replace(config.parallel, memory_budget="")
    return plan_config(dataclasses.replace(_on_its_device(config), parallel=layout))


def _on_its_device(config: RunConfig) -> RunConfig:
    """The configuration with the device that the run has here, as a dry run takes an unset one for a GPU."""
    device = config.train.device or device_type(config)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, device=device))


def _began_with(config: RunConfig) -> str:
    """What the run in run.dir keeps, if it began under the same budget; else ""."""
    path = Path(config.run.dir) / "config.toml"
    if not path.is_file():
        return ""
    before = build_config(read_toml(path)).parallel
    return before.keep if before.memory_budget == config.parallel.memory_budget else ""


def _refusal(config: RunConfig, device: Device, text: str, nbytes: float, most: float) -> str:
    """The sentence for a budget that is too small: the least that works, and what would lower it."""
    floor, keep = least(config)
    share = nbytes / most
    states = max(_states(config, rank) for rank in range(config.parallel.pipeline_parallel))
    lower = [f"{what} ({size(share * need)})" for what, need in lowering(config) if need < floor]
    less = f"less is needed with {', '.join(lower[:4])}; " if lower else ""
    return (
        f"parallel.memory_budget={text!r} is too small: this run needs {size(share * floor)} with keep = {keep!r}, "
        f"{size(share * states)} of it for model states; {less}or take more ranks"
    )


def _states(config: RunConfig, rank: int) -> float:
    plan = predicted_memory(config, rank)
    names = {state.name for state in plan.states}
    return sum(nbytes for name, nbytes in plan.parts if name in names)


def least(config: RunConfig) -> tuple[float, str]:
    """(the least bytes of the rank that needs most, with what each layer keeps then): one way for all layers, or in
    all but the last, which is computed again at once."""
    n, found = config.model.n_layers, []
    for way in ways_of(config):
        for last in {way, way._replace(recompute="none", offload=False)}:
            keep = keep_text([way] * (n - 1) + [last])
            found.append((peak(with_keep(config, keep)), keep))
    return min(found)


def lowering(config: RunConfig) -> list[tuple[str, float]]:
    """(a change of the configuration, the least bytes that the run needs then), smallest first."""
    layout, train = config.parallel, config.train
    changes: list[tuple[str, Layout, int | None]] = []
    shared = dataclasses.replace(layout, data_parallel_replicate=1, data_parallel_shard=layout.data_parallel)
    for stage in range(layout.zero + 1, 4):
        changes.append((f"zero_stage = {stage}", dataclasses.replace(shared, zero_stage=stage), None))
    if not layout.cpu_offload and config.train.device != "cpu":
        changes.append(("cpu_offload = true", dataclasses.replace(layout, cpu_offload=True), None))
        if layout.zero < 3:
            both = dataclasses.replace(shared, cpu_offload=True, zero_stage=3)
            changes.append(("cpu_offload = true and zero_stage = 3", both, None))
    if config.microbatch_size > 1:
        changes.append((f"microbatch_size = {config.microbatch_size // 2}", layout, config.microbatch_size // 2))
    found = []
    for what, changed, samples in changes:
        other = dataclasses.replace(
            config, parallel=changed, train=dataclasses.replace(train, microbatch_size=samples or train.microbatch_size)
        )
        try:
            check(other)
            found.append((what, least(other)[0]))
        except ValueError:  # this layout cannot have it
            continue
    return sorted(found, key=lambda pair: pair[1])


def uniform(config: RunConfig, device: Device, most: float) -> Choice | None:
    """The fastest Choice of one way for all layers that fits, without offloading: what one key could say so far."""
    found = []
    for way in reversed(ways_of(config)):  # of equally fast ways that which keeps most
        changed = with_keep(config, str(way))
        if not way.offload and (need := peak(changed)) <= most:
            seconds = StepModel(changed, device, ours(config.parallel, device)).step().seconds
            found.append(Choice(str(way), need, seconds, 0.0))
    return min(found, key=lambda choice: round(choice.seconds, 9), default=None)


def budget_table(config: RunConfig, device: Device, budgets: Sequence[str]) -> Iterator[Table | str]:
    """A table of what layers keep under each budget, and lines below it. Errors: ValueError for a text that is none."""
    sizes = [budget_bytes(text, device.memory) for text in budgets]
    on_cpu = config.train.device == "cpu"
    plain = with_keep(config, PLAIN)
    ways = [way for way in ways_of(config) if not way.offload]
    bare, need = StepModel(plain, device, ours(config.parallel, device)).step().seconds, peak(plain)
    table = Table(
        "budget", "one way for all", "mixed, no offload", "mixed", "peak", "keep", box=None, pad_edge=False,
        title=f"Memory budgets, predicted: all is kept in {size(need)}, a step takes {bare:.3g} s",
    )  # fmt: skip
    open_: list[str] = []
    for text, nbytes in zip(budgets, sizes, strict=True):
        most = room(nbytes, on_cpu)
        found = [uniform(config, device, most), choose(config, device, most, ways), choose(config, device, most)]
        cells = ["-" if each is None else f"+{max(0.0, each.seconds / bare - 1):.1%}" for each in found]
        if found[0] is not None:
            cells[0] += f" {found[0].keep}"
        best = found[-1]
        if best is not None and best.short > 0:
            open_.append(f"{text}: {best.short:.1%}")
        table.add_row(text, *cells, *(("", "does not fit") if best is None else (size(best.memory), best.keep)))
    yield table
    if open_:
        yield f"Another mix could be faster, at most by so much of a microbatch: {', '.join(open_)}; elsewhere none."
    else:
        yield "No other mix is faster."
    share = FORMULAS if on_cpu else MARGIN
    floor, keep = least(config)
    yield (
        f"{share:.0%} of a budget is left free{'' if on_cpu else ' for fragments'}. The least that works is "
        f"{size(floor / (1 - share))}, with keep = {keep!r}."
    )
    others = [f"{what}: {size(each / (1 - share))}" for what, each in lowering(config) if each < floor]
    if others:
        yield f"Lower with {'; '.join(others)}."
    yield "All figures are predictions."
