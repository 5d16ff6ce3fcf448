"""ColumnParallelLinear and RowParallelLinear: nn.Linear with its weight sharded over tensor-parallel ranks."""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import FP8, check_fp8_sizes, check_positive
from tpformer.ops.sequence import flat_rows, with_leading_dims
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import is_own_parameter

from .module import Constant, Normal, ParallelModule, check_plain
from .tensor_parallel import TensorParallel


def to_rows(x: Tensor, sequence_dim: int | None) -> Tensor:
    """(..., K) -> (tokens, K). The dim that is sharded over ranks, sequence_dim, comes first among the tokens' dims."""
    if sequence_dim is not None:
        if sequence_dim % x.ndim == x.ndim - 1:
            raise ValueError(
                f"sequence_dim={sequence_dim} is the dim of the features in x of shape {tuple(x.shape)}: give that of "
                f"the sequence"
            )
        x = x.movedim(sequence_dim, 0)
    return flat_rows(x)


def from_rows(y: Tensor, x: Tensor, sequence_dim: int | None) -> Tensor:
    """Undo to_rows for a result y whose rows were gathered or scattered; x is the layer's input."""
    if sequence_dim is None:
        return with_leading_dims(y, x)
    others = x.movedim(sequence_dim, 0).shape[1:-1]
    return y.view(-1, *others, y.shape[-1]).movedim(0, sequence_dim)


class _Linear(ParallelModule):
    """What both linears have in common: a weight (out_features, in_features), and maybe a bias (out_features,)."""

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel | DeviceMesh | None) -> None:
        super().__init__(tp)
        check_positive(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, tp: TensorParallel | DeviceMesh | None = None, **options: Any) -> Self:
        """A layer with copies of the weight and bias of an nn.Linear, which all ranks hold whole and which stays.

        options: the constructor's. No communication. Errors: TypeError for a module with a forward of its own.
        """
        check_plain(linear, nn.Linear)
        options = {"device": "meta", "dtype": linear.weight.dtype, **options}
        make: Any = cls
        layer: Self = make(linear.in_features, linear.out_features, linear.bias is not None, tp=tp, **options)
        return layer.filled_from(linear)

    def defers(self) -> bool:
        """Whether a WeightGradientQueue may take the weight's gradient: the layer itself holds the weight.

        If the weight is computed from other parameters, autograd needs its gradient now.
        """
        return is_own_parameter(self, "weight")

    def _add_parameters(
        self, bias: bool, init_std: float | None, *, weight_shard: int | None, bias_shard: int | None, device, dtype
    ) -> None:
        """Make and fill the parameters, each sharded on that dim over the tp axis (None: replicated)."""
        initial = Normal(self.in_features**-0.5 if init_std is None else init_std)
        shape = (self.out_features, self.in_features)
        self.add_parameter("weight", shape, initial, shard=weight_shard, device=device, dtype=dtype)
        if bias:
            self.add_parameter("bias", shape[:1], Constant(0.0), shard=bias_shard, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()


class ColumnParallelLinear(_Linear):
    """y = x W^T + b with the output features sharded: every rank computes its slice of them.

    Layout:  weight (out_features, in_features) and bias are Shard(0) on the tp axis; x is (tokens / t, in_features), a
             sequence shard, with sequence_parallel, else (tokens, in_features), equal on all ranks; y is
             (tokens, out_features / t). Leading dims are flattened batch-major; with `sequence_dim` the input is
             sharded along that dim instead, as in (batch, seq / t, hidden), and y has it whole.
    Communication, per rank: that of ops.column_linear, carried by `tp.transport` (ops.choose_transport).
    tp None, or one rank: bit-identical to nn.Linear.
    gather_output: y is (tokens, out_features), equal on all ranks, and y's gradient must be equal on all ranks, too.
             The forward then adds an all-gather of y. A block or MLP that fuses the layer does not gather.
    used_rows: weight and bias are Replicate, and this rank computes only these rows of them (keys and values with fewer
             heads than ranks). Their gradients are partial sums over the tp axis.
    most_rows: the largest number of rows that a rank uses, if ranks use different numbers.
    lower_rows: rows below it are used by lower ranks, too. In FP8 the gradient of a row's features is added up over the
             ranks before it is quantised, in the backward by an all-reduce of (tokens, out_features), and the lowest
             rank that uses the row goes on with it.
    Errors:  ValueError for sizes below 1, gather_output with used_rows, and an x that lacks some of the in_features; in
             FP8 for sizes and ends of used_rows on a rank that are no multiple of 128.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        init_std: float | None = None,
        used_rows: slice | None = None,
        most_rows: int | None = None,
        lower_rows: int = 0,
        sequence_dim: int | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(in_features, out_features, tp)
        if gather_output and used_rows is not None:
            raise ValueError(
                "gather_output=True with used_rows: ranks may compute the same rows, so their outputs do not make up a "
                "whole; leave one of them out"
            )
        if self.tp.precision == FP8:
            check_fp8_sizes({"in_features": (in_features, 1), **_fp8_rows(out_features, used_rows, self.tp.size)})
        self.gather_output, self.used_rows, self.sequence_dim = gather_output, used_rows, sequence_dim
        self.shared_rows = None if used_rows is None else ops.SharedRows(used_rows, lower_rows, out_features)
        used = -(-out_features // self.tp.size) if used_rows is None else used_rows.stop - used_rows.start
        self.width = most_rows or used  # output features of the rank that computes most
        shard = 0 if used_rows is None else None
        self._add_parameters(bias, init_std, weight_shard=shard, bias_shard=shard, device=device, dtype=dtype)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The (weight, bias) that this rank multiplies with."""
        if self.used_rows is None:
            return self.local("weight"), self.local("bias")
        weight, bias = (self.local(name, partial=True) for name in ("weight", "bias"))
        return weight[self.used_rows], None if bias is None else bias[self.used_rows]  # type: ignore[index]

    def take_weight_gradient(self, gradient: Tensor) -> None:
        """Add this rank's gradient of the weight that `local_parameters` gave."""
        self.accumulate("weight", gradient, rows=self.used_rows)

    def forward(self, x: Tensor, *, norm: ops.Norm | None = None) -> Tensor:
        """y = norm(x) W^T + b, laid out as the class says."""
        self.check(x)
        (y,), _ = project(to_rows(x, self.sequence_dim), [self], norm)
        return self.finished(y, x)

    def check(self, x: Tensor) -> None:
        """ValueError unless x has all the input features."""
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has {x.shape[-1]} features, but every rank needs all in_features={self.in_features}: if a "
                f"column-parallel linear made x, give it gather_output=True"
            )

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        """The layer's result for x from the rows y that `project` has made."""
        if self.gather_output:
            y = ops.gather_columns(y, self.out_features, self.tp.group)
        return from_rows(y, x, self.sequence_dim)

    def extra_repr(self) -> str:
        """Sizes and options, as repr() shows them."""
        gathered = ", gather_output=True" * self.gather_output
        precision = ", in FP8" * (self.tp.precision == FP8)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}{gathered}, tp={self.tp.size}{precision}"
        )


