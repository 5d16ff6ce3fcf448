"""The `tpformer` command. Its modules parse arguments and start ranks; `training` and `planner` do the work.

torch takes seconds to import. No command imports it before its arguments are parsed, and `pretrain` also checks its
configuration and its datasets first.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import tpformer
from tpformer.processes.launch import USAGE_EXIT_CODE, interrupted

from .data import build_data_command, stdlib_command
from .models import chat_command, evaluate_command, export_command, generate_command, import_command
from .run import guarded
from .training import dry_run_command, pretrain_command, timeline_command, verify_command

USAGE = """usage: tpformer COMMAND ...

  data build INPUT... --out PREFIX   make a token dataset from text files, folders or .jsonl
  data stdlib --out DIR              make the default corpus: the Python standard library's source
  pretrain FILE.toml [--section.key value ...]   train a GPT; starts its own local ranks unless under torchrun
  verify FILE.toml [--section.key value ...]     compare two steps in the file's layout with two in one process
  dry-run FILE.toml [--section.key value ...] [--ranks 0,8]   show what ranks hold and send, without starting them
  generate SOURCE --prompt TEXT      continue a text; SOURCE is a run, a Hugging Face directory or an export
  evaluate SOURCE [--data PREFIX ...] [--tasks FILE.jsonl]   a model's loss over datasets, its answers to tasks
  chat SOURCE                        talk with a model in the terminal
  timeline RUN_DIR                   draw the pipeline step that a run recorded (log.timeline_step)
  export RUN_DIR --out DIR           write a run's newest checkpoint as safetensors (--format hf: for transformers)
  import DIR --out RUN_DIR           make a run of a Hugging Face directory or an export

`tpformer COMMAND --help` lists the options of each; `tpformer --version` prints the version."""


COMMANDS: dict[tuple[str, ...], Callable[[Sequence[str]], None]] = {
    ("data", "build"): build_data_command,
    ("data", "stdlib"): stdlib_command,
    ("pretrain",): pretrain_command,
    ("verify",): verify_command,
    ("dry-run",): dry_run_command,
    ("generate",): generate_command,
    ("evaluate",): evaluate_command,
    ("chat",): chat_command,
    ("export",): export_command,
    ("import",): import_command,
    ("timeline",): timeline_command,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run the command that the first words name."""
    signal.signal(signal.SIGINT, interrupted)
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
