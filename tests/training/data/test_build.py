"""Building datasets keeps documents and their order, splits by the documents alone, writes a sidecar, names bad input
before anything is written, and reuses the default corpus."""

import gzip
import hashlib
import json
import math
import os
import random
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from turns import needs_extras, of_turn

from tpformer.cli.data import build_data_command
from tpformer.training.data import IndexedDataset, build, build_dataset, build_split, build_stdlib, corpus, read_sidecar

END = 256
FRENCH = "é".encode("latin-1")


def documents(prefix: Path) -> list[bytes]:
    """Each document, and an empty one at the end."""
    dataset = IndexedDataset(prefix)
    ids = dataset.tokens(0, dataset.n_tokens)
    return [bytes(part[part < END].tolist()) for part in np.split(ids, (ids == END).nonzero()[0] + 1)]


def test_the_sidecar_and_one_line_sum_up_a_known_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"aabbbbb")  # with the end token: frequencies 2/8, 5/8, 1/8
    summary = build_dataset([tmp_path / "a.txt"], tmp_path / "out", "bytes")
    expected = -sum(p * math.log(p) for p in (2 / 8, 5 / 8, 1 / 8))
    assert summary.entropy_nats_per_token == pytest.approx(expected, rel=1e-12)
    assert (summary.n_documents, summary.n_tokens, summary.vocab_size) == (1, 8, 257)
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar == asdict(summary)
    assert sidecar["sha256"] == hashlib.sha256((tmp_path / "out.bin").read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.bin", "out.idx", "out.json"]
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and said.err == ""
    assert f"1 documents, 8 tokens, unigram entropy {expected:.4f} nats/token" in said.out
    build_dataset([tmp_path / "a.txt"], tmp_path / "silent", "bytes", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_files_lines_and_rows_are_documents_in_their_order(tmp_path: Path) -> None:
    """A folder is walked in the order of names, without hidden files."""
    source = tmp_path / "source"
    for name in ("b.txt", "a/z.txt", "a/y.txt", ".hidden", ".git/config", "c.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name[-5])
    (source / "d.jsonl").write_text('{"text": "x", "id": 1}\n\n{"text": "\\u00e9"}')
    (tmp_path / "last.txt").write_bytes(b"last")
    summary = build_dataset([source, tmp_path / "last.txt"], tmp_path / "out", "bytes", quiet=True)
    found = [b"y", b"z", b"b", b"c", b"x", "é".encode(), b"last", b""]
    assert documents(tmp_path / "out") == found and summary.n_documents == len(found) - 1
    (tmp_path / "a.jsonl").write_text('{"content": "x", "id": 1}\n')
    build_dataset([tmp_path / "a.jsonl"], tmp_path / "field", "bytes", fields=["content"], quiet=True)
    assert documents(tmp_path / "field") == [b"x", b""]


@needs_extras
def test_parquet_gives_one_document_per_row(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", "é", ""], "id": [1, 2, 3], "gap": ["x", None, ""]}), path)
    build_dataset([path], tmp_path / "out", "bytes", fields=["body"], quiet=True)
    assert documents(tmp_path / "out") == [b"x", "é".encode(), b"", b""]
    for field, words in (
        ("text", "no column 'text' but body, gap, id"), ("id", "row 1 has 1 under 'id'"), ("gap", "row 2 has None"),
        ("body", "is not a .parquet file"),
    ):  # fmt: skip
        if "is not" in words:
            path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(ValueError, match=f"a.parquet.* {words}"):
            build_dataset([path], tmp_path / "other", "bytes", fields=[field], quiet=True)


def test_what_a_file_holds_decides_and_its_name_only_where_that_is_no_text(tmp_path: Path, capsys) -> None:
    lines, mark = b'{"id": 1, "content": "x"}\n\n{"content": "y"}', "\ufeff".encode()
    long = b'{"content": "' + b"z" * 2**17 + b'"}\n'
    for name, content, found in (
        ("a.json", lines, [b"x", b"y"]), ("a.NDJSON", lines, [b"x", b"y"]), ("corpus", lines, [b"x", b"y"]),
        ("a.txt", mark + lines + b"\n" + mark + lines, [b"x", b"y"] * 2), ("corpus", long, [b"z" * 2**17]),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        build_dataset([tmp_path / name], tmp_path / "out", "bytes", fields=["content"], quiet=True)
        assert documents(tmp_path / "out") == [*found, b""], name
        for path in tmp_path.iterdir():
            path.unlink()
    (tmp_path / "a.md").write_bytes(mark + b'# A\n{"content": "x"}\nno more' + mark)
    build_dataset([tmp_path / "a.md"], tmp_path / "out", "bytes")
    assert documents(tmp_path / "out") == [b'# A\n{"content": "x"}\nno more', b""]
    assert "2 byte order marks (U+FEFF) are left out" in capsys.readouterr().out
    line = b'{"text": "x"}\n'
    (tmp_path / "b.jsonl").write_bytes(mark + line + mark + b"\n" + 2 * mark + line + '{"text": "\ufeff"}'.encode())
    build_dataset([tmp_path / "b.jsonl"], tmp_path / "out b", "bytes")
    assert "5 byte order marks (U+FEFF) are left out" in capsys.readouterr().out
    for option in ("content", "text"):
        with pytest.raises(ValueError, match=f"--text-field {option} has no effect, as no input has fields"):
            build_data_command([str(tmp_path / "a.md"), "--out", str(tmp_path / "b"), "--text-field", option])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a pipe, which cannot be read twice: write it to a file"):
        build_dataset([tmp_path / "pipe"], tmp_path / "b", "bytes")


@of_turn(2)
def test_memory_is_less_than_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 127)) * (1 << 18))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a document of a few words"}\n' * (1 << 14))
    tracemalloc.start()
    try:
        for name in ("a.txt", "b.jsonl"):
            tracemalloc.reset_peak()
            build_dataset([tmp_path / name], tmp_path / name, "bytes", quiet=True)
            assert tracemalloc.get_traced_memory()[1] < (tmp_path / "a.txt").stat().st_size
    finally:
        tracemalloc.stop()


def test_messages_about_strangers_files_are_short_and_printable(tmp_path: Path) -> None:
    evil = "\x1b[31m"
    for record, words in (
        ({evil * 90 + str(key): 1 for key in range(3000)}, "has no 'text'; its keys are .* and 2997 more"),
        ({"text": [["x" * 10**6]] * 9}, "under 'text', where a text is expected"),
        (evil * 10**5, "is not a JSON object but"),
    ):
        (tmp_path / f"{evil}.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=words) as caught:
            build_dataset([tmp_path / f"{evil}.json"], tmp_path / "out", "bytes")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 2000


REFUSED = [
    ({"a.gz": gzip.compress(b"text", mtime=0)}, "a.gz is compressed \\(gzip\\): decompress it first"),  # N11
    ({"a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"}, "a.png is binary or UTF-16 \\(byte 8 is 0\\)"),
    ({"a.txt": "wide".encode("utf-16")}, "UTF-16 .* convert it to UTF-8"),
    ({"a.txt": b"x" * 2**17 + b"caf" + FRENCH}, "not UTF-8 \\(byte 131075 is 0xe9\\): convert it .*iconv"),
    ({"a.txt": b"x" * 2**17 + b"\0"}, "byte 131072 is 0"),  # beyond what is looked at first
    ({"a.jsonl": gzip.compress(b'{"text": "x"}\n', mtime=0)}, "a.jsonl is compressed"),
    ({f"{i}.bin": b"\0" for i in range(3)}, r"0\.bin is binary.* \(2 more files cannot be taken: .*1\.bin, .*2\.bin\)"),
    *(({"a.jsonl": f'{{"text": "x"}}\n\n{bad}\n'.encode(errors="surrogateescape")}, r"a\.jsonl:3 (is not|has)")
      for bad in ("{", '["text", "text"]', '{"text": 3}', "\udcff", '{"text": "\\ud800"}', '{"text": "x", "text": "y"}',
                  '{"text": "x", "te\\u0078t": "y"}')),
    ({"a.jsonl": b'{"txt": "x"}'}, "a.jsonl:1 has no 'text'; its keys are txt: give --text-field"),
    ({"a.jsonl": b'{"text": null}'}, "a.jsonl:1 has None under 'text', where a text is expected"),
    ({"a.TSV": b"id\ttext\n"}, "a.TSV is a table"),
    ({"a.json": b'{\n"text": "x"\n}'}, "a.json is one JSON value: write each document as an object on a line"),
    ({"a": b' [{"text": "x"},\n{"text": "y"}]'}, "a is one JSON value"),
    ({"empty.txt": b""}, r"nothing to tokenize for .*/out: .*/source \(1 files"),
    ({}, "nothing to tokenize"),
    ({"blank.jsonl": b"\n\n"}, "no tokens were added"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words"), REFUSED)
def test_what_is_no_text_is_refused_by_name_and_nothing_is_left(tmp_path: Path, files: dict, words: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if "nothing" not in words and "no tokens" not in words:
        (source / "good.txt").write_text("good")
    for name, content in files.items():
        (source / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        build_dataset([source], tmp_path / "out", "bytes", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_cannot_be_read_or_written_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N13. Tests may run as root, whom no permission stops."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").touch()
    build_dataset([tmp_path / "a.txt"], tmp_path / "built", "bytes", quiet=True)

    def refused(inputs: list[str], out: str, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            build_dataset([tmp_path / name for name in inputs], tmp_path / out, "bytes", quiet=True)

    refused([], "out", ValueError, "nothing to tokenize for .*/out: no inputs")
    refused(["absent.txt"], "out", FileNotFoundError, r"absent\.txt does not exist")
    refused(["a.parquet"], "out", ImportError, r"a.parquet needs the pyarrow package: pip install tpformer\[parquet\]")
    refused(["a.txt"], "file/out", ValueError, "file/out cannot be written: .*/file is no folder")
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    refused(["a.txt"], "out", ValueError, "a.txt cannot be read: Permission denied")
    with pytest.raises(ValueError, match=r"built\.idx cannot be read: Permission denied$"):
        IndexedDataset(tmp_path / "built")


def test_a_prefix_whose_sidecar_would_have_too_long_a_name_is_refused_before_a_text_is_read(tmp_path: Path) -> None:
    """The sidecar is written last, so all of the work was lost."""
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="has a name of 246 bytes: give a prefix of at most 245"):
        build_dataset([tmp_path / "a.txt"], tmp_path / ("x" * 246), "bytes", quiet=True)
    build_dataset([tmp_path / "a.txt"], tmp_path / ("x" * 245), "bytes", quiet=True)
    assert (tmp_path / ("x" * 245 + ".json")).is_file()


def test_links_do_not_lead_out_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R19. A link that is given by name is followed."""
    outside, source = tmp_path / "outside", tmp_path / "source"
    for folder, name in ((outside, "secret"), (source, "own")):
        folder.mkdir()
        (folder / f"{name}.txt").write_text(name)
    (source / "folder").symlink_to(outside)
    (source / "file.txt").symlink_to(outside / "secret.txt")
    (source / "round").symlink_to(source)
    assert build_dataset([source], tmp_path / "out", "bytes").n_tokens == 4
    assert "3 symbolic links in folders are left out" in capsys.readouterr().out
    assert build_dataset([source / "file.txt"], tmp_path / "named", "bytes", quiet=True).n_tokens == 7
    os.unlink(source / "own.txt")
    with pytest.raises(ValueError, match="nothing to tokenize .* 3 symbolic links"):
        build_dataset([source], tmp_path / "none", "bytes", quiet=True)


def test_a_split_depends_on_the_documents_alone(tmp_path: Path) -> None:
    """N11: --valid-fraction. Equal documents are never on both sides."""
    lines = [json.dumps({"text": f"document {number % 150}"}) + "\n" for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(reversed(lines)))
    for name in "ab":
        train, valid = build_split([tmp_path / f"{name}.jsonl"], tmp_path / name, "bytes", 0.2, quiet=True)
        assert train.n_documents + valid.n_documents == 200 and 15 < valid.n_documents < 70
    sides = {side: set(documents(tmp_path / side)) for side in ("a_train", "a_valid", "b_valid")}
    assert sides["a_valid"] == sides["b_valid"] and sides["a_valid"] & sides["a_train"] == {b""}
    assert (read_sidecar(tmp_path / "a_valid") or {})["n_documents"] == valid.n_documents
    before = sorted(tmp_path.iterdir())
    for out, fraction, words in (
        ("c", 1.0, "strictly between"), ("c", 1e-9, "200 documents are too few for .*c_valid"),
        ("a", 0.2, "a_train.bin, .* already exists"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            build_split([tmp_path / "a.jsonl"], tmp_path / out, "bytes", fraction, quiet=True)
    assert sorted(tmp_path.iterdir()) == before


def test_stdlib_files_are_sources_outside_tests_and_packages() -> None:
    names = [path.relative_to(corpus.stdlib_root()).as_posix() for path in corpus.stdlib_files()]
    assert names == sorted(set(names)) and {"argparse.py", "asyncio/tasks.py", "json/__init__.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
    assert all(name.endswith(".py") for name in names)
    sizes = [path.stat().st_size for path in corpus.split_files(corpus.stdlib_files(), root=corpus.stdlib_root())[1]]
    assert max(sizes) < 0.3 * sum(sizes), "no file is most of the validation set"


def test_a_split_of_files_is_a_partition_by_relative_names_whatever_else_is_there() -> None:
    root = Path("root")
    files = [root / f"package{i % 7}" / f"module{i}.py" for i in range(2000)]
    train, valid = corpus.split_files(files, root=root)
    assert valid == [path for path in files if path not in set(train)], "in the order given"
    assert train == [path for path in files if path not in set(valid)]
    assert 60 <= len(valid) <= 140  # 100 are expected, with a standard deviation of 9.7
    subset = random.Random(0).sample(files, 500)
    assert set(corpus.split_files(subset, root=root)[1]) == set(valid) & set(subset)
    moved = [Path("elsewhere") / path.relative_to(root) for path in files]
    _, valid_moved = corpus.split_files(moved, root=Path("elsewhere"))
    assert [path.relative_to("elsewhere") for path in valid_moved] == [path.relative_to(root) for path in valid]
    for fraction in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=str(fraction)):
            corpus.split_files(files, root=root, validation_fraction=fraction)


HARMS = {  # in which half, and what becomes of a file; None: it goes
    "library/module00.py": ("(train|valid)", lambda content: b"y" + content[1:]),  # of the same length
    "out/stdlib_train.bin": ("train", lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "out/stdlib_train.json": ("train", None),
    "out/stdlib_valid.json": ("valid", lambda content: content.replace(b'"bytes"', b'"other.json"')),
}


@pytest.mark.parametrize("harmed", HARMS)
def test_stdlib_is_built_once_a_missing_half_again_and_a_harmed_one_is_refused(tmp_path, monkeypatch, capsys, harmed):
    """100 tiny files take the place of the standard library."""
    root, folder = tmp_path / "library", tmp_path / "out"
    root.mkdir()
    for i in range(100):
        (root / f"module{i:02}.py").write_text(f"x = {i}\n")
    monkeypatch.setattr(build, "stdlib_root", lambda: root)
    monkeypatch.setattr(build, "stdlib_files", lambda: sorted(root.iterdir()))
    train, valid = build_stdlib(folder)
    assert (train, valid) == (folder / "stdlib_train", folder / "stdlib_valid")
    assert IndexedDataset(train).n_documents + IndexedDataset(valid).n_documents == 100
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert capsys.readouterr().out.count("reused") == 0
    build_stdlib(folder)
    assert capsys.readouterr().out.count("reused") == 2
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    for path in folder.glob("stdlib_valid.*"):
        path.unlink()
    build_stdlib(folder, quiet=True)
    assert Path(f"{valid}.bin").read_bytes() == before[Path(f"{valid}.bin")][1]
    (which, change), path = HARMS[harmed], tmp_path / harmed
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"stdlib_{which} does not hold .*delete .*stdlib_{which}\.bin"):
        build_stdlib(folder, quiet=True)
