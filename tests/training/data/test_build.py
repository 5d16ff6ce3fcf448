"""Building datasets keeps documents and their order, writes a sidecar, names bad input, and reuses the default
corpus."""

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from tpformer.training.data import IndexedDataset, build, build_dataset, build_stdlib, read_sidecar

END = 256


def stream(prefix: Path) -> list[int]:
    dataset = IndexedDataset(prefix)
    return dataset.tokens(0, dataset.n_tokens).tolist()


def test_entropy_of_a_known_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"aabbbbb")  # with the end token: frequencies 2/8, 5/8, 1/8
    summary = build_dataset([tmp_path / "a.txt"], tmp_path / "out", "bytes", quiet=True)
    expected = -sum(p * math.log(p) for p in (2 / 8, 5 / 8, 1 / 8))
    assert summary.entropy_nats_per_token == pytest.approx(expected, rel=1e-12)
    assert (summary.n_documents, summary.n_tokens, summary.vocab_size) == (1, 8, 257)


def test_sidecar_holds_the_summary_and_the_hash_of_the_bin(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    summary = build_dataset([tmp_path / "a.txt"], tmp_path / "out", "bytes", quiet=True)
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar == asdict(summary)
    assert sidecar["sha256"] == hashlib.sha256((tmp_path / "out.bin").read_bytes()).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.bin", "out.idx", "out.json"]


def test_folder_is_walked_in_name_order_without_hidden_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("b.txt", "a/z.txt", "a/y.txt", ".hidden", ".git/config", "c.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name[-5])
    (tmp_path / "last.txt").write_text("!")
    build_dataset([source, tmp_path / "last.txt"], tmp_path / "out", "bytes", quiet=True)
    assert stream(tmp_path / "out") == [ord("y"), END, ord("z"), END, ord("b"), END, ord("c"), END, ord("!"), END]


def test_jsonl_gives_one_document_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "id": 1}\n\n{"text": "\\u00e9"}\n{"text": "\\ud800"}')
    summary = build_dataset([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", quiet=True)
    assert stream(tmp_path / "out") == [ord("x"), END, *"é".encode(), END, ord("?"), END]
    assert summary.n_documents == 3


@pytest.mark.parametrize("bad", ["{", '["text"]', '{"txt": "x"}', '{"text": 3}', b"\xff"])
def test_bad_jsonl_line_is_named_and_nothing_is_left(tmp_path: Path, bad: str | bytes) -> None:
    line = bad.encode() if isinstance(bad, str) else bad
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:3 is not"):
        build_dataset([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_missing_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.txt does not exist"):
        build_dataset([tmp_path / "absent.txt"], tmp_path / "out", "bytes", quiet=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    for inputs in ([], [tmp_path / "empty"], [tmp_path / "empty.txt"]):
        with pytest.raises(ValueError, match="nothing to tokenize"):
            build_dataset(inputs, tmp_path / "out", "bytes", quiet=True)
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no tokens were added"):
        build_dataset([tmp_path / "blank.jsonl"], tmp_path / "out", "bytes", quiet=True)
    assert not list(tmp_path.glob("out*"))


def test_one_line_is_printed_unless_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("aaa")
    build_dataset([tmp_path / "a.txt"], tmp_path / "loud", "bytes")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "1 documents, 4 tokens, unigram entropy 0.5623 nats/token" in captured.out
    assert captured.err == ""
    build_dataset([tmp_path / "a.txt"], tmp_path / "silent", "bytes", quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def small_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """100 tiny files take the place of the standard library."""
    root = tmp_path / "library"
    root.mkdir()
    for i in range(100):
        (root / f"module{i:02}.py").write_text(f"x = {i}\n")
    monkeypatch.setattr(build, "stdlib_root", lambda: root)
    monkeypatch.setattr(build, "stdlib_files", lambda: sorted(root.iterdir()))
    return root


def test_stdlib_is_built_once_then_reused(
    tmp_path: Path, small_stdlib: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid = build_stdlib(tmp_path / "out")
    assert (train, valid) == (tmp_path / "out" / "stdlib_train", tmp_path / "out" / "stdlib_valid")
    assert IndexedDataset(train).n_documents + IndexedDataset(valid).n_documents == 100
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    build_stdlib(tmp_path / "out")
    assert capsys.readouterr().out.count("reused") == 2
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in (tmp_path / "out").iterdir()} == before


def test_stdlib_missing_half_is_built(tmp_path: Path, small_stdlib: Path) -> None:
    train, valid = build_stdlib(tmp_path / "out", quiet=True)
    content = Path(f"{valid}.bin").read_bytes()
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{valid}{suffix}").unlink()
    build_stdlib(tmp_path / "out", quiet=True)
    assert Path(f"{valid}.bin").read_bytes() == content


def test_stdlib_that_changed_is_refused(tmp_path: Path, small_stdlib: Path) -> None:
    train, _ = build_stdlib(tmp_path / "out", quiet=True)
    (small_stdlib / "module00.py").write_text("y = 0\n")  # of the same length: only the content tells
    with pytest.raises(ValueError, match=r"stdlib_(train|valid) does not hold .*delete .*stdlib_\w+\.json"):
        build_stdlib(tmp_path / "out", quiet=True)


def damage_bin(train: Path) -> None:
    data = bytearray(Path(f"{train}.bin").read_bytes())
    data[0] ^= 1
    Path(f"{train}.bin").write_bytes(data)


def drop_sidecar(train: Path) -> None:
    Path(f"{train}.json").unlink()


def claim_other_tokenizer(train: Path) -> None:
    sidecar = read_sidecar(train) or {}
    Path(f"{train}.json").write_text(json.dumps(sidecar | {"tokenizer": "other.json"}))


@pytest.mark.parametrize("harm", [damage_bin, drop_sidecar, claim_other_tokenizer])
def test_stdlib_dataset_that_was_harmed_is_refused(tmp_path: Path, small_stdlib: Path, harm) -> None:
    train, _ = build_stdlib(tmp_path / "out", quiet=True)
    harm(train)
    with pytest.raises(ValueError, match=r"stdlib_train does not hold .*delete .*stdlib_train\.bin"):
        build_stdlib(tmp_path / "out", quiet=True)
