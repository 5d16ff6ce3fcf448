"""Files that travel with a model's weights: its tokenizer, its chat template and its settings of generation."""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpformer.weights.family import read_json
from tpformer.weights.folder import inside

from .data import load_tokenizer

FOLDER = "hf"  # of a run: the copy of its tokenizer, and of what came with it
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
END = "<|endoftext|>"


def copy_companions(directory: Path, out: Path, names: Sequence[str] = COMPANIONS) -> list[str]:
    """Copy what there is of a model's companions; returns their names.

    ValueError for a link that leads out of the directory, before anything is copied. OSError where copying fails.
    """
    there = [name for name in names if inside(directory, name).is_file()]
    for name in there:
        shutil.copyfile(directory / name, out / name)
    return there


def kept_tokenizer(run: Path) -> Path | None:
    """The tokenizer.json that a run keeps, as an absolute path; None if it keeps none."""
    path = run.absolute() / FOLDER / TOKENIZER
    return path if path.is_file() else None


def keep_tokenizer(tokenizer: str | None, run: Path) -> bool:
    """Copy a tokenizer.json and what belongs to it into a run, unless the run has a copy or reads bytes.

    A file of another name is copied as tokenizer.json, without what lies beside it. The folder appears whole or not at
    all. Returns False where there is nothing to copy: nothing says which tokenizer, or its file does not exist. Errors:
    those of copy_companions.
    """
    if tokenizer == "bytes" or kept_tokenizer(run):
        return True
    source = Path(tokenizer or "")
    if not source.is_file():
        return False
    temporary = run / f".{FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    shutil.copyfile(source, temporary / TOKENIZER)  # it was named, so it may be a link
    if source.name == TOKENIZER:
        copy_companions(source.parent, temporary, (*COMPANIONS[1:], CONFIG))  # which has the ids of special tokens
    temporary.rename(run / FOLDER)
    return True


def companions_of(run: Path, tokenizer: str | None) -> Path | None:
    """The directory with the companions of a run's model: that of its tokenizer.json, or what an import kept."""
    if tokenizer not in (None, "bytes"):
        return Path(str(tokenizer)).parent
    return run / FOLDER if (run / FOLDER).is_dir() else None


def token_ids(directory: Path | None, tokenizer: str | None = None) -> dict[str, Any]:
    """The ids of special tokens that the config.json beside a tokenizer has; None for those that it has not.

    tokenizer: the path of the one that a run was trained with, whose end of a document ends a text where nothing else
    does.
    """
    path = None if directory is None else directory / CONFIG
    values = read_json(path) if path is not None and path.is_file() else {}
    found = {name: values.get(name) for name in _TOKENS}
    if found["eos_token_id"] is None and tokenizer is not None and Path(tokenizer).is_file():
        with suppress(ValueError):  # it has no such token
            found["eos_token_id"] = load_tokenizer(tokenizer).end_of_document
    return found


def write_byte_tokenizer(out: Path) -> dict[str, Any]:
    """Write byte_tokenizer() and its settings to a directory; returns the ids of its special tokens."""
    tokenizer = byte_tokenizer()
    (out / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return {"bos_token_id": None, "eos_token_id": len(_byte_letters()), "pad_token_id": None}


def byte_tokenizer() -> dict[str, Any]:
    """The tokenizer.json that equals the byte tokenizer.

    Text is taken byte by byte. A text that spells out the end token is the exception: it becomes that token.
    """
    end = len(_byte_letters())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end, "content": END, **special}],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": model,
    }


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte: GPT-2's table.

    Printable Latin-1 letters stand for themselves, and the other bytes take the letters from 256 on, in order.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte) if byte in own else chr(256 + others.index(byte)) for byte in range(256)]
