"""Text of the planner: tables of layouts and of the validation, why the winner wins, and records for JSON and CSV.

Belongs here: what is printed or written as data. The page with pictures is plan_page.py's. All figures of layouts are
predictions, and the advice is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tpformer.config import FP8
from tpformer.config.zero_gather import check_zero_gather, gather_words, gathered_weights
from tpformer.kernels.cost import break_even_width, break_evens_in_blocks
from tpformer.models import GPTConfig
from tpformer.ops.row_exchange import share_of_rank

from .advice import advice
from .candidates import Question
from .costs import Cost, cost_lines
from .layouts import WORDS, layout_text
from .placement import EXCHANGED, placement
from .published import Outcome, strong_scaling
from .quantising import check_fp8_device
from .report import size
from .search import Choice, Found, model_of, range_of
from .stage_time import StepTime
from .states import exchanging_ranks

ITEMS = {
    "compute": "compute", "tp": "exposed TP", "cp": "CP", "ep": "EP", "pp": "PP", "dp": "exposed DP",
    "bubble": "bubble", "optimizer": "optimizer", "host": "host",
}  # fmt: skip


def shares(step: StepTime) -> dict[str, float]:
    """Each item's share of the step."""
    return {name: getattr(step, name) / step.seconds for name in ITEMS}


def cost_of(choice: Choice, question: Question, tokens: float, price: float | None = None) -> Cost:
    """What a training of so many tokens costs in a layout. price: of one GPU for an hour."""
    flops = question.config.model.flops_per_token * tokens
    return Cost(flops, question.gpus, tokens / choice.tokens, price)


def cost_range(choice: Choice, question: Question, tokens: float, price: float | None = None) -> list[Cost]:
    """The same at the speeds that published runs leave open, the lower cost first."""
    speeds = sorted(range_of(question, choice.config), reverse=True)
    return [cost_of(choice._replace(tokens=speed), question, tokens, price) for speed in speeds]


def between(low: float, high: float, form: str = ",.3g", to: str = " to ") -> str:
    """A range as text; one number where both look alike."""
    return to.join(dict.fromkeys((format(low, form), format(high, form))))


def assumed(question: Question) -> str:
    """What all figures rest on and no layout shows: the step's samples, and the factor of the device's rates."""
    train, device = question.config.train, question.device
    if device.factor == 1.0:
        rates = "rates as they are in the device's file"
    else:
        rates = f"FLOP/s x {device.factor:.2f} (fitted on published runs: {between(*device.fitted, '.2f')})"
    rates = f"FP8, {rates}" if train.precision == FP8 else rates
    return f"steps of {train.global_batch_size:,} samples of {question.config.model.seq_length:,} tokens, {rates}"


def mfu_name(question: Question) -> str:
    """The heading of MFU, which in FP8 says what it is a share of: the peak of 16 bits."""
    return "MFU of 16 bits" if question.config.train.precision == FP8 else "MFU"


def plain_values(choice: Choice, question: Question, tokens: float, price: float | None) -> dict[str, Any]:
    """A layout as plain values: seconds, bytes, tokens/s, MFU, days for `tokens` tokens and their price."""
    cost, ends = cost_of(choice, question, tokens, price), cost_range(choice, question, tokens, price)
    found: dict[str, Any] = {
        "layout": layout_text(choice.config),
        "gpus": question.gpus,
        "device": question.device.name,
    }
    found |= {"step_seconds": choice.step.seconds, "tokens_per_second": choice.tokens, "mfu": choice.mfu}
    found |= {f"{name}_seconds": seconds for name, seconds in choice.step._asdict().items()}
    found |= {"memory_bytes": choice.memory.total, "host_bytes": choice.memory.host, "days": cost.days}
    found |= {"days_least": ends[0].days, "days_most": ends[1].days, "rate_factor": question.device.factor}
    found |= {"seq_length": question.config.model.seq_length, "samples": question.config.train.global_batch_size}
    found |= {f"{name.strip(' *')} bytes": nbytes for name, nbytes in choice.memory.parts}
    if question.config.train.precision == FP8:
        found |= {"precision": FP8, "mfu_of_flops": question.device.machine.peak_flops}
    if price is not None:
        found |= {"price": cost.price, "price_least": ends[0].price, "price_most": ends[1].price}
    return found


