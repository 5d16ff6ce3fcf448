"""Evaluate a model on its ranks: the loss over datasets, as training validates, and the answers to tasks.

Belongs here: what ranks do, and what they report. settings.py and tasks.py check everything before ranks start.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tpformer.config import FP8, RunConfig
from tpformer.distributed import indexed
from tpformer.distributed.agreement import Decides
from tpformer.models import GPT
from tpformer.processes.files import replace_file
from tpformer.training.data import Tokenizer
from tpformer.training.deciding import decides
from tpformer.training.model import ModelParts
from tpformer.training.setup import build_model, default_dtype, device_type, group_timeout, join_ranks, run_mesh
from tpformer.training.source import Source, open_source
from tpformer.training.step import evaluate
from tpformer.words import dtype_name

from .generate import Token, generate, load_model
from .likelihood import log_likelihoods
from .settings import Evaluation, EvaluationData
from .tasks import Score, best_choices, first_line, score


class DataScore(NamedTuple):
    """How well a model predicts a dataset. loss: nats a target token. n_bytes: None where no tokenizer is known."""

    data: str
    samples: int
    tokens: int
    n_bytes: int | None
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 709 else math.inf if self.loss == self.loss else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Summed nats / ln 2 / bytes of the text that the targets stand for."""
        return self.loss * self.tokens / math.log(2) / self.n_bytes if self.n_bytes else None


def together(scores: Sequence[DataScore]) -> DataScore:
    """The score over all targets of several datasets."""
    tokens = sum(each.tokens for each in scores)
    counted = [each.n_bytes for each in scores if each.n_bytes is not None]
    loss = math.fsum(each.loss * each.tokens for each in scores) / tokens
    n_bytes = sum(counted) if len(counted) == len(scores) else None
    return DataScore("together", sum(each.samples for each in scores), tokens, n_bytes, loss)


def start_model(
    config: RunConfig, step: int | None = None, decided: Decides | None = None
) -> tuple[ModelParts, Source]:
    """Enter the process group, and build and load the model in config.run.dir in the configured layout. Collective.

    step: of a run's checkpoint; unset, the newest good one. decided: as of load_model.
    """
    device = device_type(config)
    join_ranks(device, group_timeout(config), decided or decides("a loaded model", config, source=config.run.dir))
    mesh = run_mesh(config, device)
    source = open_source(config.run.dir, step=step)
    model = build_model(config, mesh, initial=False)
    source.load(model.parts)
    return model, source


def score_data(model: ModelParts, data: Sequence[EvaluationData], tokenizer: Tokenizer | None) -> list[DataScore]:
    """The score of each dataset, by the trainer's own evaluation; equal on all ranks but for n_bytes, which only rank 0
    counts."""
    device = indexed(torch.device(model.mesh.device_type))  # type: ignore[union-attr]
    scores = []
    for each in data:
        loss = evaluate(model, [each.samples], each.n_samples, device)
        counted = tokenizer is not None and dist.get_rank() == 0
        n_bytes = each.target_bytes(tokenizer) if counted else None  # type: ignore[arg-type]
        scores.append(DataScore(each.prefix, each.n_samples, each.targets, n_bytes, loss))
    return scores


class Prompt(NamedTuple):
    """Token ids to continue by at most `limit` tokens, up to a stop token or the first of the strings `stops`."""

    ids: list[int]
    limit: int
    stops: Sequence[str]


def greedy_texts(model: GPT, tokenizer: Tokenizer, prompts: Sequence[Prompt], batch_size: int) -> list[str]:
    """The most probable continuation of each prompt, without what ends it; equal on all tensor-parallel ranks.

    model: as load_model makes one. batch_size: prompts that are continued together.
    """
    new: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]

        def ends(token: Token, first: int = first) -> bool:
            index = first + token.sequence
            ids, limit, stops = new[index], prompts[index].limit, prompts[index].stops
            ids.append(token.id)
            text = tokenizer.decode(ids)
            found = [text.index(stop) for stop in stops if stop in text]
            texts[index] = text[: min(found)] if found else text
            return bool(found) or len(ids) == limit

        most = max(prompt.limit for prompt in batch)
        ids, stop = [prompt.ids for prompt in batch], tokenizer.stop_tokens
        for _ in generate(model, ids, max_new_tokens=most, stop=stop, ends=ends):
            pass
    return texts


