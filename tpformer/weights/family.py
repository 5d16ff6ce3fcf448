"""Families of models: what a config.json of theirs says in the fields of GPTConfig, and the reverse.

A Family is two tables, one of config fields and one of tensors. Everything else here is derived from them. Nothing
here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.config import GPTConfig
from tpformer.config.checks import parsed
from tpformer.config.ranges import NO_FLOAT
from tpformer.words import listed, printable, shown

from .rope import DEFAULT_BASE, ROPE_KEYS, read_rope, write_rope


@dataclass(frozen=True)
class Field:
    """A field of theirs that says what a field of GPTConfig says.

    default: what their library takes where the field is missing. values: {theirs: ours} where the words differ; any
    other value is refused. Of two of theirs for one of ours the first is written. also: another name of the field,
    which is read where the first is missing. prefix: theirs is a list of layers, [0, 1, ...], and ours is how many.
    """

    ours: str
    default: Any
    values: Mapping[Any, Any] | None = None
    also: str | None = None
    prefix: bool = False


@dataclass(frozen=True)
class Must:
    """A field of theirs that is refused unless it is missing or has this value (or a list of nothing else)."""

    value: Any
    why: str


@dataclass(frozen=True)
class Unused:
    """A field of theirs that does not change what the model computes. reported: a value other than 0 is mentioned."""

    why: str
    reported: bool = False


Fields = dict[str, Field | Must | Unused]
DROPOUT = Unused("it is a setting of training (model.dropout)", reported=True)
TOKEN = Unused("the tokenizer and generation_config.json say which token it is")
# what transformers 4 let a config.json say about generation, as that of Llama 2 does
GENERATION = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
).split()
COMMON: Fields = {
    "model_type": Unused("it chose the family"),
    "architectures": Unused("the tensors show whether it is a language model"),
    "bos_token_id": TOKEN,
    "eos_token_id": TOKEN,
    "pad_token_id": TOKEN,
    "torch_dtype": Unused("tensors have dtypes of their own"),
    "dtype": Unused("tensors have dtypes of their own"),
    "transformers_version": Unused("it says who wrote the file"),
    "_name_or_path": Unused("it says where the file came from"),
    "use_cache": Unused("it is a setting of generation"),
    "task_specific_params": Unused("they are settings of generation"),
    **dict.fromkeys(GENERATION, Unused("it is a setting of generation")),
    "output_attentions": Unused("it is about what a forward returns"),
    "output_hidden_states": Unused("it is about what a forward returns"),
    "return_dict": Unused("it is about what a forward returns"),
    "id2label": Unused("only classifiers have labels"),
    "label2id": Unused("only classifiers have labels"),
    "problem_type": Unused("only classifiers have one"),
    "num_labels": Unused("only classifiers have labels"),
    "_num_labels": Unused("only classifiers have labels"),
    "finetuning_task": Unused("it says what the model was trained for"),
    "is_decoder": Unused("attention is causal with either value, as there is no encoder"),
    "tie_encoder_decoder": Unused("there is no encoder"),
    "cross_attention_hidden_size": Unused("there is no encoder"),
    "decoder_start_token_id": TOKEN,
    "sep_token_id": TOKEN,
    "prefix": Unused("it is a text that a user may put before a prompt"),
    "tokenizer_class": Unused("tokenizer_config.json says it"),
    "torchscript": Unused("it is about how a model is compiled"),
    "use_bfloat16": Unused("tensors have dtypes of their own"),
    "tf_legacy_loss": Unused("it is for another program"),
    "chunk_size_feed_forward": Unused("it changes memory, not results"),
    "gradient_checkpointing": Unused("it is a setting of training"),
    "_attn_implementation": Unused("it changes speed, not results"),
    "_attn_implementation_autoset": Unused("it changes speed, not results"),
    "_commit_hash": Unused("it says where the file came from"),
    "unsloth_fixed": Unused("it says who wrote the file"),
    "unsloth_version": Unused("it says who wrote the file"),
    "attn_implementation": Unused("it changes speed, not results"),
    "transformers.js_config": Unused("it is for another program"),
    "quantization_config": Must(None, "quantized weights are not read: export the model in 16 or 32 bits"),
    "is_encoder_decoder": Must(False, "there is no encoder here"),
    "add_cross_attention": Must(False, "there is no cross-attention here"),
    "pruned_heads": Must({}, "all heads have to be there"),
}


class Tensors(NamedTuple):
    """A tensor of theirs, and the ones of ours that it holds, one after the other along dim 0.

    {} stands for a layer's index. transposed: theirs is (in_features, out_features). part: of a tensor for each expert,
    (index, number) of the equal parts of ours[expert] along dim 0 that it is; {expert} stands for the expert's index.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    part: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models of another library.

    model_type: its name in config.json. architecture: the class that an export names. fixed: the fields of GPTConfig
    that all its models share. fields: its fields of config.json, beside COMMON and RoPE's. tensors: in the order in
    which an export has them. prefix: what files of the bare model leave out of names. buffers: tensors that old files
    have and that no model needs. divides_hidden: whether hidden_size has to be a multiple of n_heads. rope_base: RoPE's
    base where config.json does not say one.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any]
    fields: Fields
    tensors: tuple[Tensors, ...]
    prefix: str
    buffers: tuple[str, ...] = ()
    divides_hidden: bool = False
    rope_base: float = DEFAULT_BASE

    @property
    def has_rope(self) -> bool:
        """Whether its models have RoPE, and so config.json has its fields."""
        return self.fixed["position"] == "rope"

    @property
    def has_experts(self) -> bool:
        """Whether its models have experts."""
        return any(isinstance(known, Field) and known.ours == "n_experts" for known in self.fields.values())

    def read(self, values: Mapping[str, Any], report: Callable[[str], None] = lambda _: None) -> GPTConfig:
        """The architecture that a config.json describes. What is left out of it is reported.

        ValueError, with the field's name, for a field that is not known, and for a value that cannot be had here.
        """
        fields = COMMON | self.fields
        others = {each.also: name for name, each in fields.items() if isinstance(each, Field) and each.also}
        for also, name in others.items():
            if also in values:
                if values.get(name, values[also]) != values[also]:
                    raise ValueError(
                        f"config.json has {name} = {shown(values[name])} and {also} = {shown(values[also])}: keep one"
                    )
                values = {name: values[also], **values}
        known = {*fields, *others, *(ROPE_KEYS if self.has_rope else ())}
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"config.json has {listed(unknown)}, which nobody here has checked for {self.model_type}: if it "
                f"does not change what the model computes, remove it from a copy"
            )
        ours: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, known_field in fields.items():
            given = values.get(name)
            if isinstance(known_field, Field):
                value = _in_our_words(name, known_field, values.get(name, known_field.default))
                before = said.setdefault(known_field.ours, f"{name} = {shown(given)}")
                if ours.setdefault(known_field.ours, value) != value:
                    raise ValueError(
                        f"config.json has {before} and {name} = {shown(given)}: a model here has one "
                        f"{known_field.ours} for both"
                    )
            elif isinstance(known_field, Must):
                _check_must(name, known_field, values)
            elif known_field.reported and given:
                report(f"{name} = {shown(given)} is left out: {known_field.why}")
        if self.has_rope:
            ours |= read_rope(values, ours["seq_length"], self.rope_base)
        return GPTConfig(**self.fixed, **ours)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """The config.json of an architecture. ValueError, with the fields' names, if it cannot say all of it."""
        if lost := self.cannot_say(config):
            raise ValueError(f"a config.json of {self.model_type} cannot say {', '.join(lost)}")
        return self._written(config)

    def cannot_say(self, config: GPTConfig) -> list[str]:
        """The fields of GPTConfig, with their values, that are lost on the way through a config.json."""
        if self.divides_hidden and config.hidden_size % config.n_heads:
            return [f"n_heads = {config.n_heads} with hidden_size = {config.hidden_size}"]
        if self.has_experts and config.n_experts is None:
            return ["a model without experts"]
        back = meaning(self.read(self._written(config)))
        return [f"{name} = {value}" for name, value in meaning(config).items() if back[name] != value]

    def _written(self, config: GPTConfig) -> dict[str, Any]:
        """A config.json. A value that the family has no word for is missing in it."""
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        said = meaning(config) | {"ffn_hidden_size": config.ffn_size}  # a number, also where no layer is dense
        for name, known_field in self.fields.items():
            if isinstance(known_field, Must):
                values |= {name: known_field.value} if isinstance(known_field.value, bool) else {}
            elif isinstance(known_field, Field):
                values |= _in_their_words(name, known_field, said[known_field.ours])
            elif known_field is DROPOUT:
                values[name] = 0.0
        return values | (write_rope(config) if self.has_rope and config.position == "rope" else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. FileNotFoundError or ValueError names the path."""
    if not path.is_file():
        raise FileNotFoundError(f"{printable(path)} does not exist")
    values = parsed(path, "JSON", json.loads)
    if not isinstance(values, dict):
        raise ValueError(f"{printable(path)} holds a JSON {type(values).__name__}, where a JSON object is expected")
    return values


def _in_our_words(name: str, known: Field, value: Any) -> Any:
    if known.prefix:
        if value is not None and (not isinstance(value, list) or value != list(range(len(value)))):
            raise ValueError(
                f"config.json has {name} = {shown(value)}: only the first layers, [0, 1, ...], can differ here"
            )
        return len(value or [])
    if known.values is not None:
        if not isinstance(value, str) or value not in known.values:
            raise ValueError(
                f"config.json has {name} = {shown(value)}: it can only be {', '.join(map(repr, known.values))}"
            )
        return known.values[value]
    hint = typing.get_type_hints(GPTConfig)[known.ours]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and type(value) is int and abs(value) < NO_FLOAT:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"config.json has {name} = {shown(value)}: expected {wanted}")
    return value


def _in_their_words(name: str, known: Field, value: Any) -> dict[str, Any]:
    """The field with its value; nothing if they have no word for the value."""
    if known.prefix:
        return {name: list(range(value or 0))}
    if known.values is None:
        return {name: value}
    words = [theirs for theirs, ours in known.values.items() if ours == value]
    return {name: words[0]} if words else {}


def _check_must(name: str, must: Must, values: Mapping[str, Any]) -> None:
    value = values.get(name, must.value)
    listed = isinstance(value, list) and all(one == must.value for one in value)
    if value is not None and value != must.value and not listed:
        raise ValueError(f"config.json has {name} = {shown(value)}: {must.why}")


# what does not change what given weights compute
FREE = ("vocab_multiple", "dropout")
_ROPE = ("rope_base", "rope_interleaved", "rope_scaling_factor")
_SCALING = ("rope_low_frequency", "rope_high_frequency", "rope_original_length")
_EXPERTS = (
    "experts_per_token expert_ffn_size shared_expert_size first_dense_layers router_score router_normalised "
    "router_scale router_groups router_top_groups router_bias"
).split()


def meaning(config: GPTConfig) -> dict[str, Any]:
    """The fields that change what given weights compute, with what follows from unset ones filled in.

    Two architectures of equal meaning take the same weights and compute the same. Fields without effect are None.
    """
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE}
    values |= {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "ffn_hidden_size": config.ffn_size,
        "qkv_bias": config.has_qkv_bias,
    }
    if config.n_experts is None:
        values |= dict.fromkeys(_EXPERTS)
    else:
        values |= {"expert_ffn_size": config.expert_size}
        if config.first_dense_layers == 0:
            values["ffn_hidden_size"] = None
    if config.position != "rope":
        values |= dict.fromkeys(_ROPE)
    if config.position != "rope" or config.rope_scaling_factor == 1:
        values |= dict.fromkeys(_SCALING)
    return values
