"""Commands about a run's training: pretrain, verify, dry-run, timeline."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro

from tpformer.config import RunConfig, check_config
from tpformer.launchers import launched
from tpformer.processes.launch import STOPPED_EXIT_CODE
from tpformer.processes.ownership import owned

from .options import parsed_with_others
from .run import parse_run, with_ranks


def pretrain_command(arguments: Sequence[str]) -> None:
    """`tpformer pretrain`: check the configuration and the datasets, then train on all ranks.

    The run directory is this launcher's meanwhile, or rank 0's under another launcher. A run that was stopped ends with
    STOPPED_EXIT_CODE, but for the ranks of another launcher: torchrun takes any code but 0 for a failure, and would
    start them again.
    """
    from tpformer.training.observe import check_wandb
    from tpformer.training.resolve import check_datasets, resolve

    config = parse_run(arguments)
    check_config(config)
    joined = launched()
    config = _within_budget(config, speaks=not joined or os.environ["RANK"] == "0")
    # every rank repeats these checks; a mistake that is found here gives one message, not one per rank
    check_wandb(config.log.wandb)
    check_datasets(config)
    resolved = resolve(config)

    from tpformer.training.setup import check_run, open_data
    from tpformer.training.trainer import pretrain

    check_run(config)
    open_data(resolved)

    def work(config: RunConfig) -> None:
        predicted = None
        if config.parallel.memory_budget:
            from tpformer.planner.memory_budget import predicted_bytes

            predicted = predicted_bytes(config)
        if not pretrain(config, predicted) and not joined:
            sys.exit(STOPPED_EXIT_CODE)

    leads = not joined or os.environ["RANK"] == "0"
    with owned(Path(config.run.dir)) if leads else nullcontext():
        with_ranks(work, config, config.run.max_restarts)


def _within_budget(config: RunConfig, speaks: bool) -> RunConfig:
    """The configuration with what its layers keep under parallel.memory_budget; every rank chooses the same."""
    if not config.parallel.memory_budget:
        return config
    from tpformer.planner.memory_budget import with_budget

    config, lines = with_budget(config)
    for line in lines if speaks else ():
        print(line, flush=True)
    return config


def verify_command(arguments: Sequence[str]) -> None:
    """`tpformer verify`: compare the layout with one process. Exit code 1 if they differ."""
    config = parse_run(arguments, "verify")

    import torch.distributed as dist

    from tpformer.training.setup import check_run
    from tpformer.training.verify import check_memory, verify_config, verify_rank

    config = verify_config(config)
    check_run(config)
    check_memory(config)

    def work(config: RunConfig) -> None:
        code = verify_rank(config)
        dist.destroy_process_group()
        sys.exit(code)

    with_ranks(work, config)


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
    options, rest = parsed_with_others(DryRun, "dry-run FILE.toml", arguments)
    config = parse_run(rest, "dry-run")

    from tpformer.planner.dry_run import check_ranks, default_ranks, device_memory, plan_config
    from tpformer.planner.report import report

    config = plan_config(_within_budget(config, speaks=True))
    try:
        ranks = default_ranks(config) if options.ranks is None else [int(rank) for rank in options.ranks.split(",")]
    except ValueError:
        raise ValueError(f"--ranks {options.ranks}: write whole numbers separated by commas") from None
    check_ranks(config, ranks)
    memory = device_memory() if options.device_memory is None else options.device_memory * 1e9
    for line in report(config, ranks, memory):
        print(line, flush=True)


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why!r}): record the step again with --log.timeline-step")


def timeline_command(arguments: Sequence[str]) -> None:
    """`tpformer timeline`: draw a recorded step. FileNotFoundError for a run that recorded none."""

    def timeline(run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="Directory of the run.")]) -> None:
        """Draw the pipeline step that a run recorded: plots/pipeline.svg, and plots/pipeline.json for Perfetto."""
        path = run_dir / "timeline.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: train a pipeline with --log.timeline-step N, the step to record"
            )
        from tpformer.parallel import Action
        from tpformer.planner import draw_timeline

        try:
            record = json.loads(path.read_text())
            actions = [Action(*action) for action in record["actions"]]
            made = record["schedule"], record["n_microbatches"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _damaged(path, error) from None
        if not actions:
            raise _damaged(path, "it has no actions")
        try:
            draw_timeline(actions, run_dir / "plots", *made)
        except (LookupError, TypeError) as error:
            raise _damaged(path, error) from None
        print(f"written: {run_dir / 'plots' / 'pipeline.svg'} and pipeline.json")

    tyro.cli(timeline, prog="tpformer timeline", args=list(arguments))
