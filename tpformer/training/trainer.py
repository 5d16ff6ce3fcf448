"""The pretraining loop of one rank."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import RunConfig, build_config, check_config, read_toml, to_toml
from tpformer.distributed import all_reduce, check_all, close, indexed
from tpformer.distributed.mesh import AXES
from tpformer.kernels.cost import machine_for
from tpformer.parallel import gather_actions
from tpformer.processes.files import replace_file
from tpformer.processes.watchdog import Watchdog

from .checkpoint import Checkpointer, CheckpointError, steps
from .metrics import MetricsLog, cut_metrics, plot_losses
from .optimizer import build_optimizer, learning_rate
from .resolve import resolve
from .setup import build_model, default_dtype, device_type, group_timeout, join_ranks, open_data, run_mesh
from .source import open_source
from .step import LossScaler, StepResult, batch, evaluate, train_step

# what a resumed run may not change, because its losses would then belong to another run
_FIXED = (("model", None), ("data", None), ("train", "seed"), ("train", "global_batch_size"))


def check_run_directory(config: RunConfig) -> None:
    """ValueError, with the remedy, if a run in run.dir would be overwritten or would go on with other settings."""
    path = Path(config.run.dir) / "config.toml"
    if not path.exists():
        return
    before = build_config(read_toml(path))
    if not before.data.train:
        raise ValueError(
            f"{config.run.dir} is an imported model, whose checkpoint has no optimizer state: set another run.dir, and "
            f"model.init_from = {config.run.dir!r}"
        )
    if not config.run.resume:
        raise ValueError(f"{config.run.dir} already holds a run: continue it with --run.resume True, or set run.dir")
    old, new = (dataclasses.asdict(each) for each in (before, config))
    changed = [
        f"{section}.{key}: {old[section][key]!r} -> {new[section][key]!r}"
        for section, only in _FIXED
        for key in old[section]
        if only in (None, key) and key != "preset" and old[section][key] != new[section][key]
    ]
    if changed:
        raise ValueError(
            f"{config.run.dir} was trained with other settings ({'; '.join(changed)}): keep them, or set run.dir"
        )


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Yield a list to which the number of every SIGTERM and SIGINT is added while the context is open."""
    seen: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
        join_ranks(device, group_timeout(config))
        self.leader = dist.get_rank() == 0
        self._prepare_directory()
        # the watchdog starts before the model is built or loaded, because a rank may hang in that, too
        with ExitStack() as stack:
            self.watchdog = stack.enter_context(Watchdog(self.directory / "ranks", timeout=config.run.timeout))
            self._build(device)
            if self.leader:
                self._write_config()
            self._watched = stack.pop_all()

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
        self.watchdog.progress(0, "looking for a checkpoint")
        where = self.directory / "checkpoints"
        self.checkpointer = Checkpointer(where, keep=config.checkpoint.keep, timeout=group_timeout(config))
        self.step = self._resume() if config.run.resume else 0
        if self.step == 0 and config.model.init_from is not None:
            self._start_from(config.model.init_from)

    def _prepare_directory(self) -> None:
        """Rank 0 checks the run directory and makes it. If that fails, all ranks raise its ValueError."""
        errors: list[str | None] = [None]
        if self.leader:
            try:
                check_run_directory(self.config)
                self.directory.mkdir(parents=True, exist_ok=True)
            except (ValueError, OSError) as error:
                errors = [str(error)]
        dist.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise ValueError(errors[0])

    def _write_config(self) -> None:
        """Write config.toml, without which no run resumes. Call it once the layout has been built."""
        replace_file(self.directory / "config.toml", to_toml(self.config))

    def _resume(self) -> int:
        """Load the newest good checkpoint and return its step; 0 if the run has no checkpoint."""
        step = self.checkpointer.newest()
        if step is None:
            if found := steps(self.checkpointer.directory):
                raise CheckpointError(
                    f"{self.checkpointer.directory} has checkpoints of steps {', '.join(map(str, found))}, and none is "
                    f"usable (see above): repair or move them away to begin anew, or set another run.dir"
                )
            return 0
        self.watchdog.progress(step, "loading the checkpoint")
        extra = self.checkpointer.load(step, self.model.parts, self.optimizers)
        self.skipped, self.skipped_in_a_row = (int(extra[name]) for name in ("skipped", "skipped_in_a_row"))
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
        extra: dict[str, Any] = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        self.checkpointer.save(self.step, self.model.parts, self.optimizers, extra)

    def _batch(self, step: int) -> tuple[Tensor, int]:
        """This data-parallel rank's samples of a step, and the global index of the first. The step alone decides."""
        first, share = self.model.own_samples(step, self.config.train.global_batch_size)
        return batch(self.data.train, first, share).to(self.device), first

    def validate(self) -> float:
        """Mean loss over the first validation_samples samples of every validation dataset, equal on all ranks."""
        return evaluate(self.model, self.data.valid, self.config.train.validation_samples, self.device)

    def _train_one(self) -> dict:
        """Take the next step and return its row for the log."""
        step, config = self.step + 1, self.config
        lr = learning_rate(step, config.train.steps, config.optimizer)
        samples, first = self._batch(step)
        check_all(step)
        with self._recorded(step):
            result = train_step(
                self.model,
                self.optimizers,
                samples,
                first_sample=first,
                step=step,
                lr=lr,
                clip_norm=config.optimizer.clip_norm,
                scaler=self.scaler,
            )
        check_all()  # if a wait in a kernel expired, the run ends before wrong numbers are logged or saved
        self._count_skipped(step, result)
        self.step = step
        row = {"step": step, "loss": result.loss, "grad_norm": result.norm, "lr": lr}
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
            kept = {"schedule": layout.pipeline_schedule, "n_microbatches": self.config.n_microbatches}
            (self.directory / "timeline.json").write_text(json.dumps({**kept, "actions": actions}))
            self._notice(f"step {step} recorded: draw it with `tpformer timeline {self.directory}`")

    def _count_skipped(self, step: int, result: StepResult) -> None:
        """Count skipped steps, in total and in a row. FloatingPointError on all ranks after too many in a row."""
        if not result.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        where = f"first in {result.offender}" if result.offender else "in no gradient"
        scale = "" if self.scaler is None else f", loss scale now {self.scaler.scale:g}"
        self._notice(f"step {step} skipped: loss {result.loss}, gradient norm {result.norm}, not finite {where}{scale}")
        if self.skipped_in_a_row >= self.config.train.max_skipped_steps:
            self.checkpointer.wait()
            raise FloatingPointError(
                f"{self.skipped_in_a_row} steps in a row were skipped, the last one step {step}: loss {result.loss}, "
                f"gradient norm {result.norm}, not finite {where}; lower optimizer.lr or lengthen "
                f"optimizer.warmup_steps, and continue from the last checkpoint with --run.resume True"
            )

    def _notice(self, text: str) -> None:
        if self.leader:
            print(text, flush=True)

    def _stop_agreed(self, requests: list[int]) -> bool:
        """Whether any rank was asked to stop; the same on all ranks. Communication: an all-reduce per mesh axis."""
        flag = torch.tensor([float(bool(requests))], device=self.device)
        for group in self.model.groups.values():
            flag = all_reduce(flag, group, op="max")
        return bool(flag)

    def run(self) -> None:
        """Train to the last step. SIGTERM or Ctrl-C ends training early, after a checkpoint.

        If a step, validation or checkpoint takes longer than run.timeout, the process ends (see Watchdog).
        """
        with self._watched:
            if not self.leader:
                self._loop(None)
                return
            cut_metrics(self.directory / "metrics.jsonl", self.step)
            options = {"first_step": self.step, "steps": self.config.train.steps}
            with MetricsLog(self.directory, tensorboard=self.config.log.tensorboard, **options) as log:
                self._loop(log)
        if self.config.log.plot:
            plot_losses(self.directory)

    def _loop(self, log: MetricsLog | None) -> None:
        """Train, log, validate and save until the last step or a request to stop. log: only on rank 0."""
        config, final, watchdog = self.config, self.config.train.steps, self.watchdog
        tokens = config.train.global_batch_size * config.model.seq_length
        if log is not None:
            log.note(self._summary())
            log.note(self.linears)
        started, first = time.perf_counter(), self.step
        with _stop_requests() as requests:
            stop = False
            while self.step < final and not stop:
                watchdog.progress(self.step + 1)
                row = self._train_one()
                stop, last = self._stop_agreed(requests), self.step == final
                if log is not None:
                    log.advance(self.step)
                if log is not None and (self.step % config.log.interval == 0 or last or stop):
                    now = time.perf_counter()
                    speed = tokens * (self.step - first) / (now - started)
                    row |= {"tokens": self.step * tokens, "tokens_per_second": round(speed, 1), **self._mfu(speed)}
                    log.row(**row)
                    started, first = now, self.step
                due = last or (not stop and self.step % config.train.validation_interval == 0)
                if self.data.valid and due:
                    watchdog.progress(self.step, "validation")
                    before = time.perf_counter()
                    loss = self.validate()
                    started += time.perf_counter() - before  # validation is not training speed
                    if log is not None:
                        log.row(step=self.step, val_loss=loss)
                interval = config.checkpoint.interval
                if last or stop or (interval and self.step % interval == 0):
                    watchdog.progress(self.step, "checkpoint")
                    self._save()
            watchdog.progress(self.step, "last checkpoint")
            self.checkpointer.wait()
        if log is not None and stop and self.step < final:
            log.note(f"stopped at step {self.step}; checkpoint written: continue with --run.resume True")

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """{"mfu": model FLOP/s as a share of the ranks' dense bf16 peak}; {} on a device whose peak is not known."""
        machine = machine_for(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        if machine is None:
            return {}
        peak = machine.peak_flops * dist.get_world_size()
        return {"mfu": self.model.config.flops_per_token * tokens_per_second / peak}

    def _summary(self) -> str:
        """The log's first line: size, layout, device and batch."""
        model, parallel = self.config.model, self.config.parallel
        layout = [f"tensor_parallel {parallel.tensor_parallel}"]
        if parallel.tensor_parallel > 1:
            layout.append(f"sequence_parallel {'on' if parallel.sequence_parallel else 'off'}")
        if parallel.pipeline_parallel > 1:
            layout.append(
                f"pipeline_parallel {parallel.pipeline_parallel} ({parallel.pipeline_schedule}, {parallel.n_stages} "
                f"stages, {self.config.n_microbatches} microbatches)"
            )
        if parallel.data_parallel > 1:
            replicas, shards = parallel.data_parallel_replicate, parallel.data_parallel_shard
            layout.append(f"data_parallel {replicas} x {shards}, ZeRO-{parallel.zero}")
        return (
            f"{model.n_parameters / 1e6:.2f}M parameters, {', '.join(layout)}, {self.device.type}, "
            f"{self.config.train.global_batch_size} samples of {model.seq_length} tokens a step, from step {self.step}"
        )

    def close(self) -> None:
        """Leave the process group; collective."""
        for axis in AXES:
            close(self.mesh.get_group(axis))
        dist.destroy_process_group()


def pretrain(config: RunConfig) -> None:
    """Train this rank's part of a run. Without torchrun's environment variables this process is the only rank.

    Errors: before the first step those of Trainer. After that FloatingPointError for too many skipped steps, and
    RuntimeError in place of any ValueError, FileNotFoundError or ImportError.
    """
    trainer = Trainer(config)
    try:
        trainer.run()
    except (ValueError, FileNotFoundError, ImportError) as error:
        # the command reports these as a user's mistake, in one line; once training runs, the traceback is needed
        raise RuntimeError(f"step {trainer.step + 1} failed: {error}") from error
    trainer.close()
