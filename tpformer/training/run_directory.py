"""The directory of a run: what is written to it as the run starts, and what a resumed run may not change.

Nothing here imports torch. Rank 0 alone calls all but check_steps.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpformer.config import RunConfig, build_config, to_toml
from tpformer.processes.files import replace_file
from tpformer.weights.family import read_json

from .companions import FOLDER, keep_tokenizer, kept_tokenizer
from .data import FileContent, read_contents
from .resolve import read_stored, same_tokenizer
from .schedules import warmup_steps

START = "start.json"  # what the run found when it last started; without it every dataset is read again
CONTENTS = {"train": "train_contents", "valid": "valid_contents"}  # keys of [data]: what its datasets hold
REQUESTED, CONTINUED, REFUSED = "requested", "continued", "refused"

# What happens when a key differs between a run and its resumption. Requests say what is to be done now. Continued keys
# leave the losses what they are, but for rounding, and are printed. Refused keys change the losses. A key that is
# missing here is refused.
_TABLE = {
    ("run", REQUESTED): "resume changes",
    ("run", CONTINUED): "dir timeout max_restarts",
    ("model", CONTINUED): "preset",  # its fields are compared
    ("model", REFUSED): "vocab_size vocab_multiple seq_length n_layers hidden_size n_heads n_kv_heads head_dim qk_norm "
    "sliding_window ffn_hidden_size n_experts experts_per_token expert_ffn_size shared_expert_size first_dense_layers "
    "router_score router_normalised router_scale router_groups router_top_groups router_bias "
    "norm norm_eps activation position rope_base rope_interleaved rope_scaling_factor "
    "rope_low_frequency rope_high_frequency rope_original_length bias qkv_bias tie_embeddings dropout "
    "init_std init_from",
    ("data", CONTINUED): "train valid tokenizer",  # names: what they stand for is compared
    ("data", REFUSED): "weights mask separate_documents end_of_document train_contents valid_contents",
    ("parallel", CONTINUED): "tensor_parallel sequence_parallel transport transport_table pipeline_parallel "
    "pipeline_schedule pipeline_stages_per_rank pipeline_split data_parallel_replicate data_parallel_shard "
    "context_parallel expert_parallel zero_stage zero_gather "
    "exchange cpu_offload recompute recompute_layers recompute_interval pack_activations "
    "pack_layers offload_activations keep memory_budget",
    ("parallel", REFUSED): "reduce_dtype",
    (
        "optimizer",
        REFUSED,
    ): "name lr min_lr_ratio schedule decay_fraction warmup_steps beta1 beta2 eps momentum nesterov "
    "newton_schulz muon_scale muon_dtype weight_decay "
    "clip_norm",
    ("train", CONTINUED): "steps microbatch_size device cuda_graph validation_interval max_skipped_steps",
    ("train", REFUSED): "seed global_batch_size batch_size_start batch_size_ramp_steps dtype label_smoothing z_loss "
    "balance_loss router_bias_rate validation_samples precision",
    ("checkpoint", CONTINUED): "interval keep",
    ("log", CONTINUED): "interval norm_interval noise_interval tensorboard plot timeline_step profile_step wandb",
}
# What decides the losses, too, with an exchange that changes them.
_LAYOUT = (
    "tensor_parallel pipeline_parallel pipeline_schedule data_parallel_replicate data_parallel_shard "
    "context_parallel expert_parallel zero_stage"
)
LAYOUT_KEYS = {"train.microbatch_size", "parallel.exchange", *(f"parallel.{key}" for key in _LAYOUT.split())}
REPLICA_KEYS = {"parallel.exchange", "parallel.data_parallel_replicate"}
VERDICTS = {f"{section}.{key}": verdict for (section, verdict), keys in _TABLE.items() for key in keys.split()}


@dataclass(frozen=True)
class Start:
    """What a run starts with. config: resolved, with the contents of its datasets. dtype: that of its computations.

    files: {path: content} of the datasets.
    """

    config: RunConfig
    dtype: str
    files: Mapping[str, FileContent]


def read_start(config: RunConfig, dtype: str, report: Callable[[str], None] = print) -> Start:
    """Read what the datasets of a resolved configuration hold (see read_contents).

    ValueError if the configuration states other contents; FileNotFoundError or ValueError for a dataset that cannot be
    read.
    """
    record = _read_record(Path(config.run.dir))
    known = {path: FileContent(tuple(stamp), content) for path, (stamp, content) in record.get("files", {}).items()}
    files = read_contents((*config.data.train, *config.data.valid), known, report)
    stated: dict[str, Any] = {}
    for use, key in CONTENTS.items():
        prefixes, given = getattr(config.data, use), getattr(config.data, key)
        stated[key] = found = tuple(files[str(Path(f"{prefix}.bin").absolute())][1] for prefix in prefixes)
        if given and given != found:
            raise ValueError(
                f"data.{use} does not hold what data.{key} states ({_contents(use, given, found, prefixes)}): "
                f"give the datasets that it describes, or leave data.{key} out"
            )
    return Start(dataclasses.replace(config, data=dataclasses.replace(config.data, **stated)), dtype, files)


def check_run_directory(start: Start) -> list[str]:
    """What a resumed run changes, as lines to print; none for a new run.

    ValueError, with the remedy, if a run in run.dir would be overwritten or would go on with other losses.
    """
    config, directory = start.config, Path(start.config.run.dir)
    path = directory / "config.toml"
    if unknown := sorted(set(config.run.changes) - VERDICTS.keys()):
        raise ValueError(f"run.changes names {', '.join(unknown)}, which is no key: write section.key, as optimizer.lr")
    if not path.is_file():
        _check_folder(directory, config.data.tokenizer, new=True)
        return []
    _check_folder(directory, config.data.tokenizer)
    before = build_config(read_stored(path))
    if not before.data.train:
        raise ValueError(
            f"{directory} is an imported model, whose checkpoint has no optimizer state: set another run.dir, and "
            f"model.init_from = {str(directory)!r}"
        )
    if not config.run.resume:
        raise ValueError(f"{directory} already holds a run: continue it with --run.resume True, or set run.dir")
    changed = _changes(before, start)
    refused = {
        key: text
        for key, text in changed.items()
        if _verdict(key, before, start) == REFUSED and key not in config.run.changes
    }
    if refused:
        raise ValueError(
            f"{directory} was trained with other settings, and its losses would change ({'; '.join(refused.values())}):"
            f" keep them, set another run.dir, or accept the change with --run.changes {' '.join(refused)}"
        )
    return [f"changed since the run was stopped: {text}" for text in changed.values()]


def check_steps(config: RunConfig, step: int) -> str | None:
    """A line for a run that is finished at `step`. ValueError if it has gone further than train.steps."""
    steps = config.train.steps
    if step > steps:
        raise ValueError(
            f"{config.run.dir} is at step {step}, further than train.steps = {steps}: set train.steps to at least "
            f"{step}, or another run.dir"
        )
    if step < steps:
        return None
    return f"{config.run.dir} is finished: it is at step {step} of {steps}; set train.steps to more to go on"


def write_run(start: Start) -> str | None:
    """Write the run's configuration, a copy of its tokenizer and what it found. Without config.toml no run resumes.

    Returns a line if there is no tokenizer to keep. ValueError, which names the file, where writing fails.
    """
    directory, config = Path(start.config.run.dir), start.config
    record = {"dtype": start.dtype, "files": start.files}
    stored = dataclasses.replace(config, run=dataclasses.replace(config.run, changes=()))
    try:
        kept = keep_tokenizer(config.data.tokenizer, directory)
        replace_file(directory / START, json.dumps(record, indent=2) + "\n", to_disk=True)
        replace_file(directory / "config.toml", to_toml(stored), to_disk=True)
    except OSError as error:
        raise ValueError(f"{error.filename or directory} cannot be written: {error.strerror or error}") from None
    if kept:
        return None
    what = "no dataset says what its tokenizer is" if config.data.tokenizer is None else config.data.tokenizer
    missing = "" if config.data.tokenizer is None else " does not exist"
    return f"the run keeps no tokenizer, because {what}{missing}: texts will need --tokenizer"


def _read_record(directory: Path) -> dict[str, Any]:
    """What start.json says; {} if there is none or it is damaged, because all of it can be found again."""
    try:
        record = read_json(directory / START)
        if not isinstance(record["dtype"], str):
            return {}
        for stamp, content in record["files"].values():
            if not isinstance(content, str) or not all(type(each) is int for each in stamp):
                return {}
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _check_folder(directory: Path, tokenizer: str | None, *, new: bool = False) -> None:
    """ValueError if a folder of something else is where the run's copy of its tokenizer belongs."""
    folder, kept = directory / FOLDER, kept_tokenizer(directory)
    if tokenizer in (None, "bytes") or not folder.exists():
        return
    if kept is None or (new and same_tokenizer(str(tokenizer), str(kept)) is False):
        raise ValueError(f"{folder} is in the way of the run's copy of {tokenizer}: move it away, or set run.dir")


