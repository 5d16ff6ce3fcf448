"""A GPT as a model of lm-evaluation-harness (the package `lm_eval`, which tpformer[eval] installs).

Only the adapter belongs here: what a text's ids are is tasks.py's, and their likelihood likelihood.py's. Every rank
runs the harness on the same requests, so that all reach the model together.
"""

import io
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness cannot be imported ({error}): pip install tpformer[eval]") from error

import torch.distributed as dist

from tpformer.models import GPT
from tpformer.training.data import Tokenizer, prompt_ids
from tpformer.words import listed, shown

from .evaluate import Prompt, answer_shared, finite, greedy_texts
from .likelihood import log_likelihoods
from .settings import Evaluation
from .tasks import Pair, encode_pair

MAX_NEW_TOKENS = 256  # of a generated text, unless its task says otherwise; the harness's own number


class HarnessModel(LM):
    """A GPT that load_model has made, on ranks that all get the same requests. Groups of them share requests.

    longest: tokens that the model takes. batch_size: pairs of a forward. Errors: ValueError for a continuation that has
    no tokens, or more than the model takes, and for a task that samples instead of taking the most probable token.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, *, longest: int, batch_size: int) -> None:
        super().__init__()
        self.model, self.tokens, self.longest, self.batch_size = model, tokenizer, longest, batch_size

    def _likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        likelihoods = partial(log_likelihoods, self.model, longest=self.longest, batch_size=self.batch_size)
        return [tuple(each) for each in answer_shared(self.model, pairs, likelihoods)]

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether it is the greedy one) of each request's (context, continuation)."""
        return self._likelihoods([encode_pair(self.tokens, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """The log-probability in nats of each request's (text,), in windows of the model's length."""
        beginning = prompt_ids(self.tokens, "")
        windows, counts = [], []
        for request in requests:
            ids = self.tokens.encode_prompt(request.args[0]).tolist()
            cuts = get_rolling_token_windows(ids, beginning[0], self.longest, context_len=1)
            pairs = [Pair(*make_disjoint_window(each)) for each in cuts]
            windows += pairs
            counts.append(len(pairs))
        found = iter(self._likelihoods(windows))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The greedy continuation of each request's (context, settings), up to the first of its stops."""
        prompts = []
        for context, settings in (request.args for request in requests):
            wanted = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
            if wanted.get("do_sample"):
                raise ValueError(
                    f"a task samples its answers ({shown(settings)}): tpformer evaluates greedy ones alone"
                )
            limit = wanted["max_gen_toks"]
            if limit >= self.longest:
                raise ValueError(f"a task generates {limit} tokens, but the model has {self.longest}: set max_gen_toks")
            ids = prompt_ids(self.tokens, context)
            stops = [stop for stop in handle_stop_sequences(wanted["until"], eos=None) if stop]
            prompts.append(Prompt(ids[-(self.longest - limit) :], limit, stops))
        return answer_shared(
            self.model, prompts, lambda share: greedy_texts(self.model, self.tokens, share, self.batch_size)
        )


def load_tasks(names: Sequence[str], folder: Path | None) -> tuple[list[str], TaskManager]:
    """Look up tasks by name. folder: further tasks, as .yaml files. ValueError for a name that no task has."""
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"lm-evaluation-harness has no task {listed(unknown)}: `lm_eval ls tasks` lists its "
            f"{len(manager.all_tasks)}, and --lm-eval-tasks names a folder of more"
        )
    return list(names), manager


def score_tasks(model: GPT, evaluation: Evaluation, tasks: tuple[list[str], TaskManager]) -> list[dict[str, Any]]:
    """The rows of the tasks' scores in a result, as the harness computes them; none on ranks other than 0."""
    assert evaluation.tokenizer is not None
    size = evaluation.config.microbatch_size
    adapter = HarnessModel(model, evaluation.tokenizer, longest=evaluation.config.model.seq_length, batch_size=size)
    leader = dist.get_rank() == 0
    with nullcontext() if leader else redirect_stderr(io.StringIO()):  # every rank would show its progress
        found = simple_evaluate(adapter, tasks=tasks[0], task_manager=tasks[1], log_samples=False)
    if not leader:
        return []
    rows = []
    for name, values in found["results"].items():
        number = found["n-samples"].get(name, {}).get("effective")  # a group of tasks has none of its own
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                error = finite(error) if isinstance(error, float) else None  # the harness writes "N/A"
                rows.append({"task": name, "metric": metric, "number": number, "value": value, "stderr": error})
    return rows
