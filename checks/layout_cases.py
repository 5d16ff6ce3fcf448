"""The layouts, and the models that are trained in them, of `python -m bench layouts`.

Belongs here: which ones, and the configuration of each. How they are trained and compared is in layouts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.parallel import SCHEDULES, Layout

BATCH, LAYERS = 8, 4
SHORT, END = "_short", 256  # the ending of the prefix of a dataset of short documents; the id that ends a document
NEWER: dict[str, Any] = {  # what Llama 3.1, Qwen and Mistral add, in one model
    **{"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "qkv_bias": True, "qk_norm": True},
    **{"n_kv_heads": 2, "head_dim": 12, "sliding_window": 7, "rope_scaling_factor": 8.0, "rope_original_length": 16},
}


# Experts as Mixtral has them; and as DeepSeek-V3, with a shared one, a dense layer first, sigmoid scores, groups, and
# both ways of balancing.
_EXPERTS: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "": {},
    "newer model": NEWER,
    "8 experts": {**_EXPERTS, "n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 24},
    "16 experts and a shared one": {
        **_EXPERTS,
        **{"n_experts": 16, "experts_per_token": 4, "expert_ffn_size": 16, "shared_expert_size": 24},
        **{"first_dense_layers": 1, "router_score": "sigmoid", "router_scale": 2.5, "router_bias": True},
        **{"router_groups": 4, "router_top_groups": 2, "init_std": 0.1},
    },
}
NEWER_MODEL, EIGHT, SIXTEEN = list(MODELS)[1:]
# those of FP8: four ranks can share a linear's features in blocks of 128
_WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 128, "ffn_hidden_size": 512}
MODELS |= {"FP8": _WIDE, "FP8, newer model": {**NEWER, **_WIDE}, "FP8, experts": {
    **{**MODELS[SIXTEEN], **_WIDE, "n_heads": 4}, "n_experts": 8, "expert_ffn_size": 128, "shared_expert_size": 512,
}}  # fmt: skip
FP8_MODEL, FP8_NEWER, FP8_EXPERTS = list(MODELS)[-3:]


class LayoutCase(NamedTuple):
    """A layout, and the settings that it is trained with. microbatch_size None: the configuration derives it.

    model: the name of its options in MODELS; without a name it is a GPT-2. optimizer: the one that trains it.
    documents: its samples have several, and attention stays within one.
    """

    layout: Layout
    microbatch_size: int | None = None
    tied: bool = True
    layers: int = LAYERS
    model: str = ""
    optimizer: str = "adamw"
    documents: bool = False

    def config(self, dtype: str, train: str, steps: int, lr: float) -> RunConfig:
        sizes = {"n_layers": self.layers, "hidden_size": 32, "n_heads": 4, "dropout": 0.1, **MODELS[self.model]}
        model = ModelSection(vocab_size=257, seq_length=16, tie_embeddings=self.tied, **sizes)
        section = TrainSection(
            steps=steps, dtype=dtype, device="cpu", global_batch_size=BATCH, microbatch_size=self.microbatch_size,
            balance_loss=0.01 if self.model in (SIXTEEN, FP8_EXPERTS) else 0.0,
            precision="fp8" if self.in_fp8 else "16",
        )  # fmt: skip
        optimizer = OptimizerSection(lr=lr, warmup_steps=steps // 5)
        if self.optimizer == "sgd":
            optimizer = replace(optimizer, name="sgd", lr=100 * lr, momentum=0.9, nesterov=True)
        elif self.optimizer == "muon":
            low = dtype if dtype == "bfloat16" else None  # on a CPU the iterations are in the parameters' dtype
            optimizer = replace(optimizer, name="muon", lr=10 * lr, muon_dtype=low)
        data = DataSection(train=(train,))
        if self.documents:
            data = DataSection(train=(train + SHORT,), separate_documents=True, end_of_document=END)
        return RunConfig(model=model, data=data, parallel=self.layout, optimizer=optimizer, train=section)

    @property
    def in_fp8(self) -> bool:
        return self.model in (FP8_MODEL, FP8_NEWER, FP8_EXPERTS)

    @property
    def alone(self) -> LayoutCase:
        """The same model in one process."""
        return self._replace(layout=Layout(), microbatch_size=None)

    @property
    def n_microbatches(self) -> int:
        return self.config("float64", "", 1, 1.0).n_microbatches

    def __str__(self) -> str:
        layout, words = self.layout, []
        if layout.tensor_parallel > 1:
            words.append(f"TP{layout.tensor_parallel}" + ("" if layout.sequence_parallel else " without SP"))
        if layout.context_parallel > 1:
            words.append(f"CP{layout.context_parallel}")
        if layout.pipeline_parallel > 1:
            words.append(f"PP{layout.pipeline_parallel} {layout.pipeline_schedule}")
        if layout.data_parallel > 1:
            replicate, shard = layout.data_parallel_replicate, layout.data_parallel_shard
            hybrid = f"{replicate}x{shard}" if min(replicate, shard) > 1 else f"{replicate * shard}"
            words.append(f"DP{hybrid} ZeRO-{layout.zero}")
        elif layout.zero != int(layout.context_parallel > 1):
            words.append(f"ZeRO-{layout.zero}")
        words += [f"EP{layout.expert_parallel}"] if layout.expert_parallel is not None else []
        words += ["gathers in blocks"] if layout.zero_gather != "16" else []
        words += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
        words += [layout.transport] if layout.transport != "auto" else []
        words += ["CPU offload"] if layout.cpu_offload else []
        words += ["activations offloaded"] if layout.offload_activations else []
        words += [layout.exchange] if layout.exchange != "library" else []
        words += [] if self.tied else ["untied"]
        words += [self.model] if self.model else []
        words += [] if self.optimizer == "adamw" else [{"sgd": "SGD", "muon": "Muon"}[self.optimizer]]
        words += ["documents"] if self.documents else []
        return ", ".join(words) or ALONE


def case(
    microbatch_size: int | None = None,
    tied: bool = True,
    model: str = "",
    optimizer: str = "adamw",
    documents: bool = False,
    **layout: object,
) -> LayoutCase:
    """A case from Layout's keywords, some by short names. It has 4 layers, or one a stage if stages are more."""
    short = {
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "schedule": "pipeline_schedule",
        "replicate": "data_parallel_replicate",
        "shard": "data_parallel_shard",
        "cp": "context_parallel",
        "ep": "expert_parallel",
        "zero": "zero_stage",
    }
    made = Layout(**{short.get(key, key): value for key, value in layout.items()})  # type: ignore[arg-type]
    return LayoutCase(made, microbatch_size, tied, max(LAYERS, made.n_stages), model, optimizer, documents)