def table(
    choices: Sequence[Choice], question: Question, tokens: float | None = None, price: float | None = None
) -> Table:
    """A row for each layout: its step by items, its memory, and where they are given the days and price of a training.

    tokens: of the training. price: of one GPU for an hour.
    """
    title = f"predicted, {question.gpus} x {question.device.name}: {assumed(question)}"
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("layout", overflow="fold", min_width=24)
    of_training = [] if tokens is None else ["days"] if price is None else ["days", "price"]
    hidden = {item for item in ("cp", "ep") if not any(getattr(choice.step, item) for choice in choices)}
    items = {item: name for item, name in ITEMS.items() if item not in hidden}
    for name in ("tokens/s", mfu_name(question), "step", *items.values(), "memory", *of_training):
        found.add_column(name, justify="right")
    for choice in choices:
        cells = [f"{choice.tokens:,.0f}", f"{choice.mfu:.1%}", f"{choice.step.seconds:.2f} s"]
        cells += [f"{share:.1%}" for item, share in shares(choice.step).items() if item in items]
        cells.append(size(choice.memory.total))
        if tokens is not None:
            low, high = cost_range(choice, question, tokens, price)
            cells.append(between(low.days, high.days, to="\nto "))
            if price is not None:
                cells.append(between(low.price or 0.0, high.price or 0.0, ",.0f", "\nto "))
        found.add_row(layout_text(choice.config), *cells)
    return found


def memory_table(choice: Choice, question: Question) -> Table:
    """What the fullest rank of a layout holds at its peak."""
    title = f"memory of the fullest rank, {question.device.name}: predicted"
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("part")
    found.add_column("bytes", justify="right")
    for name, nbytes in choice.memory.parts:
        found.add_row(name, size(nbytes))
    found.add_row("together", size(choice.memory.total))
    found.add_row("free beside context and margin", size(question.room))
    if choice.memory.host:
        found.add_row("in host memory", size(choice.memory.host))
    return found


def count_text(n: float) -> str:
    """A number of parameters or tokens, such as 8.03B or 124.4M."""
    return f"{n / 1e9:,.4g}B" if n >= 1e9 else f"{n / 1e6:,.4g}M"


def cost_part(choice: Choice, question: Question, tokens: float, price: float | None) -> dict[str, list[str]]:
    """{heading: lines} of what a training in a layout costs."""
    ends = cost_range(choice, question, tokens, price)
    lines = [*cost_lines(cost_of(choice, question, tokens, price)), f"in all: {assumed(question)}"]
    if question.device.factor != 1.0:
        dollars = "" if price is None else f", {between(ends[0].price or 0, ends[1].price or 0, ',.0f')} dollars"
        lines.append(f"with the factors of published runs: {between(ends[0].days, ends[1].days)} days{dollars}")
    return {f"Cost of training on {count_text(tokens)} tokens": list(lines)}


def exchange_part(choice: Choice, question: Question) -> dict[str, list[str]]:
    """{heading: lines} of what the exchange of tokens takes beside the experts' GEMMs, and if it is more, what helps.
    Empty without an exchange."""
    ep, model = exchanging_ranks(choice.config.parallel), choice.config.model
    if ep is None or model.n_experts is None:
        return {}
    layer, device = model_of(question, choice.config).layer, question.device
    exchanges, gemms = layer.exchanging(), layer.experts_gemms()
    inside, nodes = device.spread(ep, 1)
    out, home = (size(layer.exchanged_bytes(home=each)) for each in (False, True))
    sent = home if out == home else f"{out} out or {home} home"
    lines = [
        f"{EXCHANGED[choice.config.parallel.recompute]} exchanges of a layer and microbatch take {1e3 * exchanges:.1f} "
        f"ms, its experts' GEMMs {1e3 * gemms:.1f} ms; a rank sends {sent} in each, "
        f"{(ep - inside) / ep:.0%} of it to other nodes"
    ]
    if exchanges > gemms:
        lines.append("so ranks exchange tokens for longer than they compute with them")
        if nodes > 1:
            lines.append(f"with ep={inside}, in one node, they would take {1e3 * layer.exchanging(inside):.1f} ms")
            once = sent_once(model, nodes) / sent_once(model, ep)
            lines.append(f"a token that is sent once to each node would be {once:.2f} of the bytes, which is not built")
    return {"Exchange of tokens for experts, predicted": lines}


