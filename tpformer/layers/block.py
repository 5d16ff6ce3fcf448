"""The pre-norm transformer block, and the dropout key that travels with a microbatch."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.kernels.philox.reference import philox_key

from .attention import SelfAttention, positions_of
from .mlp import MLP
from .module import ParallelModule
from .norm import NORMS
from .positions import Positions


@dataclass(frozen=True)
class DropoutKey:
    """What fixes a step's dropout in any layout: the run's seed, the step, a sample's global index (batch,) int64."""

    seed: int
    step: int
    sample_index: Tensor

    def site(self, p: float, layer: int | str, name: str, rows: int, positions: Positions, shard: int) -> ops.Dropout:
        """The dropout of one site for `rows` rows that are the shard-th such slice of the batch's tokens."""
        return ops.Dropout(
            p=p,
            key=philox_key(self.seed, self.step, layer, name),
            sample_index=self.sample_index,
            seq_length=positions.seq_length,
            first_token=shard * rows,
        )


class TransformerBlock(ParallelModule):
    """x + dropout(attention(norm(x))), then the same with the MLP.

    Layout:  x and result (tokens / t, hidden_size) with sequence_parallel, else (tokens, hidden_size) or
             (batch, seq, hidden_size), equal on all ranks.
    Communication, per rank, B = tokens * hidden_size * itemsize: with sequence_parallel forward 2 all-gathers and
             2 reduce-scatters of B, backward the same plus 2 all-gathers (column inputs gathered again); otherwise
             forward 2 all-reduces, backward 2 all-reduces of B.
    Dropout (in training, p > 0) needs `dropout_key`; `positions` as in SelfAttention.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        ffn_hidden_size: int | None = None,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        activation: str = "gelu_tanh",
        rope_base: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        layer_index: int = 0,
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = True,
        transport: str = "auto",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp_mesh, sequence_parallel, transport)
        if norm not in NORMS:
            raise ValueError(f"unknown norm {norm!r}; choose one of {', '.join(NORMS)}")
        self.dropout, self.layer_index = dropout, layer_index
        place: dict = {
            "tp_mesh": tp_mesh,
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        linear: dict = {
            "bias": bias,
            "init_std": init_std,
            "output_init_std": output_init_std,
            "transport": transport,
            **place,
        }
        self.input_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
        self.self_attn = SelfAttention(hidden_size, n_heads, n_kv_heads=n_kv_heads, rope_base=rope_base, **linear)
        self.post_attention_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
        self.mlp = MLP(hidden_size, ffn_hidden_size=ffn_hidden_size, activation=activation, **linear)

    def forward(
        self, x: Tensor, *, positions: Positions | None = None, dropout_key: DropoutKey | None = None
    ) -> Tensor:
        positions = positions or positions_of(x, sharded=self.sharded)
        rows = x.reshape(-1, x.shape[-1])
        sites: list[ops.Dropout | None] = [None, None]
        if self.training and self.dropout > 0:
            if dropout_key is None:
                raise ValueError(
                    f"dropout={self.dropout} in training needs dropout_key=DropoutKey(seed, step, sample_index): "
                    f"without it every step would drop the same elements"
                )
            shard = self.tp_rank if self.sharded else 0
            sites = [
                dropout_key.site(self.dropout, self.layer_index, name, len(rows), positions, shard)
                for name in ("attention", "mlp")
            ]
        rows = self.self_attn(
            rows, positions=positions, norm=self.input_layernorm.prologue(), residual=rows, dropout=sites[0]
        )
        rows = self.mlp(rows, norm=self.post_attention_layernorm.prologue(), residual=rows, dropout=sites[1])
        return rows.view(x.shape)
