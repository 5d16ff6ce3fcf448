"""The `tpformer` command. Its modules parse arguments and start ranks; `training` and `planner` do the work.

torch takes seconds to import. No command imports it before its arguments are parsed, and `pretrain` also checks its
configuration and its datasets first. A command's module is imported when the command is given, so `--help` is quick.
"""

import difflib
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import tpformer
from tpformer.launchers import adopt

USAGE = """usage: tpformer COMMAND ...

  data build INPUT... --out PREFIX   make a token dataset from text files, folders, .jsonl or .parquet
  data stdlib --out DIR              make the default corpus: the Python standard library's source
  presets                            list the architectures that model.preset names, with their sizes
  pretrain FILE.toml [--section.key value ...]   train a GPT; starts its own local ranks unless under torchrun
  verify FILE.toml [--section.key value ...]     compare two steps in the file's layout with two in one process
  dry-run FILE.toml [--section.key value ...] [--ranks 0,8]   show what ranks hold and send, without starting them
  plan FILE.toml --gpus N [--device h100]        find the fastest layout that fits; --validate: beside published runs
  generate SOURCE --prompt TEXT      continue a text; SOURCE is a run, a Hugging Face directory or an export
  evaluate SOURCE [--data PREFIX ...] [--tasks FILE.jsonl]   a model's loss over datasets, its answers to tasks
  chat SOURCE                        talk with a model in the terminal
  timeline RUN_DIR                   draw the pipeline step that a run recorded (log.timeline_step)
  export RUN_DIR --out DIR           write a run's newest checkpoint as safetensors (--format hf: for transformers)
  import DIR --out RUN_DIR           make a run of a Hugging Face directory or an export

`tpformer COMMAND --help` lists the options of each; `tpformer --version` prints the version."""


# the words of a command, and its function in a module of this package
COMMANDS: dict[str, tuple[str, str]] = {
    "data build": ("data", "build_data_command"),
    "data stdlib": ("data", "stdlib_command"),
    "presets": ("presets", "presets_command"),
    "pretrain": ("training", "pretrain_command"),
    "verify": ("training", "verify_command"),
    "dry-run": ("training", "dry_run_command"),
    "plan": ("plan", "plan_command"),
    "generate": ("models", "generate_command"),
    "evaluate": ("models", "evaluate_command"),
    "chat": ("models", "chat_command"),
    "export": ("models", "export_command"),
    "import": ("models", "import_command"),
    "timeline": ("training", "timeline_command"),
}
RANKS = ("pretrain", "verify", "generate", "evaluate", "chat")  # run on several ranks, which a launcher may start
CLEAN_UP = ("data", "export", "import")  # after a signal these remove what is unfinished; the others end at once


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run the command that the first words name."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if arguments[:1] and arguments[0] in CLEAN_UP else ():
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` has SIGHUP ignored
            signal.signal(number, _interrupted)
    if not os.environ.get("COLUMNS", "80").strip("0"):
        del os.environ["COLUMNS"]  # rich writes nothing into 0 columns, which stand there where no terminal is
    from tpformer.processes.standard_files import open_standard_files

    from .guard import guarded

    open_standard_files(drops=arguments[:1] == ["pretrain"] and not {"-h", "--help"} & {*arguments})
    guarded(partial(_dispatch, arguments))


def _interrupted(number: int, _: object) -> None:
    """What a signal does: KeyboardInterrupt with its number. A second one ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _dispatch(arguments: list[str]) -> None:
    if any(not each and not option.startswith("-") for option, each in itertools.pairwise(arguments)):
        raise ValueError("an argument is empty, such as by a variable that is unset: give it a path, or leave it out")
    for count in (1, 2):
        if found := COMMANDS.get(" ".join(arguments[:count])):
            module, function = found
            if arguments[0] in RANKS:
                adopt()
            getattr(import_module(f".{module}", __name__), function)(arguments[count:])
            return
    if arguments[:1] == ["--version"]:
        print(f"tpformer {tpformer.__version__}")
        return
    helped = arguments[-1:] in (["-h"], ["--help"])
    group = " ".join(["", "", *arguments[:-1], ""]) if helped else ""  # `data --help` prints the lines of `data`
    lines = [line for line in USAGE.splitlines() if line.startswith(group)]
    if arguments and not (helped and lines):
        raise ValueError(_unknown(arguments))
    print(USAGE if len(arguments) < 2 else "\n".join(lines))
    sys.exit(0 if helped else 2)


def _unknown(arguments: list[str]) -> str:
    """What to say of a command that does not exist."""
    given = " ".join(arguments[: 2 if arguments[0] == "data" else 1])
    close = difflib.get_close_matches(given, [*COMMANDS, "--help", "--version"], 1)
    hint = f"did you mean `tpformer {close[0]}`?" if close else f"choose one of {', '.join(COMMANDS)}"
    return f"there is no command {given!r}: {hint}"
