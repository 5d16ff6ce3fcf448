"""`tpformer pretrain` from outside: its sockets, its terminal, its exit codes, a second launcher in its directory."""

import fcntl
import ipaddress
import os
import pty
import re
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command, main

from tpformer.config import build_config, to_toml
from tpformer.processes.launch import STOPPED_EXIT_CODE
from tpformer.training.export import new_directory

PIPELINE = {"tensor_parallel": 2, "pipeline_parallel": 2}
LONG = {"train": {"steps": 100_000}, "data": {"valid": []}, "checkpoint": {"interval": 0}}


@pytest.fixture
def write(tiny_values, tmp_path):
    """write(sections): the path of a run's TOML file; the run is in tmp_path/run."""

    def write(**sections: dict) -> str:
        path = tmp_path / "run.toml"
        path.write_text(to_toml(build_config(tiny_values, sections)))
        return str(path)

    return write


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def stopped(run: Path, out: str) -> bool:
    """Whether the run says that it stopped, and has the checkpoint that it says it has."""
    found = re.search(r"stopped at step (\d+); checkpoint written", out)
    return found is not None and (run / "checkpoints" / f"step-{found[1]}" / "manifest.json").exists()


# sockets


def addresses(pids: list[int]) -> Iterator[tuple[str, str]]:
    """(the own address, the peer's) of every TCP and UDP socket of these processes, from /proc."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # a process or file that has gone meanwhile
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                yield address(fields[1]), address(fields[2])


def address(field: str) -> str:
    """The address in a field of /proc/net/tcp: words of four bytes in this machine's order, then a port."""
    words = field.split(":")[0]
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    found = ipaddress.ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)


def another_interface() -> str | None:
    """An interface with an IPv4 address that is not loopback: what gloo binds where the host's name leads there."""
    for _, name in socket.if_nameindex():
        with socket.socket() as probe:
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20:24]  # SIOCGIFADDR
            except OSError:
                continue
        if found[0] != 127:
            return name
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize("layout", [PIPELINE, {}], ids=["four ranks", "one rank"])
def test_no_socket_of_a_local_run_is_outside_loopback(commands, tmp_path, write, layout):
    """R13, at any time of a run: it is looked at all the time from the start to the end."""
    variables = {"GLOO_SOCKET_IFNAME": name} if (name := another_interface()) else {}
    few = {"train": {"steps": 6}, "checkpoint": {"interval": 3}}
    command = commands.start("pretrain", write(parallel=layout, **few), **variables)
    seen: set[tuple[str, str]] = set()

    def look() -> bool:
        if command.poll() is None:
            seen.update(addresses([command.pid, *command.children()]))
        return steps(tmp_path / "run") >= 6

    command.wait_until(look, "6 steps")
    code, _, err = command.finish()
    assert code == 0, err
    outside = {
        pair for pair in seen for each in pair if each != "0.0.0.0" and not ipaddress.ip_address(each).is_loopback
    }
    listening = {own for own, peer in seen if peer in ("0.0.0.0", "::")}
    assert listening and not outside and not {"0.0.0.0", "::"} & {own for own, _ in seen}, seen


# one launcher


def test_a_second_launcher_is_refused_and_the_first_trains_on(commands, tmp_path, write):
    """R9. Ranks are started again in a directory that stays theirs."""
    toml, run = write(parallel={"tensor_parallel": 2}, run={"max_restarts": 1}, **LONG), tmp_path / "run"
    first = commands.start("pretrain", toml)
    first.wait_until(lambda: steps(run) > 1, "steps")
    for killed in (False, True):
        if killed:
            before = first.children()
            os.kill(before[1], signal.SIGKILL)
            first.wait_until(lambda: "restart 1 of 1" in first.err, "a restart")
        code, out, err = commands.run("pretrain", toml, "--run.resume", "True")
        assert code == 2 and f"{run} is in use by process {first.pid} on " in err and err.count("\n") == 1, err
    first.wait_until(lambda: len(first.children()) == 2 and steps(run) > 3, "steps of the second attempt")
    first.terminate()
    code, out, err = first.finish()
    assert code in (STOPPED_EXIT_CODE, 128 + signal.SIGTERM), err  # by SIGTERM, if it came before training began
    assert "reported" not in err and "another attempt" not in err


