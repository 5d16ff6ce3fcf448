"""Commands about a trained model: generate, chat, evaluate, import, export."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from tpformer.config import RunConfig
from tpformer.words import harmless, message, printable

from .options import new_file, parsed, parsed_with_others
from .run import parse_overrides, with_ranks

if TYPE_CHECKING:
    from tpformer.inference.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of every command whose model writes text."""

    source: tyro.conf.Positional[Path]
    """Directory of a run, of a Hugging Face model or of an export."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Draw only from this many most likely tokens."""
    top_p: float = 1.0
    """Draw only from the most likely tokens whose probabilities sum to this."""
    min_p: float = 0.0
    """Draw only from tokens at least this times as likely as the most likely one."""
    seed: int = 0
    """Text or answer number i is drawn with seed + i."""
    tensor_parallel: int | None = None
    """Tensor-parallel ranks to run on. Unset: the run's own number of them, or one for a directory of weights."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json. Unset: that of the run or directory."""

    def config(self) -> RunConfig:
        """The configuration in which the model runs. ValueError if it has no tokenizer."""
        from tpformer.training.source import source_config

        parallel = {} if self.tensor_parallel is None else {"tensor_parallel": self.tensor_parallel}
        data = {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
        config = source_config(self.source, {"parallel": parallel, "data": data})
        if config.data.tokenizer is None and not config.data.train:
            raise ValueError(f"{self.source} has no tokenizer.json: give --tokenizer")
        return config

    def sampling(self) -> Sampling:
        """How tokens are drawn. ValueError for a value out of its range. It imports torch."""
        from tpformer.inference.sampling import Sampling

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(TextOptions):
    """Continue texts with the model of a run's newest checkpoint, a Hugging Face directory or an export."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be given several times. Without one, and without a file, "def "."""
    prompt_file: Path | None = None
    """A file whose whole text is one more prompt."""
    max_new_tokens: int = 200
    """Most tokens of a text."""
    samples: int = 1
    """Texts for each prompt."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text before which to end; may be given several times."""


def generate_command(arguments: Sequence[str]) -> None:
    """`tpformer generate`: one text is printed as it comes, several at their end."""
    from tpformer.training.resolve import tokenizer_name

    options = parsed(Generate, "generate", arguments)
    prompts = [*options.prompt, *([_text(options.prompt_file)] if options.prompt_file else [])] or ["def "]
    config = options.config()

    import torch.distributed as dist

    from tpformer.inference.generate import TextStream, generate_text, load_model
    from tpformer.training.data import load_tokenizer
    from tpformer.training.deciding import decides

    sampling = options.sampling()
    tokenizer = load_tokenizer(tokenizer_name(config))
    TextStream(tokenizer, stops=options.stop)  # refuses an empty one before ranks start

    settings = {"samples": options.samples, "stop": options.stop, "max_new_tokens": options.max_new_tokens}
    settings |= {"prompts": prompts, "sampling": sampling, "seed": options.seed}

    def work(config: RunConfig) -> None:
        model, _ = load_model(config, decided=decides("generate", config, source=config.run.dir, beside=settings))
        pieces = generate_text(
            model,
            tokenizer,
            prompts,
            stops=options.stop,
            samples=options.samples,
            report=_report,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed,
        )
        _print_texts(prompts, options.samples, pieces)
        dist.destroy_process_group()

    with_ranks(work, config)


def _text(file: Path) -> str:
    """A file's text as it is, its line ends too, but for a byte order mark. ValueError if it is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{printable(file)} is not UTF-8 ({error}): convert it first") from None


def _report_line(line: str) -> None:
    print(message(line))


def _report(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"tpformer: {message(line)}", file=sys.stderr)


def _print_texts(prompts: Sequence[str], samples: int, pieces: Iterable[tuple[int, str]]) -> None:
    """Print texts on rank 0: one as it comes, several at the end, each below a line with its number.

    What the model writes has U+FFFD for control characters but new line and tab, as a terminal would obey them.
    """
    texts = [prompt for prompt in prompts for _ in range(samples)]
    first, alone = os.environ.get("RANK", "0") == "0", len(texts) == 1
    if first and alone:
        print(texts[0], end="", flush=True)
    for number, piece in pieces:
        piece = harmless(piece)
        texts[number] += piece
        if first and alone:
            print(piece, end="", flush=True)
    if first and alone:
        print()
    elif first:
        for number, text in enumerate(texts):
            print(f"--- prompt {number // samples + 1}, sample {number % samples + 1}\n{text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure how well a model predicts datasets and answers tasks. Takes --parallel.*, --train.*, --run.timeout,
    --data.tokenizer, --data.mask, --data.separate-documents and --data.end-of-document of `tpformer pretrain` too; the
    layout is otherwise the run's tensor parallelism alone."""

    source: tyro.conf.Positional[Path]
    """Directory of the run or of the weights."""
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
    json: str | None = None
    """File to write the result to; an existing one is not overwritten."""


def evaluate_command(arguments: Sequence[str]) -> None:
    """`tpformer evaluate`: check everything but the weights, evaluate on all ranks, and print the tables once."""
    from tpformer.inference.settings import prepare
    from tpformer.training.source import source_config

    options, rest = parsed_with_others(Evaluate, "evaluate", arguments)
    overrides = parse_overrides(rest, source_config(options.source), "evaluate SOURCE")
    file = None if options.json is None else new_file("--json", options.json)
    evaluation = prepare(
        options.source,
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
    from tpformer.training.deciding import decides

    more = None
    if options.lm_eval is not None:
        from tpformer.inference.lm_eval import load_tasks, score_tasks

        found = load_tasks(options.lm_eval.split(","), options.lm_eval_tasks)
        more = partial(score_tasks, tasks=found)

    def work(_: RunConfig) -> None:
        decided = decides(
            "evaluate",
            evaluation.config,
            source=str(options.source),
            data=[each.prefix for each in evaluation.data],
            beside={
                "samples": [each.n_samples for each in evaluation.data],
                "step": options.step,
                "questions": evaluation.questions,
                "lm_eval": options.lm_eval,
            },
        )
        result = evaluate_rank(evaluation, step=options.step, tasks=str(options.tasks), more=more, decided=decided)
        if dist.get_rank() == 0:
            try:
                if file is not None:  # first, as the reader of the output may go
                    write_result(result, file)
            finally:
                show(result, Console(markup=False, emoji=False, highlight=False))
        dist.destroy_process_group()

    with_ranks(work, evaluation.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(TextOptions):
    """Talk with a model: type a line, read its answer. /help lists the commands of the conversation."""

    system: str | None = None
    """System message."""
    max_new_tokens: int = 500
    """Most tokens of an answer."""


def chat_command(arguments: Sequence[str]) -> None:
    """`tpformer chat`: hold a conversation on the terminal, or one that is piped in."""
    options = parsed(Chat, "chat", arguments)
    config = options.config()

    import torch.distributed as dist

    from tpformer.inference.chat import chat

    sampling = options.sampling()

    def work(config: RunConfig) -> None:
        chat(
            config,
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed,
        )
        dist.destroy_process_group()

    with_ranks(work, config, interactive=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model of a run's checkpoint as safetensors, in one process."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""
    out: Path
    """Directory to make; an existing one must be empty."""
    step: int | None = None
    """Step of the checkpoint. Unset: the newest good one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Unset: the dtype of the run's parameters."""
    format: Literal["tpformer", "hf"] = "tpformer"
    """hf: for transformers and vLLM, with the tokenizer. tpformer: with the names and settings of this library."""
    weights: Literal["16", "fp8"] = "16"
    """With hf. fp8: the layers' linears as blocks of e4m3 with scales, as DeepSeek-V3's files have them."""


def export_command(arguments: Sequence[str]) -> None:
    """`tpformer export`: write one checkpoint's model, in this process."""
    options = parsed(Export, "export", arguments)

    from tpformer.training.export import export

    step = export(
        options.run_dir,
        options.out,
        step=options.step,
        dtype=options.dtype,
        file_format=options.format,
        weights=options.weights,
        report=_report_line,
    )
    print(f"step {step} of {options.run_dir} -> {options.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run of a Hugging Face model (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, GPT-2) or of an export, in
    one process."""

    directory: tyro.conf.Positional[Path]
    """A directory with config.json and safetensors files."""
    out: Path
    """The run's directory to make; an existing one must be empty."""


def import_command(arguments: Sequence[str]) -> None:
    """`tpformer import`: make a run of another library's weights, in this process."""
    options = parsed(Import, "import", arguments)

    from tpformer.training.source import describe

    describe(options.directory)  # refuses most mistakes before torch is imported

    from tpformer.training.importing import import_weights

    architecture = import_weights(options.directory, options.out, _report_line)
    print(f"{architecture.n_parameters / 1e6:.2f}M parameters of {options.directory} -> {options.out}, step 0")
