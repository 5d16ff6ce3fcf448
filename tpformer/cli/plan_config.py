"""The run that `tpformer plan` lays out: of a file, a preset or a size, on a device."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from tpformer.config import FP8, PRESETS, RunConfig, build_config, check_choice, preset_config, read_toml
from tpformer.config.fp8 import PRECISIONS

from .options import number

if TYPE_CHECKING:
    from tpformer.planner.devices import Device

SAMPLE_TOKENS = 4096  # of a sample, where no length is given
BATCH_TOKENS = 4 << 20  # of a step, where no batch is given; GPT-3's order


def planned_config(options: Any, device: Device) -> RunConfig:
    """The run that is laid out on this device; its vocabulary and dtype are set, because the models need them. A step
    that the file records is left out: without a pipeline there is none, and no layout is to be left out for it."""
    from tpformer.planner.devices import DTYPES
    from tpformer.planner.quantising import check_fp8_device
    from tpformer.training.resolve import with_vocab_size

    given = [name for name in ("file", "preset", "parameters") if getattr(options, name)]
    if len(given) != 1:
        raise ValueError("give one of FILE.toml, --preset NAME and --parameters SIZE")
    values: dict[str, dict[str, Any]] = {"model": {"preset": options.preset}}
    if options.file:
        values = read_toml(options.file)
    elif options.parameters:
        values["model"]["preset"] = _nearest_preset(number("--parameters", options.parameters))
    values = _with_length(options, values)
    if options.precision is not None:
        values["train"] = {**values.get("train", {}), "precision": options.precision}
    config = build_config(values)
    check_choice("train.precision", config.train.precision, PRECISIONS)
    if config.train.precision == FP8:
        check_fp8_device(device)
    if config.model.vocab_size is None:
        if config.model.known_vocab_size is None:
            raise ValueError("model.vocab_size is unset: set it in the file, or name a preset")
        config = with_vocab_size(config, config.model.known_vocab_size)
    dtype = config.train.dtype or ("bfloat16" if device.itemsize == 2 else "float32")
    if DTYPES[dtype] != device.itemsize:
        raise ValueError(
            f"train.dtype = {dtype}, and the rates of {device.name} are those of {8 * device.itemsize} bits: unset it, "
            f"or give a device's file with the rates and the dtype"
        )
    train: dict[str, Any] = {"device": "cuda" if device.capability else "cpu", "dtype": dtype}
    batch = options.batch
    if batch is None and "global_batch_size" not in values.get("train", {}):
        batch = max(options.gpus, 2 ** round(math.log2(max(1, BATCH_TOKENS / config.model.seq_length))))
    train |= {"global_batch_size": batch} if batch is not None else {}
    log = dataclasses.replace(config.log, timeline_step=0)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train), log=log)


def _with_length(options: Any, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The values with the length of a sample: presets have the longest context of a model, which few train with."""
    length = options.seq_length
    if length is None and not options.file:
        longest = build_config(values).model.seq_length
        length = min(SAMPLE_TOKENS, longest)
        if length < longest:
            print(f"samples of {length:,} tokens; the model takes {longest:,} (--seq-length)")
    return values if length is None else {**values, "model": {**values.get("model", {}), "seq_length": length}}


def _nearest_preset(parameters: float) -> str:
    name = min(PRESETS, key=lambda name: abs(math.log(preset_config(name).n_parameters / parameters)))
    print(f"the preset nearest to {parameters:.3g} parameters: {name}, {preset_config(name).n_parameters:.3g}")
    return name
