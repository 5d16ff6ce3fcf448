"""Every launcher works under Triton's own launcher: what it encodes and launches, a driver would accept, and all blocks
that wait for one another are resident at once on an A100, an H100 and a B200.

The driver is checks/driver's, which is built here; driving.py calls the launchers. No kernel runs.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Commands, python
from turns import in_turns, of_turn

from checks.driver.stub import VARIABLE, build, missing

# programs that walk tiles or rows: more than are resident at once would do their work in two waves
PERSISTENT = [f"{name}_kernel" for name in ("matmul", "grouped_matmul", "grouped_weight_gradient", "quantized_matmul",
                                            "quantized_grouped_matmul", "norm_backward", "norm_weight_gradient",
                                            "finish_backward")]  # fmt: skip
FEW_TILES = "one-shot"  # the GEMM that has fewer tiles than a GPU has SMs


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if obstacle := missing():
        pytest.skip(f"needs {obstacle}")
    return build(tmp_path_factory.mktemp("driver"))


def drive(commands: Commands, library: Path, capability: int, *parts: int) -> list:
    """What driving.py prints, in a process for each part."""
    import driving

    folder = {VARIABLE: str(library.parent)}
    begun = [commands.call(driving.drive, library, capability, part, **folder) for part in parts or (None,)]
    ended = [command.finish(900) for command in begun]
    assert not any(code for code, _, _ in ended), ended
    return [json.loads(out) for _, out, _ in ended]


@pytest.fixture(scope="module")
def driven(commands: Commands, library: Path) -> dict:
    """Trials and replays on an H100."""
    return drive(commands, library, 90)[0]


def expected_maps(case: dict) -> int:
    """How many tensor maps a GEMM encodes: A (or its shard and two slots) and the weights, or both of each pair.

    Pointers load rows that an index names, and both factors of a gradient of groups.
    """
    of_rows = 1 if "indexed" in case["name"] else 2
    grouped = {"grouped_matmul_kernel": of_rows, "quantized_grouped_matmul_kernel": of_rows,
               "grouped_weight_gradient_kernel": 0, "all_gather_grouped_matmul_kernel": 1}  # fmt: skip
    factors = 3 if "3 " in case["name"] else 1
    sources = {"matmul_kernel": 1, "all_gather_matmul_kernel": 3, "all_gather_quantized_matmul_kernel": 3}.get(
        case["kernel"], factors
    )
    return grouped.get(case["kernel"], sources + factors) if case["tma"] else 0


def faults(case: dict) -> list[str]:
    """What is wrong with a launcher's call, as driving.call_launchers describes it."""
    records = case["records"]
    launches = [record for record in records if "launch" in record]
    addresses = [record["map"] for record in records if "map" in record]
    found = [case["error"]] if case["error"] else []
    if case["kernel"] not in [launch["launch"] for launch in launches]:
        found.append(f"{case['kernel']} is not launched")
    if len(addresses) != expected_maps(case):
        found.append(f"{len(addresses)} tensor maps, not {expected_maps(case)}")
    taken = [value for launch in launches for size, value in launch["taken"] if size == 128]
    if taken != addresses:
        found.append("the kernel takes other tensor maps than were encoded")
    for launch in launches:
        name, blocks, resident = launch["launch"], math.prod(launch["grid"]), launch["resident"]
        waits = case["waits"] and name == case["kernel"]
        if launch["cooperative"] != waits:
            found.append(f"{name} {'waits for others' if waits else 'waits for nobody'}: {launch['cooperative']=}")
        if (waits or name in PERSISTENT) and blocks > resident:
            found.append(f"of {blocks} blocks of {name} {resident} are resident")
        if case["gemm"] and FEW_TILES not in case["name"] and blocks < 0.9 * case["processors"]:
            found.append(f"{blocks} blocks of {name} leave SMs without work")
        if launch["taken"] != launch["given"]:
            found.append(f"{name} takes {launch['taken']}, but is given {launch['given']}")
    return found


