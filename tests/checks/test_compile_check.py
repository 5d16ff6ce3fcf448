"""The compile check passes a toy kernel that follows the protocol; each way to break it is caught by the named rule."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

import torch
import triton
from compile_kernels import NO_BARRIER, case, exchange_kernel, good_cases
from triton.runtime.jit import JITFunction
from turns import in_turns

from checks.compile import compiler, ptx, ttgir
from checks.compile.asked import Asked
from checks.compile.check import DEFAULT, Cache, Check, load_cases, main
from checks.compile.rules import Row, empty_row, judge
from checks.compile.summary import clean_commit, write_page

UNAVAILABLE = compiler.unavailable()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


@pytest.mark.parametrize("capability, dtype", [(80, "float16"), (90, "bfloat16"), (100, "bfloat16"), (90, "float32")])
def test_a_kernel_that_follows_the_protocol_passes(capability: int, dtype: str) -> None:
    row = judge(case(capability=capability, dtype=getattr(torch, dtype)))
    assert row["violations"] == []
    assert (row["releases"], row["acquires"], row["spills"], row["narrow_stores"]) == (1, 1, 0, 0)
    assert row["wide_stores"] > 0 and row["registers"] > 32 and row["shared"] > 8192
    used = [name for name in ("wgmma", "tcgen05", "mma") if row[name]]
    assert used == ([{80: "mma", 90: "wgmma", 100: "tcgen05"}[capability]] if dtype != "float32" else [])
    tma = capability >= 90 and dtype != "float32"
    assert bool(row["tma_loads"]) != bool(row["cp_async"])
    assert (row["tile"], row["stages"], row["warps"]) == (("128x128x64", 3, 8) if tma else ("64x64x32", 3, 4))


@pytest.mark.proof
def test_the_committed_page_is_of_this_code() -> None:
    """The proofs compile for one architecture; so `make compile-check` has to be run after a change of jitted functions
    or of what launchers ask of Triton."""
    page = Path(__file__).resolve().parents[2] / "checks/results/compile.md"
    asked = Asked(DEFAULT.kernels).of_all(load_cases(DEFAULT.cases))
    assert f"Of the code {asked}." in page.read_text(), "run `make compile-check` and commit its page"


def test_bytes_in_flight() -> None:
    """A warp has 32 threads. Its loads count until it uses one of them, its asynchronous copies until it waits."""
    loads = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];\n@%p1 ld.global.b32 %r5, [ %rd1 + 16 ];\n"
    assert ptx.bytes_in_flight(loads + "add.s32 %r6, %r7, 1;\nadd.s32 %r8, %r2, 1;") == 32 * 20
    assert ptx.bytes_in_flight(loads.replace("%rd1 + 16", "%r1 + 16") + "st.global.b32 [ %rd2 ], %r5;") == 32 * 16
    assert ptx.bytes_in_flight(loads + "$L__BB0_1:\nadd.s32 %r8, %r2, 1;") == 0
    copy = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\ncp.async.commit_group ;\n"
    assert ptx.bytes_in_flight(2 * copy + "cp.async.wait_group 1;\n" + copy + "cp.async.wait_group 0;\n") == 32 * 32
    assert ptx.bytes_in_flight(copy + "ld.global.sys.acquire.b32 %r9, [%rd9];\nadd.s32 %r8, %r9, 1;") == 0


LATE, IN_LOOP = {"no_load_before_wait"}, {"no_wait_in_dot_loop", "fence_before_tma_load", "loads_run_ahead"}
# what is broken, of which architecture, with which fields of the case, the rules that are broken, and a text of one
MUTATIONS = [
    ("no barrier", 90, {}, NO_BARRIER, ""),
    ("no release", 90, {}, {"releases"}, ""),
    ("an unasked release", 90, {}, {"releases"}, ""),
    ("wait after the loads", 90, {}, LATE, ""),
    ("wait after the loads", 80, {}, LATE, ""),
    ("wait after the loads", 90, {"own": frozenset({"weight"})}, LATE, "from received (compile_kernels.py:"),
    ("wait for every other tile", 90, {}, LATE, ""),
    ("wait for the first tile, then late", 90, {}, LATE | {"acquires"}, ""),
    ("wait in the K loop", 80, {}, {"no_wait_in_dot_loop"}, ""),
    ("wait in the K loop", 90, {}, IN_LOOP, ""),
    ("wait in the K loop", 100, {}, IN_LOOP, ""),
    ("gpu scope", 90, {}, {"system_scope", "releases", "acquires"}, ""),
    ("no fence", 90, {}, {"fence_before_tma_load"}, ""),
    ("no alignment hint", 90, {}, {"wide_stores"}, ""),
    ("", 90, {"stages": 8}, {"shared_memory"}, ""),
    ("", 90, {"dtype": torch.float32, "registers": 64}, {"spills"}, ""),
    # a case may waive rules, and name memory that no peer writes
    ("no alignment hint", 90, {"waived": frozenset({"wide_stores"})}, set(), ""),
    ("no fence", 90, {"waived": frozenset({"fence_before_tma_load"})}, set(), ""),
    ("wait after the loads", 90, {"own": frozenset({"received", "weight"})}, set(), ""),
    ("", 90, {"waived": frozenset({"no_such_rule"})}, {"fails"}, "no_such_rule"),
    ("", 90, {"kernel": "another_kernel"}, {"fails"}, "launches 0 variants of another_kernel"),
]  # fmt: skip


@pytest.mark.parametrize("breakage, capability, fields, rules, text", [  # in the suite one for each rule
    *(FEW := [*{frozenset(each[3]): each for each in MUTATIONS}.values()]),
    *in_turns(each for each in MUTATIONS if each not in FEW),
])  # fmt: skip
def test_a_mutation_is_caught(breakage: str, capability: int, fields: dict[str, Any], rules: set, text: str) -> None:
    row: dict[str, Any] = {**judge(case(breakage, capability, **fields))}
    assert {violation.partition(":")[0] for violation in row["violations"]} == rules
    assert rules or all(row[name] == wanted for name, wanted in fields.items() if name in row)
    assert "registers" not in fields or (row["spills"] > 0 and row["registers"] <= fields["registers"])
    assert not text or (len(row["violations"]) == 1 and text in row["violations"][0])


def test_compiling_leaves_triton_as_it_was() -> None:
    def state() -> tuple:
        knobs = triton.knobs
        return JITFunction.run, triton.runtime.driver._active, knobs.cache.dir, knobs.nvidia.dump_ptxas_log

    before = state()
    with pytest.raises(ZeroDivisionError), compiler.compile_only(90) as kernels:
        case().launch()
        case().launch()
        assert [kernel.kernel for kernel in kernels] == ["exchange_kernel"]  # one specialisation
        raise ZeroDivisionError
    assert state() == before
    assert not any(isinstance(device, compiler.Driver) for device in exchange_kernel.device_caches)


def test_the_report_is_read_from_the_log() -> None:
    metadata = SimpleNamespace(num_stages=3, num_warps=4, shared=5)
    kernel = SimpleNamespace(metadata=metadata, asm={"ptx": "", "ttgir": ""})
    log = """    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Used 200 registers, used 1 barriers