def _changes(before: RunConfig, start: Start) -> dict[str, str]:
    """{key: how it differs} of all keys of the configuration that differ, but for requests."""
    old, new = (dataclasses.asdict(each) for each in (before, start.config))
    if (dtype := _read_record(Path(start.config.run.dir)).get("dtype")) is not None:
        old["train"]["dtype"], new["train"]["dtype"] = dtype, start.dtype  # an unset one follows from the device
    found = {}
    for section, values in new.items():
        for key, value in values.items():
            name, was = f"{section}.{key}", old[section][key]
            if was == value or VERDICTS.get(name) == REQUESTED or (name == "parallel.exchange" and _same(was, value)):
                continue
            if section == "data" and key in CONTENTS.values():
                use = key.removesuffix("_contents")
                if was or not old["data"][use]:  # a run of an earlier version has not stated its contents
                    found[name] = _contents(use, was, value, new["data"][use])
                continue
            more = _schedule_moves(before, start.config) if name == "train.steps" else ""
            found[name] = f"{name}: {_shown(was)} -> {_shown(value)}{more}"
    if other := _other_tokenizer(before, start):
        found["data.tokenizer"] = other
    return found


def _schedule_moves(before: RunConfig, now: RunConfig) -> str:
    """What other train.steps make of the schedule of the learning rate: where it ends, and an unset warm-up."""
    was, lasts = (warmup_steps(each.train.steps, each.optimizer) for each in (before, now))
    warmup = "" if was == lasts else f", and its warm-up takes {lasts} steps in place of {was} (optimizer.warmup_steps)"
    return f", where the schedule of the learning rate ends from now on{warmup}"


