"""GPTConfig: the architecture of a GPT, independent of any layout, and its parameter count.

Belongs here: the settings of an architecture, and the plain numbers that follow from them.
"""

from dataclasses import dataclass

from .checks import check_choice, check_positive
from .experts import check_expert_ranks, check_experts
from .ranges import check_range, check_ranges

NORM_NAMES = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")
# name in a config -> (elementwise function, gated)
MLP_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu_tanh", True),
    "relu2": ("relu2", False),
}
_MOST_PARAMETERS = 2**50  # of a table or a layer: bytes are counted in 63 bits


def default_ffn_size(hidden_size: int, activation: str) -> int:
    """4 * hidden_size; for a gated MLP 8/3 * hidden_size (as many parameters), rounded up to a multiple of 128."""
    return -(-8 * hidden_size // 384) * 128 if MLP_ACTIVATIONS[activation][1] else 4 * hidden_size


def check_heads(
    hidden_size: int, n_heads: int, n_kv_heads: int, tp: int, *, rope: bool, head_dim: int | None = None
) -> None:
    """Raise ValueError, with the numbers and the remedy, for heads that cannot be laid out.

    head_dim: unset, hidden_size / n_heads.
    """
    check_positive(hidden_size=hidden_size, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    if head_dim is None and hidden_size % n_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of n_heads={n_heads}: change either, or give head_dim"
        )
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}: change either")
    if n_heads % tp:
        fitting = [t for t in range(1, n_heads + 1) if n_heads % t == 0]
        raise ValueError(
            f"n_heads={n_heads} cannot be split over tensor_parallel={tp} ranks: choose tensor_parallel from {fitting}"
        )
    if rope and (head_dim or hidden_size // n_heads) % 2:
        given = f"hidden_size / n_heads = {hidden_size // n_heads}" if head_dim is None else f"head_dim={head_dim}"
        raise ValueError(f"RoPE needs an even head dim, not {given}")


def check_rope_scaling(factor: float, low_frequency: float, high_frequency: float, original_length: int) -> None:
    """ValueError for an impossible scaling of RoPE's frequencies (Llama 3.1's)."""
    check_range("model.rope_scaling_factor", factor, "rope_scaling_factor")
    check_range("model.rope_low_frequency", low_frequency, "rope_low_frequency")
    check_range("model.rope_high_frequency", high_frequency, "rope_high_frequency")
    check_range("model.rope_original_length", original_length, "rope_original_length")
    if low_frequency >= high_frequency:
        raise ValueError(
            f"rope_low_frequency={low_frequency} must be above 0 and below rope_high_frequency={high_frequency}"
        )


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
    head_dim: int | None = None
    """Features of a head; unset: hidden_size / n_heads."""
    qk_norm: bool = False
    """An RMSNorm of each head's queries and keys, before RoPE (Qwen 3)."""
    sliding_window: int | None = None
    """How many tokens a token attends to, itself included (Mistral); unset: all before it."""
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
    rope_scaling_factor: float = 1.0
    """Divides RoPE's low frequencies, as in Llama 3.1, for texts longer than rope_original_length; 1: no scaling."""
    rope_low_frequency: float = 1.0
    """Frequencies with at most this many turns in rope_original_length tokens are divided by the whole factor."""
    rope_high_frequency: float = 4.0
    """Frequencies with at least this many turns stay. Those between are interpolated."""
    rope_original_length: int = 8192
    """Tokens of the texts that a model with scaled frequencies was trained on before."""
    n_experts: int | None = None
    """Experts of a layer, of which a router chooses a few for each token; unset: every layer has one MLP."""
    experts_per_token: int = 2
    expert_ffn_size: int | None = None
    """Width of an expert; unset: that of an MLP."""
    shared_expert_size: int = 0
    """Width of the shared expert, an MLP that takes every token; 0: there is none."""
    first_dense_layers: int = 0
    """Layers at the beginning that have an MLP in place of experts."""
    router_score: str = "softmax"
    """softmax or sigmoid: how the router's numbers become scores of experts."""
    router_normalised: bool = True
    """Whether a token's weights, the scores of its experts, are divided by their sum."""
    router_scale: float = 1.0
    """Factor of the weights (DeepSeek-V3 has 2.5)."""
    router_groups: int = 1
    """Groups of neighbouring experts, for router_top_groups."""
    router_top_groups: int = 1
    """Groups that a token's experts may be in: those whose two best experts have the largest sum of scores."""
    router_bias: bool = False
    """Whether experts are chosen by score + bias. Training moves the bias towards equal loads (DeepSeek-V3)."""
    bias: bool = True
    """Biases in the linear layers."""
    qkv_bias: bool | None = None
    """Biases of the projections to queries, keys and values (Qwen 2 has these alone); unset: bias."""
    tie_embeddings: bool = True
    """The output head uses the token embedding's table."""
    dropout: float = 0.0
    """Probability of zeroing an element of the embedding and of the two residual branches of every layer."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual stream use init_std / sqrt(2 * n_layers)."""

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORM_NAMES)
        check_choice("activation", self.activation, MLP_ACTIVATIONS)
        check_choice("position", self.position, POSITIONS)
        check_ranges("model", self, prefix="")
        check_rope_scaling(
            self.rope_scaling_factor, self.rope_low_frequency, self.rope_high_frequency, self.rope_original_length
        )
        if self.rope_scaling_factor != 1 and self.position != "rope":
            raise ValueError(
                f"rope_scaling_factor={self.rope_scaling_factor} with position={self.position!r} would scale nothing: "
                f"set position='rope', or leave the factor out"
            )
        check_experts(self)
        parts = {
            "vocab_size": (self.vocab_size or 0) * self.hidden_size,
            "seq_length, with learned positions,": self._position_parameters,
            "a layer": max(self.layer_parameters(0), self.layer_parameters(self.n_layers - 1)),
        }
        largest = max(parts, key=parts.__getitem__)
        if parts[largest] >= _MOST_PARAMETERS:
            raise ValueError(
                f"{largest} with hidden_size={self.hidden_size} has {parts[largest]:.3g} parameters, more than "
                f"machines hold: lower the sizes"
            )

    def check_ranks(self, tp: int, ep: int | None = None) -> None:
        """ValueError unless tp tensor-parallel ranks can share the heads, and they or ep ranks the experts."""
        rope = self.position == "rope"
        check_heads(self.hidden_size, self.n_heads, self.kv_heads, tp, rope=rope, head_dim=self.head_dim)
        if self.n_experts is not None:
            check_expert_ranks(self.n_experts, *((tp,) if ep is None else (ep, "expert_parallel")))
        elif ep is not None:
            raise ValueError(
                f"parallel.expert_parallel={ep} without experts would do nothing: set model.n_experts, or leave it out"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the layer with this index has experts in place of an MLP."""
        return self.n_experts is not None and layer >= self.first_dense_layers

    @property
    def n_expert_layers(self) -> int:
        """Layers that have experts."""
        return 0 if self.n_experts is None else max(0, self.n_layers - self.first_dense_layers)

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def active_expert_size(self) -> int:
        """Width of all experts that one token goes through, the shared one included."""
        return self.experts_per_token * self.expert_size + self.shared_expert_size

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size, self.activation)

    @property
    def hidden_features(self) -> int:
        """Features that the MLP's activation reads of a token: those of two linears if it is gated."""
        return self.ffn_size * (2 if MLP_ACTIVATIONS[self.activation][1] else 1)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.n_heads

    @property
    def query_size(self) -> int:
        """Features of all queries of a token, and of its attention's result."""
        return self.n_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Features of all keys of a token, and of all its values."""
        return self.kv_heads * self.head_size

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def layer_parameters(self, layer: int) -> int:
        """Parameters of the layer with this index."""
        h, qkv = self.hidden_size, self.query_size + 2 * self.kv_size
        hidden = 0 if self.has_experts(layer) else self.hidden_features
        biases = (qkv if self.has_qkv_bias else 0) + (2 * h + hidden if self.bias else 0)
        norms = 2 * self._norm_parameters + (2 * self.head_size if self.qk_norm else 0)
        return self._attention_weights + self._mlp_weights(layer, active=False) + biases + norms

    @property
    def _attention_weights(self) -> int:
        """Elements of the matrices of one layer's attention."""
        return self.hidden_size * 2 * (self.query_size + self.kv_size)

    def _mlp_weights(self, layer: int, *, active: bool) -> int:
        """Elements of the matrices of a layer's MLP, or of its router and experts: all, or those that a token uses."""
        if self.n_experts is None or not self.has_experts(layer):
            return self.hidden_size * (self.hidden_features + self.ffn_size)
        routed = self.experts_per_token if active else self.n_experts
        width = routed * self.expert_size + self.shared_expert_size
        return self.hidden_size * (self.n_experts + 3 * width)

    def activated_features(self, layer: int) -> int:
        """Features that the activations of a layer read of a token: those of all its experts, or of its MLP."""
        return 2 * self.active_expert_size if self.has_experts(layer) else self.hidden_features

    def kept_features(self, layer: int) -> int:
        """Features that a layer keeps of a token for its backward, on all tensor-parallel ranks together.

        They are two residual inputs, q, k, v, the attention's result, and what the activation reads; with qk_norm, q
        and k before their norms, too. Statistics of rows and what a router decided are not counted (docs/memory.md).
        """
        before_norms = self.query_size + self.kv_size if self.qk_norm else 0
        rest = 2 * (self.hidden_size + self.query_size + self.kv_size) + before_norms
        return rest + self.activated_features(layer)

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
        layers = sum(map(self.layer_parameters, range(self.n_layers)))
        return layers + self._norm_parameters + tables + self._position_parameters

    @property
    def n_active_parameters(self) -> int:
        """Parameters that a token uses: n_parameters without the experts that were not chosen for it."""
        if self.n_experts is None:
            return self.n_parameters
        left_out = self.n_experts - self.experts_per_token
        return self.n_parameters - 3 * self.n_expert_layers * left_out * self.hidden_size * self.expert_size

    def layer_flops_per_token(self, layer: int) -> int:
        """FLOPs of the layer with this index per token, counted as in flops_per_token."""
        seen = min(self.seq_length, self.sliding_window or self.seq_length)
        weights = self._attention_weights + self._mlp_weights(layer, active=True)
        return 6 * weights + 12 * self.query_size * seen

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of forward and backward per token: 6 per weight that it uses, and attention over seq_length.

        The half that a causal mask saves is counted. With a shorter sliding_window the attention is over that many
        tokens. The plain block: 72 L h^2 (1 + s/6h + V/12hL), arXiv:2205.05198.
        """
        layers = sum(map(self.layer_flops_per_token, range(self.n_layers)))
        return layers + 6 * (self.vocab_size or 0) * self.hidden_size

    def layer_costs(self, by: str) -> list[float]:
        """The cost of each layer for a pipeline split, by "parameters" or by "time" (FLOPs per token).

        The first layer's cost includes the embeddings, the last one's the final norm and the head. A tied table counts
        in both, as both stages hold it.
        """
        table = float((self.vocab_size or 0) * self.hidden_size)
        if by == "time":
            costs = [float(self.layer_flops_per_token(layer)) for layer in range(self.n_layers)]
            first, last = 0.0, 6 * table
        else:
            costs = [float(self.layer_parameters(layer)) for layer in range(self.n_layers)]
            first, last = table + self._position_parameters, table + self._norm_parameters
        costs[0] += first
        costs[-1] += last
        return costs
