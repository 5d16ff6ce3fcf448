"""The pretraining loop of one rank."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import RunConfig, check_config
from tpformer.distributed import all_reduce, check_all, close, indexed
from tpformer.distributed.mesh import AXES
from tpformer.ops.transport import dtype_name
from tpformer.parallel import gather_actions
from tpformer.processes.stops import stop_requests
from tpformer.processes.watchdog import Watchdog

from .checkpoint import Checkpointer, CheckpointError, steps
from .checkpoint_files import remove_leftovers
from .data import DataError
from .metrics import ROWS, LossMean, MetricsLog, cut_metrics, is_validated, plot_losses, read_metrics, rounded
from .norms import NoiseScale, NormWatch, batch_gradient_norm
from .observe import WandbLog, check_wandb, profiled
from .optimizer import build_optimizer
from .resolve import mask_notes, resolve, vocabulary_note
from .run_directory import Start, check_run_directory, check_steps, read_start, write_run
from .saves import ADVICE, RunLost, Saves, check_history, lost, note_saved
from .schedules import batch_size, learning_rate, samples_before, warmup_notice
from .setup import build_model, default_dtype, device_type, group_timeout, join_ranks, open_data, run_mesh
from .source import open_source
from .step import LossScaler, StepResult, batch, evaluate, train_step
from .summary import mfu, summary


class Trainer:
    """One rank of a run, from its configuration to its checkpoints. All methods are collective over the world.

    Constructing it enters the process group, builds the model and, with run.resume, loads the newest good checkpoint.
    Errors: ValueError or FileNotFoundError for a configuration, dataset or run directory that cannot be used;
    CheckpointError if the run has checkpoints and none is usable.
    """

    def __init__(self, config: RunConfig) -> None:
        check_config(config)
        self.config = config = resolve(config)
        self.directory = Path(config.run.dir)
        self.data = open_data(config)
        device = device_type(config)
        self.start = self._start(device)
        join_ranks(device, group_timeout(config))
        self.leader = dist.get_rank() == 0
        self._prepare_directory()
        # the watchdog starts before the model is built or loaded, because a rank may hang in that, too
        with ExitStack() as stack:
            self.watchdog = stack.enter_context(Watchdog(self.directory / "ranks", timeout=config.run.timeout))
            self._build(device)
            if self.start is not None and (note := write_run(self.start)):
                self._notice(note)
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
        self.optimizers = [build_optimizer(part, config.optimizer) for part in self.model.parts]
        microbatches = config.n_microbatches * config.parallel.data_parallel
        half = default_dtype(config) == torch.float16
        # 2**16 times the number of microbatches, rounded up to a power of two
        self.scaler = LossScaler(2.0 ** (16 + (microbatches - 1).bit_length())) if half else None
        self.skipped_in_a_row = self.skipped = 0
        self.diverging = False  # the last step was skipped, and not because the loss scale is being found
        self.losses, self.noise = LossMean(config.log.interval), NoiseScale()
        self.watch = NormWatch(self.model) if config.log.norm_interval else None
        self.watchdog.progress(0, "looking for a checkpoint")
        self.checkpointer = Checkpointer(
            self.directory / "checkpoints",
            keep=config.checkpoint.keep,
            timeout=group_timeout(config),
            report=self._notice,
            on_saved=lambda step: note_saved(self.directory, step),
        )
        self.saves = Saves(self.checkpointer, config.checkpoint.interval, self._save, self._notice)
        self.step = self._resume() if config.run.resume else 0
        if finished := check_steps(config, self.step):
            self._notice(finished)
        if self.step == 0:
            check_history(self.directory)
            if config.model.init_from is not None:
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
                    (self.directory / name).mkdir(parents=True, exist_ok=True)
                for name in ROWS:
                    read_metrics(self.directory / name)  # a bad line ends the run before it begins
                remove_leftovers(self.directory / "checkpoints")  # before anything is written: they may fill the disk
            except OSError as error:
                errors = [f"{error.filename} cannot be made: {error.strerror}"]
            except ValueError as error:
                errors = [str(error)]
        dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise ValueError(errors[0])

    def _resume(self) -> int:
        """Load the newest good checkpoint and return its step; 0 if the run has no checkpoint."""
        step = self.checkpointer.newest()
        if step is None:
            if found := steps(self.checkpointer.directory):
                raise CheckpointError(
                    f"{self.checkpointer.directory} has checkpoints of steps {', '.join(map(str, found))}, and none is "
                    f"usable (see above): repair them, or set another run.dir to begin anew"
                )
            return 0
        self.watchdog.progress(step, "loading the checkpoint")
        extra = self.checkpointer.load(step, self.model.parts, self.optimizers)
        self.skipped, self.skipped_in_a_row = (int(extra.get(name, 0)) for name in ("skipped", "skipped_in_a_row"))
        self.losses.load_state_dict(extra.get("losses", {}))
        self.noise.load_state_dict(extra.get("noise", {}))
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
        extra: dict[str, Any] = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        extra |= {"losses": self.losses.state_dict(), "noise": self.noise.state_dict()}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        self.checkpointer.save(self.step, self.model.parts, self.optimizers, extra)

    def _batch(self, step: int, parts: int = 1) -> tuple[Tensor, int]:
        """This data-parallel rank's samples of a step, and the global index of the first. The step alone decides.

        parts: 2 for the samples of the step's first half, shared by all ranks.
        """
        size = batch_size(step, self.config.train) // parts
        self.model.set_samples(size)
        first, share = self.model.own_samples(samples_before(step, self.config.train), size)
        return batch(self.data.train, first, share).to(self.device), first

    def validate(self) -> float:
        """Mean loss over the first validation_samples samples of every validation dataset, equal on all ranks."""
        return evaluate(self.model, self.data.valid, self.config.train.validation_samples, self.device)

    def _half_norm(self, step: int) -> float | None:
        """The gradient norm of the first half of a step's batch, in every log.noise_interval-th step."""
        interval = self.config.log.noise_interval
        if not interval or step % interval:
            return None
        rows, first = self._batch(step, parts=2)
        return batch_gradient_norm(self.model, rows, first, step, 1.0 if self.scaler is None else self.scaler.scale)

    def _train_one(self, log: MetricsLog | None = None) -> dict:
        """Take the next step and return its row for the log. log: what gets its norms, on rank 0."""
        step, config = self.step + 1, self.config
        lr = learning_rate(step, config.train.steps, config.optimizer)
        half_norm = self._half_norm(step)
        watched = self.watch is not None and step % config.log.norm_interval == 0
        samples, first = self._batch(step)
        check_all(step)
        profiles = self.leader and step == config.log.profile_step
        with self._recorded(step), profiled(self.directory / "profile.json") if profiles else nullcontext():
            result = train_step(
                self.model,
                self.optimizers,
                samples,
                first_sample=first,
                step=step,
                lr=lr,
                clip_norm=config.optimizer.clip_norm,
                scaler=self.scaler,
                watch=self.watch if watched else None,
            )
        check_all()  # if a wait in a kernel expired, the run ends before wrong numbers are logged or saved
        self._count_skipped(step, result)
        self.step = step
        norms = result.norms
        if half_norm is not None:
            norms |= {"noise_scale": self.noise.add(batch_size(step, config.train), result.norm, half_norm)}
        if norms and log is not None:
            log.norms(step=step, **norms)
        mean = self.losses.add(step, result.loss)
        row = {"step": step, "loss": mean, "step_loss": result.loss, "grad_norm": result.norm, "lr": lr}
        if self.skipped:
            row["skipped"] = self.skipped
        return row

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """In the step log.timeline_step, record the actions of rank 0's pipeline in timeline.json."""
        pipeline = self.model.pipeline
        if pipeline is None or step != self.config.log.timeline_step:
            yield
            return
        with pipeline.recording() as own:
            yield
        actions = gather_actions(own, self.mesh.get_group("pp"))
        if self.leader:
            layout = self.config.parallel
            kept = {"schedule": layout.pipeline_schedule, "n_microbatches": self.model.n_microbatches}
            (self.directory / "timeline.json").write_text(json.dumps({**kept, "actions": actions}))
            self._notice(f"step {step} recorded: draw it with `tpformer timeline {self.directory}`")

    def _count_skipped(self, step: int, result: StepResult) -> None:
        """Count skipped steps, in total and in a row. FloatingPointError on all ranks after too many in a row."""
        # a float16 run whose loss is finite is looking for its loss scale, as it does now and then
        self.diverging = result.skipped and (self.scaler is None or not math.isfinite(result.loss))
        if not result.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        where = f"first in {result.offender}" if result.offender else "in no gradient"
        scale = "" if self.scaler is None else f", loss scale now {self.scaler.scale:g}"
        self._notice(f"step {step} skipped: loss {result.loss}, gradient norm {result.norm}, not finite {where}{scale}")
        if self.skipped_in_a_row >= self.config.train.max_skipped_steps:
            self.checkpointer.settle()
            raise FloatingPointError(
                f"{self.skipped_in_a_row} steps in a row were skipped, the last one step {step}: loss {result.loss}, "
                f"gradient norm {result.norm}, not finite {where}; {ADVICE}"
            )

    def _notice(self, text: str) -> None:
        if self.leader:
            print(text, flush=True)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Each flag, true if it is on any rank; the same on all ranks. Communication: an all-reduce per mesh axis."""
        agreed = torch.tensor([float(flag) for flag in flags], device=self.device)
        for group in self.model.groups.values():
            agreed = all_reduce(agreed, group, op="max")
        return [bool(flag) for flag in agreed.tolist()]

    def _after_step(self, requests: list[int]) -> bool:
        """Whether to stop. A save that has failed is planned again. RunLost if the run directory is gone.

        A run that is asked to stop while steps are skipped goes on until one is not, because only then it can save.
        """
        gone = self.leader and not (self.directory / "config.toml").exists()
        stop, failed, is_lost = self._agreed(bool(requests), self.checkpointer.failed, gone)
        if is_lost:
            raise lost(self.directory, self.step)
        if failed:
            self.saves.retry(self.step)
        return stop and not self.diverging

    def _validate(self, log: MetricsLog | None) -> None:
        self.watchdog.progress(self.step, "validation")
        loss = self.validate()
        if log is not None:
            log.row(step=self.step, val_loss=loss)

    def _validation_due(self) -> bool:
        last = self.step == self.config.train.steps
        return bool(self.data.valid) and (last or self.step % self.config.train.validation_interval == 0)

    def _validation_lost(self) -> bool:
        """Whether the run was stopped after a step whose validation is due. Communication: a broadcast from rank 0."""
        missing = [False]
        if self.leader and self.step > 0 and self._validation_due():
            missing = [not is_validated(self.directory / "metrics.jsonl", self.step)]
        dist.broadcast_object_list(missing, src=0)
        return missing[0]

    def run(self) -> None:
        """Train to the last step. SIGTERM, Ctrl-C or a closed terminal ends training early, after a checkpoint.

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
            plot_losses(self.directory)

    def _loop(self, log: MetricsLog | None) -> None:
        """Train, log, validate and save until the last step or a request to stop. log: only on rank 0."""
        config, final, watchdog = self.config, self.config.train.steps, self.watchdog
        if log is not None:
            log.note(summary(config, self.device, self.step))
            if self.config.parallel.tensor_parallel > 1:
                log.note(self.linears)
            if notice := warmup_notice(final, config.optimizer):
                log.note(notice)
        if self._validation_lost():
            self._validate(log)
        started, counted = time.perf_counter(), self._tokens()
        with stop_requests() as requests:
            stop = False
            while self.step < final and not stop:
                watchdog.progress(self.step + 1)
                row = self._train_one(log)
                stop, last = self._after_step(requests), self.step == final
                if log is not None:
                    log.advance(self.step)
                if log is not None and (self.step % config.log.interval == 0 or last or stop):
                    now, tokens = time.perf_counter(), self._tokens()
                    speed = (tokens - counted) / (now - started)
                    row |= {"tokens": tokens, "tokens_per_second": rounded(speed), **mfu(config, self.device, speed)}
                    log.row(**row)
                    started, counted = now, tokens
                if self._validation_due() and (last or not stop):  # after a stop, it is done when the run resumes
                    before = time.perf_counter()
                    self._validate(log)
                    started += time.perf_counter() - before  # validation is not training speed
                if last or stop or self.saves.due(self.step):
                    self.saves.save(self.step, diverging=self.diverging, ending=last or stop)
            watchdog.progress(self.step, "last checkpoint")
            self.saves.end(self.step, skipped_in_a_row=self.skipped_in_a_row, diverging=self.diverging)
        if log is not None and stop and self.step < final:
            log.note(f"stopped at step {self.step}; checkpoint written: continue with --run.resume True")

    def _tokens(self) -> int:
        """Tokens of all steps so far."""
        return samples_before(self.step + 1, self.config.train) * self.config.model.seq_length

    def close(self) -> None:
        """Leave the process group; collective."""
        for axis in AXES:
            close(self.mesh.get_group(axis))
        dist.destroy_process_group()


def pretrain(config: RunConfig) -> bool:
    """Train this rank's part of a run. Without torchrun's environment variables this process is the only rank.

    Returns whether the run has reached its last step. Otherwise it was stopped, after a checkpoint.

    Errors: before the first step those of Trainer. After that FloatingPointError for too many skipped steps, or if the
    last one is skipped; RunLost; DataError for tokens outside of the vocabulary; and RuntimeError in place of any other
    ValueError, FileNotFoundError or ImportError.
    """
    trainer = Trainer(config)
    try:
        trainer.run()
    except (RunLost, DataError):
        raise  # what they say is the user's to mend
    except (ValueError, FileNotFoundError, ImportError) as error:
        # the command reports these as a user's mistake, in one line; once training runs, the traceback is needed
        raise RuntimeError(f"step {trainer.step + 1} failed: {error}") from error
    trainer.close()
    return trainer.step >= trainer.config.train.steps
