"""What an evaluation runs on: its configuration, datasets and tokenizer, checked before any rank starts.

Nothing here imports torch. Only what can be found out without the model's weights belongs here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpformer.config import Layout, RunConfig, check_config
from tpformer.training.data import ByteTokenizer, Tokenizer, TokenSamples, load_tokenizer, read_sidecar
from tpformer.training.resolve import mask_notes, open_dataset, same_tokenizer, with_end_of_document
from tpformer.training.source import source_config

from .tasks import Question, ask, read_tasks

FORWARD_TOKENS = 8192  # tokens of a forward, unless train.microbatch_size says otherwise
DATA = ("tokenizer", "mask", "separate_documents", "end_of_document")
SECTIONS = {"parallel": None, "train": None, "run": ("timeout",), "data": DATA}


class EvaluationData(NamedTuple):
    """One dataset of an evaluation: its prefix, the windows in the stream's order, and how many of them count."""

    prefix: str
    samples: TokenSamples
    n_samples: int

    @property
    def targets(self) -> int:
        """Targets of the windows that count. ValueError if there is none."""
        return self.samples.n_targets(self.n_samples)

    def target_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of UTF-8 text that the targets stand for.

        Without a mask they are tokens 1 ... n of the stream. With ByteTokenizer every id below 256 is a byte. With
        another tokenizer the stream is cut where documents end, and each piece is decoded without special tokens; of a
        mask's targets what they add to the text before them counts. A character of which the first or the last piece
        has only some tokens counts as what the tokenizer decodes them to.
        """
        stream = self._chunks()
        if isinstance(tokenizer, ByteTokenizer):
            return sum(int(((chunk >= 0) & (chunk < 256)).sum()) for chunk in stream)
        total, rest = 0, np.empty(0, np.int64)
        for chunk in stream:
            ends = np.flatnonzero(np.where(chunk < 0, ~chunk, chunk) == tokenizer.end_of_document) + 1
            *documents, tail = np.split(chunk, ends)
            for document in documents:
                total += _target_bytes(tokenizer, np.append(rest, document))
                rest = np.empty(0, np.int64)
            rest = np.append(rest, tail)
        return total + _target_bytes(tokenizer, rest)

    def _chunks(self, size: int = 2**20) -> Iterator[np.ndarray]:
        end = 1 + self.n_samples * self.samples.seq_length
        for start in range(1, end, size):
            yield self.samples.dataset.tokens(start, min(start + size, end))


def _target_bytes(tokenizer: Tokenizer, stream: np.ndarray) -> int:
    """Bytes that targets add to the text before them, as many tokenizers drop a space at the beginning of a text.

    stream: of one document at most, -1 - id for no targets.
    """
    ids, total, last = np.where(stream < 0, ~stream, stream), 0, 0
    borders = np.flatnonzero(np.diff(stream >= 0, prepend=False, append=False)).tolist()
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        before, text = (tokenizer.decode(ids[last:to]) for to in (start, end))
        total, last = total + len(text.encode()) - len(before.encode()), end
    return total


class Evaluation(NamedTuple):
    """What an evaluation does. tokenizer: None where nothing says which it is. notes: what the user should know.

    config.model.seq_length: tokens of a sample, and the most that the model is given of a task.
    """

    config: RunConfig
    data: list[EvaluationData]
    tokenizer: Tokenizer | None
    questions: list[Question]
    notes: list[str]


def prepare(
    path: Path,
    overrides: Mapping[str, Mapping[str, Any]],
    *,
    data: Sequence[str] = (),
    tasks: Path | None = None,
    asks: bool = False,
    samples: int | None = None,
    seq_length: int | None = None,
) -> Evaluation:
    """Check an evaluation of the model in `path`, and read everything that it needs but the model's weights.

    data: prefixes; without any, and without tasks, those of the run's validation. asks: whether it asks questions
    beside those of `tasks`, so that a tokenizer is needed. Errors: those of the functions below, of source_config and
    of check_config; ValueError if there is nothing to evaluate.
    """
    check_overrides(overrides)
    config = evaluation_config(source_config(path, overrides), overrides, seq_length)
    if not (config.data.separate_documents or "end_of_document" in overrides.get("data", {})):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, end_of_document=None))  # a run's own
    check_config(config, trains=False)
    config = with_end_of_document(config)
    layout, size, length = config.parallel, config.model.vocab_size, config.model.seq_length
    asks = asks or tasks is not None
    if asks:
        _check_shares_nothing(layout)
    prefixes = tuple(data) if data or asks else config.data.valid
    if not prefixes and not asks:
        raise ValueError(f"{path} has no validation data of its own: give --data PREFIX or --tasks FILE.jsonl")
    read = read_tasks(tasks) if tasks is not None else []
    name = config.data.tokenizer
    notes = []
    if asks and layout.pipeline_parallel > 1:
        notes.append(
            f"tasks are answered without the pipeline: each tensor-parallel group holds all layers, and the "
            f"{layout.pipeline_parallel} stages' groups share the requests"
        )
    masked = config.data.mask
    counts: Any = {"masked": masked, "end_of_document": config.data.end_of_document}
    opened = open_evaluation_data(prefixes, name, size, length, samples, **counts)  # type: ignore[arg-type]
    notes += mask_notes(prefixes, masked=masked)
    tokenizer = evaluation_tokenizer(name, prefixes)
    if tokenizer is None:
        if asks:
            raise ValueError(f"{path} does not say what its tokenizer is: give --data.tokenizer")
        notes.append("no tokenizer is known, so there are no bits per byte: give --data.tokenizer")
    elif asks and tokenizer.vocab_size > size:  # type: ignore[operator]
        raise ValueError(
            f"the tokenizer {name} has {tokenizer.vocab_size} ids, more than the model's vocab_size {size}: give the "
            f"model's own with --data.tokenizer"
        )
    questions = [ask(tokenizer, task, length) for task in read]  # type: ignore[arg-type]
    if n_cut := sum(cut for _, cut in questions):
        notes.append(f"{n_cut} of {len(read)} prompts were cut at the left to fit {length} tokens")
    return Evaluation(config, opened, tokenizer, [question for question, _ in questions], notes)


def _check_shares_nothing(layout: Layout) -> None:
    """ValueError for a layout in which ranks with other prompts would need one another."""
    if layout.context_parallel > 1:
        raise ValueError(
            f"tasks with parallel.context_parallel={layout.context_parallel}: prompts and their answers have no common "
            f"length that these ranks could share; leave the key out"
        )
    if layout.expert_parallel is not None:
        raise ValueError(
            f"tasks with parallel.expert_parallel={layout.expert_parallel}: ranks with other requests would wait "
            f"for one another's tokens; leave the key out, and tensor-parallel ranks share the experts"
        )


def check_overrides(overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError for a setting that an evaluation does not take, because the model or its training has fixed it."""
    for section, values in overrides.items():
        allowed = SECTIONS.get(section, ())
        for key in values:
            if allowed is not None and key not in allowed:
                instead = "give --seq-length" if (section, key) == ("model", "seq_length") else "leave it out"
                raise ValueError(
                    f"--{section}.{key.replace('_', '-')} is no setting of an evaluation: {instead} (it takes "
                    f"--parallel.*, --train.*, --run.timeout, --data.tokenizer, --data.mask, "
                    f"--data.separate-documents and --data.end-of-document)"
                )


