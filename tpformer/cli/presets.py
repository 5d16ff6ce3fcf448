"""The command that lists presets."""

from collections.abc import Sequence

import tyro

from tpformer.config import PRESETS, preset_config

COLUMNS: tuple[str, ...] = (
    "preset",
    "parameters",
    "active",
    "layers",
    "hidden",
    "heads",
    "kv heads",
    "vocabulary",
    "tokens",
)


def presets_command(arguments: Sequence[str]) -> None:
    """`tpformer presets`: print a table, one line for each."""

    def presets() -> None:
        """List the architectures that model.preset names. "tokens" is the longest context each was published for,
        "active" the parameters that a token uses."""
        rows = [COLUMNS]
        for name in PRESETS:
            config = preset_config(name)
            sizes = (config.n_layers, config.hidden_size, config.n_heads, config.n_kv_heads or config.n_heads)
            parameters = (f"{n / 1e6:,.0f}M" for n in (config.n_parameters, config.n_active_parameters))
            rows.append((name, *parameters, *map(str, (*sizes, config.vocab_size, config.seq_length))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *cells in rows:
            numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            print(f"{name:<{widths[0]}}", *numbers, sep="  ")

    tyro.cli(presets, prog="tpformer presets", args=list(arguments))
