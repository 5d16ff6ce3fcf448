"""What stands beside a tokenizer.json in a Hugging Face folder: special tokens, stop tokens and the chat template.

Only reading these files belongs here. chat_template.py renders a template, and tokenizer.py knows the ids.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpformer.weights.family import read_json
from tpformer.words import listed, shown

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files beside a tokenizer.json say. All is empty where there are none."""

    special_tokens: dict[str, str] = field(default_factory=dict)  # by role, such as {"eos_token": "</s>"}
    stop_ids: tuple[int, ...] = ()  # generation_config.json's eos_token_id
    chat_template: str | None = None


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the configuration, special tokens, chat template and generation configuration beside a tokenizer.json.

    A file of another name than tokenizer.json stands alone: what lies beside it may belong to another tokenizer. As in
    transformers, special_tokens_map.json counts only if tokenizer_config.json does not list its added tokens, and
    chat_template.jinja comes before the configuration's template. ValueError names a file that cannot be understood.
    """
    if path.name != "tokenizer.json":
        return TokenizerFiles()
    folder = path.parent
    config = _read_object(folder / "tokenizer_config.json")
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= _read_object(folder / "special_tokens_map.json")
    tokens = {role: _content(folder, role, named[role]) for role in ROLES if named.get(role) is not None}
    return TokenizerFiles(tokens, _stop_ids(folder / "generation_config.json"), _chat_template(folder, config))


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(folder: Path, role: str, value: Any) -> str:
    """A token's text, which is written plainly or as an object of its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{folder}: {role} is {shown(value)}, where a token's text is expected")
    return text


def _stop_ids(path: Path) -> tuple[int, ...]:
    ids = _read_object(path).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(each) is int for each in listed):
        raise ValueError(f"{path}: eos_token_id is {shown(ids)}, where an id or a list of ids is expected")
    return tuple(listed)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): convert it first") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        try:
            named = {str(each["name"]): each["template"] for each in template}
        except (TypeError, KeyError):
            raise ValueError(
                f"{folder}: chat_template is {shown(template)}, where objects of a name and a template are expected"
            ) from None
        if "default" not in named:
            raise ValueError(f"{folder}: its chat templates are {listed(named)}, and none of them is named default")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template is {shown(template)}, where a template's text is expected")
    return template
