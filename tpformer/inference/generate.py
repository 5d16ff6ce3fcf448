"""Sample text from a run's newest checkpoint, on any number of tensor-parallel ranks."""

import torch
from torch import Tensor

from tpformer import ops
from tpformer.config import RunConfig, check_config
from tpformer.models import GPT
from tpformer.training.data import load_tokenizer
from tpformer.training.resolve import tokenizer_name
from tpformer.training.setup import build_model, device_type, group_timeout, join_ranks, run_mesh
from tpformer.training.source import open_source


@torch.no_grad()
def next_token_logits(model: GPT, ids: Tensor) -> Tensor:
    """Logits (vocab_size,) float32 for the token after ids (n,), equal on all ranks. Gathers every rank's slice."""
    logits = model(ids[None])[0, -1].float()
    return ops.gather_columns(logits[None], model.lm_head.rows, model.tp.group)[0, : model.config.vocab_size]


def generate(
    model: GPT, prompt: Tensor, max_new_tokens: int, *, temperature: float, seed: int, end: int | None = None
) -> Tensor:
    """The prompt (n,) int64 followed by up to max_new_tokens sampled tokens. It ends before the token `end`.

    temperature 0 takes the most likely token. Every rank draws the same token, because their generators have the same
    seed. For each token the whole model runs on the last seq_length tokens: this shows what a run has learned, and is
    too slow for serving.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt
    model.eval()
    for _ in range(max_new_tokens):
        logits = next_token_logits(model, ids[-model.config.seq_length :]).cpu()
        if temperature == 0:
            token = logits.argmax().view(1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        if int(token) == end:
            break
        ids = torch.cat([ids, token.to(ids.device)])
    return ids


def generate_text(config: RunConfig, *, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and what the run's newest good checkpoint adds to it. Collective over the configured ranks.

    ValueError for a negative temperature or a configuration that cannot run; FileNotFoundError without a checkpoint or
    a tokenizer.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0: always the most likely token)")
    check_config(config, trains=False)
    tokenizer = load_tokenizer(tokenizer_name(config))
    ids = tokenizer.encode(prompt)
    if len(ids) == 0:
        ids = [tokenizer.end_of_document]  # type: ignore[assignment]
    device = device_type(config)
    join_ranks(device, group_timeout(config))
    mesh = run_mesh(config, device)
    source = open_source(config.run.dir)
    (model,) = build_model(config, mesh).parts
    source.load([model])
    start = torch.as_tensor(ids, dtype=torch.int64, device=mesh.device_type)
    end = tokenizer.end_of_document
    result = generate(model, start, max_new_tokens, temperature=temperature, seed=seed, end=end)
    return tokenizer.decode(result.cpu().numpy())
