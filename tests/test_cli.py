"""What all commands have in common: what they say of themselves, and how they end when nobody reads their output."""

import contextlib
import dataclasses
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import typing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT, main

from tpformer.cli.data import BuildData, build_data_command
from tpformer.cli.guard import guarded
from tpformer.cli.models import Chat, Evaluate, Export, Generate, Import, evaluate_command
from tpformer.cli.options import OPTION_RANGES, checked
from tpformer.cli.plan import FILES, Plan, plan_command
from tpformer.cli.run import EXIT_CODES
from tpformer.cli.training import DryRun
from tpformer.config import MLP_ACTIVATIONS, NORM_NAMES, PRESETS, RunConfig, preset_config
from tpformer.config.layout import CHOICES
from tpformer.config.transport_table import DTYPES
from tpformer.training.data import build
from tpformer.training.data.indexed import IndexedWriter
from tpformer.weights.families import FAMILIES

TINY = (str(ROOT / "examples/gpt_tiny.toml"), "--model.vocab-size", "257", "--model.n-layers", "1")
VERIFY = ("verify", *TINY, "--model.seq-length", "16", "--model.hidden-size", "32", "--parallel.tensor-parallel", "1")


def main_unheard(full: bool, *arguments: str) -> None:
    """The command, with a standard output that takes nothing, or whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(os.open("/dev/full", os.O_WRONLY) if full else writer, 1)
    main(*arguments)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("pretrain", "--help"), ("dry-run", *TINY), VERIFY])
def test_a_command_whose_output_cannot_be_written_has_failed_and_one_that_nobody_reads_ends(commands, arguments, full):
    """The one says so once, the other ends by SIGPIPE, as in `tpformer dry-run FILE | head`, where `head` leaves."""
    code, _, err = commands.call(main_unheard, full, *arguments).finish()
    said = "tpformer: standard output cannot be used: No space left on device\n"
    assert (code, err) == ((2, said) if full else (-signal.SIGPIPE, ""))


@pytest.mark.parametrize(("given", "said"), [
    (["pretrian", "run.toml"], "did you mean `tpformer pretrain`?"),
    (["data", "biuld"], "did you mean `tpformer data build`?"),
    (["data"], "choose one of data build, data stdlib, "),
    (["--verison"], "did you mean `tpformer --version`?"),
    (["data", "build", "", "--out", "x"], "an argument is empty"),  # which was the current folder
])  # fmt: skip
def test_a_command_that_cannot_be_is_refused_in_a_line(commands, given, said):
    code, out, err = commands.run(*given)
    assert code == 2 and said in err and err.count("\n") == 1 and not out


def main_interrupted_behind(owner: str, *arguments: str) -> None:
    """The command, to which SIGTERM comes as soon as a context manager of this class has been entered."""
    kind = IndexedWriter if owner == "writer" else contextlib._GeneratorContextManager
    entered = kind.__enter__

    def enter(self: object) -> object:
        result = entered(self)
        if owner == "writer" or self.gen.gi_code is build._written.__wrapped__.__code__:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    kind.__enter__ = enter
    main(*arguments)


def main_on_a_full_disk(*arguments: str) -> None:
    """The command, with room for 300 bytes in each file, and a standard output that is no file. Bytecode would be cut
    off, too, and be what the next process finds."""
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    main(*arguments)


@pytest.mark.parametrize("command", [
    ("data", "build", "many.txt", "--out", "{}"),
    ("data", "build", "few.txt", "--valid-fraction", "0.5", "--out", "{}"),  # all but PREFIX.json fits
    *(("plan", "--preset", "gpt2-124m", "--top", "1", f"--{name}", "{}") for name in FILES),
])  # fmt: skip
def test_on_a_full_disk_a_command_leaves_nothing_and_names_the_path(commands, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for name, number in (("few.txt", 9), ("many.txt", 999)):
        Path(name).write_text("".join(f'{{"text": "abc{n}"}}\n' for n in range(number)))
    code, _, err = commands.call(main_on_a_full_disk, *(word.format("made") for word in command)).finish()
    assert code == 2 and err.splitlines()[-1].startswith("tpformer: made") and "File too large" in err, err
    assert sorted(os.listdir()) == ["few.txt", "many.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_a_signal_ends_leaves_nothing(commands, tmp_path, number):
    (tmp_path / "long.txt").write_bytes(b"some words\n" * 2_000_000)
    command = commands.start("data", "build", str(tmp_path / "long.txt"), "--out", str(tmp_path / "made"))
    command.wait_until((tmp_path / "made.bin.tmp").exists, "the build")
    os.kill(command.pid, number)
    assert command.finish()[0] == -number and os.listdir(tmp_path) == ["long.txt"]


@pytest.mark.parametrize("owner", ["writer", "writers"])
def test_a_signal_as_a_build_begins_leaves_nothing(commands, tmp_path, owner):
    (tmp_path / "text.txt").write_text("some words\n" * 20)
    command = "data", "build", str(tmp_path / "text.txt"), "--out", str(tmp_path / "made")
    code, _, err = commands.call(main_interrupted_behind, owner, *command).finish()
    assert code == -signal.SIGTERM and os.listdir(tmp_path) == ["text.txt"], err


@pytest.mark.parametrize(("command", "arguments"), [
    (build_data_command, ("text.txt", "--out")), (evaluate_command, ("run", "--json")),
    *((plan_command, ("--preset", "gpt2-124m", f"--{name}")) for name in FILES),
])  # fmt: skip
def test_a_folder_or_nothing_is_refused_where_a_file_is_meant(tmp_path, monkeypatch, command, arguments):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abc")
    Path("run").mkdir()
    monkeypatch.setattr("tpformer.training.source.source_config", lambda *_: RunConfig())
    for path in (" ", "new/", ".", "..", "run", "run/", "/"):
        with pytest.raises(ValueError, match="is empty: give it a path|is a folder: add a name, such as --"):
            command([*arguments, path])
    assert sorted(os.listdir()) == ["run", "text.txt"]


def allocate(of: str) -> None:
    """What a command does whose sizes are more than the machine's memory."""
    guarded({"torch": partial(torch.empty, 2**50), "numpy": partial(np.empty, 2**50)}[of])


