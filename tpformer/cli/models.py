"""Commands about a trained model: generate, evaluate, export."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from tpformer.config import RunConfig

from .run import parse_overrides, with_ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample from a run's newest checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    seed: int = 0
    tensor_parallel: int | None = None
    """Tensor-parallel ranks to run on. Unset: the run's own number of them."""


def generate_command(arguments: Sequence[str]) -> None:
    """`tpformer generate`: sample on the tensor-parallel ranks and print the text once."""
    from tpformer.training.source import source_config

    options = tyro.cli(Generate, prog="tpformer generate", args=list(arguments))
    ranks = options.tensor_parallel
    config = source_config(options.run_dir, {} if ranks is None else {"parallel": {"tensor_parallel": ranks}})

    import torch.distributed as dist

    from tpformer.inference.generate import generate_text

    def work(config: RunConfig) -> None:
        text = generate_text(
            config,
            prompt=options.prompt,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        if dist.get_rank() == 0:
            print(text)
        dist.destroy_process_group()

    with_ranks(work, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure how well a model predicts datasets and answers tasks. Takes --parallel.*, --train.*, --run.timeout and
    --data.tokenizer of `tpformer pretrain` too; the layout is otherwise the run's tensor parallelism alone."""

    model: tyro.conf.Positional[Path]
    """A run's directory, or one of a Hugging Face model's weights."""
    data: tuple[str, ...] = ()
    """Prefixes of token datasets. Without any, and without tasks, those of the run's validation."""
    samples: int | None = None
    """Samples of each dataset, the first ones. Unset: all."""
    seq_length: int | None = None
    """Tokens of a sample, and the most of a task. Unset: the model's."""
    tasks: Path | None = None
    """A .jsonl file of {"prompt", "choices", "answer"} and {"prompt", "answer"}."""
    lm_eval: str | None = None
    """Tasks of lm-evaluation-harness, separated by commas (needs tpformer[eval])."""
    lm_eval_tasks: Path | None = None
    """A folder of further tasks of lm-evaluation-harness, as .yaml files."""
    step: int | None = None
    """Step of a run's checkpoint. Unset: the newest good one."""
    json: Path | None = None
    """File to write the result to; an existing one is not overwritten."""


def evaluate_command(arguments: Sequence[str]) -> None:
    """`tpformer evaluate`: check everything but the weights, evaluate on all ranks, and print the tables once."""
    from tpformer.inference.settings import prepare
    from tpformer.training.source import source_config

    options, rest = tyro.cli(Evaluate, prog="tpformer evaluate", args=list(arguments), return_unknown_args=True)
    overrides = parse_overrides(rest, source_config(options.model), "evaluate MODEL")
    if options.json is not None and (options.json.exists() or not options.json.absolute().parent.is_dir()):
        raise ValueError(f"--json {options.json}: give a new file in a folder that exists")
    evaluation = prepare(
        options.model,
        overrides,
        data=options.data,
        tasks=options.tasks,
        asks=options.lm_eval is not None,
        samples=options.samples,
        seq_length=options.seq_length,
    )

    import torch.distributed as dist
    from rich.console import Console

    from tpformer.inference.evaluate import evaluate_rank, show, write_result

    more = None
    if options.lm_eval is not None:
        from tpformer.inference.lm_eval import load_tasks, score_tasks

        found = load_tasks(options.lm_eval.split(","), options.lm_eval_tasks)
        more = partial(score_tasks, tasks=found)

    def work(_: RunConfig) -> None:
        result = evaluate_rank(evaluation, options.model, step=options.step, tasks=str(options.tasks), more=more)
        if dist.get_rank() == 0:
            show(result, Console())
            if options.json is not None:
                write_result(result, options.json)
        dist.destroy_process_group()

    with_ranks(work, evaluation.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model of a run's checkpoint as safetensors, in one process."""

    run_dir: tyro.conf.Positional[Path]
    out: Path
    """Directory to make; an existing one must be empty."""
    step: int | None = None
    """Step of the checkpoint. Unset: the newest good one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Unset: the dtype of the run's parameters."""


def export_command(arguments: Sequence[str]) -> None:
    """`tpformer export`: write one checkpoint's model, in this process."""
    options = tyro.cli(Export, prog="tpformer export", args=list(arguments))

    from tpformer.training.export import export

    step = export(options.run_dir, options.out, step=options.step, dtype=options.dtype)
    print(f"step {step} of {options.run_dir} -> {options.out}")
