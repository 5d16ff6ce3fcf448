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


def test_stdlib_is_built_once_and_a_missing_half_again(
    tmp_path: Path, small_stdlib: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    train, valid = build_stdlib(folder)
    assert (train, valid) == (folder / "stdlib_train", folder / "stdlib_valid")
    assert IndexedDataset(train).n_documents + IndexedDataset(valid).n_documents == 100
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    capsys.readouterr()
    build_stdlib(folder)
    assert capsys.readouterr().out.count("reused") == 2
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    for path in folder.glob("stdlib_valid.*"):
        path.unlink()
    build_stdlib(folder, quiet=True)
    assert Path(f"{valid}.bin").read_bytes() == before[Path(f"{valid}.bin")][1]


def change_the_source(train: Path) -> None:
    (train.parents[1] / "library" / "module00.py").write_text("y = 0\n")  # of the same length: only the content tells


def damage_bin(train: Path) -> None:
    data = bytearray(Path(f"{train}.bin").read_bytes())
    data[0] ^= 1
    Path(f"{train}.bin").write_bytes(data)


def drop_sidecar(train: Path) -> None:
    Path(f"{train}.json").unlink()


def claim_other_tokenizer(train: Path) -> None:
    sidecar = read_sidecar(train) or {}
    Path(f"{train}.json").write_text(json.dumps(sidecar | {"tokenizer": "other.json"}))


@pytest.mark.parametrize("harm", [change_the_source, damage_bin, drop_sidecar, claim_other_tokenizer])
def test_stdlib_that_changed_and_a_dataset_that_was_harmed_are_refused(
    tmp_path: Path, small_stdlib: Path, harm
) -> None:
    train, _ = build_stdlib(tmp_path / "out", quiet=True)
    harm(train)
    which = "(train|valid)" if harm is change_the_source else "train"
    with pytest.raises(ValueError, match=rf"stdlib_{which} does not hold .*delete .*stdlib_{which}\.bin"):
        build_stdlib(tmp_path / "out", quiet=True)
