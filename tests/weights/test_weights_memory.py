"""Memory beyond the model's parameters, of a checkpoint with a tensor of 256 MiB: below twice that tensor."""

import json
from pathlib import Path

import torch
from commands import Commands
from growth import growth
from turns import of_turn

from tpformer.models import GPT
from tpformer.training.export import export
from tpformer.training.importing import import_weights
from tpformer.training.source import open_source
from tpformer.weights.files import Spec, create_file
from tpformer.weights.gpt2 import GPT2
from tpformer.weights.tensors import TensorMap

LARGEST = 2**28
VALUES = {"model_type": "gpt2", "vocab_size": 2**18 + 1, "n_positions": 8, "n_embd": 256, "n_layer": 1, "n_head": 2}
VALUES |= {"tie_word_embeddings": False}


def measure(folder: str) -> None:
    """Print the growth of each step. A GPT that loads has its parameters before."""
    hub, run, out = (Path(folder, name) for name in ("hub", "run", "out"))
    grown = {"import": growth(lambda: import_weights(hub, run))}
    grown["export"] = growth(lambda: export(run, out, file_format="hf"))
    for name in ("hub", "run"):
        source = open_source(Path(folder, name))
        model = GPT(source.architecture)
        grown[f"load {name}"] = growth(lambda source=source, model=model: source.load([model]))
        del model
    print(json.dumps(grown))


@of_turn(5)
def test_one_tensor_at_a_time(commands: Commands, tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text(json.dumps(VALUES))
    shapes = TensorMap(GPT2, GPT2.read(VALUES)).shapes
    specs = {name: Spec(shape, torch.float32) for name, shape in shapes.items()}
    for number, tensor in enumerate(create_file(tmp_path / "hub" / "model.safetensors", specs).values()):
        tensor.fill_(number)
    code, out, err = commands.call(measure, str(tmp_path), OMP_NUM_THREADS="1").finish()
    assert code == 0, err
    grown = json.loads(out.splitlines()[-1])
    assert len(grown) == 4 and max(grown.values()) < 2 * LARGEST, grown
    assert max(grown["import"], grown["load hub"]) < LARGEST / 8, "safetensors are memory-mapped"
