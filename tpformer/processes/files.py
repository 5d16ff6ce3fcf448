"""Files that survive a kill: they are written whole or not at all, and a digest shows whether they changed since.

Importing this file does not import torch.
"""

import hashlib
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file as UTF-8, in place of one that exists. OSError where that fails.

    Readers find the old content or the new one, never a part: the text goes to a hidden file beside it, which is then
    renamed. Only one process may write a path at a time.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. OSError where the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
