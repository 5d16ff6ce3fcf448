"""Commands about a trained model: generate, export."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from tpformer.config import RunConfig

from .run import with_ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample from a run's newest checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    seed: int = 0
    tensor_parallel: int | None = None
    """Tensor-parallel ranks to run on. Unset: the run's own number of them."""


def generate_command(arguments: Sequence[str]) -> None:
    """`tpformer generate`: sample on the tensor-parallel ranks and print the text once."""
    from tpformer.training.source import source_config

    options = tyro.cli(Generate, prog="tpformer generate", args=list(arguments))
    ranks = options.tensor_parallel
    config = source_config(options.run_dir, {} if ranks is None else {"parallel": {"tensor_parallel": ranks}})

    import torch.distributed as dist

    from tpformer.inference.generate import generate_text

    def work(config: RunConfig) -> None:
        text = generate_text(
            config,
            prompt=options.prompt,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        if dist.get_rank() == 0:
            print(text)
        dist.destroy_process_group()

    with_ranks(work, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model of a run's checkpoint as safetensors, in one process."""

    run_dir: tyro.conf.Positional[Path]
    out: Path
    """Directory to make; an existing one must be empty."""
    step: int | None = None
    """Step of the checkpoint. Unset: the newest good one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Unset: the dtype of the run's parameters."""
    format: Literal["tpformer", "hf"] = "tpformer"
    """hf: for transformers and vLLM, with the tokenizer. tpformer: with the names and settings of this library."""


def export_command(arguments: Sequence[str]) -> None:
    """`tpformer export`: write one checkpoint's model, in this process."""
    options = tyro.cli(Export, prog="tpformer export", args=list(arguments))

    from tpformer.training.export import export

    step = export(options.run_dir, options.out, step=options.step, dtype=options.dtype, file_format=options.format)
    print(f"step {step} of {options.run_dir} -> {options.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run of a Hugging Face model (Llama, Mistral, Qwen 2, Qwen 3, GPT-2) or of an export, in one process."""

    directory: tyro.conf.Positional[Path]
    """A directory with config.json and safetensors files."""
    out: Path
    """The run's directory to make; an existing one must be empty."""


def import_command(arguments: Sequence[str]) -> None:
    """`tpformer import`: make a run of another library's weights, in this process."""
    options = tyro.cli(Import, prog="tpformer import", args=list(arguments))

    from tpformer.training.source import describe

    describe(options.directory)  # refuses most mistakes before torch is imported

    from tpformer.training.importing import import_weights

    architecture = import_weights(options.directory, options.out)
    print(f"{architecture.n_parameters / 1e6:.2f}M parameters of {options.directory} -> {options.out}, step 0")