def evaluation_config(
    config: RunConfig, overrides: Mapping[str, Mapping[str, Any]], seq_length: int | None
) -> RunConfig:
    """A model's configuration with the batch of an evaluation.

    overrides: what was given on the command line, already in config. Unless given, a forward has about FORWARD_TOKENS
    tokens, and a step as many microbatches as a pipeline has stages. seq_length: unset, the model's.
    ValueError for a seq_length that the model cannot take.
    """
    model, layout, given = config.model, config.parallel, overrides.get("train", {})
    length = seq_length or model.seq_length
    if seq_length is not None and seq_length < 1:
        raise ValueError(f"--seq-length {seq_length}: a sample has at least 1 token")
    if model.position == "learned" and length > model.seq_length:
        raise ValueError(
            f"--seq-length {length} is more than the model's {model.seq_length} learned positions: give at most "
            f"{model.seq_length}"
        )
    together = layout.tensor_parallel // math.gcd(length, layout.tensor_parallel)  # samples that the ranks can share
    microbatch = given.get("microbatch_size") or together * max(1, FORWARD_TOKENS // (length * together))
    microbatches = 1 if layout.pipeline_schedule == "naive" else layout.n_stages
    batch = given.get("global_batch_size") or microbatch * microbatches * layout.data_parallel
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, seq_length=length),
        train=dataclasses.replace(
            config.train, microbatch_size=microbatch, global_batch_size=batch, batch_size_start=None
        ),
    )


def open_evaluation_data(
    prefixes: Sequence[str],
    tokenizer: str | None,
    vocab_size: int,
    seq_length: int,
    samples: int | None,
    *,
    masked: bool = False,
    end_of_document: int | None = None,
) -> list[EvaluationData]:
    """Open the datasets and check that they are of the model.

    tokenizer: the model's, None where it is not known. samples: how many of each dataset count; None for all. masked:
    whether only the tokens that a dataset's mask marks are targets. end_of_document: as for open_dataset.
    Errors: FileNotFoundError or ValueError, with the file and the remedy, for a dataset that is missing, damaged or
    shorter than one sample, that was built with another tokenizer, that has ids outside the vocabulary or no target.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples {samples}: evaluate at least 1, or leave it out for all")
    opened = []
    for prefix in prefixes:
        built = read_sidecar(prefix)
        if built is not None and tokenizer is not None:
            theirs = built["tokenizer"]
            same = same_tokenizer(theirs, tokenizer)
            if same is None:
                raise FileNotFoundError(
                    f"{prefix} was built with the tokenizer {theirs}, and the model's is {tokenizer}: one of the files "
                    f'does not exist, so they cannot be compared; correct the path under "tokenizer" in {prefix}.json, '
                    f"or give the model's with --data.tokenizer"
                )
            if not same:
                raise ValueError(
                    f"{prefix} was built with the tokenizer {theirs}, but the model's is {tokenizer}: build the "
                    f"dataset again with `tpformer data build --tokenizer {tokenizer}`"
                )
        dataset = open_dataset(prefix, vocab_size, masked=masked, end_of_document=end_of_document)
        windows = TokenSamples(dataset, seq_length, shuffle=False)
        opened.append(EvaluationData(prefix, windows, min(samples or windows.n_samples, windows.n_samples)))
        windows.n_targets(opened[-1].n_samples)
    return opened


def evaluation_tokenizer(name: str | None, prefixes: Sequence[str]) -> Tokenizer | None:
    """The model's tokenizer; where it is not known, that of the first dataset with a sidecar; else None."""
    sidecars = (read_sidecar(prefix) for prefix in prefixes)
    name = name or next((sidecar["tokenizer"] for sidecar in sidecars if sidecar is not None), None)
    return None if name is None else load_tokenizer(name)
