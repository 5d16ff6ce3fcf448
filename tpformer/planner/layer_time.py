"""Seconds of one layer and of the loss on one rank, by kind of work: what a stage's forward and backward consist of.

Belongs here: which kernels and collectives a layer runs, on a configuration alone. Single kernels are in roofline.py,
tensor-parallel communication by transport in ops/choice/prediction.py, stages and steps in step_time.py.

All is a prediction. Terms: gemm, attention, scores (their traffic), elementwise, cast (of operands; in FP8 what
quantises them), tp (exposed), cp and ep (all of it is exposed: attention waits for the keys and values, experts for
their tokens), recompute, logits, packing, launch (on a CPU), wait (for the host).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tpformer.config import FP8, RunConfig
from tpformer.distributed.links import Link, all_reduce_seconds, all_to_all_seconds
from tpformer.kernels.cost import as_sent, overlapped_seconds
from tpformer.kernels.quantize.format import NUMBER_BYTES, VALUES
from tpformer.layers.embedding import padded_vocab
from tpformer.ops.choice import Grouped
from tpformer.ops.choice.prediction import fused_times, grouped_seconds, sequential_times
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .devices import Device, as_if_on
from .gathers import gather_launches
from .kept import kept_by_kind
from .memory import context_bytes, exchanged_rows, kv_heads, microbatch_tokens
from .quantising import check_fp8_device, launches, quantising_bytes, weight_bytes
from .roofline import GAP, activation_seconds, attention_seconds, gemm_seconds, stream_seconds
from .software import Software
from .states import Precision, exchanging_ranks
from .terms import Linear, PassSeconds, Terms


@functools.lru_cache(maxsize=65536)
def exposed_seconds(
    op: str,
    sizes: tuple[int, int, int],
    t: int,
    transport: str,
    device: Device,
    gemm: float,
    itemsize: int,
    grouped: Grouped | None = None,
    blocks: bool = False,
) -> float:
    """Seconds that a linear's communication adds to its GEMM's `gemm`. sizes: M of all ranks, N and K of this rank.
    grouped: of experts that are gathered for, and have as much work. blocks: the GEMM multiplies blocks of e4m3."""
    if t == 1:
        return 0.0
    if transport == "auto":
        ways = ("sequential", "fused") if device.capability else ("sequential",)
        return min(exposed_seconds(op, sizes, t, each, device, gemm, itemsize, grouped, blocks) for each in ways)
    if transport == "fused":
        with as_if_on(device) as cuda:
            machine, dtype, parts = device.machine, torch.bfloat16, None
            if blocks:
                machine, dtype = machine.of_blocks or machine, VALUES
            if grouped is not None:
                m, _, k = sizes
                parts = grouped_seconds(grouped, m, k, t, t, dtype, cuda, machine)
            found = fused_times(op, sizes, t, dtype, cuda, machine, gemm=parts)
        return max(0.0, found.device - gemm)
    sizes, itemsize = as_sent(op, sizes, itemsize, blocks)
    found = sequential_times(op, sizes, t, itemsize, device.machine, gemm)
    if transport == "pipelined":
        return overlapped_seconds(gemm, found.links, t) - gemm
    return found.links


# float32 without tensor cores beside 16 bits, in TFLOP/s by data sheets: 19.5 and 312 on an A100, 67 and 989 on an H100
FLOAT32 = 1 / 16


class LayerModel:
    """The terms of one layer of a configuration. The numbers are taken to be of the device's dtype."""

    def __init__(self, config: RunConfig, device: Device, software: Software) -> None:
        model, layout = config.model, config.parallel
        self.config, self.model, self.layout, self.device, self.software = config, model, layout, device, software
        self.t, self.h = layout.tensor_parallel, model.hidden_size
        self.tokens = microbatch_tokens(config)
        self.rows = self.tokens / self.t if layout.sequence_parallel else self.tokens
        self.ep = exchanging_ranks(layout)
        self.fp8 = config.train.precision == FP8
        self.uses = config.n_microbatches if layout.keeps_weights else None  # of a weight that is quantised
        self.fuses = self.fp8 and self.t > 1 and software.forward_transport in ("auto", "fused")
        self.speed = check_fp8_device(device) / device.machine.flops if self.fp8 else software.speed
        q, kv = model.query_size // self.t, kv_heads(model, self.t)[0] * model.head_size
        self.q, self.kv = q, kv
        qkv = Linear("qkv", q + 2 * kv, self.h, True, self.tokens, weights=3)
        o = Linear("o", self.h, q, False, self.tokens, bias=model.bias, dropout=model.dropout > 0, normed=True)
        mlp = self._mlp(model.hidden_features, model.ffn_size)
        # an exchange and a shared expert have a norm each
        of_experts = o._replace(normed=self.ep is None or model.shared_expert_size == 0)
        self.linears = {False: (qkv, o, *mlp), True: (qkv, of_experts, *self._experts())}

    def _mlp(self, hidden: int, ffn: int, silent: bool = False) -> tuple[Linear, Linear]:
        n, k = -(-hidden // self.t), -(-ffn // self.t)
        return (
            Linear("fc1", n, self.h, True, self.tokens, weights=hidden // ffn, silent=silent),
            Linear("fc2", self.h, k, False, self.tokens, 1, None, silent, self.model.bias, self.model.dropout > 0),
        )

    def _experts(self) -> tuple[Linear, ...]:
        """Grouped GEMMs of this rank's experts, each with as many rows, and the shared expert's, on the same rows.

        Where tokens are exchanged, the rows are those of all ranks that share the experts, and a shared expert has its
        own collectives.
        """
        model, n_experts = self.model, self.model.n_experts or 0
        if n_experts == 0:
            return ()
        exchanges, f, shared = self.ep is not None, model.expert_size, model.shared_expert_size
        tokens = self.tokens if self.ep is None else round(self.rows) * self.ep
        of_each = -(-tokens * model.experts_per_token // n_experts), 1, n_experts // (self.ep or self.t), exchanges
        # what is exchanged with a shared expert's part beside it stays in 16 bits until it is sent
        dropout = model.dropout > 0 and not (exchanges and shared)
        down = Linear("fc2", self.h, f, False, *of_each, dropout=dropout)
        grouped = Linear("fc1", 2 * f, self.h, True, *of_each), down
        return grouped if shared == 0 else grouped + self._mlp(2 * shared, shared, silent=not exchanges)

    def _gemm(self, m: int, n: int, k: int, experts: int | None) -> float:
        """Seconds of a linear's GEMM in the forward, or of its input gradients: in FP8 those that multiply blocks."""
        operand = NUMBER_BYTES if self.fp8 else None
        return gemm_seconds(m, n, k, self.device, batch=experts or 1, speed=self.speed, operand=operand)

    def _quantising(self, linear: Linear, again: bool = False) -> tuple[float, float, float]:
        """Seconds of FP8's passes in the forward, for the gradients of the input and for those of the weights.

        again: as of linear_forward.
        """
        if not self.fp8:
            return 0.0, 0.0, 0.0
        gathered, there = self.t > 1 and self.layout.sequence_parallel, self.tokens
        if linear.experts is not None and self.ep is not None:
            gathered, there = True, exchanged_rows(self.config)
        moved = quantising_bytes(linear, self.rows, gathered, there, self.fuses)
        forward, inputs, weights = (stream_seconds(each, self.device) for each in moved)
        of_weights, of_inputs = (stream_seconds(each, self.device) for each in weight_bytes(linear, self.uses))
        return forward + (0.0 if again and self.uses else of_weights), inputs + of_inputs, weights

    def launches(self, experts: bool) -> tuple[float, float]:
        """Kernels that FP8 adds to the forward and to the backward of a layer. experts: whether it has some."""
        if not self.fp8:
            return 0, 0
        gather = gather_launches(self.config, experts) if self.layout.zero == 3 else 0  # else once a step
        forward, backward = launches(self.linears[experts], self.uses, self.fuses)
        return forward + gather, backward + gather

    def _cast(self, linear: Linear, operands: int) -> float:
        """Seconds to cast the operands of a linear's GEMM: its weight, and features of all rows."""
        elements = linear.n * linear.k * (operands > 0) + linear.rows * (linear.n if operands > 1 else linear.k)
        return activation_seconds(self.software.cast * elements * (linear.experts or 1), self.device)

    def _exposed(self, op: str, linear: Linear, gemm: float, backward: bool) -> float:
        """Seconds that a linear's collective adds to its forward, or to the GEMM of its input gradients.

        Experts are reduced by a plain collective with every transport but `pipelined` (ops/transports/experts.py).
        """
        if linear.silent:
            return 0.0
        n, k = (linear.k, linear.n) if backward else (linear.n, linear.k)
        grouped = None
        if linear.experts is not None and op == GATHER:
            grouped = Grouped(self.model.experts_per_token, linear.experts, n)
            n = grouped.width(self.t)
        transport = self.software.backward_transport if backward else self.software.forward_transport
        if linear.experts is not None and op != GATHER and transport in ("auto", "fused"):
            transport = "sequential"
        itemsize, sizes = self.device.itemsize, (self.tokens, n, k)
        if op == GATHER and not backward and self.software.gathered_bytes:
            itemsize = self.software.gathered_bytes
        return exposed_seconds(op, sizes, self.t, transport, self.device, gemm, itemsize, grouped, self.fp8)

    def _links(self, op: str, blocks: bool = False) -> float:
        """Seconds of a collective of rows as wide as the residual stream, hidden by nothing. blocks: as in as_sent."""
        sizes, itemsize = (self.tokens, self.h, self.h), self.device.itemsize
        return exposed_seconds(op, sizes, self.t, "sequential", self.device, 1.0, itemsize, None, blocks)

    def linear_forward(self, linear: Linear, again: bool = False) -> Terms:
        """The forward of one linear. again: one that a backward repeats, for which kept blocks of weights are there."""
        gemm = self._gemm(linear.rows, linear.n, linear.k, linear.experts)
        found = Terms(gemm=gemm, cast=self._cast(linear, 1) + self._quantising(linear, again)[0])
        if self.layout.sequence_parallel:
            found["tp"] = self._exposed(GATHER if linear.column else SCATTER, linear, gemm, False)
        elif not linear.column:
            found["tp"] = self._exposed(ALL_REDUCE, linear, gemm, False)
        return found

    def linear_backward(self, linear: Linear) -> tuple[Terms, Terms]:
        """(input gradients, weight gradients) of one linear."""
        dgrad = self._gemm(linear.rows, linear.k, linear.n, linear.experts)
        software, shape = self.software, (linear.n, linear.k, linear.rows)
        speed = 1.0 if self.fp8 else software.speed
        wgrad = gemm_seconds(*shape, self.device, batch=linear.experts or 1, added=software.accumulation, speed=speed)
        _, of_inputs, of_weights = self._quantising(linear)
        inputs = Terms(gemm=dgrad, cast=self._cast(linear, 2) + of_inputs)
        weights = Terms(gemm=wgrad, cast=of_weights)
        if linear.silent:
            return inputs, weights
        sequence, beside = self.layout.sequence_parallel, software.backward_transport == "beside"
        if linear.column:
            op = SCATTER if sequence else ALL_REDUCE
            if beside:
                inputs["tp"] = max(0.0, self._links(op) - wgrad)
            else:
                inputs["tp"] = self._exposed(op, linear, dgrad, True)
            if sequence and software.regathers:
                # `sequential` gathers when it is waited for, behind the GEMM: of blocks this is counted
                behind = self.fp8 and software.backward_transport == "sequential"
                inputs["tp"] += max(0.0, self._links(GATHER, self.fp8) - dgrad * (not behind))
        elif sequence:
            inputs["tp"] = self._links(GATHER) if beside else self._exposed(GATHER, linear, dgrad, True)
        return inputs, weights

    def attention(self, backward: bool) -> Terms:
        """Attention without its linears: flash, or products with scores in main memory and the passes over them.

        Context-parallel ranks have equal parts of what is not masked: their queries see the keys of whole samples.
        """
        model, seq = self.model, self.model.seq_length
        if self.software.scores is None:
            keys = min(seq, model.sliding_window or seq)
            speed = self.software.shared_attention if self.layout.context_parallel > 1 else 1.0
            return Terms(attention=attention_seconds(self.tokens, keys, self.q, self.device, backward) / speed)
        heads, d = self.config.microbatch_size * (model.n_heads // self.t), model.head_size
        own = seq // self.layout.context_parallel
        shapes = [(own, seq, d), (own, d, seq)] * (2 if backward else 1)
        products = sum(gemm_seconds(*shape, self.device, batch=heads) for shape in shapes)
        traffic = activation_seconds(heads * own * seq * self.software.scores[backward], self.device)
        return Terms(attention=products, scores=traffic)

    def keys_and_values(self) -> tuple[float, float]:
        """Seconds in which context-parallel ranks gather a layer's keys and values, and exchange their gradients."""
        place = self.device.spread(self.layout.context_parallel, self.t)
        links = Link(*self.device.inside), Link(self.device.network_latency, self.device.network)
        elements = context_bytes(self.config) / Precision.of(self.config).compute.itemsize
        if self.software.repeats_keys:
            elements *= self.model.n_heads / self.t / kv_heads(self.model, self.t)[1]
        sent = self.device.itemsize * elements
        exchanged = (self.software.key_gradient_bytes or self.device.itemsize) * elements
        return all_reduce_seconds(sent, *place, *links) / 2, all_to_all_seconds(exchanged, *place, *links)

    def routing(self) -> PassSeconds:
        """The router of a layer with experts, what it sends, and the sums of each token's rows.

        Its weights' gradient is not deferred. On several ranks the host waits for the numbers of rows, and the device
        has nothing to do until they are read and the next kernel is launched: each is taken to be as long as a launch.
        Indices are left out.
        """
        if self.ep is not None:
            return self._exchanged(self.ep)
        t, k, logits = self.t, self.model.experts_per_token, self._router_seconds()
        combined = activation_seconds(2 * self.h * self.tokens * (k / t + 1), self.device)
        sent = exposed_seconds(GATHER, (self.tokens, 1, 2 * k), t, "sequential", self.device, 1.0, 4)
        op = SCATTER if self.layout.sequence_parallel else ALL_REDUCE
        returned = exposed_seconds(op, (self.tokens, k, 1), t, "sequential", self.device, 1.0, 4)
        forward = Terms(gemm=logits, elementwise=combined, tp=sent if self.layout.sequence_parallel else 0.0)
        forward["wait"] = 2 * self.software.host_kernel * (t > 1)
        return PassSeconds(forward, Terms(gemm=2 * logits, elementwise=combined, tp=returned), Terms())

    def _router_seconds(self) -> float:
        """Seconds of the router's GEMM, which is in float32."""
        rows, n_experts, speed = round(self.rows), self.model.n_experts or 0, FLOAT32 if self.device.capability else 1.0
        # a library divides such thin products along K, too, so that they fill the device
        moved = 4 * (rows * (self.h + n_experts) + n_experts * self.h)
        flops = 2 * rows * n_experts * self.h
        return max(flops / self.device.machine.flops / speed, stream_seconds(moved, self.device)) + GAP

    def exchange(self, nbytes: float, ep: int | None = None) -> float:
        """Seconds in which the ranks that share experts each send one another equal parts of so many bytes.

        ep: how many these are, if not as many as in the layout. They are neighbours, and fill one node after the other.
        """
        links = Link(*self.device.inside), Link(self.device.network_latency, self.device.network)
        return all_to_all_seconds(nbytes, *self.device.spread(ep or self.ep or 1, 1), *links)

    def exchanged_bytes(self, ep: int | None = None, *, home: bool = True) -> float:
        """Bytes of the rows that a rank sends to its tokens' experts, or with `home` of what it sends back. ep: as in
        exchange."""
        itemsize = NUMBER_BYTES if self.fp8 and not home else self.device.itemsize
        return exchanged_rows(self.config, ep=ep) * self.h * itemsize

    def exchanging(self, ep: int | None = None) -> float:
        """Seconds of all exchanges of rows of one microbatch in a layer, on average. ep: as in exchange."""
        ways = self.layout.kept(self.model.n_layers)
        again = sum(self._repeats(way.recompute).get("fc1", 0.0) for way in ways) / len(ways)
        leaving, coming = (self.exchange(self.exchanged_bytes(ep, home=home), ep) for home in (False, True))
        return (3 + again) * leaving + 2 * coming

    def experts_gemms(self) -> float:
        """Seconds of the grouped GEMMs of one microbatch in a layer, forward and backward."""
        seconds = 0.0
        for linear in (each for each in self.linears[True] if each.experts):
            passes = self.linear_forward(linear), *self.linear_backward(linear)
            seconds += sum(terms["gemm"] for terms in passes)
        return seconds

    def _exchanged(self, ep: int) -> PassSeconds:
        """The same where tokens are exchanged: five times their rows (docs/moe.md), all in turn with computing.

        All experts are taken to get as many tokens. Rows are put in order before they leave; what experts make of them
        is added up before it goes back, and again where it comes back.
        """
        chosen, leaving = self.rows * self.model.experts_per_token, exchanged_rows(self.config)
        logits = self._router_seconds()
        sent, home = (self.exchange(self.exchanged_bytes(home=home)) for home in (False, True))
        weights = self.exchange(4 * chosen)
        ordered = activation_seconds(2 * self.h * 2 * leaving, self.device)
        combined = activation_seconds(2 * self.h * (chosen + 2 * leaving + self.rows), self.device)
        forward = Terms(gemm=logits, elementwise=ordered + combined)
        forward["ep"] = self.exchange(16 * ep) + self.exchange(8 * chosen) + sent + home
        forward["wait"] = 2 * self.software.host_kernel * (ep > 1)
        inputs = Terms(gemm=2 * logits, elementwise=ordered + combined, ep=weights + sent + home)
        return PassSeconds(forward, inputs, Terms(elementwise=ordered, ep=sent))

    def elementwise(self, backward: bool, experts: bool = False) -> dict[str, float]:
        """Seconds of the kernels that only move memory: those of the activation, and all others."""
        software, model = self.software, self.model
        rest = self.rows * self.h * software.stream[backward]
        rest += self.tokens * (self.q + 2 * self.kv) * software.heads[backward]
        if model.position == "rope":
            rest += self.tokens * (self.q + self.kv) * software.rotary[backward]
        features = 2 * model.active_expert_size if experts else model.hidden_features
        activation = self.tokens * features / self.t * software.hidden[backward]
        return {
            "activation": activation_seconds(activation, self.device),
            "rest": activation_seconds(rest, self.device),
        }

    def again(self, recompute: str, experts: bool = False) -> float:
        """Seconds in which the backward of a layer computes parts of the forward again, and communicates for them."""
        repeats = self._repeats(recompute)
        seconds = sum(
            repeats.get(each.name, 0.0) * self.linear_forward(each, again=True).seconds
            for each in self.linears[experts]
        )
        seconds += repeats.get("attention", 0.0) * self.attention(False).seconds
        moved = self.elementwise(False, experts)
        every = repeats.get("elementwise", 0.0)
        return seconds + max(every, repeats.get("activation", 0.0)) * moved["activation"] + every * moved["rest"]

    def _repeats(self, recompute: str) -> Mapping[str, float]:
        """Which parts of a layer a backward computes again, and how much of each."""
        return self.software.repeats.get(recompute, {})

    def work(self, recompute: str = "none", *, experts: bool = False, packs: bool = False) -> PassSeconds:
        """A layer's. recompute: none, mlp or full. experts: whether it has some. packs: whether its activations are
        packed."""
        forward, inputs, weights = self.routing() if experts else (Terms(), Terms(), Terms())
        for linear in self.linears[experts]:
            forward += self.linear_forward(linear)
            of_inputs, of_weights = self.linear_backward(linear)
            inputs += of_inputs
            weights += of_weights
        forward += self.attention(False) + Terms(elementwise=sum(self.elementwise(False, experts).values()))
        inputs += self.attention(True) + Terms(elementwise=sum(self.elementwise(True, experts).values()))
        if self.fp8 and self.model.kv_heads % self.t:  # ranks add up what they share of these gradients, then quantise
            shared = self.tokens, 2 * self.model.kv_size, 1
            inputs["tp"] += exposed_seconds(
                ALL_REDUCE, shared, self.t, "sequential", self.device, 1.0, self.device.itemsize
            )
        if self.layout.context_parallel > 1:
            gather, exchange = self.keys_and_values()
            repeats = self._repeats(recompute).get("attention", 0.0)
            forward["cp"], inputs["cp"] = gather, gather * (1 + repeats) + exchange
        if experts and self.ep is not None:  # tokens come again; what was decided about them is kept
            inputs["ep"] += self._repeats(recompute).get("fc1", 0.0) * self.exchange(self.exchanged_bytes(home=False))
        if recompute != "none":
            inputs["recompute"] += self.again(recompute, experts)
        if packs:
            kept = kept_by_kind(self.config)[experts]
            moved = kept.packing(recompute)
            forward["packing"], inputs["packing"] = (activation_seconds(nbytes, self.device) for nbytes in moved)
        if self.device.launch:
            more = self.software.expert_kernels if experts else (0, 0)
            kernels = [self.device.launch * sum(n) for n in zip(self.software.kernels, more, strict=True)]
            forward["launch"], inputs["launch"], weights["launch"] = kernels[0], kernels[1] * 2 / 3, kernels[1] / 3
        return PassSeconds(forward, inputs, weights)

    def head(self) -> PassSeconds:
        """The last norm, the logits and the loss of one microbatch, and their gradients."""
        width = padded_vocab(self.model.vocab_size or 0, self.model.vocab_multiple) // self.t
        traffic = activation_seconds(self.tokens * width * self.software.logits / 2, self.device)
        gather = self._links(GATHER) if self.layout.sequence_parallel else 0.0
        reduce = self._links(SCATTER if self.layout.sequence_parallel else ALL_REDUCE)
        forward = gemm_seconds(self.tokens, width, self.h, self.device)
        inputs = gemm_seconds(self.tokens, self.h, width, self.device)
        weights = gemm_seconds(width, self.h, self.tokens, self.device, added=self.software.accumulation)
        return PassSeconds(
            Terms(logits=forward + traffic, tp=gather), Terms(logits=inputs + traffic, tp=reduce), Terms(logits=weights)
        )
