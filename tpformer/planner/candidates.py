"""What a plan is asked for, and the layouts that divide: which the search looks at, before any model of them.

Belongs here: settings of layouts and why some are dropped. What a layout takes and needs, search.py asks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tpformer.config import FP8, SCHEDULES, Layout, RunConfig, check_config
from tpformer.config.fp8 import check_precision
from tpformer.parallel import Exchange, exchange_of

from .devices import Device
from .layouts import OFFLOADS, pack_of, with_layout
from .software import OURS, Software

CONTEXT = 1e9  # bytes of the CUDA context and libraries, as docs/planner.md says
MARGIN = 0.05  # the share of a device's memory that fragments and NCCL's buffers may take, apart from what is predicted
# naive, GPipe and LoopedBFS idle as long as 1F1B and Interleaved1F1B, and keep more
SEARCHED_SCHEDULES = tuple(name for name in SCHEDULES if name not in ("naive", "GPipe", "LoopedBFS"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: the values that each of a layout's settings may have. None: any that divides."""

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    ep: tuple[int | None, ...] | None = None
    """None in it: experts on the tensor-parallel ranks, which gather tokens in place of exchanging them."""
    schedule: tuple[str, ...] = SEARCHED_SCHEDULES
    stages: tuple[int, ...] | None = None
    most_stages: int = 16
    """The most stages on a rank."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    microbatch: tuple[int, ...] = (1, 2, 4, 8, 16)
    recompute: tuple[str, ...] = ("none", "mlp", "full")
    offload: tuple[str, ...] = OFFLOADS
    pack: tuple[str, ...] | None = None
    """Members of PACKS. None: what the configuration says."""

    def has(self, **values: int | None) -> bool:
        """Whether these settings may have these values."""
        return all((allowed := getattr(self, key)) is None or value in allowed for key, value in values.items())


class Question(NamedTuple):
    """A model and batch (config), and what it is to run on."""

    config: RunConfig
    gpus: int
    device: Device
    software: Software = OURS
    space: Space = Space()
    exchange: Exchange = Exchange()

    @property
    def room(self) -> float:
        """Bytes of a device that a layout may be predicted to need."""
        return self.device.memory * (1 - MARGIN) - CONTEXT


def divisors(n: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return sorted({*small, *(n // each for each in small)})


def shapes(question: Question, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """tp, cp, pp, dp, ep, microbatch, recompute and pack of all layouts that divide. Counts what does not."""
    model, space, batch = question.config.model, question.space, question.config.train.global_batch_size
    for t in divisors(question.gpus):
        if not space.has(tp=t):
            continue
        if crosses_nodes(question, t):
            dropped["tp does not divide a node"] += 1
            continue
        if model.n_heads % t:
            dropped["tp does not divide the heads"] += 1
            continue
        if (why := _why_not_in_blocks(question.config, t)) is not None:
            dropped[why] += 1
            continue
        gathers = (model.n_experts or 0) % t == 0
        if not gathers:
            dropped[_no_gathers(question, t)] += 1
        for cp, p in itertools.product(divisors(question.gpus // t), divisors(question.gpus // t)):
            dp, rest = divmod(question.gpus, t * cp * p)
            if rest or not space.has(cp=cp, pp=p, dp=dp):
                continue
            if cp > 1 and model.seq_length % (2 * cp):
                dropped["2 cp does not divide a sample's tokens"] += 1
                continue
            if p > model.n_layers:
                dropped["fewer layers than pipeline ranks"] += 1
                continue
            every_ep = list(expert_ranks(question, t, cp * dp, gathers))
            for b in space.microbatch if every_ep else ():
                if batch % (dp * b):
                    dropped["dp x microbatch does not divide the batch"] += 1
                    continue
                packs = space.pack or (pack_of(question.config),)
                for ep, recompute, pack in itertools.product(every_ep, space.recompute, packs):
                    sizes = {"tp": t, "cp": cp, "pp": p, "dp": dp, "ep": ep}
                    yield {**sizes, "microbatch": b, "recompute": recompute, "pack": pack}


def _why_not_in_blocks(config: RunConfig, tp: int) -> str | None:
    """Why so many tensor-parallel ranks cannot train in FP8, with the numbers; None if they can, and in 16 bits."""
    train, parallel = config.train, config.parallel
    if train.precision != FP8:
        return None
    try:
        layout = Layout(tensor_parallel=tp, transport=parallel.transport)
        check_precision(config.model, layout, train.device, train.dtype)
    except ValueError as error:
        return str(error).partition(";")[0]
    return None


def _no_gathers(question: Question, tp: int) -> str:
    """What is said of tensor-parallel ranks that cannot share the experts: whether ranks that exchange tokens can."""
    if tp > 1 and not question.config.parallel.sequence_parallel:
        return "tp does not divide the experts, and ep takes sequence_parallel"
    if question.space.ep == (None,):
        return "tp does not divide the experts, and ep, whose ranks exchange tokens, was left out"
    return "tp does not divide the experts without ep, whose ranks exchange tokens"


def expert_ranks(question: Question, tp: int, copies: int, gathers: bool) -> Iterator[int | None]:
    """The numbers of ranks that may share experts and exchange tokens. First None if tp ranks can share them instead.

    copies: data-parallel times context-parallel ranks. One rank alone is what None gives, unless tp ranks would gather.
    """
    n_experts, layout = question.config.model.n_experts, question.config.parallel
    if gathers and question.space.has(ep=None):
        yield None
    if n_experts is None or (tp > 1 and not layout.sequence_parallel):
        return
    for ep in divisors(tp * copies):
        if n_experts % ep == 0 and ep * tp > 1 and question.space.has(ep=ep):
            yield ep


def crosses_nodes(question: Question, tp: int) -> bool:
    """Whether some of the `tp` ranks that share a layer would be in different nodes."""
    node = question.device.gpus_per_node
    return tp > node or (question.gpus > node and node % tp > 0)


def schedules(question: Question, shape: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schedules with which the run's settings allow a shape. Without a pipeline it is {}."""
    n_layers, pipeline = question.config.model.n_layers, shape["pp"]
    candidates: list[dict[str, Any]] = [{}] if pipeline == 1 else []
    for name in question.space.schedule if pipeline > 1 else ():
        kind = SCHEDULES[name]
        sizes = [kind.stages_per_rank]
        if kind.looped:
            most = min(question.space.most_stages, n_layers // pipeline)
            sizes = [v for v in range(2, most + 1) if n_layers % (pipeline * v) == 0 or v == 2]
        sizes = [v for v in sizes if question.space.has(stages=v)]
        candidates += [{"schedule": name, "stages": stages} for stages in sizes]
    # replicas allow fewer numbers of ranks that exchange tokens than shards do; variants looks at each ZeRO stage
    zero = int(shape["ep"] is not None and shape["dp"] * shape["cp"] > 1)
    for schedule in candidates:
        try:
            check(with_layout(question.config, {**shape, **schedule, "zero": zero}))
        except ValueError:
            continue
        yield schedule


def variants(question: Question, shape: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A shape in its schedules and ZeRO stages, in values that Layout allows, without offloading."""
    for schedule in schedules(question, shape):
        splits = bool(schedule) and SCHEDULES[schedule["schedule"]].splits_backward
        for zero in question.space.zero if shape["dp"] * shape["cp"] > 1 else (0,):
            if question.space.has(zero=zero) and (zero <= 1 or not splits) and _shares_experts(shape, zero):
                yield {**shape, **schedule, "zero": zero}


def _shares_experts(shape: Mapping[str, Any], zero: int) -> bool:
    """Whether ZeRO stage 0 makes replicas among which so many ranks can be chosen for experts (Layout.check)."""
    ep, inner = shape["ep"], shape["tp"] * shape["cp"]
    return ep is None or zero > 0 or inner % ep == 0 or ep % inner == 0


def check(config: RunConfig) -> None:
    """ValueError for a layout that the run's settings forbid."""
    check_config(config, trains=False)
    exchange_of(config)
