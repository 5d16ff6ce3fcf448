"""The `tpformer` command: data build, pretrain, generate, export. Parsing only; the work is in tpformer.training."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tpformer.distributed.launch import USAGE_EXIT_CODE, launched, record_exception, run_ranks
from tpformer.training.config import RunConfig, build_config, check_config, read_toml

USAGE = """usage: tpformer COMMAND ...

  data build INPUT... --out PREFIX   make a token dataset from text files, folders or .jsonl
  data stdlib --out DIR              make the default corpus: the Python standard library's source
  pretrain FILE.toml [--section.key value ...]   train a GPT; starts its own local ranks unless under torchrun
  generate RUN_DIR --prompt TEXT     sample from a run's newest checkpoint
  export RUN_DIR --out DIR           write a run's newest checkpoint as safetensors

`tpformer COMMAND --help` lists the options of each."""


def _overrides(arguments: Sequence[str], parsed: RunConfig) -> dict[str, dict[str, Any]]:
    """The values of exactly those options that were given, so that everything else can still be derived."""
    values: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        section, dot, key = argument.removeprefix("--").split("=")[0].replace("-", "_").partition(".")
        if argument.startswith("--") and dot:
            values.setdefault(section, {})[key] = getattr(getattr(parsed, section), key)
    return values


def parse_run(arguments: Sequence[str]) -> RunConfig:
    """The configuration of `pretrain FILE.toml [--section.key value ...]`: preset < file < command line."""
    prog = "tpformer pretrain FILE.toml"
    if not arguments or arguments[0].startswith("-"):
        tyro.cli(RunConfig, prog=prog, args=list(arguments) or ["--help"], config=(tyro.conf.FlagConversionOff,))
        raise ValueError("pretrain needs a configuration: tpformer pretrain FILE.toml [--section.key value ...]")
    file = read_toml(arguments[0])
    parsed = tyro.cli(
        RunConfig,
        prog=prog,
        args=list(arguments[1:]),
        default=build_config(file),
        config=(tyro.conf.FlagConversionOff,),
    )
    return build_config(file, _overrides(arguments[1:], parsed))


def _with_ranks(arguments: Sequence[str], world_size: int, work: Callable[[], None], max_restarts: int = 0) -> None:
    """Do the work in this process, or start the ranks that will each do it; restarts resume the run."""
    if launched() or (world_size == 1 and not max_restarts):
        work()
        return
    command = [sys.executable, "-m", "tpformer.cli", *arguments]
    sys.exit(run_ranks(command, world_size, max_restarts=max_restarts, restart_arguments=("--run.resume", "True")))


def pretrain_command(arguments: Sequence[str]) -> None:
    from tpformer.training.setup import resolve

    config = parse_run(arguments)
    check_config(config)
    resolve(config)  # a missing dataset is one clear message here, not one per rank

    def work() -> None:
        from tpformer.training.trainer import pretrain

        pretrain(config)

    _with_ranks(["pretrain", *arguments], config.parallel.world_size, work, config.run.max_restarts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample from a run's newest checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0: always the most likely token."""
    seed: int = 0
    tensor_parallel: int | None = None
    """Ranks to run on; unset: as many as the run was trained on."""


def generate_command(arguments: Sequence[str]) -> None:
    from tpformer.training.generate import generate_text, load_run_config

    options = tyro.cli(Generate, prog="tpformer generate", args=list(arguments))
    config = load_run_config(options.run_dir, options.tensor_parallel)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(options.run_dir)))

    def work() -> None:
        import torch.distributed as dist

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

    _with_ranks(["generate", *arguments], config.parallel.world_size, work)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model of a run's checkpoint as safetensors, in one process."""

    run_dir: tyro.conf.Positional[Path]
    out: Path
    """Directory to make; an existing one must be empty."""
    step: int | None = None
    """Which checkpoint; unset: the newest good one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Unset: as the run's parameters."""


def export_command(arguments: Sequence[str]) -> None:
    from tpformer.training.export import export

    options = tyro.cli(Export, prog="tpformer export", args=list(arguments))
    step = export(options.run_dir, options.out, step=options.step, dtype=options.dtype)
    print(f"step {step} of {options.run_dir} -> {options.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildData:
    """Make a token dataset (PREFIX.bin, PREFIX.idx, PREFIX.json): one document per file, or per line of a .jsonl."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    """Prefix of the files to write; existing ones are never overwritten."""
    tokenizer: str = "bytes"
    """"bytes" or the path of a tokenizer.json (needs tpformer[hf])."""


def build_data_command(arguments: Sequence[str]) -> None:
    from tpformer.training.data import build_dataset

    options = tyro.cli(BuildData, prog="tpformer data build", args=list(arguments))
    build_dataset(options.inputs, options.out, options.tokenizer)


def stdlib_command(arguments: Sequence[str]) -> None:
    from tpformer.training.data import build_stdlib

    def stdlib(out: Annotated[Path, tyro.conf.arg(help="Folder for stdlib_train and stdlib_valid.")]) -> None:
        """Make the default corpus from the Python standard library's source (no download)."""
        build_stdlib(out)

    tyro.cli(stdlib, prog="tpformer data stdlib", args=list(arguments))


COMMANDS: dict[tuple[str, ...], Callable[[Sequence[str]], None]] = {
    ("data", "build"): build_data_command,
    ("data", "stdlib"): stdlib_command,
    ("pretrain",): pretrain_command,
    ("generate",): generate_command,
    ("export",): export_command,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. What a user can mend (a value, a missing file or package) is one line on stderr and exit code 2.

    Any other exception is its traceback, which torch prefixes with the rank, and exit code 1. Both leave at once: an
    open process group can hang or abort on the way out of the interpreter, and peers notice only a process that ended.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for words, command in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            try:
                return command(arguments[len(words) :])
            except SystemExit:
                raise
            except BaseException as error:  # DCP's CheckpointException is no Exception
                record_exception(error)
                usage = isinstance(error, ValueError | FileNotFoundError | ImportError)
                if usage:
                    print(f"tpformer: {error}", file=sys.stderr, flush=True)
                else:
                    sys.excepthook(*sys.exc_info())
                sys.stdout.flush()
                os._exit(USAGE_EXIT_CODE if usage else 1)
    print(USAGE, file=sys.stderr if arguments and arguments[0] not in ("-h", "--help") else sys.stdout)
    sys.exit(0 if arguments and arguments[0] in ("-h", "--help") else 2)


if __name__ == "__main__":
    main()