def blocks_part(choice: Choice, question: Question) -> dict[str, list[str]]:
    """{heading: lines} of what FP8 is predicted to gain over 16 bits in the same layout. Empty without FP8."""
    config, machine = choice.config, question.device.machine
    if config.train.precision != FP8:
        return {}
    train = dataclasses.replace(config.train, precision="16")
    without = model_of(question, dataclasses.replace(config, train=train)).step()
    rate, gain = check_fp8_device(question.device), without.seconds / choice.step.seconds
    lines = [
        f"GEMMs of blocks at {rate / 1e12:.0f} TFLOP/s, those of weight gradients, in 16 bits, at "
        f"{machine.flops / 1e12:.0f}; MFU is of the dense peak of 16 bits, {machine.peak_flops / 1e12:.0f}",
        f"in 16 bits this layout takes {without.seconds:.3g} s for a step: FP8 is {gain:.2f} times as fast",
    ]
    lines += _gather_lines(choice, question)
    t = config.parallel.tensor_parallel
    evens = break_evens_in_blocks(t, machine, question.device.itemsize)
    if t > 1 and evens is not None:
        of_16_bits = break_even_width(t, machine, question.device.itemsize)
        lines.append(
            f"a GEMM takes longer than its collective from {of_16_bits:.0f} features of a rank on; one of blocks takes "
            f"longer than their gather from {evens[0]:.0f} on, and than a reduction in 16 bits from {evens[1]:.0f}"
        )
    return {"FP8, predicted": lines}


def _gather_lines(choice: Choice, question: Question) -> list[str]:
    """What ZeRO's gathers in blocks are predicted to gain; nothing where they cannot be."""
    config, model = choice.config, choice.config.model
    both = {
        gather: dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero_gather=gather))
        for gather in WORDS["gather"]
    }
    try:
        check_zero_gather(model, both[FP8].parallel, FP8)
    except ValueError:
        return []
    takes = [f"{model_of(question, each).step().seconds:.3g} s with gather={gather}" for gather, each in both.items()]
    lines = [f"a step takes {' and '.join(takes)}"]
    if config.parallel.zero_gather == FP8:
        kinds = dict.fromkeys(map(model.has_experts, range(model.n_layers)))
        weights = [each for kind in kinds for each in gathered_weights(model, config.parallel, experts=kind)]
        lines.append(gather_words((each.name, each.shard) for each in weights))
    return lines


def sent_once(model: GPTConfig, places: int) -> float:
    """Rows of a token that leave if each rank or node that has experts of it gets one, all equally often chosen."""
    return places * share_of_rank(model.experts_per_token, model.n_experts or 0, places)


