"""A run that FP8 cannot serve in every layout is refused with its numbers, before anything starts."""

from typing import Any

import pytest

from tpformer.config import build_config, check_config, preset_config
from tpformer.config.fp8 import BLOCK, check_fp8_run, check_precision
from tpformer.config.layout import Layout
from tpformer.kernels.quantize import format

WIDE = {"hidden_size": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128, "ffn_hidden_size": 768, "vocab_size": 256}
EXPERTS = {"model.n_experts": 4, "model.activation": "swiglu", "model.bias": False, "model.expert_ffn_size": 128}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model.hidden_size": 192}, "model.hidden_size=192: 128 features share a scale, .*choose a multiple of 128"),
    ({"model.head_dim": 32}, r"model.n_kv_heads \* head_dim=64: 128 features"),
    (
        {"model.ffn_hidden_size": 640, "parallel.tensor_parallel": 2},
        r"model.ffn_hidden_size=640 / 2 tensor-parallel ranks = 320: .* multiple of 256, or tensor_parallel from \[1\]",
    ),
    ({"parallel.tensor_parallel": 4, "model.head_dim": 64, "model.n_heads": 8}, "model.head_dim=64: 128 features"),
    ({**EXPERTS, "model.expert_ffn_size": 192}, "model.expert_ffn_size=192: 128 features share a scale"),
    (
        {**EXPERTS, "model.shared_expert_size": 128, "parallel.tensor_parallel": 2},
        "model.shared_expert_size=128 / 2 tensor-parallel ranks = 64",
    ),
    ({**EXPERTS, "model.first_dense_layers": 1, "model.ffn_hidden_size": 192}, "model.ffn_hidden_size=192"),
    ({"train.device": "cuda", "train.dtype": "float32"}, "FP8 with float32 on a GPU: its GEMMs give bfloat16"),
    ({"train.dtype": "float16"}, "FP8 with float16"),
    ({"train.precision": "int8"}, "train.precision='int8': choose one of 16, fp8"),
]
GATHER = {"parallel.zero_gather": "fp8"}
GATHERS: list[tuple[dict[str, Any], str]] = [
    ({"train.precision": "16", "parallel.data_parallel_shard": 2}, "with train.precision='16': linears would multiply"),
    ({}, r"no ranks share a linear's weight \(zero_stage=0, data_parallel_shard \* context_parallel = 1\)"),
    ({"parallel.data_parallel_replicate": 2, "parallel.zero_stage": 0}, r"no ranks share .*zero_stage=0"),
    (
        {"parallel.data_parallel_shard": 8, "parallel.tensor_parallel": 2},
        "with 8 ranks that share each weight: .* of e4m3: none; as they are, being no whole blocks of 128 x 128: "
        "q_proj 256 x 32, k_proj 128 x 32, v_proj 128 x 32, o_proj 32 x 256, fc1 384 x 32, fc2 32 x 384; share them",
    ),
    ({"parallel.zero_gather": "e4m3"}, "parallel.zero_gather='e4m3': choose one of 16, fp8"),
]


def values(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {"model": dict(WIDE), "train": {"precision": "fp8"}, "parallel": {}}
    for key, value in changes.items():
        section, name = key.split(".")
        sections[section][name] = value
    return sections


def test_gpus_that_have_no_gemm_of_blocks_are_refused() -> None:
    for capability in ((8, 0), (8, 9), (12, 0)):
        with pytest.raises(ValueError, match=f"FP8 on a GPU of sm_{capability[0]}{capability[1]}: .* sm_90 and sm_100"):
            check_fp8_run("cuda", "bfloat16", capability)
    for capability in ((9, 0), (10, 0), (10, 3)):
        check_fp8_run("cuda", "bfloat16", capability)


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_cannot_be_is_refused_and_taken_in_16_bits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(build_config(values(changes)), trains=False)
    if "train.precision" not in changes:
        check_config(build_config(values({**changes, "train.precision": "16"})), trains=False)


@pytest.mark.parametrize("changes, message", GATHERS)
def test_gathers_without_blocks_are_refused(changes: dict[str, Any], message: str) -> None:
    batch = {"train.global_batch_size": 8}
    with pytest.raises(ValueError, match=message):
        check_config(build_config(values({**batch, **GATHER, **changes})), trains=False)
    check_config(build_config(values({**batch, **changes, "parallel.zero_gather": "16"})), trains=False)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_fits_is_taken(tp: int) -> None:
    """Each rank has two heads of 128, one of keys, and 384 of the MLP's features; experts are whole on their ranks, and
    where all layers have them no MLP has to fit."""
    check_config(
        build_config(values({"parallel.tensor_parallel": tp, "parallel.transport": "pipelined"})), trains=False
    )
    unsharded = {"parallel.transport": "fused", "parallel.sequence_parallel": False}  # reductions are fused all-reduces
    check_config(build_config(values({"parallel.tensor_parallel": tp, **unsharded})), trains=False)
    shared = {"parallel.data_parallel_shard": 2, "train.global_batch_size": 2, **GATHER}
    check_config(build_config(values({"parallel.tensor_parallel": tp, **shared})), trains=False)
    experts = {**EXPERTS, "model.shared_expert_size": 256, "model.ffn_hidden_size": 100}
    check_config(build_config(values({**experts, "parallel.tensor_parallel": tp})), trains=False)


# the most tensor-parallel ranks of each architecture, powers of two up to 16, by hand
LARGEST = {
    "gpt2-124m": 2,  # 12 heads of 64, 768 features
    "gpt2-1.5b": None,  # 1600 = 12.5 * 128
    "gpt3-175b": 16,
    "llama3-8b": 16,  # 8 key-value heads of 128, two ranks to each
    "llama3-70b": 16,
    "mistral-7b": 16,
    "llama2-7b": 2,  # 11008 = 86 * 128
    "llama2-13b": 4,  # 13824 = 108 * 128
    "qwen2-7b": 4,  # 28 heads
    "qwen2-72b": 1,  # 29568 = 231 * 128
}


def test_the_most_ranks_of_known_architectures() -> None:
    assert {name: most(name) for name in LARGEST} == LARGEST


def most(name: str) -> int | None:
    fitting = []
    for tp in (1, 2, 4, 8, 16):
        try:
            check_precision(preset_config(name), Layout(tensor_parallel=tp), "cpu", "bfloat16")
        except ValueError:
            continue
        fitting.append(tp)
    return max(fitting, default=None)


def test_blocks_are_those_of_the_format() -> None:
    """The configuration imports no torch, so it has the number a second time."""
    assert BLOCK == format.BLOCK
