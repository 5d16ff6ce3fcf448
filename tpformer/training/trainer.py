"""The pretraining loop of one rank."""

import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import RunConfig
from tpformer.config.zero_gather import gathers_blocks
from tpformer.distributed import check_all, indexed
from tpformer.distributed.mesh import close_mesh
from tpformer.parallel import local_part
from tpformer.processes.files import make_folder, what_failed
from tpformer.processes.standard_files import when_unread
from tpformer.processes.stops import stop_requests
from tpformer.processes.watchdog import Watchdog
from tpformer.words import dtype_name

from . import saves
from .agreement import Agreement
from .batches import Batch, Batches
from .checkpoint import Checkpointer
from .checkpoint_files import remove_leftovers
from .data import DataError
from .deciding import decides
from .graph import build_steps, check_graph
from .metrics import ROWS, MetricsLog, Speed, cut_metrics, is_validated, plot_losses, read_metrics, rounded
from .norms import NormWatch, batch_gradient_norm
from .observe import WandbError, WandbLog, check_wandb, profiled, recorded, unless_it_fails
from .optimizer import build_optimizers
from .resolve import mask_notes, resolve, vocabulary_note
from .results import Launched, Tally
from .run_directory import Start, check_run_directory, check_steps, read_start, write_run
from .saves import ADVICE, NotSaved, RunLost, Saves
from .schedules import batch_size, falls_due, learning_rate
from .setup import build_model, check_run, default_dtype, device_type, group_timeout, join_ranks, open_data, run_mesh
from .source import open_source
from .step import LossScaler, evaluate, why_skipped
from .summary import Reserved, mfu, notices, summary
from .transfers import Fetched


