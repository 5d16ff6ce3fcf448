"""The .bin/.idx format is that of bytes laid out here by struct.pack, masks too; what is malformed, or is not
what its sidecar describes, is refused."""

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import flip, values_with
from turns import needs_extras

from tpformer.cli.data import build_data_command
from tpformer.config import build_config
from tpformer.inference.settings import open_evaluation_data
from tpformer.training import data
from tpformer.training.data import IndexedDataset, IndexedWriter, TokenSamples, build_dataset, read_sidecar, token_dtype
from tpformer.training.resolve import mask_notes, open_dataset, resolve
from tpformer.training.setup import open_data

DOCUMENTS = [[5, 6, 7], [8], [65535, 0]]


def idx_bytes(lengths, itemsize=2, *, magic=b"MMIDIDX\0\0", version=1, code=8, pointers=None, documents=None) -> bytes:
    """An .idx file, one document per sequence unless told otherwise."""
    pointers = [itemsize * sum(lengths[:i]) for i in range(len(lengths))] if pointers is None else pointers
    documents = [*range(len(lengths) + 1)] if documents is None else documents
    layout = f"<9sQBQQ{len(lengths)}i{len(pointers)}q{len(documents)}q"
    return struct.pack(layout, magic, version, code, len(lengths), len(documents), *lengths, *pointers, *documents)


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 65536) -> None:
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add_document(ids)


