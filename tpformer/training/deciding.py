"""What all ranks of a command must have alike: their configuration, and the contents of the files that it names.

Belongs here: which keys and files count. tpformer.distributed.agreement compares them as ranks join.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpformer.config import RunConfig
from tpformer.distributed.agreement import Decides

from .companions import CONFIG, kept_tokenizer
from .data import dataset_paths

# Keys that may differ: timeouts, what rank 0 alone writes, names of what is compared by its contents, and a preset,
# whose fields are compared.
FREE = frozenset(
    "run.dir run.timeout run.max_restarts model.preset model.init_from data.train data.valid data.tokenizer "
    "parallel.transport_table log.interval log.tensorboard log.plot log.profile_step log.wandb".split()
)


def decides(
    command: str,
    config: RunConfig,
    *,
    source: str | None = None,
    data: Sequence[str] = (),
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> Decides:
    """What decides a command on a run's configuration.

    source: the directory whose weights are used as they are; data: what then takes the place of the run's datasets.
    beside: what decides the command beside that. Of a run's checkpoints the manifest is compared where one is chosen.
    """
    values = dict(beside)
    for section, keys in dataclasses.asdict(config).items():
        values |= {f"{section}.{key}": value for key, value in keys.items() if f"{section}.{key}" not in FREE}
    files: dict[str, Path] = {}
    own = {"data.train": config.data.train, "data.valid": config.data.valid}
    used = own if source is None else {"--data": data}
    for use, prefixes in used.items():
        for index, prefix in enumerate(prefixes):
            paths = dataset_paths(prefix)
            files |= {f"{use}[{index}]{path.suffix}": path for path in (paths.bin, paths.idx, paths.mask)}
    name = config.data.tokenizer
    kept = kept_tokenizer(Path(config.run.dir)) if config.run.resume else None
    if name not in (None, "bytes"):
        files["data.tokenizer"] = Path(str(name)) if kept is None or Path(str(name)).is_file() else kept
    else:
        values["data.tokenizer"] = name
    if config.parallel.transport_table:
        files["parallel.transport_table"] = Path(config.parallel.transport_table)
    resumed = config.run.resume and (Path(config.run.dir) / "config.toml").is_file()
    weights = source or (None if resumed else config.model.init_from)
    if weights is not None:
        there = [path for path in sorted(Path(weights).glob("*.safetensors*")) if path.is_file()]
        there += [Path(weights, name) for name in (CONFIG, "config.toml") if Path(weights, name).is_file()]
        files |= {f"{path.name} of the weights": path for path in there}
    return Decides(command, values, files)
