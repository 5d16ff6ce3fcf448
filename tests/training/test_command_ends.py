"""`tpformer pretrain` from outside: its sockets, its terminal, its exit codes, a second launcher in its directory."""

import fcntl
import ipaddress
import os
import pty
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from commands import main, on_terminal
from tiny_runs import rows, write_run
from turns import in_turns

from tpformer.processes.launch import STOPPED_EXIT_CODE
from tpformer.training.checkpoint import steps
from tpformer.training.data import IndexedDataset, IndexedWriter

ANY = ("0.0.0.0", "::")
PIPELINE = {"pipeline_parallel": 2}
LONG = {"train": {"steps": 100_000}, "data": {"valid": []}, "checkpoint": {"interval": 0}}


@pytest.fixture
def write(tiny_values, tmp_path):
    """write(sections): the path of a run's TOML file; the run is in tmp_path/run."""
    return partial(write_run, tmp_path, tiny_values)


def made(run: Path) -> list[int]:
    """The steps of the checkpoints that are whole."""
    return [step for step in steps(run / "checkpoints") if (run / f"checkpoints/step-{step}/manifest.json").exists()]


def addresses(pids: list[int]) -> Iterator[tuple[str, str]]:
    """(the own address, the peer's) of every TCP and UDP socket of these processes, from /proc."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # a process or file that has gone meanwhile
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
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
        with socket.socket() as probe, suppress(OSError):
            if fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20] != 127:  # SIOCGIFADDR
                return name
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize(("layout", "number"), [(PIPELINE, signal.SIGTERM), *in_turns([({}, signal.SIGINT)], first=2)])
def test_a_run_has_no_socket_outside_loopback_and_a_stop_is_no_failure(commands, tmp_path, write, layout, number):
    """R13, at any time of a run: it is looked at all the time. R19: a stopped run writes a checkpoint, has an exit code
    of its own, and is not started again."""
    variables = {"GLOO_SOCKET_IFNAME": name} if (name := another_interface()) else {}
    more = {**LONG, "checkpoint": {"interval": 3, "keep": 1}}
    command = commands.start("pretrain", write(parallel=layout, run={"max_restarts": 1}, **more), **variables)
    run, seen = tmp_path / "run", set[tuple[str, str]]()

    def look() -> bool:
        if command.poll() is None:
            seen.update(addresses([command.pid, *command.children()]))
        return len(rows(run)) > 5

    command.wait_until(look, "6 steps")
    os.kill(command.pid, number)
    code, out, err = command.finish()
    assert code == STOPPED_EXIT_CODE and not err, out + err
    assert made(run) == [len(rows(run))] and f"stopped at step {made(run)[0]}; checkpoint" in out
    assert any(peer in ANY for _, peer in seen), "none listens"
    assert not any(own in ANY for own, _ in seen), seen
    assert all(each in ANY or ipaddress.ip_address(each).is_loopback for pair in seen for each in pair), seen


def test_a_directory_is_its_launchers_until_that_one_is_killed(commands, tmp_path, write):
    """R9. A second launcher is refused, also while ranks are started again in a directory that stays theirs. R11: the
    ranks of a launcher that was killed end with it, and the next launcher waits for that."""
    toml, run = write(parallel={"tensor_parallel": 2}, run={"max_restarts": 1}, **LONG), tmp_path / "run"
    again = ("pretrain", toml, "--run.resume", "True")
    first = commands.start("pretrain", toml)
    first.wait_until(lambda: len(rows(run)) > 1, "steps")
    for killed in (False, True):
        if killed:
            os.kill(first.children()[1], signal.SIGKILL)
            first.wait_until(lambda: "restart 1 of 1" in first.err, "a restart")
        code, out, err = commands.run(*again)
        assert code == 2 and f"{run} is in use by process {first.pid} on " in err and err.count("\n") == 1, err
    first.wait_until(lambda: len(first.children()) == 2 and len(rows(run)) > 1, "steps of the second attempt")
    os.kill(first.pid, signal.SIGKILL)
    first.process.join()
    code, out, err = commands.run(*again, "--train.steps", "2")
    assert code == 0, out + err
    assert [row["step"] for row in rows(run)] == [1, 2], "R5: without a checkpoint it begins anew"


@pytest.mark.parametrize("n_ranks", [2, *in_turns([1], first=1)])
def test_a_run_whose_terminal_closes_writes_a_checkpoint(commands, tmp_path, write, n_ranks):
    """R19: the kernel sends SIGHUP, and each line that is printed after that fails."""
    ours, theirs = pty.openpty()
    toml = write(parallel={"tensor_parallel": n_ranks}, **LONG)
    command, run = commands.call(on_terminal, os.ttyname(theirs), "pretrain", toml), tmp_path / "run"

    def look() -> bool:
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            os.read(ours, 1 << 16)  # else the terminal is full at some time, and the run waits
        return len(rows(run)) > 2

    command.wait_until(look, "steps")
    os.close(theirs)
    os.close(ours)
    assert command.finish()[0] == STOPPED_EXIT_CODE
    assert made(run) == [len(rows(run))]


def without_standard_files(*arguments: str) -> None:
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None  # as Python starts without them
    main(*arguments)


def test_closed_standard_files_are_no_mistake(commands, tmp_path, write):
    toml = write(parallel={"tensor_parallel": 2}, train={"steps": 2})
    assert commands.call(without_standard_files, "pretrain", toml).finish()[0] == 0
    assert made(tmp_path / "run") == [2]


def printing_to(where: str, *arguments: str) -> None:
    """The command, whose standard output goes to a full disk, or to a reader that leaves after step 3."""
    if where == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    else:
        end, start = os.pipe()
        if os.fork() == 0:
            os.close(start)
            while b"step 3/" not in os.read(end, 1 << 16):
                pass
            os._exit(0)
        os.close(end)
        os.dup2(start, 1)
        os.close(start)
    main(*arguments)


@pytest.mark.parametrize("n_ranks", [1, *in_turns([2], first=0)])
def test_what_a_run_prints_is_not_worth_its_steps(commands, tmp_path, write, n_ranks):
    """On a full disk it trains to its end; without a reader it stops, after a checkpoint."""
    toml, run = write(parallel={"tensor_parallel": n_ranks}, train={"steps": 2}, data={"valid": []}), tmp_path / "run"
    code, _, err = commands.call(printing_to, "full", "pretrain", toml).finish()
    assert code == 0 and made(run) == [2] and len(rows(run)) == 2, err
    assert err.count("standard output cannot be written (No space left on device)") == 1, err
    more = ("--run.resume", "True", "--train.steps", "100000")
    code, _, err = commands.call(printing_to, "unread", "pretrain", toml, *more).finish()
    assert code == STOPPED_EXIT_CODE and made(run)[-1] == len(rows(run)) > 2 and err == "", err


ONE = ("--parallel.tensor-parallel", "1")
HARMED = "harmed.bin has the id 300 at token 0, but the model's ids are 0 to 256"
MISTAKES = [
    (["pretrain", "{toml}", "--train.device", "cuda"], {}, "no CUDA device is visible"),  # N6
    (["pretrain", "{toml}"], {"RANK": "0", "WORLD_SIZE": "3"}, "the layout has 2 ranks, but 3 were started"),  # N6
    (["pretrain", "{toml}"], {"RANK": "2", "WORLD_SIZE": "3"}, "the layout has 2 ranks, but 3 were started"),
    (["pretrain", "{toml}", "--run.dir", "{toml}"], {}, "cannot be written"),
    (["pretrain", "{toml}", "--run.dir", "{tmp}/blocked"], {}, "blocked/ranks"),  # R18
    (["pretrain", "{toml}", "--model.vocab-size", "50"], {}, "but the model's vocab_size is 50"),
    (["pretrain", "{toml}", "--parallel.transport", "fused"], {}, "fused needs a CUDA device"),
    # R3: such ids became token 0 or were dropped, and the losses looked fine
    (["pretrain", "{toml}", *ONE, "--data.train", "{tmp}/harmed"], {}, HARMED),
    (["pretrain", "{toml}", *ONE, "--data.valid", "{tmp}/harmed"], {}, HARMED),
    (["timeline", "{tmp}/blocked"], {}, "timeline.json is damaged"),  # R18
    (["timeline", "{tmp}"], {}, "--log.timeline-step"),
    (["import", "{tmp}/blocked", "--out", "{tmp}/new"], {}, "config.json"),
    (["data", "build", "{toml}", "--out", "{tmp}/new", "--tokenizer", "{toml}"], {}, "run.toml is not a tokenizer"),
    (["generate", "{tmp}", "--tensor-parallel", "-1"], {}, "--tensor-parallel=-1 must be at least 1"),  # R19
    (["chat", "{tmp}", "--tensor-parallel", "0"], {}, "--tensor-parallel=0 must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "variables", "said"), MISTAKES)
def test_a_mistake_takes_one_line(commands, tmp_path, tiny_data, write, arguments, variables, said):
    """tests/test_imports.py has the mistakes that are found without data."""
    blocked, harmed = tmp_path / "blocked", tmp_path / "harmed"
    blocked.mkdir()
    (blocked / "ranks").touch()
    (blocked / "timeline.json").write_text('{"actions": [[1]]}')
    (blocked / "config.json").write_text("[")
    with IndexedWriter(harmed, IndexedDataset(tiny_data).dtype) as writer:  # one window, which every sample is
        writer.add_document([300, *range(16)])
    harmed.with_suffix(".json").write_text('{"tokenizer": "bytes", "vocab_size": 257}')
    toml = write(parallel={"tensor_parallel": 2}, train={"steps": 2})
    code, out, err = commands.run(*(each.format(toml=toml, tmp=tmp_path) for each in arguments), **variables)
    assert code == 2 and said in err and err.count("\n") == 1 and err.startswith("tpformer: "), out + err
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or said == HARMED