def _verdict(key: str, before: RunConfig, start: Start) -> str:
    """What becomes of a change. A name is compared by what it stands for, as far as that is known."""
    if key in ("data.train", "data.valid"):
        use = key.removeprefix("data.")
        return CONTINUED if getattr(before.data, CONTENTS[use]) or not getattr(before.data, use) else REFUSED
    if key == "data.valid_contents" and not (before.data.valid and start.config.data.valid):
        return CONTINUED  # no validation loss stands beside one of other data
    if any(key in _deciding(each) for each in (before, start.config)):
        return REFUSED
    if key == "data.tokenizer":
        return REFUSED if _other_tokenizer(before, start) else CONTINUED
    return VERDICTS.get(key, REFUSED)


def _deciding(config: RunConfig) -> set[str]:
    """The keys of the layout that decide its losses. Where replicas take steps by themselves, any layout of one gives
    the same."""
    from tpformer.parallel import exchange_named

    exchange = exchange_named(config.parallel.exchange)
    if exchange.keeps_apart:
        return REPLICA_KEYS
    return LAYOUT_KEYS if exchange.changes_losses else set()


def _same(was: str, now: str) -> bool:
    """Whether two texts of parallel.exchange name the same exchange, with the same options."""
    from tpformer.parallel import exchange_named

    return exchange_named(was) == exchange_named(now)


def _other_tokenizer(before: RunConfig, start: Start) -> str | None:
    """What is wrong if the tokenizer is another than the run's, under its old path or a new one; else None."""
    kept, new = kept_tokenizer(Path(start.config.run.dir)), start.config.data.tokenizer
    old = str(kept) if kept is not None else before.data.tokenizer
    if old is None or new is None or same_tokenizer(old, new) is not False:
        return None
    return f"data.tokenizer: {new} is another tokenizer than the run's {old}"


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(list(value) if isinstance(value, tuple) else value)


def _contents(use: str, old: Sequence[str], new: Sequence[str], prefixes: Sequence[str]) -> str:
    """How the contents of datasets differ, by the names that they have now."""
    if sorted(old) == sorted(new):
        return f"data.{use}: the same {len(new)} datasets in another order"
    found = []
    for index in range(max(len(old), len(new))):
        was, now = (_short(each[index]) if index < len(each) else "nothing" for each in (old, new))
        if was != now:
            name = prefixes[index] if index < len(prefixes) else f"data.{use}[{index}]"
            found.append(f"{name}: {was} -> {now}")
    return "; ".join(found)


def _short(content: str) -> str:
    """A content without most of its SHA-256s."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", content)