def answer_shared(model: GPT, asked: Sequence, answer: Callable[[Sequence], list]) -> list:
    """The answers to all requests, in their order, where each tensor-parallel group computes a share of them.

    asked: equal on all ranks. answer: gives an answer, which can be pickled, for each request that it gets; collective
    over the tensor-parallel ranks of `model`. The world's other ranks, data-parallel ones and those of a pipeline's
    other stages, hold the same model. Communication: beside them, one all-gather of the answers as objects.
    """
    tp, world = model.tp.size, dist.get_world_size() if dist.is_initialized() else 1
    if (groups := world // tp) == 1:
        return answer(asked)
    own = answer(asked[dist.get_rank() // tp :: groups])
    found: list[list] = [[] for _ in range(world)]
    dist.all_gather_object(found, own)
    return [found[index % groups * tp][index // groups] for index in range(len(asked))]


def score_tasks(model: GPT, evaluation: Evaluation) -> list[Score]:
    """The scores of all questions, equal on all ranks: of multiple choices acc and acc_bytes, of texts exact_match."""
    tokenizer = evaluation.tokenizer
    assert tokenizer is not None
    size, length = evaluation.config.microbatch_size, evaluation.config.model.seq_length
    pairs = [pair for question in evaluation.questions for pair in question.pairs]
    likelihoods = partial(log_likelihoods, model, longest=length, batch_size=size)
    found = iter(answer_shared(model, pairs, likelihoods))
    choices = [
        best_choices(question.task, [next(found).log_probability for _ in question.pairs])
        for question in evaluation.questions
        if question.pairs
    ]
    asked = [question for question in evaluation.questions if not question.pairs]
    prompts = [Prompt(question.prompt, question.limit, ["\n"]) for question in asked]
    answers = answer_shared(model, prompts, lambda share: greedy_texts(model, tokenizer, share, size))
    texts = [first_line(text) == str(each.task.answer).strip() for text, each in zip(answers, asked, strict=True)]
    scores = []
    if choices:
        plain, per_byte = zip(*choices, strict=True)
        scores = [score("acc", plain), score("acc_bytes", per_byte)]
    return scores + ([score("exact_match", texts)] if texts else [])


def task_rows(task: str, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The rows of a task's scores in a result."""
    return [
        {
            "task": task,
            "metric": each.metric,
            "number": each.number,
            "value": each.accuracy,
            "stderr": finite(each.error),
        }
        for each in scores
    ]


def data_rows(scores: Sequence[DataScore]) -> list[dict[str, Any]]:
    """The rows of datasets' scores in a result; the last one is that of all together, where there are several."""
    return [
        {
            "data": each.data,
            "samples": each.samples,
            "tokens": each.tokens,
            "bytes": each.n_bytes,
            "loss": finite(each.loss),
            "perplexity": finite(each.perplexity),
            "bits_per_byte": finite(each.bits_per_byte),
        }
        for each in (*scores, *([together(scores)] if len(scores) > 1 else []))
    ]


def finite(value: float | None) -> float | None:
    """The value; None, JSON's null, if it is no finite number."""
    return value if value is not None and math.isfinite(value) else None


def evaluate_rank(
    evaluation: Evaluation,
    *,
    step: int | None,
    tasks: str,
    more: Callable[[GPT, Evaluation], list] | None = None,
    decided: Decides | None = None,
) -> dict[str, Any]:
    """Do an evaluation on this rank; collective. The result is complete on rank 0.

    tasks: the name of the questions in the result. more: gives further rows of tasks. decided: as of load_model.
    """
    config = evaluation.config
    dtype, precision = dtype_name(default_dtype(config)), config.train.precision
    facts = {"dtype": dtype, "precision": precision, "seq_length": config.model.seq_length}
    notes, data, rows = list(evaluation.notes), [], []
    if evaluation.data:
        parts, source = start_model(config, step, decided)
        data = data_rows(score_data(parts, evaluation.data, evaluation.tokenizer))
        notes += [f"the loss of {row['data']} is not finite" for row in data if row["loss"] is None]
        del parts
    if evaluation.questions or more is not None:
        model, source = load_model(config, step=step, decided=decided)
        rows = task_rows(tasks, score_tasks(model, evaluation)) if evaluation.questions else []
        rows += more(model, evaluation) if more is not None else []
    return {"model": str(source), **facts, "data": data, "tasks": rows, "notes": notes}


def show(found: dict[str, Any], console: Console) -> None:
    """Print the tables of a result."""
    quantised = ", linears in FP8" * (found["precision"] == FP8)
    console.print(
        f"{found['model']}, {found['dtype']}{quantised}, {found['seq_length']} tokens a sample", soft_wrap=True
    )
    counts = {"samples": ",d", "tokens": ",d", "bytes": ",d"}
    measures = {"loss": ".6f", "perplexity": ",.4f", "bits_per_byte": ".6f"}
    for rows, names, forms in (
        (found["data"], ["data"], counts | measures),
        (found["tasks"], ["task", "metric"], {"number": ",d", "value": ".4f", "stderr": ".4f"}),
    ):
        table = Table(box=None)
        for name in names:
            table.add_column(name, overflow="fold")
        for name in forms:
            table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
        for row in rows:
            numbers = ("-" if row[key] is None else format(row[key], form) for key, form in forms.items())
            table.add_row(*(row[name] for name in names), *numbers)
        if rows:
            console.print(table)
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True)


def write_result(found: dict[str, Any], path: Path) -> None:
    """Write a result as JSON."""
    replace_file(path, json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