def test_files_are_read_and_written_as_they_are_laid_out_by_hand(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus.v1_text"  # a dot in the prefix must survive
    Path(f"{prefix}.bin").write_bytes(struct.pack("<6i", 70000, 1, 2, 3, 4, 5))
    # the first of two documents has two sequences
    Path(f"{prefix}.idx").write_bytes(idx_bytes([2, 1, 3], 4, code=4, documents=[0, 2, 3]))
    dataset = IndexedDataset(prefix)
    assert (dataset.n_tokens, dataset.n_documents, dataset.dtype) == (6, 2, np.dtype(np.int32))
    tokens = dataset.tokens(0, 6)
    assert tokens.dtype == np.int64 and tokens.tolist() == [70000, 1, 2, 3, 4, 5]
    assert dataset.tokens(1, 4).tolist() == [1, 2, 3]
    write(tmp_path / "a", DOCUMENTS)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 65535, 0)
    assert (tmp_path / "a.idx").read_bytes() == idx_bytes([3, 1, 2])
    assert len([*tmp_path.iterdir()]) == 4


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_round_trip_at_the_largest_id(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    write(tmp_path / "new" / "a", [[0, vocab_size - 1], [], [1]], vocab_size)
    dataset = IndexedDataset(tmp_path / "new" / "a")
    assert dataset.n_documents == 3 and dataset.dtype == token_dtype(vocab_size) == dtype
    for ids in (dataset.tokens(0, 3), np.concatenate(list(dataset.chunks()))):
        assert ids.tolist() == [0, vocab_size - 1, 1]
    for start, stop in ((-1, 2), (0, 4), (3, 2)):
        with pytest.raises(ValueError, match="which has 3"):
            dataset.tokens(start, stop)


def test_malformed_files_are_named_and_of_absent_ones_it_is_said_what_to_do(tmp_path: Path) -> None:
    for idx, message in (
        (idx_bytes([6], magic=b"MMIDIDX\x00\x01"), r"a\.idx starts with .* not a Megatron \.idx"),
        (b"", "not a Megatron"), (idx_bytes([6])[:20], r"truncated: 20 bytes of a 34-byte header"),
        (idx_bytes([6], version=2), r"a\.idx has format version 2"),
        (idx_bytes([6], code=7), r"dtype code 7 \(float32\)"), (idx_bytes([6], code=99), r"dtype code 99 \(unknown\)"),
        (idx_bytes([6])[:-1], r"has 61 bytes, but its header announces 1 sequences .* 62 bytes"),
        (idx_bytes([6]) + b"\x00", r"63 bytes.* multimodal"),
        (idx_bytes([4, 2], pointers=[0, 10]), r"sequence 1 starts at byte 10 .* end at byte 8"),
        (idx_bytes([4, 2], pointers=[2, 10]), r"sequence 0 starts at byte 2"),
        (idx_bytes([7, -4, 3]), r"a\.idx has a sequence of -4 tokens; rebuild or recopy it"),
        (idx_bytes([6], documents=[1, 1]), r"must start with 0"), (idx_bytes([6], documents=[]), r"must start with 0"),
        (idx_bytes([7]), r"a\.bin is truncated: 12 bytes, but .*a\.idx describes 7 uint16 tokens, 14 bytes"),
        (idx_bytes([5]), r"a\.bin is too long: 12 bytes"), (idx_bytes([]), r"a\.bin holds no tokens"),
    ):  # fmt: skip
        (tmp_path / "a.idx").write_bytes(idx)
        (tmp_path / "a.bin").write_bytes(bytes(0 if "no tokens" in message else 12))
        with pytest.raises(ValueError, match=message):
            IndexedDataset(tmp_path / "a")
    (tmp_path / "half.bin").touch()
    for prefix, words in (
        ("a.bin", r"a\.bin\.bin does not exist; .*named by its prefix, so write .*/a without .bin"),
        ("a.idx", r"a\.idx\.bin does not exist; .*write .*/a without .idx"),
        ("data/stdlib_valid", "stdlib_valid.bin does not exist; .*`tpformer data stdlib --out .*/data`"),
        ("b.v2", r"b\.v2\.bin does not exist; .*PREFIX.bin and PREFIX.idx, give the PREFIX"), ("half", "half.idx"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError, match=words):
            IndexedDataset(tmp_path / prefix)


def test_a_write_that_is_interrupted_or_refused_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    for interrupted in (True, False):
        with suppress(KeyboardInterrupt), IndexedWriter(tmp_path / "a", token_dtype(257)) as writer:
            writer.add_document([1, 2])
            with pytest.raises(ValueError, match="another build of this dataset is running"):
                write(tmp_path / "a", [[3]])
            if interrupted:
                raise KeyboardInterrupt
        assert bool([*tmp_path.iterdir()]) != interrupted
    assert IndexedDataset(tmp_path / "a").tokens(0, 2).tolist() == [1, 2]
    for ending in ("bin", "idx", "json"):
        path = tmp_path / ending / f"a.{ending}"
        path.parent.mkdir()
        path.write_bytes(b"precious")
        with pytest.raises(ValueError, match=rf"{path.name} already exists; choose another --out or delete it"):
            write(path.parent / "a", DOCUMENTS)
        assert [*path.parent.iterdir()] == [path] and path.read_bytes() == b"precious"


@pytest.mark.parametrize("after", ["open", "exists"])
def test_a_signal_before_the_first_token_leaves_nothing(tmp_path, monkeypatch, after) -> None:
    """It ends the call that made the file, or a later one. Another build's file stays."""
    called = getattr(Path, after)

    def interrupted(path: Path, *arguments: str) -> object:
        result = called(path, *arguments)
        if (tmp_path / "made.bin.tmp") in tmp_path.iterdir():
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, after, interrupted)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "made", np.dtype(np.uint16)):
        raise AssertionError("the block has begun")
    assert not [*tmp_path.iterdir()]
    monkeypatch.undo()
    (tmp_path / "made.bin.tmp").touch()
    with pytest.raises(ValueError, match="another build"), IndexedWriter(tmp_path / "made", np.dtype(np.uint16)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["made.bin.tmp"]


def test_ids_that_do_not_fit_are_refused_where_they_are_written_and_where_they_are_read(tmp_path: Path) -> None:
    """R3: with a sidecar they became token 0, or were dropped. The position is that in the stream."""
    for ids, message in (
        ([65536], r"document 0 of .*a\.bin has ids from 65536"), ([-1], "from -1"), ([[1]], r"got shape \(1, 1\)"),
        ([], "no tokens were added"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a", [ids])
    with pytest.raises(ValueError, match="got int64"):
        IndexedWriter(tmp_path / "a", np.dtype(np.int64))
    with pytest.raises(ValueError, match="got 0"):
        token_dtype(0)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a", DOCUMENTS)
    assert IndexedDataset(tmp_path / "a").tokens(0, 6).max() == 65535
    assert IndexedDataset(tmp_path / "a", 9).tokens(0, 4).tolist() == [5, 6, 7, 8]
    with pytest.raises(data.DataError, match=r"a\.bin has the id 65535 at token 4, but the model's ids are 0 to 8"):
        IndexedDataset(tmp_path / "a", 9).tokens(2, 6)
    write(tmp_path / "b", [[1, 2, 3]], 70_000)
    (tmp_path / "b.bin").write_bytes(struct.pack("<3i", 1, 2, -3))
    with pytest.raises(data.DataError, match=r"b\.bin has the id -3 at token 2"):
        IndexedDataset(tmp_path / "b", 9).tokens(1, 3)


def test_sidecar_is_optional_but_must_be_an_object_with_its_keys(tmp_path: Path) -> None:
    """R18: one without keys was a KeyError."""
    assert read_sidecar(tmp_path / "a") is None
    (tmp_path / "a.json").write_text('{"tokenizer": "bytes", "vocab_size": 257}')
    assert read_sidecar(tmp_path / "a") == {"tokenizer": "bytes", "vocab_size": 257}
    for content, message in (
        ("{", r"a\.json is not valid JSON"), ("[]", r"a\.json holds a JSON list"),
        ("{}", r"a\.json is no sidecar.* tokenizer is None"),
        ('{"tokenizer": "bytes", "vocab_size": "257"}', r"vocab_size '257', where .* expected"),
    ):  # fmt: skip
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_sidecar(tmp_path / "a")


REMEDY = "recopy or rebuild the dataset, or, if its tokens are meant to be others, remove the .json and set data.token"


DAMAGES = {
    "a bit": lambda one, two: flip(Path(f"{one}.bin")),
    # what a copy that was cut short leaves, where its room was reserved before
    "zeros": lambda one, two: Path(f"{one}.bin").write_bytes(bytes(Path(f"{one}.bin").stat().st_size)),
    "tokens of another": lambda one, two: shutil.copyfile(f"{two}.bin", f"{one}.bin"),
    "sidecar of another": lambda one, two: shutil.copyfile(f"{two}.json", f"{one}.json"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_its_sidecar_does_not_describe_is_refused(tmp_path, damage):
    one, two = tmp_path / "one", tmp_path / "two"
    for prefix in (one, two):
        source = tmp_path / f"{prefix.name}.txt"
        source.write_text(f"{prefix.name} " * 30)
        build_dataset([source], prefix, "bytes", quiet=True)
    data.read_contents([str(one), str(two)], {}, print)
    damage(one, two)
    with pytest.raises(ValueError) as error:
        data.read_contents([str(one)], {}, print)
    assert f"{one}.bin is damaged, or is not the file that {one}.json describes" in str(error.value)
    assert REMEDY in str(error.value)
    sidecar = Path(f"{one}.json")
    stated = json.loads(sidecar.read_text())
    del stated["sha256"]  # as of a sidecar that another tool writes
    sidecar.write_text(json.dumps(stated))
    data.read_contents([str(one)], {}, print)
    sidecar.unlink()
    data.read_contents([str(one)], {}, print)


PAIRS = [("2+2=", "4"), ("é", ""), ("", "ü"), ("", "")]
FIELDS = ("question", "answer")


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps(dict(zip(FIELDS, pair, strict=True))) + "\n" for pair in pairs))
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    source = write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    build_data_command([str(source), "--prompt-field", "question", "--completion-field", "answer", f"--out={source}"])
    return source


def test_the_completion_and_the_end_are_targets(prefix: Path) -> None:
    ids = [*b"2+2=4", END := 256, *"é".encode(), END, *"ü".encode(), END, END]
    mask = [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    dataset = IndexedDataset(prefix, masked=True)
    assert Path(f"{prefix}.mask").read_bytes() == bytes(mask)
    assert dataset.tokens(0, 13).tolist() == [id if target else -1 - id for id, target in zip(ids, mask, strict=True)]
    assert IndexedDataset(prefix).tokens(2, 9).tolist() == ids[2:9] and dataset.n_targets(2, 9) == 3
    assert (read_sidecar(prefix) or {})["n_targets"] == 7
    window = TokenSamples(dataset, 4, shuffle=False).sample(1)
    assert window.tolist() == [ord("4"), END, *(-1 - byte for byte in "é".encode()), END], "it begins in a completion"


@needs_extras
def test_parquet_and_splits_give_the_same(tmp_path: Path, prefix: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    columns = {"other": [1] * len(PAIRS)} | {name: [pair[i] for pair in PAIRS] for i, name in enumerate(FIELDS)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    build_dataset([tmp_path / "a.parquet"], tmp_path / "a", "bytes", fields=FIELDS, quiet=True)
    for ending in ("bin", "idx", "mask"):
        assert Path(f"{tmp_path}/a.{ending}").read_bytes() == Path(f"{prefix}.{ending}").read_bytes()
    many = write_pairs(tmp_path / "many.jsonl", [(f"{number}", "x" * number) for number in range(99)])
    sides = data.build_split([many], tmp_path / "many", "bytes", 0.3, fields=FIELDS, quiet=True)
    assert sum(side.n_targets or 0 for side in sides) == sum(range(1, 100))


def test_inputs_without_both_texts_are_refused(tmp_path: Path) -> None:
    for name, text, words in (
        ("half.jsonl", '{"question": "x"}', "has no 'answer'.* --prompt-field and"),
        ("list.jsonl", "[]", "not a JSON object"),
        ("a.txt", "text", r"a\.txt has no fields question, answer: give JSON lines or \.parquet"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            build_dataset([tmp_path / name], tmp_path / "out", "bytes", fields=FIELDS, quiet=True)
    for options in (
        ["--prompt-field", "x"],
        ["--prompt-field=x", "--completion-field=x"],
        ["--prompt-field=x", "--completion-field=y", "--text-field=z"],
    ):
        with pytest.raises(ValueError, match="--completion-field together, without --text-field"):
            build_data_command([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *options])
    for masked, mask in ((True, None), (False, [True]), (True, [True])):
        with pytest.raises(ValueError, match="2 ids and a mask of shape"):
            with IndexedWriter(tmp_path / "out", np.dtype(np.uint16), masked=masked) as writer:
                writer.add_document([1, 2], mask)
    assert not list(tmp_path.glob("out*"))


def test_a_mask_that_is_not_the_datasets_is_refused_where_it_counts(prefix: Path) -> None:
    path = Path(f"{prefix}.mask")
    before, mask = data.read_contents([str(prefix)], {}, print), path.read_bytes()
    for harmed, words in (
        (mask[:-1], "has 12 bytes, but .* has 13 tokens"), (mask[:5] + b"\2" + mask[6:], "has the byte 2 at token 5"),
        (bytes(13), "marks 0 targets"), (b"\1" + mask[1:], "marks 8 targets, where the dataset was built with 7"),
        (None, r"mask does not exist, but the dataset was built with a mask of 7 targets"),
    ):  # fmt: skip
        path.unlink() if harmed is None else path.write_bytes(harmed)
        with pytest.raises(ValueError, match=words):
            open_dataset(str(prefix), 257, masked=True)
        assert open_dataset(str(prefix), 257).tokens(0, 1).tolist() == [ord("2")]
        (old,), (new,) = before.values(), data.read_contents([str(prefix)], before, print).values()
        assert old.content != new.content and old.content.split(", mask")[0] == new.content.split(", mask")[0]


def test_samples_without_targets_are_refused_and_notes_say_what_counts(prefix: Path) -> None:
    samples = TokenSamples(open_dataset(str(prefix), 257, masked=True), 2, shuffle=False)
    assert samples.n_targets(3) == 2
    with pytest.raises(ValueError, match=r"mask marks no target in the first 1 samples of 2 tokens"):
        samples.n_targets(1)
    (evaluated,) = open_evaluation_data([str(prefix)], "bytes", 257, 2, None, masked=True)
    assert (evaluated.targets, evaluated.target_bytes(data.ByteTokenizer())) == (7, 3)
    (unused,) = mask_notes([str(prefix)] * 2, masked=False)
    assert "every token" in unused and "data.mask = true" in unused and mask_notes([str(prefix)], masked=True) == []
    Path(f"{prefix}.mask").unlink()
    assert mask_notes([str(prefix)], masked=False) == [] and "every token" in mask_notes([str(prefix)], masked=True)[0]


def test_a_run_refuses_data_without_a_mask_or_without_targets_unless_blended(prefix, tiny_data, tiny_values) -> None:
    values = values_with(tiny_values, model={"seq_length": 4}, data={"train": [str(prefix)], "valid": [], "mask": True})
    with pytest.raises(ValueError, match=f"data.mask = true, but {tiny_data} has no .mask file: make one with"):
        open_data(resolve(build_config(values, {"data": {"train": [str(tiny_data)]}})))
    blend = {"train": [str(prefix), str(tiny_data)], "weights": [1, 9]}
    samples = open_data(resolve(build_config(values, {"data": blend}))).train
    whole = [(samples.sample(i)[1:] >= 0).all() for i in range(1000)]
    assert 900 < sum(whole) < 1000, "of data without a mask every token is a target"
    few = {"data": {"valid": [str(prefix)]}, "train": {"validation_samples": 1}, "model": {"seq_length": 2}}
    with pytest.raises(ValueError, match="no target in the first 1 samples"):
        open_data(resolve(build_config(values, few)))
