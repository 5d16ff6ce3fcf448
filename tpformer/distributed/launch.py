"""Starting the ranks of a run on this machine, and ending them together."""

import os
import signal
import socket
import subprocess
import sys
import time

POLL_SECONDS = 0.05


def launched() -> bool:
    """Whether this process already is a rank: torchrun, SLURM with torchrun's variables, or run_ranks started it."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], world_size: int) -> list[subprocess.Popen]:
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]


def _describe(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def run_ranks(command: list[str], world_size: int) -> int:
    """Run `command` once per rank, with torchrun's environment; returns 0, or the exit code of the first to fail.

    SIGTERM and SIGINT are passed on, so that ranks can finish in order; a second one kills them. When a rank fails the
    others are killed at once (they would wait for it), and stderr names it.
    """
    processes = _start(command, world_size)
    received: list[int] = []

    def forward(number: int, _) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number if len(received) == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                for process in processes:
                    process.kill()
                for rank, code in failed:
                    print(f"rank {rank} of {world_size} {_describe(code)}; all ranks were stopped", file=sys.stderr)
                return failed[0][1] if failed[0][1] > 0 else 128 - failed[0][1]
            if all(code == 0 for code in codes):
                return 0
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
