"""What several commands share: a run's configuration from arguments, local ranks, and errors as one line."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tyro

from tpformer.config import RunConfig, build_config, read_toml
from tpformer.processes.launch import USAGE_EXIT_CODE, check_local_ranks, launched, record_exception, run_ranks


def _overrides(arguments: Sequence[str], parsed: RunConfig) -> dict[str, dict[str, Any]]:
    """The values of the options that were given, and of no others: what is left unset can still be derived."""
    values: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        section, dot, key = argument.removeprefix("--").split("=")[0].replace("-", "_").partition(".")
        if argument.startswith("--") and dot:
            values.setdefault(section, {})[key] = getattr(getattr(parsed, section), key)
    return values


def parse_overrides(arguments: Sequence[str], config: RunConfig, command: str) -> dict[str, dict[str, Any]]:
    """{section: {key: value}} of `--section.key value ...`. config: the values that are not given, for the help.

    Anything else among the arguments ends the process with the usage.
    """
    prog = f"tpformer {command}"
    parsed = tyro.cli(RunConfig, prog=prog, args=list(arguments), default=config, config=(tyro.conf.FlagConversionOff,))
    return _overrides(arguments, parsed)


def parse_run(arguments: Sequence[str], command: str = "pretrain") -> RunConfig:
    """The configuration of `COMMAND FILE.toml [--section.key value ...]`: init_from < preset < file < command line.

    ValueError without a file, or for an unknown key or a value of a wrong type; FileNotFoundError names the file.
    """
    prog = f"tpformer {command} FILE.toml"
    if not arguments or arguments[0].startswith("-"):
        tyro.cli(RunConfig, prog=prog, args=list(arguments) or ["--help"], config=(tyro.conf.FlagConversionOff,))
        raise ValueError(f"{command} needs a configuration: {prog} [--section.key value ...]")
    file = read_toml(arguments[0])
    from tpformer.training.source import from_source

    given = parse_overrides(arguments[1:], build_config(file), f"{command} FILE.toml")
    return build_config(*from_source(file, given))


def with_ranks(
    work: Callable[[RunConfig], None], config: RunConfig, max_restarts: int = 0, *, interactive: bool = False
) -> None:
    """Do the work here if this process is a rank, or the only one. Otherwise start a fork for each rank, which does it.

    After a failure all ranks start again, at most max_restarts times, and resume the run. Import what `work` needs
    before this call, so that the forks share it. interactive: Ctrl-C is left to the ranks (see run_ranks).
    """
    world_size = config.parallel.world_size
    if launched() or (world_size == 1 and not max_restarts):
        work(config)
        return
    check_local_ranks(world_size, config.train.device)
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))

    def attempt(number: int) -> None:
        guarded(partial(work, resumed if number else config))

    sys.exit(run_ranks(attempt, world_size, max_restarts=max_restarts, interactive=interactive))


def guarded(work: Callable[[], None]) -> None:
    """Call `work`. What a user can mend (a value, a missing file or package, a run that diverges) is reported as one
    line on stderr, with exit code 2.

    Any other exception is reported by its traceback, to which torch adds the rank, with exit code 1. In both cases the
    interpreter's shutdown is skipped: an open process group can hang or abort in it, and peers notice only a process
    that has ended. If the reader of the output has gone (`| head`), the process ends by SIGPIPE. After Ctrl-C it ends
    by SIGINT.
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
        _end_by(signal.SIGPIPE)
    except KeyboardInterrupt:
        _end_by(signal.SIGINT)
    except BaseException as error:  # DCP's CheckpointException does not derive from Exception
        record_exception(error)
        usage = isinstance(error, ValueError | FileNotFoundError | ImportError | FloatingPointError)
        if usage:
            print(f"tpformer: {error}", file=sys.stderr, flush=True)
        else:
            sys.excepthook(*sys.exc_info())
        os._exit(USAGE_EXIT_CODE if usage else 1)


def _end_by(number: signal.Signals) -> None:
    """End this process by a signal, so that its parent learns why."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
