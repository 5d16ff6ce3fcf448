"""A dataset's file is the one that its sidecar describes, or a run does not start with it."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import flip

from tpformer.training.data import build_dataset, read_contents

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
    read_contents([str(one), str(two)], {}, print)
    damage(one, two)
    with pytest.raises(ValueError) as error:
        read_contents([str(one)], {}, print)
    assert f"{one}.bin is damaged, or is not the file that {one}.json describes" in str(error.value)
    assert REMEDY in str(error.value)
    sidecar = Path(f"{one}.json")
    stated = json.loads(sidecar.read_text())
    del stated["sha256"]  # as of a sidecar that another tool writes
    sidecar.write_text(json.dumps(stated))
    read_contents([str(one)], {}, print)
    sidecar.unlink()
    read_contents([str(one)], {}, print)
