"""Norms of a step by layer, and the gradient noise scale: numbers of the whole model, equal in every layout."""

import math
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpformer.distributed import all_reduce

from .model import ModelParts

DECAY = 0.95  # of the weight of an estimate of the noise scale, from one to the next


class NormWatch:
    """Gradient norms and the size of activations, by layer. Use as a context manager around a step's gradients.

    Gradients are grouped by layer, embedding, final norm and head; activations are the rows that a layer gives, of
    which the root mean square over all tokens and features is taken. Constructing it is collective over the world.
    """

    def __init__(self, model: ModelParts) -> None:
        self.model = model
        self._sets: dict[str, list[nn.Parameter]] = {}
        for part in model.parts:
            for name, parameter in part.named_parameters():
                self._sets.setdefault(_layer(name), []).append(parameter)
        names = [list(self._sets)]
        if model.groups:
            names = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(names, list(self._sets))
        self._names = sorted({name for some in names for name in some}, key=lambda name: (len(name), name))
        layers = range(model.config.n_layers)
        self.names = [*(f"gradient.{name}" for name in self._names), *(f"output.layers.{index}" for index in layers)]
        self._handles: list = []

    def __enter__(self) -> "NormWatch":
        self._sums: Tensor | None = None
        for part in self.model.parts:
            for name, layer in part.layers.items():
                self._handles.append(layer.register_forward_hook(self._hook(int(name))))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, index: int):
        def add(module: nn.Module, args: tuple, y: Tensor) -> None:
            if self._sums is None:
                self._sums = torch.zeros(2, self.model.config.n_layers, dtype=torch.float64, device=y.device)
            self._sums[0, index] += torch.linalg.vector_norm(y.detach(), dtype=torch.float64).square()
            self._sums[1, index] += y.numel()

        return add

    def measured(self, scale: float | Tensor) -> Tensor:
        """The norms, in the order of `names`; float64. scale: what the gradients were multiplied by.

        Call it when gradients are whole, before they are clipped. A recomputed layer's rows count twice, in sum and
        number alike, as do rows that tensor-parallel ranks all hold. Communication: two all-reduces per mesh axis.
        """
        norms = self.model.gradient_norms([self._sets.get(name, []) for name in self._names]) / scale
        sums = self._sums
        assert sums is not None, "the step has run no layer"
        for group in self.model.groups.values():
            sums = all_reduce(sums, group)
        return torch.cat([norms, (sums[0] / sums[1]).sqrt().to(norms.device)])


def _layer(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


class NoiseScale:
    """The gradient noise scale: tr(covariance of a sample's gradient) / |gradient|^2, a number of samples.

    Batches far below it waste steps, far above it samples. With the gradients of a batch of B samples and of half of
    them, 2 |G_B|^2 - |G_B/2|^2 estimates |gradient|^2, and B (|G_B/2|^2 - |G_B|^2) the trace, both without bias. Their
    running means are divided. Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
    """

    def __init__(self) -> None:
        self._square = self._trace = 0.0

    def add(self, samples: int, norm: float, half_norm: float) -> float:
        """Add the gradient norms of a batch of `samples` and of half of it; the noise scale, NaN while not positive."""
        if math.isfinite(norm) and math.isfinite(half_norm):
            self._square = DECAY * self._square + 2 * norm**2 - half_norm**2
            self._trace = DECAY * self._trace + samples * (half_norm**2 - norm**2)
        return self._trace / self._square if self._square > 0 and self._trace > 0 else math.nan

    def state_dict(self) -> dict[str, float]:
        """The running sums, for a checkpoint."""
        return {"square": self._square, "trace": self._trace}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a state that state_dict returned; without one, begin anew."""
        self._square, self._trace = float(state.get("square", 0.0)), float(state.get("trace", 0.0))


def batch_gradient_norm(model: ModelParts, rows: Tensor, first_sample: int, scale: float | Tensor) -> Tensor:
    """The gradient norm of a batch that updates nothing, as ModelParts.gradient_norm. Arguments and communication as of
    ModelParts.gradients; .grad is None after."""
    model.gradients(rows, first_sample=first_sample, loss_scale=scale)
    norm = model.gradient_norm() / scale
    model.drop_gradients()
    return norm