def _fp8_rows(out_features: int, used: slice | None, ranks: int) -> dict[str, tuple[int, int]]:
    """What check_fp8_sizes asks of a column-parallel weight's rows."""
    if used is None:
        return {"out_features": (out_features, ranks)}
    return {"out_features": (out_features, 1), "used_rows.start": (used.start, 1), "used_rows.stop": (used.stop, 1)}


@uncompiled
def project(
    rows: Tensor,
    layers: Sequence[ColumnParallelLinear],
    norm: ops.Norm | None,
    normed: ops.Normed | None = None,
    *,
    carry: bool = False,
    private: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(the layers' outputs for the same rows (tokens, K), the rows that ops.column_linear carries or None).

    The layers lie on one mesh, and one gather serves them all. `carry` returns rows for the residual path. private: as
    of ops.column_linear.
    """
    weights, biases = zip(*[layer.local_parameters() for layer in layers], strict=True)
    tp = layers[0].tp
    queue = ops.active_queue()
    if queue is not None and not all(layer.defers() for layer in layers):
        queue = None
    outputs = ops.column_linear(
        rows,
        weights,
        biases,
        norm=norm,
        normed=normed,
        carry=carry,
        transport=tp.column_transport(rows, sum(layer.width for layer in layers)),
        deferred=None if queue is None else ops.Deferred(queue, [layer.take_weight_gradient for layer in layers]),
        private=private,
    )
    ys, carried = (outputs[:-1], outputs[-1]) if carry else (outputs, None)
    return _whole(ys, layers) if tp.precision == FP8 else ys, carried


def _whole(ys: tuple[Tensor, ...], layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The layers' outputs, of which those that several ranks compute get whole gradients, to be quantised."""
    shared = {place: layer.shared_rows for place, layer in enumerate(layers) if layer.shared_rows is not None}
    if not shared:
        return ys
    whole = ops.shared_rows([ys[place] for place in shared], list(shared.values()), layers[0].tp.group)
    found = dict(zip(shared, whole, strict=True))
    return tuple(found.get(place, y) for place, y in enumerate(ys))


class RowParallelLinear(_Linear):
    """y = residual + dropout(reduce(act(x) W^T) + b) with the input features sharded.

    Layout:  weight (out_features, in_features) is Shard(1) on the tp axis; bias is Replicate and added once, after the
             reduction; x is (tokens, in_features / t); y and residual are (tokens / t, out_features), a sequence shard,
             with sequence_parallel, else (tokens, out_features), equal on all ranks. `sequence_dim` as in
             ColumnParallelLinear.
    Communication, per rank: that of ops.row_linear, carried by `tp.transport` (ops.choose_transport).
    With sequence_parallel the bias gradient is a partial sum over the tp axis.
    input_is_parallel=False: x and gate are (tokens, in_features), equal on all ranks, and each rank takes its part of
             them. The backward adds an all-reduce of their gradients, which makes these equal on all ranks.
    tp None, or one rank: bit-identical to nn.Linear.
    Errors:  ValueError for sizes below 1, for an x of another width, and for a sequence_dim that t does not divide; in
             FP8 for sizes on a rank that are no multiple of 128.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        init_std: float | None = None,
        activation: str | None = None,
        sequence_dim: int | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(in_features, out_features, tp)
        if self.tp.precision == FP8:
            check_fp8_sizes({"in_features": (in_features, self.tp.size), "out_features": (out_features, 1)})
        self.input_is_parallel, self.activation, self.sequence_dim = input_is_parallel, activation, sequence_dim
        self.width = -(-in_features // self.tp.size)  # input features of the rank that has most
        self.columns = slice(self.tp.rank * self.width, min((self.tp.rank + 1) * self.width, in_features))
        self._add_parameters(bias, init_std, weight_shard=1, bias_shard=None, device=device, dtype=dtype)

    def take_weight_gradient(self, gradient: Tensor) -> None:
        """Add this rank's gradient of its shard of the weight."""
        self.accumulate("weight", gradient)

    def forward(
        self,
        x: Tensor,
        *,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
        dropout: ops.Dropout | None = None,
    ) -> Tensor:
        """y = residual + dropout(reduce(act(x) W^T) + b), or with act(gate) * x; laid out as the class says."""
        if self.sequence_dim is not None and self.tp.sharded and x.shape[self.sequence_dim] % self.tp.size:
            raise ValueError(
                f"x of shape {tuple(x.shape)} has {x.shape[self.sequence_dim]} along sequence_dim={self.sequence_dim}, "
                f"which {self.tp.size} tensor-parallel ranks cannot share equally: pad it to a multiple"
            )
        self._check("x", x)
        if gate is not None:
            self._check("gate", gate)
        rows = [None if each is None else to_rows(each, self.sequence_dim) for each in (x, gate, residual)]
        if not self.input_is_parallel:
            rows[:2] = [
                None if each is None else ops.take_columns(each, self.columns, self.tp.group) for each in rows[:2]
            ]
        y, _ = self.reduced(rows[0], self.activation, gate=rows[1], residual=rows[2], dropout=dropout)
        return from_rows(y, x, self.sequence_dim)

    def _check(self, name: str, x: Tensor) -> None:
        own = self.columns.stop - self.columns.start
        if x.shape[-1] != (own if self.input_is_parallel else self.in_features):
            raise ValueError(
                f"{name} has {x.shape[-1]} features, but this rank's part of in_features={self.in_features} has {own}: "
                f"set input_is_parallel=False if it has all of them, True if it has this rank's"
            )

    @uncompiled
    def reduced(
        self,
        rows: Tensor,
        activation: str | None,
        *,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
        dropout: ops.Dropout | None = None,
        next_norm: ops.Norm | None = None,
        private: bool = False,
    ) -> tuple[Tensor, ops.Normed | None]:
        """(result, its norm by next_norm or None) for rows (tokens, in_features / t), by ops.row_linear."""
        queue = ops.active_queue()
        if not self.defers():
            queue = None
        y = ops.row_linear(
            rows,
            self.local("weight"),
            self.local("bias", partial=self.tp.sequence_parallel),
            activation=activation,
            gate=gate,
            residual=residual,
            dropout=dropout,
            next_norm=next_norm,
            transport=self.tp.row_transport(rows, self.width, self.out_features),
            deferred=None if queue is None else ops.Deferred(queue, [self.take_weight_gradient]),
            private=private,
        )
        return (y, None) if next_norm is None else y

    def extra_repr(self) -> str:
        """Sizes and options, as repr() shows them."""
        whole = ", input_is_parallel=False" * (not self.input_is_parallel)
        precision = ", in FP8" * (self.tp.precision == FP8)
        return f"in_features={self.in_features}, out_features={self.out_features}{whole}, tp={self.tp.size}{precision}"