ONE = case()
TP4, PP4 = case(tp=4), case(2, pp=4, schedule="1F1B")
DP4 = case(shard=4, zero=3)
ALL_AXES = case(2, tp=2, pp=2, shard=2, zero=3, recompute="full")
CASES = (
    # one process: accumulation, recompute, offload
    *(case(1), case(2, recompute="mlp"), case(4, recompute="full"), case(4, cpu_offload=True)),
    # one axis of two
    *(case(tp=2), case(2, tp=2, sequence_parallel=False), case(4, tp=2, recompute="mlp"), case(tp=2, tied=False)),
    *(case(2, replicate=2), case(2, shard=2, zero=1), case(1, shard=2, zero=2), case(2, shard=2, zero=3)),
    case(2, shard=2, zero=3, cpu_offload=True),
    *(case(None if name == "naive" else 2, pp=2, schedule=name) for name in SCHEDULES),
    case(2, pp=2, schedule="ZBVZeroBubble", recompute="full"),
    case(2, pp=2, schedule="GPipe", tied=False),
    # four ranks: one axis, two axes
    *(TP4, case(tp=4, sequence_parallel=False, recompute="full")),
    *(case(replicate=4), case(shard=4, zero=1), case(1, shard=4, zero=2), DP4),
    *(case(None if stage == 1 else 1, replicate=2, shard=2, zero=stage) for stage in (1, 2, 3)),
    *(case({"naive": None, "DualPipeV": 1}.get(name, 2), pp=4, schedule=name) for name in SCHEDULES),
    *(case(2, tp=2, shard=2, zero=2), case(2, tp=2, pp=2, schedule="Interleaved1F1B")),
    *(case(2, pp=2, replicate=2), case(2, pp=2, shard=2, schedule="ZBVZeroBubble")),
    *(case(2, pp=2, shard=2, zero=2, schedule="Interleaved1F1B"), case(2, pp=2, shard=2, zero=3)),
    # eight ranks
    *(case(2, tp=4, shard=2, zero=3), case(tp=2, replicate=2, shard=2, zero=3)),
    *(case(2, tp=4, pp=2, schedule="ZBVZeroBubble"), case(1, tp=2, pp=4, schedule="DualPipeV")),
    *(case(1, pp=4, shard=2, zero=2), case(1, pp=2, shard=4, zero=3)),
    case(2, tp=2, pp=2, replicate=2, schedule="GPipe"),
    case(1, tp=2, pp=2, shard=2, schedule="DualPipeV", recompute="mlp"),
    case(2, tp=2, pp=2, shard=2, zero=2, schedule="Interleaved1F1B"),
    ALL_AXES,
    case(2, tp=2, pp=2, shard=2, zero=3, schedule="LoopedBFS", cpu_offload=True, tied=False),
    # the other model: with more ranks than key-value heads, with the backward split, and on all axes
    *(
        case(2, tp=4, sequence_parallel=False, model=NEWER_MODEL),
        case(2, tp=2, pp=2, schedule="ZBVZeroBubble", model=NEWER_MODEL),
    ),
    case(2, tp=2, pp=2, shard=2, zero=3, recompute="full", model=NEWER_MODEL),
    # all-reduces over replicas as messages: in each ZeRO stage, in a pipeline, and offloaded
    *(case(2, replicate=4, exchange="tree"), case(1, replicate=2, shard=2, zero=1, exchange="driver")),
    *(case(1, replicate=2, shard=2, zero=2, exchange="ring"), case(1, replicate=4, exchange="hierarchical")),
    *(
        case(1, replicate=2, shard=2, zero=3, exchange="butterfly"),
        case(4, replicate=2, cpu_offload=True, exchange="all_pairs"),
    ),
    case(1, pp=2, replicate=2, shard=2, schedule="ZBVZeroBubble", exchange="halving_doubling"),
    # another optimizer: on each axis, and on all
    *(case(4, optimizer="sgd"), case(tp=2, optimizer="sgd"), case(2, tp=4, sequence_parallel=False, optimizer="sgd")),
    *(case(2, pp=2, schedule="ZBVZeroBubble", optimizer="sgd"), case(2, pp=4, schedule="1F1B", optimizer="sgd")),
    *(case(2, shard=2, zero=1, optimizer="sgd"), case(2, shard=4, zero=3, optimizer="sgd")),
    *(
        case(1, replicate=2, shard=2, zero=2, optimizer="sgd"),
        case(4, shard=2, zero=3, cpu_offload=True, optimizer="sgd"),
    ),
    case(2, tp=2, pp=2, shard=2, zero=3, recompute="full", optimizer="sgd"),
    # documents that attention separates
    case(2, tp=2, pp=2, schedule="ZBVZeroBubble", documents=True),
)
# the least, on at most four processes
QUICK_CASES = (case(4, tp=2), case(2, shard=2, zero=3), case(2, tp=2, pp=2, schedule="ZBVZeroBubble"))
# experts: tp is the axis that they are divided over
MOE_CASES = (
    # one process: accumulation, recompute
    *(case(2, model=EIGHT), case(4, model=SIXTEEN, recompute="full"), case(2, model=SIXTEEN, recompute="mlp")),
    # one axis of two and of four
    *(case(tp=2, model=EIGHT), case(2, tp=2, model=SIXTEEN), case(2, tp=2, sequence_parallel=False, model=SIXTEEN)),
    *(case(tp=4, model=EIGHT), case(2, tp=4, model=SIXTEEN, recompute="full")),
    case(4, tp=4, sequence_parallel=False, recompute="mlp", model=EIGHT),
    *(case(2, tp=2, transport="pipelined", model=SIXTEEN), case(2, tp=4, transport="pipelined", model=EIGHT)),
    *(case(2, replicate=2, model=SIXTEEN), case(2, shard=2, zero=1, model=EIGHT)),
    *(case(1, shard=2, zero=2, model=SIXTEEN), case(2, shard=4, zero=3, model=SIXTEEN)),
    *(case(2, pp=2, schedule="1F1B", model=SIXTEEN), case(2, pp=2, schedule="ZBVZeroBubble", model=SIXTEEN)),
    case(2, pp=2, schedule="GPipe", recompute="full", model=EIGHT),
    case(2, pp=4, schedule="InterleavedZeroBubble", model=EIGHT),
    # two and three axes
    *(case(2, tp=2, shard=2, zero=3, model=EIGHT), case(2, tp=2, replicate=2, model=SIXTEEN)),
    *(
        case(2, tp=2, pp=2, schedule="ZBVZeroBubble", model=SIXTEEN),
        case(1, tp=2, pp=2, schedule="DualPipeV", model=EIGHT),
    ),
    case(2, tp=2, pp=2, schedule="Interleaved1F1B", recompute="mlp", model=EIGHT),
    case(2, tp=4, pp=2, schedule="ZBVZeroBubble", recompute="full", model=SIXTEEN),
    case(2, tp=4, shard=2, zero=3, model=SIXTEEN),
    case(2, tp=2, pp=2, shard=2, zero=3, recompute="full", model=SIXTEEN),
    case(1, tp=2, pp=2, shard=2, schedule="ZBVZeroBubble", model=EIGHT),
)
# the least, on at most four processes
QUICK_MOE_CASES = (
    case(2, tp=2, recompute="full", model=SIXTEEN),
    case(2, tp=2, pp=2, schedule="ZBVZeroBubble", model=EIGHT),
)
# context parallelism: the ranks share every sample's tokens
CONTEXT_CASES = (
    # one axis of two and of four
    *(case(cp=2), case(cp=2, model=NEWER_MODEL), case(4, cp=2, recompute="full"), case(2, cp=2, model=SIXTEEN)),
    *(case(cp=4), case(cp=4, model=NEWER_MODEL), case(2, cp=2, zero=0), case(2, cp=2, offload_activations=True)),
    # two axes
    *(case(2, cp=2, tp=2), case(2, cp=2, tp=2, model=NEWER_MODEL), case(cp=2, tp=2, sequence_parallel=False)),
    case(2, cp=2, tp=2, recompute="full", model=SIXTEEN),
    *(case(2, cp=2, shard=2, zero=3), case(2, cp=2, replicate=2, zero=0), case(2, cp=2, shard=2, zero=2, model=EIGHT)),
    *(case(2, cp=2, replicate=2, exchange="tree"), case(2, cp=2, replicate=2, zero=0, exchange="ring")),
    *(case(2, cp=2, pp=2, schedule="ZBVZeroBubble"), case(2, cp=2, pp=2, schedule="1F1B", zero=3)),
    case(2, cp=2, shard=2, zero=3, cpu_offload=True),
    # eight ranks
    *(case(1, cp=2, tp=2, pp=2, schedule="DualPipeV"), case(2, cp=4, tp=2, model=NEWER_MODEL)),
    case(2, cp=2, tp=2, shard=2, zero=3, recompute="full", model=SIXTEEN),
    case(1, cp=2, replicate=2, shard=2, zero=2),
    # documents that attention separates
    case(2, cp=2, shard=2, zero=3, model=NEWER_MODEL, documents=True),
    # ten of thirty that chance chose
    case(4, cp=2, tp=2, shard=2, sequence_parallel=False, cpu_offload=True, model=NEWER_MODEL),
    case(1, cp=2, tp=2, zero=0, recompute="mlp", model=EIGHT, optimizer="sgd"),
    case(1, cp=2, replicate=2, shard=2, zero=1, recompute="mlp"),
    case(1, cp=2, tp=2, replicate=2, zero=0, recompute="mlp", transport="pipelined", exchange="butterfly", model=EIGHT),
    case(4, cp=2, tp=2, pp=2, schedule="LoopedBFS", zero=3, recompute="mlp", transport="pipelined"),
    case(2, cp=4, tp=2, recompute="mlp", transport="pipelined", model=NEWER_MODEL),
    case(1, cp=2, pp=2, schedule="GPipe", zero=2),
    case(1, cp=2, pp=2, schedule="DualPipeV", zero=0, recompute="mlp", model=SIXTEEN),
    case(2, cp=4, tp=2, zero=3, recompute="mlp", tied=False, model=EIGHT),
    case(4, cp=4, cpu_offload=True, optimizer="sgd"),
)
QUICK_CONTEXT_CASES = (case(2, cp=2, model=NEWER_MODEL), case(2, cp=2, tp=2))
# experts over the data axes: the ranks exchange tokens
EXCHANGE_CASES = (
    # one axis of two: data, replicas, tensor, context
    *(case(2, shard=2, ep=2, model=EIGHT), case(2, shard=2, zero=3, ep=2, model=SIXTEEN)),
    *(case(2, replicate=2, ep=2, model=SIXTEEN), case(2, tp=2, ep=2, model=SIXTEEN)),
    case(2, cp=2, ep=2, recompute="full", model=SIXTEEN),
    # four ranks: copies of experts on some of them, or on none
    *(case(1, shard=4, zero=3, ep=2, model=SIXTEEN), case(1, shard=4, zero=2, ep=4, model=EIGHT)),
    case(2, shard=2, tp=2, ep=4, zero=3, recompute="full", model=SIXTEEN),
    case(2, shard=2, tp=2, ep=2, recompute="mlp", model=SIXTEEN),
    *(case(1, replicate=2, shard=2, zero=3, ep=2, model=SIXTEEN), case(1, replicate=2, shard=2, ep=4, model=EIGHT)),
    *(case(1, replicate=4, ep=2, model=SIXTEEN), case(2, cp=2, tp=2, ep=4, model=SIXTEEN)),
    *(case(2, cp=2, shard=2, ep=4, zero=2, model=SIXTEEN), case(2, cp=4, ep=4, model=SIXTEEN)),
    case(2, pp=2, shard=2, ep=2, schedule="ZBVZeroBubble", model=SIXTEEN),
    case(2, pp=2, shard=2, ep=2, zero=3, schedule="1F1B", recompute="full", model=EIGHT),
    case(1, shard=4, zero=3, cpu_offload=True, ep=2, model=SIXTEEN),
    *(case(2, tp=4, ep=2, model=SIXTEEN), case(2, tp=2, pp=2, ep=1, schedule="ZBVZeroBubble", model=SIXTEEN)),
    # eight ranks
    case(1, pp=2, tp=2, shard=2, ep=4, schedule="DualPipeV", model=SIXTEEN),
    case(1, cp=2, tp=2, shard=2, ep=8, zero=3, recompute="full", model=SIXTEEN),
    case(1, pp=2, cp=2, shard=2, ep=2, schedule="ZBVZeroBubble", model=SIXTEEN),
    # ten of thirty that chance chose
    case(4, cp=4, replicate=2, ep=4, zero=1, model=SIXTEEN),
    case(2, pp=4, tp=2, ep=1, schedule="1F1B", zero=1, model=EIGHT),
    case(2, shard=2, ep=2, model=EIGHT, optimizer="sgd"),
    case(2, cp=2, ep=2, zero=0, recompute="mlp", model=EIGHT),
    case(1, pp=2, cp=2, replicate=2, ep=2, schedule="1F1B", zero=3, recompute="full", model=SIXTEEN),
    case(1, tp=2, pp=4, ep=1, schedule="GPipe", zero=0, recompute="mlp", model=SIXTEEN),
    case(
        4,
        shard=2,
        tp=2,
        ep=1,
        zero=1,
        recompute="mlp",
        cpu_offload=True,
        transport="pipelined",
        model=SIXTEEN,
        optimizer="sgd",
    ),
    case(1, shard=2, cp=2, ep=4, zero=3, recompute="full", model=EIGHT, optimizer="sgd"),
    case(2, cp=2, pp=2, ep=2, schedule="Interleaved1F1B", zero=0, transport="pipelined", model=SIXTEEN),
    case(2, cp=4, shard=2, ep=2, zero=1, recompute="mlp", cpu_offload=True, model=EIGHT, optimizer="sgd"),
)
QUICK_EXCHANGE_CASES = (case(2, shard=2, ep=2, model=SIXTEEN), case(2, tp=4, ep=2, model=EIGHT))
# FP8: the matrix multiplications of all layouts are of the same quantised numbers
FP8_CASES = (
    # one process: accumulation, recompute
    *(case(1, model=FP8_MODEL), case(4, recompute="full", model=FP8_NEWER), case(2, recompute="mlp", model=FP8_MODEL)),
    # one axis of two
    *(case(tp=2, model=FP8_MODEL), case(2, tp=2, model=FP8_NEWER), case(tp=2, tied=False, model=FP8_NEWER)),
    *(case(2, tp=2, sequence_parallel=False, model=FP8_NEWER), case(4, tp=2, recompute="full", model=FP8_MODEL)),
    *(case(2, replicate=2, model=FP8_NEWER), case(2, shard=2, zero=1, model=FP8_MODEL)),
    *(case(1, shard=2, zero=2, model=FP8_NEWER), case(2, shard=2, zero=3, model=FP8_MODEL)),
    *(case(cp=2, model=FP8_NEWER), case(2, cp=2, zero=0, recompute="full", model=FP8_MODEL)),
    *(case(2, pp=2, schedule="1F1B", model=FP8_NEWER), case(2, pp=2, schedule="ZBVZeroBubble", model=FP8_MODEL)),
    # four ranks
    *(case(tp=4, model=FP8_MODEL), case(2, tp=4, sequence_parallel=False, recompute="mlp", model=FP8_MODEL)),
    *(case(2, shard=4, zero=3, model=FP8_NEWER), case(2, pp=4, schedule="1F1B", model=FP8_MODEL)),
    *(case(2, tp=2, shard=2, zero=3, model=FP8_NEWER), case(2, tp=2, replicate=2, model=FP8_MODEL)),
    *(case(2, cp=2, tp=2, model=FP8_MODEL), case(2, cp=2, shard=2, zero=3, recompute="full", model=FP8_NEWER)),
    case(2, tp=2, pp=2, schedule="ZBVZeroBubble", model=FP8_NEWER),
    case(1, tp=2, pp=2, schedule="DualPipeV", recompute="mlp", model=FP8_MODEL),
    case(2, cp=2, pp=2, schedule="Interleaved1F1B", zero=2, model=FP8_MODEL),
    # eight ranks
    case(2, tp=2, pp=2, shard=2, zero=3, recompute="full", model=FP8_NEWER),
    *(case(1, cp=2, tp=2, shard=2, zero=3, model=FP8_MODEL), case(2, tp=4, pp=2, schedule="GPipe", model=FP8_MODEL)),
    # key-value heads that ranks share
    *(case(tp=4, model=FP8_NEWER), case(2, tp=4, sequence_parallel=False, recompute="full", model=FP8_NEWER)),
    case(2, tp=4, pp=2, schedule="ZBVZeroBubble", model=FP8_NEWER),
    # weights that ZeRO gathers in blocks, as far as shards have whole ones
    *(
        case(2, shard=2, zero=3, zero_gather="fp8", model=FP8_NEWER),
        case(1, shard=2, zero=2, zero_gather="fp8", model=FP8_MODEL),
    ),
    # chunks of gathers
    *(case(2, tp=2, transport="pipelined", model=FP8_NEWER), case(2, tp=4, transport="pipelined", model=FP8_MODEL)),
    case(2, tp=2, pp=2, transport="pipelined", schedule="ZBVZeroBubble", model=FP8_MODEL),
)
# likewise of experts, which tensor-parallel ranks share, or ranks that exchange tokens
FP8_EXPERTS_CASES = tuple(
    each._replace(model=FP8_EXPERTS)
    for each in (
        *(case(1), case(4, recompute="full"), case(tp=2), case(2, tp=2, sequence_parallel=False)),
        *(case(tp=4), case(2, tp=4, sequence_parallel=False, recompute="mlp"), case(2, tp=4, recompute="full")),
        *(case(2, tp=2, transport="pipelined"), case(2, tp=4, transport="pipelined", recompute="mlp")),
        *(case(2, replicate=2), case(2, shard=2, zero=3), case(1, shard=2, zero=2), case(2, cp=2)),
        *(case(2, pp=2, schedule="1F1B"), case(2, pp=2, schedule="ZBVZeroBubble")),
        *(case(2, tp=2, pp=2, schedule="ZBVZeroBubble"), case(2, tp=2, shard=2, zero=3)),
        # tokens that travel
        *(case(2, shard=2, ep=2), case(2, shard=2, zero=3, ep=2), case(2, replicate=2, ep=2, recompute="full")),
        *(case(2, tp=2, ep=2), case(2, cp=2, ep=2, recompute="full"), case(2, tp=2, pp=2, ep=1, schedule="1F1B")),
        *(case(1, shard=4, zero=3, ep=2), case(1, shard=4, zero=2, ep=4), case(2, tp=4, ep=2)),
        *(case(2, shard=2, tp=2, ep=4, zero=3, recompute="full"), case(2, cp=2, tp=2, ep=4)),
        *(case(2, shard=2, tp=2, ep=2, recompute="mlp"), case(2, pp=2, shard=2, ep=2, schedule="ZBVZeroBubble")),
        case(1, pp=2, tp=2, shard=2, ep=4, schedule="DualPipeV"),
        # weights that ZeRO gathers in blocks
        *(case(2, shard=2, zero=3, zero_gather="fp8"), case(1, shard=4, zero=3, ep=2, zero_gather="fp8")),
    )
)
BFLOAT16_CASES = (TP4, PP4, DP4, ALL_AXES)
BFLOAT16_MOE_CASES = (case(tp=4, model=EIGHT), case(2, tp=2, pp=2, schedule="ZBVZeroBubble", model=SIXTEEN))
ALONE = "one process"
CURVES = {ALONE: ONE, "TP4": TP4, "PP4 1F1B": PP4, "DP4 ZeRO-3": DP4}
