"""Training data: token files, tokenizers, the default corpus and the order of samples, all without torch. Only
re-exports belong here."""

from .boundaries import check_ends
from .build import Summary, build_dataset, build_split, build_stdlib
from .chat_template import PLAIN_STOP, Message, chat_ids, render_chat
from .contents import FileContent, read_contents
from .corpus import split_files, stdlib_files, stdlib_root
from .indexed import DataError, IndexedDataset, IndexedWriter, dataset_paths, read_sidecar, token_dtype
from .sampling import BlendedSamples, Samples, TokenSamples, check_vocab, permute
from .tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, prompt_ids

__all__ = [
    "BlendedSamples",
    "ByteTokenizer",
    "DataError",
    "FileContent",
    "IndexedDataset",
    "IndexedWriter",
    "JsonTokenizer",
    "Message",
    "PLAIN_STOP",
    "Samples",
    "Summary",
    "TokenSamples",
    "Tokenizer",
    "build_dataset",
    "build_split",
    "build_stdlib",
    "chat_ids",
    "check_ends",
    "check_vocab",
    "dataset_paths",
    "load_tokenizer",
    "prompt_ids",
    "permute",
    "read_contents",
    "read_sidecar",
    "render_chat",
    "split_files",
    "stdlib_files",
    "stdlib_root",
    "token_dtype",
]