def test_a_launcher_that_was_killed_leaves_its_directory_at_once(commands, tmp_path, write):
    """R11, R9: its ranks end with it, and the next launcher waits for that."""
    toml, run = write(parallel={"tensor_parallel": 2}, **LONG), tmp_path / "run"
    first = commands.start("pretrain", toml)
    first.wait_until(lambda: steps(run) > 1, "steps")
    os.kill(first.pid, signal.SIGKILL)
    first.process.join()
    code, out, err = commands.run("pretrain", toml, "--run.resume", "True", "--train.steps", "2")
    assert code == 0, out + err


# terminals


def in_terminal(path: str, *arguments: str) -> None:
    """The command in a session of its own, whose terminal is the file."""
    os.setsid()
    terminal = os.open(path, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    main(*arguments)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_run_whose_terminal_closes_writes_a_checkpoint(commands, tmp_path, write, n_ranks):
    """R19: the kernel sends SIGHUP, and each line that is printed after that fails."""
    ours, theirs = pty.openpty()
    toml = write(parallel={"tensor_parallel": n_ranks}, **LONG)
    command = commands.call(in_terminal, os.ttyname(theirs), "pretrain", toml)
    run = tmp_path / "run"

    def look() -> bool:
        os.set_blocking(ours, False)
        try:
            os.read(ours, 1 << 16)  # else the terminal is full at some time, and the run waits
        except BlockingIOError:
            pass
        return steps(run) > 2

    command.wait_until(look, "steps")
    os.close(theirs)
    os.close(ours)
    assert command.finish()[0] == STOPPED_EXIT_CODE
    made = [path.name for path in (run / "checkpoints").iterdir() if (path / "manifest.json").exists()]
    assert made == [f"step-{steps(run)}"]


def without_standard_files(*arguments: str) -> None:
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None  # as Python starts without them
    main(*arguments)


def test_closed_standard_files_are_no_mistake(commands, tmp_path, write):
    toml = write(parallel={"tensor_parallel": 2}, train={"steps": 2})
    assert commands.call(without_standard_files, "pretrain", toml).finish()[0] == 0
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json").exists()


# exit codes


@pytest.mark.parametrize(("n_ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGHUP)])
def test_a_stopped_run_writes_a_checkpoint_and_exits_with_its_own_code(commands, tmp_path, write, n_ranks, number):
    """R19. It is no failure, so it is not started again."""
    command: Command = commands.start(
        "pretrain", write(parallel={"tensor_parallel": n_ranks}, run={"max_restarts": n_ranks - 1}, **LONG)
    )
    run = tmp_path / "run"
    command.wait_until(lambda: steps(run) > 2, "steps")
    os.kill(command.pid, number)
    code, out, err = command.finish()
    assert code == STOPPED_EXIT_CODE and stopped(run, out) and not err, out + err


MISTAKES = [
    (["pretrain", "{toml}", "--train.device", "cuda"], {}, "no CUDA device is visible"),  # N6
    (["pretrain", "{toml}"], {"RANK": "0", "WORLD_SIZE": "3"}, "the layout has 2 ranks, but 3 were started"),  # N6
    (["pretrain", "{toml}"], {"RANK": "2", "WORLD_SIZE": "3"}, "the layout has 2 ranks, but 3 were started"),
    (["pretrain", "{toml}", "--run.dir", "{toml}"], {}, "cannot be written"),
    (["pretrain", "{toml}", "--run.dir", "{tmp}/blocked"], {}, "blocked/ranks"),  # R18
    (["timeline", "{tmp}/blocked"], {}, "timeline.json is damaged"),  # R18
    (["generate", "{tmp}", "--tensor-parallel", "-1"], {}, "--tensor-parallel=-1 must be at least 1"),  # R19
    (["chat", "{tmp}", "--tensor-parallel", "0"], {}, "--tensor-parallel=0 must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "variables", "said"), MISTAKES)
def test_a_mistake_takes_one_line(commands, tmp_path, write, arguments, variables, said):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "ranks").touch()
    (blocked / "timeline.json").write_text('{"actions": [[1]]}')
    toml = write(parallel={"tensor_parallel": 2})
    code, out, err = commands.run(*(each.format(toml=toml, tmp=tmp_path) for each in arguments), **variables)
    assert code == 2 and said in err and err.count("\n") == 1 and err.startswith("tpformer: "), out + err


def test_an_export_does_not_replace_the_current_directory(tmp_path, monkeypatch):
    """R18. A shell there would be left in a directory that is gone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the current directory: give --out a new one"):
        new_directory(Path()).__enter__()
