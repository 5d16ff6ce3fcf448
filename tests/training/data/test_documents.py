"""Inputs of `data build`: what is no text is refused by name before anything is written; links, fields, splits."""

import gzip
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tpformer.training.data import IndexedDataset, build_dataset, build_split, read_sidecar

FRENCH = "é".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.gz", gzip.compress(b"text", mtime=0), "is compressed \\(gzip\\): decompress it first"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary or UTF-16 \\(byte 8 is 0\\)"),
        ("a.txt", "wide".encode("utf-16"), "UTF-16 .* convert it to UTF-8"),
        ("a.txt", (b"caf" + FRENCH + b" ") * 50, "not UTF-8 \\(50 of 250 bytes are invalid, the first at 3\\)"),
        ("a.txt", b"x" * 2**17 + b"\0", "byte 131072 is 0"),  # beyond what is looked at first
        ("a.jsonl", gzip.compress(b'{"text": "x"}\n', mtime=0), "a.jsonl is compressed"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """N11: a .gz was taken as text."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "good.txt").write_text("good")
    (source / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} {words}" if words[0] == "i" else words):
        build_dataset([source], tmp_path / "out", "bytes", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_several_are_named_and_few_stray_bytes_are_text(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"0\.bin is binary.* \(2 more files are no text: .*1\.bin, .*2\.bin\)"):
        build_dataset([tmp_path], tmp_path / "out", "bytes", quiet=True)
    (tmp_path / "stray.txt").write_bytes(b"na" + FRENCH + b"ve")
    assert build_dataset([tmp_path / "stray.txt"], tmp_path / "out", "bytes", quiet=True).n_tokens == 6


def test_links_do_not_lead_out_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R19. A link that is given by name is followed."""
    outside, source = tmp_path / "outside", tmp_path / "source"
    for folder in (outside, source):
        folder.mkdir()
    (outside / "secret.txt").write_text("secret")
    (source / "own.txt").write_text("own")
    (source / "folder").symlink_to(outside)
    (source / "file.txt").symlink_to(outside / "secret.txt")
    (source / "round").symlink_to(source)
    assert build_dataset([source], tmp_path / "out", "bytes").n_tokens == 4
    assert "3 symbolic links in folders are left out" in capsys.readouterr().out
    assert build_dataset([source / "file.txt"], tmp_path / "named", "bytes", quiet=True).n_tokens == 7
    os.unlink(source / "own.txt")
    with pytest.raises(ValueError, match="nothing to tokenize .* 3 symbolic links"):
        build_dataset([source], tmp_path / "none", "bytes", quiet=True)


def documents(prefix: Path) -> set[bytes]:
    dataset = IndexedDataset(prefix)
    ids = dataset.tokens(0, dataset.n_tokens)
    return {bytes(part[part < 256].tolist()) for part in np.split(ids, (ids == 256).nonzero()[0] + 1)}


def test_a_split_depends_on_the_documents_alone(tmp_path: Path) -> None:
    """N11: --valid-fraction. Equal documents are never on both sides."""
    lines = [json.dumps({"text": f"document {number % 150}"}) + "\n" for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(reversed(lines)))
    for name in "ab":
        train, valid = build_split([tmp_path / f"{name}.jsonl"], tmp_path / name, "bytes", 0.2, quiet=True)
        assert train.n_documents + valid.n_documents == 200 and 15 < valid.n_documents < 70
    assert documents(tmp_path / "a_valid") == documents(tmp_path / "b_valid")
    assert documents(tmp_path / "a_valid") & documents(tmp_path / "a_train") == {b""}
    assert (read_sidecar(tmp_path / "a_valid") or {})["n_documents"] == valid.n_documents
    before = sorted(tmp_path.iterdir())
    for fraction, words in ((1.0, "strictly between"), (1e-9, "200 documents are too few for .*c_valid")):
        with pytest.raises(ValueError, match=words):
            build_split([tmp_path / "a.jsonl"], tmp_path / "c", "bytes", fraction, quiet=True)
    with pytest.raises(ValueError, match="a_train.bin, .* already exists"):
        build_split([tmp_path / "a.jsonl"], tmp_path / "a", "bytes", 0.2, quiet=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_field_of_jsonl_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "id": 1}\n')
    assert build_dataset([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", fields=["content"], quiet=True).n_tokens
    with pytest.raises(ValueError, match='a.jsonl:1 .* under "text"; its keys are content, id: give --text-field'):
        build_dataset([tmp_path / "a.jsonl"], tmp_path / "other", "bytes", quiet=True)


def test_parquet_gives_one_document_per_row(tmp_path: Path) -> None:
    """N11."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", "é", ""], "id": [1, 2, 3]}), path)
    summary = build_dataset([path], tmp_path / "out", "bytes", fields=["body"], quiet=True)
    assert documents(tmp_path / "out") == {b"x", "é".encode(), b""} and summary.n_documents == 3
    for field, words in (("text", "no column 'text' but body, id"), ("id", "row 1 has 1 under 'id'")):
        with pytest.raises(ValueError, match=f"a.parquet.* {words}"):
            build_dataset([path], tmp_path / "other", "bytes", fields=[field], quiet=True)
    parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    with pytest.raises(ValueError, match="row 2 has None"):
        build_dataset([path], tmp_path / "other", "bytes", quiet=True)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="a.parquet is not a .parquet file"):
        build_dataset([path], tmp_path / "other", "bytes", quiet=True)


def test_what_cannot_be_read_or_written_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N13. Tests may run as root, whom no permission stops."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"a.parquet needs the pyarrow package: pip install tpformer\[parquet\]"):
        build_dataset([tmp_path / "a.parquet"], tmp_path / "out", "bytes", quiet=True)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/out cannot be written: File exists"):
        build_dataset([tmp_path / "a.txt"], tmp_path / "file" / "out", "bytes", quiet=True)

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match="a.txt cannot be read: Permission denied"):
        build_dataset([tmp_path / "a.txt"], tmp_path / "out", "bytes", quiet=True)
