"""What several commands share: a run's configuration from arguments, and local ranks."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tyro

from tpformer.config import RunConfig, build_config, read_toml
from tpformer.config.refused import without_refused_options
from tpformer.launchers import launched
from tpformer.processes.launch import check_local_ranks, run_ranks

from .guard import guarded

EXIT_CODES = (
    "Exit codes: 0 the run reached its last step; 1 an error; 2 a mistake in settings, files or the machine, in one "
    "line, or a run that diverged; 3 stopped after a checkpoint, by SIGTERM, SIGINT or SIGHUP, or because nobody reads "
    "the output; 124 a rank hung; 128 + N signal N killed a rank. Ranks of another launcher, such as torchrun, exit "
    "with 0 in place of 3."
)
DESCRIPTIONS = {
    "pretrain": f"Train a GPT as FILE.toml says; any key of it is an option here. {EXIT_CODES}",
    "verify": "Compare two steps of FILE.toml in its layout with two in one process, in float64. Exit code 1 if they "
    "differ. Any key of the file is an option here.",
}


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
    arguments = without_refused_options(arguments)
    return _overrides(arguments, _parse(arguments, config, command))


def _parse(arguments: Sequence[str], config: RunConfig, command: str) -> RunConfig:
    return tyro.cli(
        RunConfig,
        prog=f"tpformer {command}",
        description=DESCRIPTIONS.get(command.split()[0]),
        args=list(arguments),
        default=config,
        config=(tyro.conf.FlagConversionOff,),
    )


def parse_run(arguments: Sequence[str], command: str = "pretrain") -> RunConfig:
    """The configuration of `COMMAND FILE.toml [--section.key value ...]`: init_from < preset < file < command line.

    ValueError without a file, or for an unknown key or a value of a wrong type; FileNotFoundError names the file.
    """
    prog = f"tpformer {command} FILE.toml"
    if not arguments or arguments[0].startswith("-"):
        _parse(list(arguments) or ["--help"], RunConfig(), f"{command} FILE.toml")
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
    if launched() and int(os.environ["WORLD_SIZE"]) != world_size:
        raise ValueError(
            f"the layout has {world_size} ranks, but {os.environ['WORLD_SIZE']} were started: start {world_size}, or "
            f"change one of --parallel.tensor-parallel, --parallel.context-parallel, --parallel.pipeline-parallel, "
            f"--parallel.data-parallel-shard and --parallel.data-parallel-replicate"
        )
    if launched() or (world_size == 1 and not max_restarts):
        work(config)
        return
    check_local_ranks(world_size, config.train.device)
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))

    def attempt(number: int) -> None:
        guarded(partial(work, resumed if number else config))

    sys.exit(run_ranks(attempt, world_size, max_restarts=max_restarts, interactive=interactive))
