"""A file is replaced whole, and its digest is that of its content."""

from pathlib import Path

import pytest

from tpformer.processes.files import file_sha256, replace_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "config.toml"
    for text in ("first", "ünd", ""):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    replace_file(path, "old")

    def cut(self: Path, text: str, **options: str) -> None:
        with self.open("w") as file:
            file.write(text[:1])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_the_digest_is_sha256_of_the_content(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(tmp_path / "abc") == expected
