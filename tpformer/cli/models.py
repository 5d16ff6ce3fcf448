"""Commands about a trained model: generate, chat, export."""

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
class Chat:
    """Talk with a model: type a line, read its answer. /help lists the commands."""

    model: tyro.conf.Positional[Path]
    """A run's directory, or one of a Hugging Face model's weights."""
    system: str | None = None
    """System message."""
    max_new_tokens: int = 500
    """Most tokens of an answer."""
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float = 1.0
    """Draw from the most likely tokens only whose probabilities sum to this."""
    min_p: float = 0.0
    """Draw only from tokens at least this many times as likely as the most likely one."""
    seed: int = 0
    tensor_parallel: int | None = None
    """Tensor-parallel ranks to run on. Unset: the run's own number of them."""


def chat_command(arguments: Sequence[str]) -> None:
    """`tpformer chat`: hold a conversation on the terminal, or one that is piped in."""
    from tpformer.training.source import source_config

    options = tyro.cli(Chat, prog="tpformer chat", args=list(arguments))
    ranks = options.tensor_parallel
    config = source_config(options.model, {} if ranks is None else {"parallel": {"tensor_parallel": ranks}})

    import torch.distributed as dist

    from tpformer.inference.chat import chat
    from tpformer.inference.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p)

    def work(config: RunConfig) -> None:
        chat(
            config,
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed,
        )
        dist.destroy_process_group()

    with_ranks(work, config, interactive=True)


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


def export_command(arguments: Sequence[str]) -> None:
    """`tpformer export`: write one checkpoint's model, in this process."""
    options = tyro.cli(Export, prog="tpformer export", args=list(arguments))

    from tpformer.training.export import export

    step = export(options.run_dir, options.out, step=options.step, dtype=options.dtype)
    print(f"step {step} of {options.run_dir} -> {options.out}")