class Trainer:
    """One rank of a run, from its configuration to its checkpoints. All methods are collective over the world.

    Constructing it enters the process group, builds the model and, with run.resume, loads the newest good checkpoint.
    Errors: ValueError or FileNotFoundError for a configuration, dataset or run directory that cannot be used;
    CheckpointError if the run has checkpoints and none is usable.
    """

    def __init__(self, config: RunConfig, predicted: float | None = None) -> None:
        check_run(config)
        self.reserved = Reserved(predicted)
        self.config = config = resolve(config)
        self.directory = Path(config.run.dir)
        device = device_type(config)
        check_graph(config, device)
        self.data = open_data(config)
        self.start = self._start(device)
        join_ranks(device, group_timeout(config), decides("pretrain", config))
        self.leader = dist.get_rank() == 0
        self._prepare_directory()
        # the watchdog starts before the model is built or loaded, because a rank may hang in that, too
        with ExitStack() as stack:
            self.watchdog = stack.enter_context(Watchdog(self.directory / "ranks", timeout=config.run.timeout))
            self._build(device)
            if self.start is not None and (note := write_run(self.start)):
                self._notice(note)
            self._place = saves.place_of(self.directory)
            self._watched = stack.pop_all()

    def _start(self, device: str) -> Start | None:
        """What rank 0 finds as the run starts. It may read whole datasets, before anything that has a time limit."""
        if os.environ.get("RANK", "0") != "0":
            return None
        return read_start(self.config, dtype_name(default_dtype(self.config, device)))

    def _build(self, device: str) -> None:
        """Make the mesh, the model, its optimizers and the checkpointer; resume if asked to."""
        config = self.config
        self.watchdog.progress(0, "building the model")
        self.mesh: DeviceMesh = run_mesh(config, device)
        self.device = indexed(torch.device(device))
        self.model = build_model(config, self.mesh)
        self.linears = self.model.explain(default_dtype(config))  # refuses a transport that cannot run
        self.optimizers = build_optimizers(self.model, config.optimizer, group_timeout(config))
        self.take_step = build_steps(config, device, self.model, self.optimizers, self._notice)
        microbatches = config.n_microbatches * config.parallel.data_parallel
        # 2**16 times the number of microbatches, rounded up to a power of two
        first_scale = 2.0 ** (16 + (microbatches - 1).bit_length())
        where = local_part(self.model.parameters()[0]).device
        self.scaler = LossScaler(first_scale, device=where) if default_dtype(config) == torch.float16 else None
        _, replicas = self.model.exchange.replica or (0, 1)
        self.tally = Tally(config, replicas)
        self.agreement = Agreement(self.model, self.device, config.train.steps)
        self.batches = Batches(config, self.model, self.data.train, self.device)
        self.watch = NormWatch(self.model) if config.log.norm_interval else None
        self.watchdog.progress(0, "looking for a checkpoint")
        self.checkpointer = Checkpointer(
            self.directory / "checkpoints",
            keep=config.checkpoint.keep,
            timeout=group_timeout(config),
            report=self._notice,
            on_saved=lambda step: saves.note_saved(self.directory, step),
        )
        self.saves = Saves(self.checkpointer, config, self.model.exchange.every, self._save, self._notice)
        self.step = self._resume() if config.run.resume else 0
        self.working_on = self.step + 1  # the step that is queued or read, which an error names
        if finished := check_steps(config, self.step):
            self._notice(finished)
        saves.check_history(self.directory, self.step)
        if self.step == 0 and config.model.init_from is not None:
            self._start_from(config.model.init_from)

    def _prepare_directory(self) -> None:
        """Rank 0 checks the run directory and makes it. If that fails, all ranks raise its ValueError."""
        errors: list[str | None] = [None]
        if self.start is not None:
            try:
                check_wandb(self.config.log.wandb)
                data = self.config.data
                notes = vocabulary_note(self.config), *mask_notes((*data.train, *data.valid), masked=data.mask)
                for line in filter(None, (*notes, *check_run_directory(self.start))):
                    self._notice(line)
                for name in ("ranks", "checkpoints"):
                    make_folder(self.directory / name)
                for name in ROWS:
                    read_metrics(self.directory / name)  # a bad line ends the run before it begins
                remove_leftovers(self.directory / "checkpoints")  # before anything is written: they may fill the disk
            except OSError as error:
                errors = [what_failed(error)]
            except ValueError as error:
                errors = [str(error)]
        dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise ValueError(errors[0])

    def _resume(self) -> int:
        """Load the newest good checkpoint and return its step; 0 if the run has no checkpoint."""
        step = self.checkpointer.newest()
        if step is None:
            saves.check_damaged(self.checkpointer.directory)
            return 0
        self.watchdog.progress(step, "loading the checkpoint")
        extra = self.checkpointer.load(step, self.model.parts, self.optimizers, self.model.exchange)
        self.tally.load_state_dict(extra)
        self.batches.go_on(step, extra.get("taken", {}))
        if self.scaler is not None and "scaler" in extra:
            self.scaler.load_state_dict(extra["scaler"])
        return step

    def _start_from(self, path: str) -> None:
        """Replace the initial values by the weights of model.init_from."""
        self.watchdog.progress(0, "loading the weights")
        source = open_source(path, report=self._notice)
        source.load(self.model.parts)
        self._notice(f"weights of {source}")

    def _save(self) -> None:
        self.watchdog.progress(self.step, "checkpoint")
        extra = self.tally.state_dict() | {"taken": self.batches.taken(self.step)}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        self.checkpointer.save(self.step, self.model.parts, self.optimizers, extra, self.model.exchange)

    def validate(self) -> float:
        """Mean loss over the first validation_samples samples of every validation dataset, equal on all ranks."""
        return evaluate(self.model, self.data.valid, self.config.train.validation_samples, self.device)

    def _half_norm(self, step: int, half: Batch) -> Tensor:
        """The gradient norm of the first half of a step's batch."""
        self.model.set_samples(batch_size(step, self.config.train) // 2)
        return batch_gradient_norm(self.model, half.rows, half.first, self.scaler.scale if self.scaler else 1.0)

    def _launch(self, samples: Batch, requests: list[int]) -> Launched:
        """Queue the next step and the copy of its numbers. On a GPU nothing here waits for the device."""
        step, config = self.step + 1, self.config
        self.working_on = step
        lr = learning_rate(step, config.train.steps, config.optimizer)
        half_norm = None if samples.half is None else self._half_norm(step, samples.half)
        self.model.set_samples(batch_size(step, config.train))
        watched = self.watch is not None and step % config.log.norm_interval == 0
        check_all(step)
        with self._observed(step):
            result = self.take_step(
                samples.rows,
                first_sample=samples.first,
                lr=lr,
                clip_norm=config.optimizer.clip_norm,
                scaler=self.scaler,
                watch=self.watch if watched else None,
            )
        flags = self.agreement.flags(self._flags(requests), result.norm.device)
        numbers = {"half_norm": half_norm, "flags": flags, **result._asdict()}
        numbers["pairs"] = self.batches.pairs(step, samples)
        if step == config.train.steps:
            self.model.exchange.finish()
        del numbers["local"]  # stays on the device until somebody asks why the step was skipped
        self.step = step
        return Launched(step, lr, samples, result, Fetched(numbers))

    def _flags(self, requests: list[int]) -> list[bool]:
        """Whether this rank is asked to stop, has a save that failed, or misses the run directory."""
        gone = self.leader and self._place != saves.place_of(self.directory)
        return [bool(requests), self.checkpointer.failed, gone]

    def _read(self, launched: Launched, log: MetricsLog | None) -> bool:
        """Read a step's numbers, count it and write its rows. Returns whether to stop. log: only on rank 0.

        All ranks read a step after they have queued the same ones, so all decide alike: a save that has failed is
        planned again, and RunLost says that the run directory is gone. A run that is asked to stop while steps are
        skipped goes on until one is not, because only then it can save.
        """
        self.working_on = step = launched.step
        numbers = launched.numbers.read()
        self.reserved.compare(self.device, self._notice)
        check_all()  # if a wait in a kernel expired, the run ends before wrong numbers are logged or saved
        row = self.tally.add(step, numbers) | {"lr": launched.lr}
        stop, failed, gone = self.agreement.agreed(step, numbers["flags"], self.tally, row)
        if gone:
            raise saves.lost(self.directory, step)
        if numbers["skipped"]:
            self._report_skipped(launched, numbers)
        norms = self.tally.norms(step, numbers, self.watch.names if self.watch else [])
        if norms and log is not None:
            log.norms(step=step, **norms)
        if failed:
            self.saves.retry(self.step)
        stopping = bool(stop) and not self.tally.diverging
        if log is not None:
            log.advance(step)
            ends = step == self.config.train.steps or (stopping and step == self.step)
            if ends or step % self.config.log.interval == 0:
                tokens = self.batches.taken(step)["tokens"]
                speed = self.speed.until(launched.numbers.at, tokens)
                log.row(**row, tokens=tokens, tokens_per_second=rounded(speed), **mfu(self.config, self.device, speed))
        return stopping

    def _report_skipped(self, launched: Launched, numbers: Mapping[str, Any]) -> None:
        """Say which step was skipped and why. FloatingPointError after too many in a row, on all ranks that take steps
        together."""
        step, in_a_row = launched.step, self.tally.skipped_in_a_row
        offender = why_skipped(self.model, launched.batch.host, launched.result)
        where = f"first in {offender}" if offender else "in no gradient"
        what = f"loss {numbers['loss']}, gradient norm {numbers['norm']}, not finite {where}"
        scale = f", loss scale now {numbers['scale']:g}" if "scale" in numbers else ""
        self._notice(f"step {step} skipped: {what}{scale}")
        if in_a_row >= self.config.train.max_skipped_steps:
            self.checkpointer.settle()
            text = f"{in_a_row} steps in a row were skipped, the last one step {step}: {what}; {ADVICE}"
            raise FloatingPointError(text)

    def _observed(self, step: int) -> AbstractContextManager:
        """What records the actions of rank 0's pipeline in this step, its profile, or nothing."""
        log, pipeline, stack = self.config.log, self.model.pipeline, ExitStack()
        if pipeline is not None and step == log.timeline_step:
            group, named = (
                self.mesh.get_group("pp"),
                (self.config.parallel.pipeline_schedule, self.model.n_microbatches),
            )
            stack.enter_context(recorded(self.directory, step, pipeline, group, named, self._notice))
        if self.leader and step == log.profile_step:
            stack.enter_context(profiled(self.directory / "profile.json", self._notice))
        return stack

    def _notice(self, text: str) -> None:
        if self.leader:
            print(text, flush=True)

    def _validate(self, log: MetricsLog | None) -> None:
        self.watchdog.progress(self.step, "validation")
        before = time.perf_counter()
        loss = self.validate()
        if log is not None:
            log.row(step=self.step, val_loss=loss)
        self.speed.leave_out(time.perf_counter() - before)

    def _validation_due(self) -> bool:
        last = self.step == self.config.train.steps
        every = self.model.exchange.every
        return bool(self.data.valid) and (last or falls_due(self.step, self.config.train.validation_interval, every))

    def _validation_lost(self) -> bool:
        """Whether the run was stopped after a step whose validation is due. Communication: a broadcast from rank 0."""
        missing = [False]
        if self.leader and self.step > 0 and self._validation_due():
            missing = [not is_validated(self.directory / "metrics.jsonl", self.step)]
        dist.broadcast_object_list(missing, src=0)
        return missing[0]

    def run(self) -> None:
        """Train to the last step. SIGTERM, Ctrl-C, a closed terminal or an output that nobody reads end it early, after
        a checkpoint.

        If a step, validation or checkpoint takes longer than run.timeout, the process ends (see Watchdog).
        """
        with self._watched:
            if not self.leader:
                self._loop(None)
                return
            for name in ROWS:
                cut_metrics(self.directory / name, self.step)
            options, settings = {"first_step": self.step, "steps": self.config.train.steps}, self.config.log
            project = settings.wandb
            wandb = WandbLog(self.directory, project, dataclasses.asdict(self.config)) if project else None
            with MetricsLog(self.directory, tensorboard=settings.tensorboard, wandb=wandb, **options) as log:
                self._loop(log)
        if self.config.log.plot:
            with unless_it_fails("plots/loss.png", self._notice):
                plot_losses(self.directory)

    def _loop(self, log: MetricsLog | None) -> None:
        """Train, log, validate and save until the last step or a request to stop. log: only on rank 0."""
        config, final = self.config, self.config.train.steps
        if log is not None:
            log.note(summary(config, self.device, self.step))
            if config.parallel.shares_layers or gathers_blocks(config.parallel, config.train.precision):
                log.note(self.linears)
            for notice in notices(config):
                log.note(notice)
        self.speed = Speed(self.batches.taken(self.step)["tokens"])
        if self._validation_lost():
            self._validate(log)
        with stop_requests() as requests:
            when_unread(lambda: requests.append(signal.SIGPIPE))  # the run stops, after a checkpoint
            stop = self._train(log, requests)
            self.watchdog.progress(self.step, "last checkpoint")
            self.saves.end(self.step, requests, self.tally)
        if log is not None and stop and self.step < final:
            log.note(f"stopped at step {self.step}; checkpoint written: continue with --run.resume True")

    def _train(self, log: MetricsLog | None, requests: list[int]) -> bool:
        """Take steps until the last one or a request to stop. Returns whether the last one that was read says stop.

        A step is read when the next one is queued, so that a GPU has work meanwhile. Before a validation, a checkpoint
        and the end all steps are read. A step's batch is made while the device works on the step before.
        """
        final, stop = self.config.train.steps, False
        pending: Launched | None = None
        samples = self.batches.take(self.step + 1) if self.step < final else None
        while samples is not None:
            self.watchdog.progress(self.step + 1)
            before, pending = pending, self._launch(samples, requests)
            if before is not None:
                stop = self._read(before, log)
            last = self.step == final
            met = self.agreement.meets(self.step)
            if last or stop or met or self._validation_due() or self.saves.due(self.step):
                stop, pending = self._read(pending, log), None
                if self._validation_due() and (last or not stop):  # after a stop, it is done when the run resumes
                    self._validate(log)
                if last or stop or self.saves.due(self.step):
                    self.saves.save(self.step, diverging=self.tally.diverging, ending=last or stop)
            samples = None if last or stop else self._next_batch(pending, log)
        return stop

    def _next_batch(self, pending: Launched | None, log: MetricsLog | None) -> Batch:
        """The samples of the next step. A DataError comes after all steps before it are read."""
        try:
            return self.batches.take(self.step + 1)
        except DataError:
            if pending is not None:
                self._read(pending, log)
            self.working_on = self.step + 1
            raise

    def close(self) -> None:
        """Leave the process group; collective."""
        close_mesh(self.mesh)
        dist.destroy_process_group()


def pretrain(config: RunConfig, predicted: float | None = None) -> bool:
    """Train this rank's part of a run. Without torchrun's environment variables this process is the only rank.

    predicted: bytes of its device by a memory budget's prediction. Returns whether the run has reached its last step.
    Errors: before the first step those of Trainer. After that FloatingPointError for too many skipped steps, or if the
    last is skipped; RunLost; NotSaved; DataError for tokens outside of the vocabulary; WandbError; RuntimeError for any
    other ValueError, FileNotFoundError or ImportError.
    """
    trainer = Trainer(config, predicted)
    try:
        trainer.run()
    except (RunLost, NotSaved, DataError, WandbError):
        raise  # what they say is the user's to mend
    except (ValueError, FileNotFoundError, ImportError) as error:
        # the command reports these as a user's mistake, in one line; once training runs, the traceback is needed
        raise RuntimeError(f"step {trainer.working_on} failed: {error}") from error
    trainer.close()
    return trainer.step >= trainer.config.train.steps
