"""The `tpformer` command. It parses arguments and starts ranks; `training` does the work, `planner` the dry runs.

torch takes seconds to import. No command imports it before its arguments are parsed, and `pretrain` also checks its
configuration and its datasets first.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import tpformer
from tpformer.config import RunConfig, build_config, check_config, read_toml
from tpformer.processes.launch import USAGE_EXIT_CODE, check_local_ranks, launched, record_exception, run_ranks

USAGE = """usage: tpformer COMMAND ...

  data build INPUT... --out PREFIX   make a token dataset from text files, folders or .jsonl
  data stdlib --out DIR              make the default corpus: the Python standard library's source
  pretrain FILE.toml [--section.key value ...]   train a GPT; starts its own local ranks unless under torchrun
  verify FILE.toml [--section.key value ...]     compare two steps in the file's layout with two in one process
  dry-run FILE.toml [--section.key value ...] [--ranks 0,8]   show what ranks hold and send, without starting them
  generate RUN_DIR --prompt TEXT     sample from a run's newest checkpoint
  timeline RUN_DIR                   draw the pipeline step that a run recorded (log.timeline_step)
  export RUN_DIR --out DIR           write a run's newest checkpoint as safetensors

`tpformer COMMAND --help` lists the options of each; `tpformer --version` prints the version."""


def _overrides(arguments: Sequence[str], parsed: RunConfig) -> dict[str, dict[str, Any]]:
    """The values of the options that were given, and of no others: what is left unset can still be derived."""
    values: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        section, dot, key = argument.removeprefix("--").split("=")[0].replace("-", "_").partition(".")
        if argument.startswith("--") and dot:
            values.setdefault(section, {})[key] = getattr(getattr(parsed, section), key)
    return values


def parse_run(arguments: Sequence[str], command: str = "pretrain") -> RunConfig:
    """The configuration of `COMMAND FILE.toml [--section.key value ...]`: preset < file < command line.

    ValueError without a file, or for an unknown key or a value of a wrong type; FileNotFoundError names the file.
    """
    prog = f"tpformer {command} FILE.toml"
    if not arguments or arguments[0].startswith("-"):
        tyro.cli(RunConfig, prog=prog, args=list(arguments) or ["--help"], config=(tyro.conf.FlagConversionOff,))
        raise ValueError(f"{command} needs a configuration: {prog} [--section.key value ...]")
    file = read_toml(arguments[0])
    parsed = tyro.cli(
        RunConfig,
        prog=prog,
        args=list(arguments[1:]),
        default=build_config(file),
        config=(tyro.conf.FlagConversionOff,),
    )
    return build_config(file, _overrides(arguments[1:], parsed))


def _with_ranks(work: Callable[[RunConfig], None], config: RunConfig, max_restarts: int = 0) -> None:
    """Do the work here if this process is a rank, or the only one. Otherwise start a fork for each rank, which does it.

    After a failure all ranks start again, at most max_restarts times, and resume the run. Import what `work` needs
    before this call, so that the forks share it.
    """
    world_size = config.parallel.world_size
    if launched() or (world_size == 1 and not max_restarts):
        work(config)
        return
    check_local_ranks(world_size, config.train.device)
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))

    def attempt(number: int) -> None:
        guarded(partial(work, resumed if number else config))

    sys.exit(run_ranks(attempt, world_size, max_restarts=max_restarts))


def pretrain_command(arguments: Sequence[str]) -> None:
    """`tpformer pretrain`: check the configuration and the datasets, then train on all ranks."""
    from tpformer.training.resolve import check_datasets, resolve

    config = parse_run(arguments)
    check_config(config)
    # every rank repeats these checks; a mistake that is found here gives one message, not one per rank
    check_datasets(config)
    resolve(config)

    from tpformer.training.trainer import pretrain

    _with_ranks(pretrain, config, config.run.max_restarts)


def verify_command(arguments: Sequence[str]) -> None:
    """`tpformer verify`: compare the layout with one process. Exit code 1 if they differ."""
    config = parse_run(arguments, "verify")

    import torch.distributed as dist

    from tpformer.training.verify import check_memory, verify_config, verify_rank

    config = verify_config(config)
    check_config(config)
    check_memory(config)

    def work(config: RunConfig) -> None:
        code = verify_rank(config)
        dist.destroy_process_group()
        sys.exit(code)

    _with_ranks(work, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """Show what ranks of FILE.toml's layout hold and send, and whether they fit. Needs no GPUs, data or other ranks.
    Takes the options of `tpformer pretrain FILE.toml` too."""

    ranks: str | None = None
    """Ranks to show, separated by commas. Unset: one rank of the first, of a middle and of the last pipeline stage."""
    device_memory: float | None = None
    """GB (10^9 bytes) of one device. Unset: the memory of this machine's GPU, or 80 without one."""


