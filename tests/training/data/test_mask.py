"""A dataset of prompts and completions has a mask of its targets; a mask that is damaged, lost or another's is
refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from tpformer.cli.data import build_data_command
from tpformer.inference.settings import open_evaluation_data
from tpformer.training.data import (
    ByteTokenizer,
    IndexedDataset,
    IndexedWriter,
    TokenSamples,
    build_dataset,
    build_split,
    read_contents,
    read_sidecar,
)
from tpformer.training.resolve import mask_notes, open_dataset

END = 256
PAIRS = [("2+2=", "4"), ("é", ""), ("", "ü"), ("", "")]
FIELDS = ("question", "answer")


def write(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps(dict(zip(FIELDS, pair, strict=True))) + "\n" for pair in pairs))
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    source = write(tmp_path / "pairs.jsonl", PAIRS)
    build_data_command([str(source), "--prompt-field", "question", "--completion-field", "answer", f"--out={source}"])
    return source


def test_the_completion_and_the_end_are_targets(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [*b"2+2=4", END, *"é".encode(), END, *"ü".encode(), END, END]
    mask = [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    dataset = IndexedDataset(prefix, masked=True)
    assert Path(f"{prefix}.mask").read_bytes() == bytes(mask)
    assert dataset.tokens(0, 13).tolist() == [id if target else -1 - id for id, target in zip(ids, mask, strict=True)]
    assert IndexedDataset(prefix).tokens(2, 9).tolist() == ids[2:9] and dataset.n_targets(2, 9) == 3
    assert (read_sidecar(prefix) or {})["n_targets"] == 7
    window = TokenSamples(dataset, 4, shuffle=False).sample(1)
    assert window.tolist() == [ord("4"), END, *(-1 - byte for byte in "é".encode()), END], "it begins in a completion"


def test_parquet_and_splits_give_the_same(tmp_path: Path, prefix: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    columns = {"other": [1] * len(PAIRS)} | {name: [pair[i] for pair in PAIRS] for i, name in enumerate(FIELDS)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    build_dataset([tmp_path / "a.parquet"], tmp_path / "a", "bytes", fields=FIELDS, quiet=True)
    for ending in ("bin", "idx", "mask"):
        assert Path(f"{tmp_path}/a.{ending}").read_bytes() == Path(f"{prefix}.{ending}").read_bytes()
    many = write(tmp_path / "many.jsonl", [(f"{number}", "x" * number) for number in range(99)])
    sides = build_split([many], tmp_path / "many", "bytes", 0.3, fields=FIELDS, quiet=True)
    assert sum(side.n_targets or 0 for side in sides) == sum(range(1, 100))


def test_inputs_without_both_texts_are_refused(tmp_path: Path) -> None:
    for name, text, words in (
        ("half.jsonl", '{"question": "x"}', 'under "answer".* --prompt-field and'),
        ("list.jsonl", "[]", "not a JSON object"),
        ("a.txt", "text", r"a\.txt has no fields question, answer: give \.jsonl or \.parquet"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            build_dataset([tmp_path / name], tmp_path / "out", "bytes", fields=FIELDS, quiet=True)
    for options in (["--prompt-field", "x"], ["--prompt-field=x", "--completion-field=y", "--text-field=z"]):
        with pytest.raises(ValueError, match="--completion-field together, without --text-field"):
            build_data_command([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *options])
    for masked, mask in ((True, None), (False, [True]), (True, [True])):
        with pytest.raises(ValueError, match="2 ids and a mask of shape"):
            with IndexedWriter(tmp_path / "out", np.dtype(np.uint16), masked=masked) as writer:
                writer.add_document([1, 2], mask)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("harmed", "words"),
    [
        (lambda mask: mask[:-1], "has 12 bytes, but .* has 13 tokens"),
        (lambda mask: mask[:5] + b"\2" + mask[6:], "has the byte 2 at token 5"),
        (lambda mask: bytes(13), "marks 0 targets"),
        (lambda mask: b"\1" + mask[1:], "marks 8 targets, where the dataset was built with 7"),
        (None, r"mask does not exist, but the dataset was built with a mask of 7 targets"),
    ],
)
def test_a_mask_that_is_not_the_datasets_is_refused_where_it_counts(prefix: Path, harmed, words: str) -> None:
    path = Path(f"{prefix}.mask")
    before = read_contents([str(prefix)], {}, print)
    if harmed is None:
        path.unlink()
    else:
        path.write_bytes(harmed(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        open_dataset(str(prefix), 257, masked=True)
    assert open_dataset(str(prefix), 257).tokens(0, 1).tolist() == [ord("2")]
    (old,), (new,) = before.values(), read_contents([str(prefix)], before, print).values()
    assert old.content != new.content and old.content.split(", mask")[0] == new.content.split(", mask")[0]


def test_samples_without_targets_are_refused_and_notes_say_what_counts(prefix: Path) -> None:
    samples = TokenSamples(open_dataset(str(prefix), 257, masked=True), 2, shuffle=False)
    assert samples.n_targets(3) == 2
    with pytest.raises(ValueError, match=r"mask marks no target in the first 1 samples of 2 tokens"):
        samples.n_targets(1)
    (evaluated,) = open_evaluation_data([str(prefix)], "bytes", 257, 2, None, masked=True)
    assert (evaluated.targets, evaluated.target_bytes(ByteTokenizer())) == (7, 3)
    (unused,) = mask_notes([str(prefix)] * 2, masked=False)
    assert "every token" in unused and "data.mask = true" in unused and mask_notes([str(prefix)], masked=True) == []
    Path(f"{prefix}.mask").unlink()
    assert mask_notes([str(prefix)], masked=False) == [] and "every token" in mask_notes([str(prefix)], masked=True)[0]
