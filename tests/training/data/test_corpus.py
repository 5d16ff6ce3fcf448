"""The default corpus has the standard library's sources, and a file's side of the split does not depend on the
others."""

import random
from pathlib import Path

import pytest

from tpformer.training.data import split_files, stdlib_files, stdlib_root

ROOT = Path("root")
FILES = [ROOT / f"package{i % 7}" / f"module{i}.py" for i in range(2000)]


def test_stdlib_files_are_sources_outside_tests_and_packages() -> None:
    names = [path.relative_to(stdlib_root()).as_posix() for path in stdlib_files()]
    assert names == sorted(set(names))
    assert {"argparse.py", "asyncio/tasks.py", "json/__init__.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
    assert all(name.endswith(".py") for name in names)


def test_a_split_is_a_partition_by_relative_names_whatever_else_is_there() -> None:
    train, valid = split_files(FILES, root=ROOT)
    assert set(train).isdisjoint(valid) and len(train) + len(valid) == len(FILES)
    for side in (train, valid):
        assert [path for path in FILES if path in set(side)] == side, "in the order given"
    assert 60 <= len(valid) <= 140  # 100 are expected, with a standard deviation of 9.7
    subset = random.Random(0).sample(FILES, 500)
    assert set(split_files(subset, root=ROOT)[1]) == set(valid) & set(subset)
    moved = [Path("elsewhere") / path.relative_to(ROOT) for path in FILES]
    _, valid_moved = split_files(moved, root=Path("elsewhere"))
    assert [path.relative_to("elsewhere") for path in valid_moved] == [path.relative_to(ROOT) for path in valid]
    for fraction in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=str(fraction)):
            split_files(FILES, root=ROOT, validation_fraction=fraction)


def test_no_file_is_most_of_the_validation_set() -> None:
    sizes = [path.stat().st_size for path in split_files(stdlib_files(), root=stdlib_root())[1]]
    assert max(sizes) < 0.3 * sum(sizes)
