"""A cache that is made beforehand: a second process, of a copy of the tree elsewhere, compiles nothing; what has come
is packed, the newest first, and what was left on a GPU's machine is added."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from bench.gpu import cache, schedule
from bench.gpu.items import ITEMS
from bench.gpu.schedule import FILL, MEASURE, REHEARSE
from checks.driver.stub import missing

CALLS = ("-m", "checks.driver.pretend", "-m", "bench.gpu.rehearsal", "rope", "--quick", "--into")


def kernels(tree: Path, folder: Path, into: Path) -> dict[str, int]:
    """How many kernels the bench compiles and finds, run from a tree with this cache."""
    env = {**os.environ, **cache.environment(), "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *CALLS, str(into)], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((into / "rope-quick.json").read_text())["kernels"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The cache's, and no packed one."""
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(cache, "PACKED", tmp_path / "packed")
    return cache.FOLDER


@pytest.mark.proof
@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_copy_of_the_tree_compiles_nothing(folder, tmp_path):
    assert cache.begin() == set()
    first = kernels(ROOT, folder, tmp_path)
    assert first["compiled"] > 0 and first.keys() == {"compiled"}
    assert "entries have come" in cache.end(set(), cache.packed())
    shutil.rmtree(folder)
    tree, ignore = tmp_path / "elsewhere", shutil.ignore_patterns("results", "__pycache__")
    for part in ("bench", "checks", "harness", "kernels", "tpformer"):
        shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignore)
    before = cache.begin()
    assert not [path for path in folder.rglob("*") if path.suffix in cache.LEFT_OUT]
    assert kernels(tree, folder, tmp_path) == {"cached": first["compiled"]}
    assert "has all that was called" in cache.end(before, cache.packed())


def entry(folder: Path, name: str, size: int, age: int) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "kernel.cubin").write_bytes(os.urandom(size))
    (folder / name / "kernel.ttir").write_bytes(b"text")
    os.utime(folder / name, (10**9 - age, 10**9 - age))


def test_what_has_come_is_packed_and_added(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache, "PRESET", 0)  # it holds back less, and is quicker
    monkeypatch.setattr(cache, "HELD", 1 << 19)
    for age, name in enumerate(("new", "old", "oldest")):
        entry(folder, name, 1 << 20, age)
    assert "1 entries have come" in cache.end({"old", "oldest"}, tmp_path / "brought.tar.xz")
    shutil.rmtree(folder)
    entry(folder, "older", 1 << 19, 9)
    entry(folder, "old", 1 << 19, 5)
    assert cache.end({"older"}, cache.packed()).startswith(str(cache.packed()))
    shutil.rmtree(folder)
    entry(folder, "old", 5, 5)
    cache.main([str(tmp_path / "brought.tar.xz")])
    assert (folder / "old" / "kernel.cubin").stat().st_size == 5, "what is there stays: it may be loaded"
    assert cache.entries() == {"new", "old", "older"} and not (folder / "new" / "kernel.ttir").exists()
    assert "0 entries left out" in capsys.readouterr().out
    monkeypatch.setattr(cache, "LIMIT", 2 * cache.HELD)
    assert cache.pack(cache.packed(), cache.entries()) == 2, "the older ones"
    shutil.rmtree(folder)
    assert cache.begin() == {"new"}


def test_all_but_a_rehearsal_share_the_cache(tmp_path):
    item = next(item for item in ITEMS if item.name == "norm")
    common: dict = {"items": ITEMS, "folder": tmp_path, "state": None, "until": 0.0, "stop": None}
    sessions = {way: schedule.Session(**common, way=way) for way in (MEASURE, FILL, REHEARSE)}
    variables = {way: schedule.environment(found, item) for way, found in sessions.items()}
    assert variables[MEASURE] == variables[FILL] and variables[FILL]["TRITON_CACHE_DIR"] == str(cache.FOLDER)
    assert variables[FILL]["TRITON_PTXAS_PATH"].endswith("backends/nvidia/bin/ptxas")
    assert variables[REHEARSE].get("TRITON_CACHE_DIR") == os.environ.get("TRITON_CACHE_DIR")
    without = [each.name for each in ITEMS if not sessions[FILL].possible(each)]
    assert without == ["pretrain for 60 steps", "matmul by torch's ptxas", "memcheck", "gather 20 times", "ncu matmul",
                       "ncu matmul_reduce_scatter", "whole pretrain"]  # fmt: skip
    assert sessions[FILL].command(item).arguments[:5] == (*CALLS[:4], "--wide")
