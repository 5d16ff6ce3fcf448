"""Parameter servers as Exchanges: which layouts and runs they serve, and who takes which samples.

Belongs here: their options and refusals. Their steps are in parameter_server.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tpformer.config import Layout, RunConfig
from tpformer.distributed.links import Link
from tpformer.exchange import NamedExchange, StepResult
from tpformer.words import shown

from .algorithms import all_reduce_seconds
from .arrivals import Arrivals
from .parameter_server import ParameterServer

WHOLE = ("tensor_parallel", "pipeline_parallel", "data_parallel_shard", "context_parallel", "expert_parallel") + (
    *("cpu_offload", "reduce_dtype", "recompute_interval", "offload_activations", "keep", "memory_budget"),
)  # settings that servers leave at their defaults


@dataclass
class SyncServer(NamedExchange):
    """sync_server: workers push gradients to servers at once, and pull parameters."""

    takes_steps = True

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """Servers have whole models on CPU processes, in the dtype of the parameters, and measure no norms by layer."""
        wrong = {name: value for name in WHOLE if (value := getattr(layout, name)) != getattr(Layout, name)}
        if wrong or layout.data_parallel_replicate == 1:
            given = ", ".join(f"{name}={value!r}" for name, value in wrong.items()) or "data_parallel_replicate=1"
            raise ValueError(
                f"parallel.exchange={self.text!r} is for whole models on data_parallel_replicate ranks, to learn from, "
                f"and not with {given}: leave one of them out"
            )
        if run is not None:
            self.check_run(run)

    def check_run(self, run: RunConfig) -> None:
        """ValueError for what servers do not serve."""
        train = run.train
        found = {
            "train.dtype": train.dtype if train.dtype in ("bfloat16", "float16") else None,
            "train.device": train.device if train.device == "cuda" else None,
            "model.n_experts": run.model.n_experts,
            "optimizer.name": run.optimizer.name if run.optimizer.name == "muon" else None,
            "log.norm_interval": run.log.norm_interval or None,
            "log.noise_interval": run.log.noise_interval or None,
        }
        if given := [f"{key}={value}" for key, value in found.items() if value is not None]:
            raise ValueError(
                f"parallel.exchange={self.text!r} is for dense models in float32 or float64 on CPU processes, to learn "
                f"from, and not with {', '.join(given)}: leave that out"
            )

    def steps(
        self, take_step: Callable[..., StepResult], model: Any, optimizers: Sequence[Any], loss: Callable[..., Tensor]
    ) -> Callable[..., StepResult]:
        """Those of a ParameterServer."""
        return ParameterServer(model, optimizers, loss).step

    def seconds(self, nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
        """Of pushes and pulls, each rank serving as many values."""
        return all_reduce_seconds("parameter_server", nbytes, inside, nodes, fast, slow)


@dataclass
class StaleServer(SyncServer):
    """stale_server: each gradient is an update by itself, when it arrives, and may be of older parameters.

    staleness: how many updates may come between a gradient's parameters and its own update. arrivals: the ranks in
    whose order gradients are taken, again and again, such as "0,1,0,2"; empty: as they come.
    """

    RANGES: ClassVar = {"staleness": "[0, inf)"}
    changes_losses = True
    staleness: int = 16
    arrivals: str = ""

    @property
    def given(self) -> list[int]:
        """The workers that `arrivals` names, in order."""
        return [int(worker) for worker in self.arrivals.split(",")] if self.arrivals else []

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """Every worker must have its turn, and no update may be too stale."""
        super().check(layout, run)
        ranks = layout.data_parallel_replicate
        if self.staleness < ranks - 1:
            raise ValueError(
                f"parallel.exchange={self.text!r}: staleness={self.staleness} with {ranks} workers: each has an update "
                f"between two of any other even if they take turns, so that at least {ranks - 1} are needed"
            )
        workers = self.arrivals.split(",") if self.arrivals else list(map(str, range(ranks)))
        if {worker.strip() for worker in workers} != set(map(str, range(ranks))):
            raise ValueError(
                f"parallel.exchange={self.text!r}: arrivals={shown(self.arrivals)} must name each of the {ranks} "
                f"workers, 0 to {ranks - 1}, and no others, such as {','.join(map(str, range(ranks)))}"
            )
        if run is not None and self.given:
            # the largest batch: in the order of a smaller one workers stop earlier, which only brings others forward
            arrivals = Arrivals(ranks, run.train.global_batch_size // run.microbatch_size, self.staleness, self.given)
            while not arrivals.finished:
                chosen = arrivals.choose(arrivals.computing)
                assert chosen is not None  # all that may be next have arrived
                arrivals.take(chosen)

    def samples(self, first: int, number: int, rank: int, ranks: int) -> tuple[int, int]:
        """All of them: ranks share them out as they go."""
        return first, number