@pytest.mark.timeout(900)  # about 120 kernels are compiled
@pytest.mark.parametrize("capability", in_turns([80, 100, 90]))
def test_every_launcher(commands, library, capability) -> None:
    import driving

    from checks.compile.check import DEFAULT, uncovered

    cases = [case for part in drive(commands, library, capability, *range(driving.PARTS)) for case in part]
    assert {case["case"]: found for case in cases if (found := faults(case))} == {}
    assert [case["case"] for case in cases if not case["same"]] == []
    again = {(case["kernel"], case["name"]) for case in cases if not case["replayed"]}
    # polls are timed once; rows that do not begin at multiples of 16 bytes are copied in every call
    # and the gather of experts, which have other numbers of rows in every call, keeps no plan; nor do updates
    expected = {
        "poll_in_vain": ["1 rank"], "await_gathered": ["8 ranks, odd rows"],
        "matmul": ["gated derivative, odd columns"], "all_gather_matmul": ["gated derivative, odd columns"],
        "grouped_matmul": [f"{form}, odd inner dim" for form in ("rows", "indexed rows", "dgrad, indexed rows")],
        "grouped_weight_gradient": ["indexed dy, odd columns"],
        "all_gather_grouped_matmul": ["copies", "push", "dgrad", "push, odd columns", "push, odd inner dim",
                                      "dgrad, odd inner dim"],
        "adamw": ["adamw without copies", "adamw anywhere"], "sgd": ["sgd anywhere", "momentum anywhere"],
    }  # fmt: skip
    if capability >= 90:
        expected["all_gather_grouped_matmul"] += [
            f"blocks, {name}" for name in ("copies", "push", "dgrad", "virtual ranks")
        ]
    assert again == {(f"{kernel}_kernel", name) for kernel, names in expected.items() for name in names}
    assert any(case["waits"] for case in cases) and any(case["tma"] for case in cases) == (capability >= 90)
    missing = uncovered(DEFAULT, {case["case"]: SimpleNamespace(kernel=case["kernel"]) for case in cases})
    of_e4m3 = ("quantize", "_blocks_kernel")  # which sm_80 has not
    e4m3 = [text for text in missing if any(each in text for each in of_e4m3)]
    assert missing == e4m3 and bool(e4m3) == (capability < 90)


@of_turn(0)
def test_a_call_that_is_replayed_launches_what_triton_would(driven) -> None:
    """To the bit, tensor maps included: over sizes, alignments, missing members, keys, and tensors given twice."""
    variants = driven["variants"]
    assert [each for each in variants if not each["same"] or each["plain"]["error"]] == []
    assert {each["name"]: each["replayed"] for each in variants if each["replayed"] != each["expected"]} == {}
    assert len(variants) > 40
    # patched to keep 4 of each; the channel, its two tensors' memory and the tensors themselves die with their owner
    assert driven["kept"] == {"plans": 4, "channel": 4, "maps": 4, "replayed": 1, "before": 7, "alive": 0}


@of_turn(0)
def test_what_is_wrong_is_refused(driven) -> None:
    """And what is right beside it is accepted: the largest grid, the largest shared memory."""
    tried = driven["trials"]
    for each in tried:
        launches = sum("launch" in record for record in each["records"])
        assert launches == each["launches"], each
        right = each["error"] is None if each["message"] is None else re.search(each["message"], str(each["error"]))
        assert right, each
    assert len(tried) > 25
    a, w, launch = tried[-1]["records"]
    kind = {"type": 9, "swizzle": 3}  # bfloat16, 128 bytes are swizzled
    assert a == kind | {"map": a["map"], "dims": [64, 256], "strides": [128], "box": [64, 64]}
    assert w == a | {"map": w["map"], "dims": [64, 128], "box": [64, 128]}
    assert launch["grid"] == [4, 1, 1] and launch["taken"] == launch["given"]


def test_every_fault_of_a_launcher_is_named() -> None:
    launch = {
        "launch": "matmul_kernel", "grid": [132, 1, 1], "cooperative": False, "resident": 132,
        "taken": [[128, 16], [128, 32], [4, 7]], "given": [[128, 16], [128, 32], [4, 7]],
    }  # fmt: skip
    case = {
        "name": "plain", "kernel": "matmul_kernel", "waits": False, "gemm": True, "tma": True, "processors": 132,
        "error": None, "records": [{"map": 16}, {"map": 32}, launch],
    }  # fmt: skip
    assert faults(case) == []

    def but(**changed) -> list[str]:
        return faults(case | {"records": [*case["records"][:2], launch | changed]})

    assert faults(case | {"error": "ValueError: no"}) == ["ValueError: no"]
    assert faults(case | {"records": []})[0] == "matmul_kernel is not launched"
    assert faults(case | {"tma": False}) == ["2 tensor maps, not 0"]
    assert faults(case | {"name": "3 weights"}) == ["2 tensor maps, not 4"]
    assert but(taken=launch["given"][::-1])[0] == "the kernel takes other tensor maps than were encoded"
    assert but(taken=[*launch["taken"][:2], [4, 8]])[0].startswith("matmul_kernel takes [[128, 16]")
    assert but(cooperative=True)[0].startswith("matmul_kernel waits for nobody")
    assert faults(case | {"waits": True})[0].startswith("matmul_kernel waits for others")
    assert but(grid=[133, 1, 1]) == ["of 133 blocks of matmul_kernel 132 are resident"]
    assert but(grid=[100, 1, 1]) == ["100 blocks of matmul_kernel leave SMs without work"]


@of_turn(1)
@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_the_hosts_bench_times_every_call() -> None:
    assert "gather by copies, preparation" in python("-m", "bench", "host", "--quick")
