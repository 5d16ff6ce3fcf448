"""RANGES: the values that each number of a configuration may have, and the one check of them.

Belongs here: ranges of single numbers. What two settings must have in common is checked beside their sections.
"""

from functools import cache
from typing import Any

from tpformer.words import shown

NO_FLOAT = 2**1000  # whole numbers from here on are not turned into floats
COUNT, AMOUNT, POSITIVE, SHARE = "[1, inf)", "[0, inf)", "(0, inf)", "[0, 1)"

# "[" and "]" include the end, "(" and ")" do not. A whole number below inf is below 2**63, a float is finite.
RANGES = {
    "run.timeout": "[1e-3, 1e9]",  # torch.distributed counts in milliseconds
    "run.max_restarts": AMOUNT,
    "model.vocab_size": "[1, 2147483648]",  # ids are stored as int32
    "model.vocab_multiple": "[1, 2147483648]",  # so is the padding
    "model.seq_length": COUNT,
    "model.n_layers": "[1, 1e4]",  # each is an entry of several lists
    "model.hidden_size": COUNT,
    "model.n_heads": "[1, 1e6]",  # the same
    "model.n_kv_heads": COUNT,
    "model.head_dim": COUNT,
    "model.sliding_window": COUNT,
    "model.ffn_hidden_size": COUNT,
    "model.n_experts": "[1, 1e5]",
    "model.experts_per_token": COUNT,
    "model.expert_ffn_size": COUNT,
    "model.shared_expert_size": AMOUNT,
    "model.first_dense_layers": AMOUNT,
    "model.router_scale": POSITIVE,
    "model.router_groups": COUNT,
    "model.router_top_groups": COUNT,
    "model.norm_eps": AMOUNT,
    "model.rope_base": POSITIVE,
    "model.rope_scaling_factor": COUNT,
    "model.rope_low_frequency": POSITIVE,
    "model.rope_high_frequency": POSITIVE,
    "model.rope_original_length": COUNT,
    "model.dropout": SHARE,
    "model.init_std": AMOUNT,
    "data.weights": POSITIVE,
    "data.end_of_document": AMOUNT,
    "parallel.tensor_parallel": COUNT,
    "parallel.pipeline_parallel": COUNT,
    "parallel.pipeline_stages_per_rank": COUNT,
    "parallel.data_parallel_replicate": COUNT,
    "parallel.data_parallel_shard": COUNT,
    "parallel.context_parallel": COUNT,
    "parallel.expert_parallel": COUNT,
    "parallel.zero_stage": "[0, 3]",
    "parallel.recompute_interval": COUNT,
    "optimizer.lr": AMOUNT,
    "optimizer.min_lr_ratio": "[0, 1]",
    "optimizer.warmup_steps": AMOUNT,
    "optimizer.decay_fraction": "[0, 1]",
    "optimizer.beta1": SHARE,
    "optimizer.beta2": SHARE,
    "optimizer.eps": "[1e-37, inf)",  # float32 makes less 0, and 0 / 0 of what has no gradient
    "optimizer.momentum": SHARE,
    "optimizer.weight_decay": AMOUNT,
    "optimizer.clip_norm": AMOUNT,
    "train.steps": COUNT,
    "train.seed": AMOUNT,
    "train.global_batch_size": "[1, 1e8]",  # they are taken one by one
    "train.batch_size_start": COUNT,
    "train.batch_size_ramp_steps": COUNT,
    "train.microbatch_size": COUNT,
    "train.label_smoothing": SHARE,
    "train.z_loss": AMOUNT,
    "train.balance_loss": AMOUNT,
    "train.router_bias_rate": AMOUNT,
    "train.validation_interval": COUNT,
    "train.validation_samples": COUNT,
    "train.max_skipped_steps": COUNT,
    "checkpoint.interval": AMOUNT,
    "checkpoint.keep": COUNT,
    "log.interval": COUNT,
    "log.norm_interval": AMOUNT,
    "log.noise_interval": AMOUNT,
    "log.timeline_step": AMOUNT,
    "log.profile_step": AMOUNT,
}


@cache
def _ends(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


@cache
def _keys_of(section: str) -> list[tuple[str, str]]:
    """(key, name in the section) of its numbers. A search for plans checks thousands of configurations."""
    pairs = [(key, *key.split(".")) for key in RANGES]
    return [(key, name) for key, of, name in pairs if of == section]


def in_range(value: float, interval: str) -> bool:
    """Whether an interval such as "[0, 1)" contains the value; none contains NaN."""
    low, high = _ends(interval)
    if isinstance(value, int) and high == float("inf"):
        high = 2.0**63
    return (value > low if interval[0] == "(" else value >= low) and (
        value < high if interval[-1] == ")" else value <= high
    )


def check_range(key: str, value: float | tuple[float, ...] | None, name: str | None = None) -> None:
    """ValueError with key, value and range if a number, or one of several, is outside of RANGES[key]; None passes.

    name: what the message calls it; unset: the key.
    """
    for number in value if isinstance(value, tuple) else () if value is None else (value,):
        check_inside(name or key, number, RANGES[key])


def check_inside(name: str, value: float, interval: str) -> None:
    """ValueError with name, value and range if a number is outside of an interval such as "[0, 1)"."""
    if not in_range(value, interval):
        raise ValueError(f"{name}={shown(value)} must be {_words(interval, value)}")


def _words(interval: str, value: float) -> str:
    low, high = interval[1:-1].split(", ")
    if high != "inf":
        return f"in {interval}"
    least = f"{'above' if interval[0] == '(' else 'at least'} {low}"
    if isinstance(value, float):
        return f"{least} and finite"
    return least if value < 1 else f"{least} and below 2**63"


def check_ranges(section: str, values: Any, prefix: str | None = None) -> None:
    """check_range of every number of a section, an object with its keys as attributes.

    prefix: what messages put before a key; unset: the section and a dot.
    """
    for key, name in _keys_of(section):
        check_range(key, getattr(values, name), key if prefix is None else prefix + name)