def parts(choice: Choice, question: Question, tokens: float, price: float | None) -> dict[str, list[str]]:
    """{heading: lines} of what else is to be known of a layout: its placement, its cost, and advice on its training."""
    of_node, layout = question.device.gpus_per_node, choice.config.parallel
    axes = placement(choice.config, of_node, layout.pipeline_parallel // 2)
    sender = "a rank in the middle of the pipeline" if layout.pipeline_parallel > 1 else "a rank"
    return {
        f"Placement on nodes of {of_node}, and what {sender} sends in a step": [*map(str, axes)] or ["nothing"],
        **blocks_part(choice, question),
        **exchange_part(choice, question),
        **cost_part(choice, question, tokens, price),
        "Advice: published rules, no predictions": [*map(str, advice(question.config.model, tokens))],
    }


def largest_loss(choice: Choice) -> tuple[str, float]:
    """The largest item of a step beside computing, and its share."""
    lost = {name: share for name, share in shares(choice.step).items() if name != "compute"}
    worst = max(lost, key=lost.__getitem__)
    return ITEMS[worst], lost[worst]


def why(choices: Sequence[Choice]) -> str:
    """One sentence: why the first layout is the fastest, and what limits it."""
    first = choices[0]
    item, share = largest_loss(first)
    limit = f"{shares(first.step)['compute']:.1%} of its step computes"
    if share >= 0.0005:  # less is 0.0%
        limit += f", and most of the rest is {item} ({share:.1%})"
    if len(choices) == 1:
        return f"{layout_text(first.config)} is the only layout shown: {limit}."
    axes = ("tensor_parallel", "expert_parallel", "pipeline_parallel", "pipeline_schedule", "recompute")
    for other in choices[1:]:
        if any(getattr(other.config.parallel, axis) != getattr(first.config.parallel, axis) for axis in axes):
            break
    else:
        return f"{layout_text(first.config)} is the fastest: {limit}."
    gain = other.step.seconds / first.step.seconds - 1
    more = {name: getattr(other.step, name) - getattr(first.step, name) for name in ITEMS}
    what = max(more, key=more.__getitem__)
    return (
        f"{layout_text(first.config)} wins by {gain:.1%} over {layout_text(other.config)}, which spends "
        f"{more[what]:.3g} s more of a step on {ITEMS[what]}; {limit}."
    )


def dropped_lines(found: Found) -> Iterator[str]:
    """What was not ranked, by reason."""
    for reason, count in (+found.dropped).most_common():
        yield f"  {count:7,d}  {reason}"


def validation_table(found: Outcome) -> Table:
    """Predicted beside published values of one table of runs."""
    source = found.table
    result = Table(title=f"{source.title}: {source.unit}", title_justify="left")
    for name in ("run", "published", "predicted", "error"):
        result.add_column(name, justify="left" if name == "run" else "right")
    for name, value in found.values.items():
        error = "fitted" if name == source.fit else f"{found.errors[name]:+.1f} %"
        result.add_row(name, f"{source.published[name]:.4g}", f"{value:.4g}", error)
    return result


def validation_lines(found: Outcome, teeth: Mapping[str, Sequence[str]] | None = None) -> Iterator[str]:
    """The errors of a table, the constant that they must beat, what was fitted, and the gates."""
    source = found.table
    flops = source.device.machine.flops / 1e12
    if source.fit is None:
        yield f"  nothing fitted: {flops:.0f} TFLOP/s of large GEMMs ({source.device.name}), all rows held out"
    else:
        rate = f"{found.rate:.3f} x {flops:.0f} TFLOP/s of large GEMMs ({source.device.name})"
        if source.rate_of is not None:
            rate = f"attention on context-parallel ranks at {found.rate:.3f} of its speed on one, at the rate of "
            rate += source.rate_of
        yield f"  fitted on {source.fit} alone: {rate}"
    yield (
        f"  held out: mean error {found.mean:.2f} %, largest {found.largest:.1f} %, Spearman {found.spearman:.2f}; the "
        f"best constant, which has seen all rows: {found.constant:.1f} %"
    )
    for name, predicted, published, _ in found.ratios():
        yield f"  {name}: predicted {predicted:.3f}, published {published:.3f}"
    if source.scaling:
        few, many = strong_scaling(source, found.rate)
        low, high = source.scaling["published"]
        yield (
            f"  strong scaling of {source.scaling['row']}: MFU {few:.1f} -> {many:.1f} %, ratio {many / few:.3f}; "
            f"published {low:.0f} -> {high:.0f} %, {high / low:.3f}"
        )
    yield "  gates: " + ("met" if not found.failures else "MISSED: " + "; ".join(found.failures))
    for term, failures in (teeth or {}).items():
        yield f"  without {term}: {'; '.join(failures) or 'the gates are still met'}"