def dry_run_command(arguments: Sequence[str]) -> None:
    """`tpformer dry-run`: print the report line by line, as ranks are counted."""
    options, rest = tyro.cli(DryRun, prog="tpformer dry-run FILE.toml", args=list(arguments), return_unknown_args=True)
    config = parse_run(rest, "dry-run")

    from tpformer.planner.dry_run import check_ranks, default_ranks, device_memory, plan_config
    from tpformer.planner.report import report

    config = plan_config(config)
    try:
        ranks = default_ranks(config) if options.ranks is None else [int(rank) for rank in options.ranks.split(",")]
    except ValueError:
        raise ValueError(f"--ranks {options.ranks}: write whole numbers separated by commas") from None
    check_ranks(config, ranks)
    memory = device_memory() if options.device_memory is None else options.device_memory * 1e9
    for line in report(config, ranks, memory):
        print(line, flush=True)


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
    from tpformer.training.resolve import load_run_config

    options = tyro.cli(Generate, prog="tpformer generate", args=list(arguments))
    config = load_run_config(options.run_dir, options.tensor_parallel)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(options.run_dir)))

    import torch.distributed as dist

    from tpformer.training.generate import generate_text

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

    _with_ranks(work, config)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildData:
    """Make a token dataset (PREFIX.bin, PREFIX.idx, PREFIX.json): one document per file, or per line of a .jsonl."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    """Prefix of the files to write; existing ones are never overwritten."""
    tokenizer: str = "bytes"
    """"bytes" or the path of a tokenizer.json (needs tpformer[hf])."""


def build_data_command(arguments: Sequence[str]) -> None:
    """`tpformer data build`: make a token dataset from files."""
    from tpformer.training.data import build_dataset

    options = tyro.cli(BuildData, prog="tpformer data build", args=list(arguments))
    build_dataset(options.inputs, options.out, options.tokenizer)


def stdlib_command(arguments: Sequence[str]) -> None:
    """`tpformer data stdlib`: make the default corpus."""
    from tpformer.training.data import build_stdlib

    def stdlib(out: Annotated[Path, tyro.conf.arg(help="Folder for stdlib_train and stdlib_valid.")]) -> None:
        """Make the default corpus from the Python standard library's source (no download)."""
        build_stdlib(out)

    tyro.cli(stdlib, prog="tpformer data stdlib", args=list(arguments))


def timeline_command(arguments: Sequence[str]) -> None:
    """`tpformer timeline`: draw a recorded step. FileNotFoundError for a run that recorded none."""

    def timeline(run_dir: tyro.conf.Positional[Path]) -> None:
        """Draw the pipeline step that a run recorded: plots/pipeline.svg, and plots/pipeline.json for Perfetto."""
        path = run_dir / "timeline.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: train a pipeline with --log.timeline-step N, the step to record"
            )
        from tpformer.parallel import Action
        from tpformer.planner import draw_timeline

        record = json.loads(path.read_text())
        actions = [Action(*action) for action in record["actions"]]
        draw_timeline(actions, run_dir / "plots", record["schedule"], record["n_microbatches"])
        print(f"written: {run_dir / 'plots' / 'pipeline.svg'} and pipeline.json")

    tyro.cli(timeline, prog="tpformer timeline", args=list(arguments))


COMMANDS: dict[tuple[str, ...], Callable[[Sequence[str]], None]] = {
    ("data", "build"): build_data_command,
    ("data", "stdlib"): stdlib_command,
    ("pretrain",): pretrain_command,
    ("verify",): verify_command,
    ("dry-run",): dry_run_command,
    ("generate",): generate_command,
    ("export",): export_command,
    ("timeline",): timeline_command,
}


def guarded(work: Callable[[], None]) -> None:
    """Call `work`. What a user can mend (a value, a missing file or package, a run that diverges) is reported as one
    line on stderr, with exit code 2.

    Any other exception is reported by its traceback, to which torch adds the rank, with exit code 1. In both cases the
    interpreter's shutdown is skipped: an open process group can hang or abort in it, and peers notice only a process
    that has ended. If the reader of the output has gone (`| head`), the process ends by SIGPIPE.
    """
    try:
        try:
            work()
        finally:
            sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as error:
        # the only pipe that is written to is the output; rich turns its BrokenPipeError into SystemExit
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    except BaseException as error:  # DCP's CheckpointException does not derive from Exception
        record_exception(error)
        usage = isinstance(error, ValueError | FileNotFoundError | ImportError | FloatingPointError)
        if usage:
            print(f"tpformer: {error}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(*sys.exc_info())
        os._exit(USAGE_EXIT_CODE if usage else 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run the command that the first words name."""
    guarded(partial(_dispatch, sys.argv[1:] if arguments is None else list(arguments)))


def _dispatch(arguments: list[str]) -> None:
    for words, command in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            return command(arguments[len(words) :])
    if arguments[:1] == ["--version"]:
        print(f"tpformer {tpformer.__version__}")
        return
    helped = arguments[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if helped or not arguments else sys.stderr)
    sys.exit(0 if helped else USAGE_EXIT_CODE)


if __name__ == "__main__":
    main()
