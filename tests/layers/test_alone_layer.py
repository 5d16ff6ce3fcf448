"""Every layer works inside a module of somebody else, without a process group; its parameters have plain names and
shapes."""

import inspect

import torch
from torch import nn

from tpformer import layers

PROGRAM = """
import torch
from torch import nn
from tpformer.layers import *
import torch.distributed as dist

class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = {layer}

    def forward(self, x):
        return self.layer({call})

model = Theirs()
loss = model(torch.randn(2, 3, 8)).square().sum()
loss.backward()
assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()), "gradients"
assert type(model.layer.weight if hasattr(model.layer, "weight") else next(model.layer.parameters())) is nn.Parameter
again = Theirs()
again.load_state_dict(model.state_dict())
assert torch.equal(again({again}), model({again}))
assert not dist.is_initialized()
print("fine")
"""
LAYERS = {
    "ColumnParallelLinear(8, 4)": "self.first(x)",
    "RowParallelLinear(8, 4, activation='silu')": "self.first(x)",
    "LayerNorm(8)": "self.first(x)",
    "RMSNorm(8)": "self.first(x)",
    "MLP(8)": "self.first(x)",
    "SelfAttention(8, 2, rope_base=1e4)": "self.first(x)",
    "TransformerBlock(8, 2, norm='rmsnorm', activation='swiglu')": "self.first(x)",
    "VocabParallelEmbedding(100, 8)": "self.first(x).argmax(-1)",
    "LMHead(100, 8)": "self.first(x)",
    "PositionEmbedding(3, 8)": "self.first(x).flatten(0, 1), Positions(2, 3)",
}


def execute(programs: list[str]) -> None:
    for program in programs:
        exec(program, {"__name__": "theirs"})


def test_each_layer_in_a_module_of_others(commands):
    programs = []
    for layer, call in LAYERS.items():
        text = PROGRAM.format(layer=layer, call=call, again="torch.ones(2, 3, 8)")
        if "argmax" in call:  # ids have no gradient, so the first layer gets none
            text = text.replace('model.parameters()), "gradients"', 'model.layer.parameters()), "gradients"')
        programs.append(text)
    _, out, err = commands.call(execute, programs).finish()
    assert out.split() == ["fine"] * len(LAYERS), err


def test_block_state_dict_names_and_shapes():
    """The names are those of Hugging Face's Llama; a bias is beside its weight."""
    block = layers.TransformerBlock(
        16, 4, n_kv_heads=2, norm="rmsnorm", activation="swiglu", ffn_hidden_size=24, bias=False
    )
    assert {name: tuple(p.shape) for name, p in block.state_dict().items()} == {
        "input_layernorm.weight": (16,),
        "self_attn.q_proj.weight": (16, 16),
        "self_attn.k_proj.weight": (8, 16),
        "self_attn.v_proj.weight": (8, 16),
        "self_attn.o_proj.weight": (16, 16),
        "post_attention_layernorm.weight": (16,),
        "mlp.gate_proj.weight": (24, 16),
        "mlp.up_proj.weight": (24, 16),
        "mlp.down_proj.weight": (16, 24),
    }
    plain = layers.TransformerBlock(16, 4)
    assert {name: tuple(p.shape) for name, p in plain.mlp.state_dict().items()} == {
        "fc1.weight": (64, 16),
        "fc1.bias": (64,),
        "fc2.weight": (16, 64),
        "fc2.bias": (16,),
    }


def test_a_model_has_one_placement():
    """A norm on sequence shards beside linears on whole samples would be trained with wrong gradients."""
    place = layers.TensorParallel(sequence_parallel=True)
    block = layers.TransformerBlock(16, 4, tp=place)
    assert all(part.tp is place for part in block.modules() if isinstance(part, layers.ParallelModule))
    modules = [each for each in vars(layers).values() if inspect.isclass(each) and issubclass(each, nn.Module)]
    for module in modules:
        taken = {name for base in module.__mro__ for name in inspect.signature(base.__init__).parameters}
        assert not taken & {"tp_mesh", "mesh", "transport"} and "tp" in taken
    assert len(modules) >= 10 and not layers.TransformerBlock(16, 4).tp.sequence_parallel


def test_default_ffn_width():
    """A gated MLP is 8/3 as wide as its input, rounded up to a multiple of 128: 10922.67 becomes Llama's 11008."""
    assert layers.MLP(4096, activation="swiglu", device="meta").gate_proj.weight.shape == (11008, 4096)
    assert layers.MLP(384, activation="geglu", device="meta").up_proj.weight.shape == (1024, 384)


def test_dtype_and_device_are_passed_on():
    block = layers.TransformerBlock(8, 2, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in block.parameters())
