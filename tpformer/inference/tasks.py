"""Tasks: questions from a JSON Lines file, what a model is asked about them, and the scores of its answers.

A line is {"prompt": text, "choices": [text, text, ...], "answer": index}, a multiple choice, or
{"prompt": text, "answer": text}, of which the generated text has to be equal. Nothing here imports torch or a model.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.training.data import Tokenizer, prompt_ids
from tpformer.words import listed, printable, shown

KEYS = ({"prompt", "choices", "answer"}, {"prompt", "answer"})
ANSWER_MARGIN = 8  # tokens that a generated text may have beyond the bytes of its answer, such as spaces


class Task(NamedTuple):
    """One line of a file. choices: empty where the answer is a text. where: "FILE:line", for messages."""

    prompt: str
    choices: tuple[str, ...]
    answer: int | str
    where: str


class Pair(NamedTuple):
    """Token ids of a text, and of what follows it. Neither is empty."""

    context: list[int]
    continuation: list[int]


class Question(NamedTuple):
    """A task in token ids. pairs: one for each choice; or prompt: what a model continues by at most `limit` tokens."""

    task: Task
    pairs: list[Pair]
    prompt: list[int]
    limit: int


class Score(NamedTuple):
    """A share of right answers with its standard error, sqrt(p (1 - p) / (n - 1)); the error of one answer is NaN."""

    metric: str
    number: int
    accuracy: float
    error: float


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a JSON Lines file, in its order. Lines of spaces alone are skipped.

    FileNotFoundError without the file; ValueError, with FILE:line, for a line that is no task, and for a file with
    none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a .jsonl file of tasks")
    with path.open("rb") as stream:
        lines = [
            (f"{printable(path)}:{number}", line) for number, line in enumerate(stream, start=1) if not line.isspace()
        ]
    if not lines:
        raise ValueError(f"{path} has no tasks: give one JSON object a line")
    return [_task(where, line) for where, line in lines]


def _task(where: str, line: bytes) -> Task:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {printable(error, 200)}") from None
    if not isinstance(record, dict) or record.keys() not in KEYS:
        found = f"the keys {listed(record, 6)}" if isinstance(record, dict) else f"a JSON {type(record).__name__}"
        raise ValueError(f'{where} has {found}: write "prompt", "answer", and "choices" for a multiple choice')
    prompt, answer, choices = record["prompt"], record["answer"], record.get("choices", [])
    _check_text(where, "prompt", prompt)
    if "choices" not in record:
        _check_text(where, "answer", answer)
        if not answer.strip() or "\n" in answer.strip():
            raise ValueError(f"{where}: the answer {shown(answer)} is empty or has several lines, so no line equals it")
        return Task(prompt, (), answer, where)
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f'{where}: "choices" has to be a list of at least 2 texts')
    for index, choice in enumerate(choices):
        _check_text(where, f"choices[{index}]", choice)
        if choice == "":
            raise ValueError(f"{where}: choices[{index}] is empty, and would always have probability 1")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{where}: the answer {shown(answer)} is no index of the {len(choices)} choices: write 0 to "
            f"{len(choices) - 1}"
        )
    return Task(prompt, tuple(choices), answer, where)


def _check_text(where: str, key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} is {shown(value)}: write a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {key} has half of a surrogate pair, which is no character: {printable(error, 200)}"
        ) from None


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """A text and what follows it, as lm-evaluation-harness cuts them: both together are encoded, and what is beyond
    the context's own number of tokens is the continuation.

    Whitespace at the end of the context moves to the continuation, because most tokenizers join it to the next word.
    An empty context is what the tokenizer puts before a text (BOS), or the end of a document. ValueError for a
    continuation of no tokens, which has nothing to score.
    """
    text = context + continuation
    context = context.rstrip()
    before = tokenizer.encode_prompt(context).tolist()
    if before:
        pair = Pair(before, tokenizer.encode_prompt(text).tolist()[len(before) :])
    else:
        pair = Pair([tokenizer.end_of_document], tokenizer.encode(text).tolist())
    if not pair.continuation:
        raise ValueError(
            f"{shown(text[len(context) :])} adds no token to {shown(context[-20:])}: the tokenizer drops it, or "
            f"makes one token of it and what is before; begin it with a space"
        )
    return pair


def ask(tokenizer: Tokenizer, task: Task, longest: int) -> tuple[Question, bool]:
    """A task in token ids, for a model of `longest` inputs; and whether its prompt has to be cut at the left.

    A text gets a token for each byte of the answer and ANSWER_MARGIN more, so that any way of writing it fits.
    ValueError, with the task's line, for a choice without tokens, and for an answer too long for the model.
    """
    if not task.choices:
        ids = prompt_ids(tokenizer, task.prompt)
        answer = str(task.answer).strip()
        if (least := len(tokenizer.encode(answer))) >= longest:
            raise ValueError(f"{task.where}: the answer has {least} tokens, {_too_many(longest)}")
        limit = min(len(answer.encode()) + ANSWER_MARGIN, longest - 1)
        return Question(task, [], ids[-(longest - limit) :], limit), len(ids) > longest - limit
    pairs = []
    for index, choice in enumerate(task.choices):
        where = f"{task.where}: choices[{index}]"
        try:
            pair = encode_pair(tokenizer, task.prompt, choice)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if (length := len(pair.continuation)) > longest:
            raise ValueError(f"{where} has {length} tokens, {_too_many(longest)}")
        pairs.append(pair)
    most = max(len(pair.context) + len(pair.continuation) for pair in pairs)
    return Question(task, pairs, [], 0), most > longest + 1


def _too_many(longest: int) -> str:
    return f"too many for a model of {longest}: shorten it, or raise --seq-length"


def best_choices(task: Task, log_probabilities: Sequence[float]) -> tuple[bool, bool]:
    """Whether the most probable choice is the answer; then the same with log-probabilities divided by UTF-8 bytes.

    Of equal ones the first counts, as in lm-evaluation-harness.
    """
    per_byte = [value / len(choice.encode()) for value, choice in zip(log_probabilities, task.choices, strict=True)]
    first, second = (max(range(len(values)), key=values.__getitem__) for values in (log_probabilities, per_byte))
    return first == task.answer, second == task.answer


def first_line(text: str) -> str:
    """What counts of a generated text: its first line, without spaces at both ends."""
    return text.partition("\n")[0].strip()


def score(metric: str, right: Sequence[bool]) -> Score:
    """The share of True and its standard error."""
    n, accuracy = len(right), sum(right) / len(right)
    return Score(metric, n, accuracy, math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else math.nan)