"""
    found = compiler.report("toy", kernel, log)
    assert (found.registers, found.spills, found.shared, found.tensor_memory) == (200, 16, 5, 0)
    assert len(found.warnings) == 1 and found.warnings[0].startswith("(C7515) Potential")
    with pytest.raises(RuntimeError, match="no report"):
        compiler.report("toy", kernel, "")


FLOW = """.visible .entry toy(
)
{{
	st.global.v4.b32 [ %rd1 + 0 ], {{ %r1, %r2, %r3, %r4 }};
	@%p1 bra $L__BB0_2;
	{first}
	bra.uni $L__BB0_3;
$L__BB0_2:
	{second}
$L__BB0_3:
	ld.global.b64 {{ %rd2 }}, [ %rd3 + 0 ];
	@%p2 atom.global.release.sys.exch.b32 %r5, [ %rd2 + 0 ], %r6;
	ret;
}}
"""


def test_a_barrier_must_be_on_every_path() -> None:
    def violations(first: str, second: str) -> list[str]:
        return ptx.barrier_before_release(ptx.parse(FLOW.format(first=first, second=second)), warps=4)

    assert violations("bar.sync 0;", "barrier.cta.sync.aligned 0;") == []
    (missing,) = violations("bar.sync 0;", "add.s32 %r7, %r8, 1;")
    assert missing.startswith("atom.global.release.sys.exch.b32") and "after st.global.v4.b32" in missing
    assert violations("bar.sync 0;", "bar.warp.sync 0xffffffff;")  # four warps
    assert violations("bar.sync 0;", "bar.sync 0;\n\tst.global.b32 [ %rd1 + 4 ], { %r1 };")


def test_fences_of_the_tensor_map_do_not_count_as_releases() -> None:
    copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 128;"
    rest = "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\nred.shared.add.u32 [%r1], 1;\nret;"
    assert ptx.parse(f".visible .entry toy(\n)\n{{\n{copy}\n{rest}\n}}").events == []


def test_a_pointer_is_followed_to_its_arguments() -> None:
    text = """
  tt.func public @toy(%a: !tt.ptr<f32> loc("a"(#loc)), %b: !tt.ptr<f32> loc("b"(#loc)), %n: i32 loc("n"(#loc))) {
    %0 = scf.if %cond -> (!tt.ptr<f32>) {
      scf.yield %a : !tt.ptr<f32> loc(#loc1)
    } else {
      scf.yield %b : !tt.ptr<f32> loc(#loc1)
    } loc(#loc1)
    %1:2 = scf.for %i = %c0 to %n step %c1 iter_args(%p = %0, %q = %b) -> (!tt.ptr<f32>, !tt.ptr<f32>)  : i32 {
      %2 = tt.load %q : tensor<8x!tt.ptr<f32>> loc(#loc1)
      %3 = tt.addptr %p, %2 : !tt.ptr<f32>, i32 loc(#loc1)
      scf.yield %3, %q : !tt.ptr<f32>, !tt.ptr<f32> loc(#loc1)
    } loc(#loc1)
    %4 = tt.load %1#0 : tensor<8x!tt.ptr<f32>> loc(#loc1)
    %5 = tt.int_to_ptr %n : i32 -> !tt.ptr<f32> loc(#loc1)
    %6 = tt.load %5 : tensor<8x!tt.ptr<f32>> loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc)
#loc1 = loc("/a/b/toy.py":7:1)
"""
    module = ttgir.parse(text)
    loads = [operation for operation in module.operations() if operation.name == "tt.load"]
    assert [ttgir.origins(load.operands[0]) for load in loads] == [{"b"}, {"a", "b"}, {ttgir.TABLE}]
    assert {module.source(load) for load in loads} == {"toy.py:7"}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def new_check(folder: Path, cases: str) -> Check:
    """A check whose kernels are one toy, in a git checkout without changes."""
    kernels = folder / "kernels"
    kernels.mkdir()
    (kernels / "toy.py").write_text("@triton.jit\ndef exchange_kernel():\n    pass\n")
    (folder / ".gitignore").write_text("cache/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "toy")
    return Check(f"compile_kernels:{cases}", kernels, folder / "cache", folder / "results" / "compile.md")


def test_rows_are_kept_while_their_code_is_the_same(
    forked: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    check = new_check(tmp_path, "good_cases")
    assert main(["--only", "sm_80 float16"], check) == 0
    assert "1 cases, 1 to compile" in (printed := capsys.readouterr().out) and "0 violations" in printed
    assert not check.results.exists()  # a run of some cases writes no page
    for left in (1, 0):
        assert main([], check) == 0
        assert f"2 cases, {left} to compile" in capsys.readouterr().out
    assert [main(["--share", each], check) for each in ("0/3", "1/3", "2/3")] == [0, 0, 2]
    assert capsys.readouterr().out.count("1 cases, 0 to compile") == 2  # a case each for two of them
    assert main(["--only", "nothing of that name"], check) == 2

    good = good_cases()[0]
    row = Cache(check).get(good)
    assert list(row) == list(Row.__annotations__) and row["arch"] == "sm_90"
    toy = (check.kernels / "toy.py").read_text()
    (check.kernels / "another.py").write_text("@triton.jit\ndef another_kernel():\n    pass\n")
    (check.kernels / "toy.py").write_text(f"# moved\n{toy}\ndef check_operands():\n    pass\n")
    assert Cache(check).get(good) == row, "another operation, and what a launcher does before its launch"
    asks = replace(good, launch=case("no fence").launch)
    assert Cache(check).get(asks) is None, "a launch that asks for other code"
    (check.kernels / "toy.py").write_text(toy + "LIMIT = 3\nTWICE = 2 * LIMIT\n")
    assert Cache(check).get(good) == row, "constants that no jitted function names"
    found = set()
    for limit in (3, 4):
        (check.kernels / "toy.py").write_text(toy.replace("pass", "TWICE") + f"LIMIT = {limit}\nTWICE = 2 * LIMIT\n")
        assert Cache(check).get(good) is None
        found.add(Cache(check).fingerprint(good))
    assert len(found) == 2, "a constant by which another is named"


def test_the_command_lists_what_is_wrong(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    check = new_check(tmp_path, "bad_cases")
    (check.kernels / "toy.py").write_text("@triton.jit(repr=f)\ndef another_kernel(): ...\ndef to_kernel(): ...\n")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "another toy")
    assert main(["--jobs", "1"], check) == 1
    printed = capsys.readouterr().out
    for text in ("4 cases, 4 violations", "sm_90 bfloat16 128x128x64 s3 w8: releases: 0 instead of 1", "process died",
                 "Insufficient registers", "no case compiles another_kernel of kernels/toy.py"):  # fmt: skip
        assert text in printed
    assert main(["--jobs", "1", "--without", "releases"], check) == 1
    printed = capsys.readouterr().out
    assert "4 cases, 2 violations" in printed and "releases: 0 instead" not in printed


def test_the_page_has_the_worst_of_each_kernel(tmp_path: Path) -> None:
    counts = {"releases": 3, "fences": 2, "acquires": 4, "barriers": 7, "in_flight": 64}
    usual = dict.fromkeys(Row.__annotations__) | {"kernel": "toy", "arch": "sm_90", "violations": []}
    rows: list[Any] = [
        usual | {"registers": 40, "spills": 0, "shared": 512},
        usual | {"registers": 90, "spills": 8, "shared": 256, "violations": ["spills: 8 bytes"], **counts},
        usual | {"arch": "sm_80", "violations": ["fails: the process died"]},
    ]
    page = tmp_path / "compile.md"
    assert write_page(page, "abc", rows, "0123", {"triton": "1.2"}) == f"{page} is written"
    text = page.read_text()
    assert " at commit abc." in text and "3 cases, 2 violations." in text and "Compiled by triton 1.2." in text
    assert "| toy | sm_90 | 2 | 90 | 8 | 512 | 3 | 2 | 4 | 7 | 64 | 1 |" in text
    assert "| toy | sm_80 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |" in text


def test_the_page_is_written_from_a_clean_tree_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    check = new_check(tmp_path, "good_cases")
    (check.kernels / "new.py").write_text("")
    for each in good_cases():
        Cache(check).put(each, empty_row(each))
    assert main([], check) == 0
    assert f"{check.results} is not written: these changes are not committed" in (printed := capsys.readouterr().out)
    assert "kernels/new.py" in printed and not check.results.exists()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "new")
    assert main([], check) == 0
    assert f"at commit {git(tmp_path, 'rev-parse', 'HEAD')}." in (first := check.results.read_text())
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "nothing")
    assert main([], check) == 0  # the page itself does not count as a change that is not committed
    assert f"{check.results} is up to date" in capsys.readouterr().out and check.results.read_text() == first


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert clean_commit(tmp_path / "results") == ("", "this is no git checkout with a commit to name")


def test_two_cases_of_one_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_kernels.good_cases", lambda: [case(), case()])
    load_cases.cache_clear()
    with pytest.raises(ValueError, match="exchange_kernel good sm_90 bfloat16"):
        load_cases("compile_kernels:good_cases")
