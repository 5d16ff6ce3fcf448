"""What all commands have in common: how they end when nobody reads their output."""

import os
import signal
from pathlib import Path

import pytest
from commands import main

TINY = (str(Path(__file__).parents[1] / "examples/gpt_tiny.toml"), "--model.vocab-size", "257", "--model.n-layers", "1")
VERIFY = ("verify", *TINY, "--model.seq-length", "16", "--model.hidden-size", "32", "--parallel.tensor-parallel", "1")


def main_unread(*arguments: str) -> None:
    """The command, with a standard output whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    main(*arguments)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("pretrain", "--help"), ("dry-run", *TINY), VERIFY])
def test_a_command_whose_output_nobody_reads_ends_by_sigpipe_without_a_word(commands, arguments):
    """As in `tpformer dry-run FILE | head`, where `head` leaves first."""
    code, _, err = commands.call(main_unread, *arguments).finish()
    assert (code, err) == (-signal.SIGPIPE, "")