@pytest.mark.parametrize(("of", "size"), [("torch", "4503599627370496 bytes"), ("numpy", "8.00 PiB")])
def test_memory_that_there_is_not_is_said_in_one_line(commands, of, size):
    code, _, err = commands.call(allocate, of).finish()
    assert code == 2 and err.startswith(f"tpformer: {size} at once cannot be allocated: lower"), err


@pytest.mark.parametrize(("given", "first"), [(["--help"], "usage: "), (["data", "-h"], "  data build ")])
def test_help_is_there_for_all_commands_and_for_those_of_one_word(commands, given, first):
    code, out, _ = commands.run(*given)
    assert code == 0 and out.startswith(first) and "  data stdlib " in out


def test_import_names_every_family():
    for family in FAMILIES:
        assert re.sub(r"\W|_", "", family) in re.sub(r"\W", "", (Import.__doc__ or "").lower()), family


@pytest.mark.parametrize("options", [BuildData, Chat, DryRun, Evaluate, Export, Generate, Import, Plan])
def test_every_number_among_the_options_has_a_range(options):
    hints = typing.get_type_hints(options)
    numbers = {name: kind[0] for name, hint in hints.items() if (kind := re.search(r"\b(int|float)\b", str(hint)))}
    assert {*numbers} <= {*OPTION_RANGES}
    for name, kind in numbers.items():
        values = (math.nan, math.inf, -math.inf) if kind == "float" else (2**63, -(2**63))
        for value in values:
            with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')}={value} must be "):
                checked(dataclasses.make_dataclass("Given", [name])(value))


def test_presets_are_listed_with_their_sizes(commands):
    code, out, _ = commands.run("presets")
    rows = {row.split()[0]: row for row in out.splitlines()[1:]}
    assert code == 0 and [*rows] == [*PRESETS]
    assert all(f"{preset_config(name).n_parameters / 1e6:,.0f}M" in row for name, row in rows.items())


def test_help_has_the_choices_and_the_exit_codes_and_each_command_its_own_heading(commands):
    """Words are compared, because the help is wrapped into boxes."""
    pretrain, verify = (commands.run(command, "--help", COLUMNS="200")[1] for command in ("pretrain", "verify"))
    words = set(re.findall(r"[\w.]+", pretrain))
    choices = [*MLP_ACTIVATIONS, *NORM_NAMES, *DTYPES, *(name for names in CHOICES.values() for name in names)]
    assert {name.lower() for name in choices} <= {word.lower().rstrip(".") for word in words}
    assert set(re.findall(r"[\w.]+", EXIT_CODES)) <= words
    assert "Compare two steps of FILE.toml" in verify and "Exit codes" not in verify


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("line, found", [("pret", "pretrain"), ("data s", "stdlib"), ("export RUN --dt", "--dtype")])
def test_bash_completes_commands_and_options(line, found):
    script = f"""
    tpformer() {{ {sys.executable} -m tpformer.cli "$@"; }}
    source {ROOT / "examples/completion.bash"}
    COMP_WORDS=(tpformer {line}); COMP_CWORD={len(line.split())}; _tpformer; echo "${{COMPREPLY[*]}}"
    """
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == [found], result.stderr
