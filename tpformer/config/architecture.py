"""GPTConfig: the architecture of a GPT, independent of any layout, and its parameter count.

Belongs here: the settings of an architecture, and the plain numbers that follow from them.
"""

from dataclasses import dataclass

from .checks import check_choice, check_dropout, check_positive

NORM_NAMES = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")
SIZES = (
    "seq_length",
    "n_layers",
    "hidden_size",
    "n_heads",
    "n_kv_heads",
    "ffn_hidden_size",
    "vocab_size",
    "vocab_multiple",
)
# name in a config -> (elementwise function, gated)
MLP_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu_tanh", True),
    "relu2": ("relu2", False),
}


def default_ffn_size(hidden_size: int, activation: str) -> int:
    """4 * hidden_size; for a gated MLP 8/3 * hidden_size (as many parameters), rounded up to a multiple of 128."""
    return -(-8 * hidden_size // 384) * 128 if MLP_ACTIVATIONS[activation][1] else 4 * hidden_size


def check_heads(hidden_size: int, n_heads: int, n_kv_heads: int, tp: int, *, rope: bool) -> None:
    """Raise ValueError, with the numbers and the remedy, for head counts that cannot be laid out."""
    check_positive(hidden_size=hidden_size, n_heads=n_heads, n_kv_heads=n_kv_heads)
    if hidden_size % n_heads:
        raise ValueError(f"hidden_size={hidden_size} is not a multiple of n_heads={n_heads}: change either")
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}: change either")
    if n_heads % tp:
        fitting = [t for t in range(1, n_heads + 1) if n_heads % t == 0]
        raise ValueError(
            f"n_heads={n_heads} cannot be split over tensor_parallel={tp} ranks: choose tensor_parallel from {fitting}"
        )
    if rope and (hidden_size // n_heads) % 2:
        raise ValueError(f"RoPE needs an even head dim, not hidden_size / n_heads = {hidden_size // n_heads}")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """An architecture. Global parameter shapes follow from these fields alone, never from the layout."""

    vocab_size: int | None = None
    """Entries of the vocabulary. Unset: a run takes it from its data."""
    vocab_multiple: int = 128
    """The vocabulary's tables are padded to a multiple of this. Padding is zero and masked out of the loss."""
    seq_length: int = 1024
    """Tokens per sample, and the number of learned positions."""
    n_layers: int = 12
    hidden_size: int = 768
    n_heads: int = 12
    n_kv_heads: int | None = None
    """Key-value heads (grouped-query attention); unset: n_heads."""
    ffn_hidden_size: int | None = None
    """MLP width; unset: 4 * hidden_size, or 8/3 of it rounded up to 128 for a gated activation."""
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    norm_eps: float = 1e-5
    activation: str = "gelu_tanh"
    """gelu, gelu_tanh, swiglu, geglu or relu2 (squared ReLU)."""
    position: str = "learned"
    """learned or rope."""
    rope_base: float = 10000.0
    rope_interleaved: bool = False
    """Pair neighbouring elements (GPT-J) instead of the two halves of a head (Llama)."""
    bias: bool = True
    """Biases in the linear layers."""
    tie_embeddings: bool = True
    """The output head uses the token embedding's table."""
    dropout: float = 0.0
    """Probability of zeroing an element of the embedding and of the two residual branches of every layer."""
    attention_dropout: float = 0.0
    """Must stay 0: SDPA would leave its fused kernel and store seq x seq masks."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual stream use init_std / sqrt(2 * n_layers)."""

    def __post_init__(self) -> None:
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} is not supported: PyTorch's attention then leaves its "
                f"fused kernel and stores seq_length x seq_length masks; use dropout (residual) instead"
            )
        check_choice("norm", self.norm, NORM_NAMES)
        check_choice("activation", self.activation, MLP_ACTIVATIONS)
        check_choice("position", self.position, POSITIONS)
        check_dropout(self.dropout)
        check_positive(**{name: getattr(self, name) for name in SIZES})

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size, self.activation)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        h, f = self.hidden_size, self.ffn_size
        kv = h // self.n_heads * self.kv_heads
        up = 2 if MLP_ACTIVATIONS[self.activation][1] else 1
        layer = 2 * h * h + 2 * h * kv + (up + 1) * h * f + 2 * self._norm_parameters
        return layer + ((2 * h + 2 * kv + up * f + h) if self.bias else 0)

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    @property
    def _position_parameters(self) -> int:
        return self.seq_length * self.hidden_size if self.position == "learned" else 0

    @property
    def n_parameters(self) -> int:
        """Parameters without the vocabulary's padding (the number that papers print)."""
        tables = (self.vocab_size or 0) * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.n_layers * self.layer_parameters + self._norm_parameters + tables + self._position_parameters

    @property
    def layer_flops_per_token(self) -> int:
        """FLOPs of one layer per token, counted as in flops_per_token."""
        h = self.hidden_size
        kv = h // self.n_heads * self.kv_heads
        up = 2 if MLP_ACTIVATIONS[self.activation][1] else 1
        return 6 * (2 * h * h + 2 * h * kv + (up + 1) * h * self.ffn_size) + 12 * h * self.seq_length

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward per token: 6 per weight, plus attention over the full seq_length.

        The half that a causal mask saves is counted. The plain block: 72 L h^2 (1 + s/6h + V/12hL), arXiv:2205.05198.
        """
        return self.n_layers * self.layer_flops_per_token + 6 * (self.vocab_size or 0) * self.hidden_size

    def layer_costs(self, by: str) -> list[float]:
        """The cost of each layer for a pipeline split, by "parameters" or by "time" (FLOPs per token).

        The first layer's cost includes the embeddings, the last one's the final norm and the head. A tied table counts
        in both, as both stages hold it.
        """
        table = float((self.vocab_size or 0) * self.hidden_size)
        if by == "time":
            costs = [float(self.layer_flops_per_token)] * self.n_layers
            first, last = 0.0, 6 * table
        else:
            costs = [float(self.layer_parameters)] * self.n_layers
            first, last = table + self._position_parameters, table + self._norm_parameters
        costs[0] += first
        costs[-1] += last
        return costs
