"""The executor finds what is wrong: each order, scope and barrier of a hand-over between ranks matters to it, and so
do bounds, alignment, what is never written and what is still being copied. Nothing compiles: PTX is written by hand."""

import re
from types import SimpleNamespace

import pytest
import torch
from execution import SCHEDULES, Execution

from checks.execute.code import Code
from checks.execute.copies import copy
from checks.execute.memory import Fault
from checks.execute.ptx import Unsupported, parse

HEADER = """.file 1 "snippet.ptx"
.visible .entry kernel(
{parameters}
)
.reqntid 64
{{
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<19>;
.reg .b64 %rd<19>;
.loc 1 7 0
"""

# rank 0 writes 64 words and sets a flag; rank 1 waits for the flag, and copies the words
SEND = """mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [data];
mad.wide.u32 %rd2, %r1, 4, %rd1;
add.s32 %r2, %r1, 100;
st.global.b32 [%rd2], %r2;
bar.sync 0;
setp.eq.b32 %p1, %r1, 0;
ld.param.b64 %rd3, [flag];
@%p1 atom.global.sys.release.exch.b32 %r3, [%rd3 + 0], 1;
ret;
"""
RECEIVE = """mov.u32 %r1, %tid.x;
setp.eq.b32 %p1, %r1, 0;
ld.param.b64 %rd3, [flag];
ld.param.b64 %rd1, [data];
ld.param.b64 %rd4, [out];
mad.wide.u32 %rd2, %r1, 4, %rd1;
mad.wide.u32 %rd5, %r1, 4, %rd4;
// early
$L__BB0_1:
@%p1 ld.global.sys.acquire.b32 %r4, [%rd3 + 0];
shl.b32 %r5, %r1, 2;
@%p1 st.shared.b32 [global_smem], %r4;
bar.sync 0;
ld.shared.b32 %r6, [global_smem];
bar.sync 0;
setp.eq.b32 %p2, %r6, 0;
@%p2 bra $L__BB0_1;
ld.global.b32 %r7, [%rd2];
st.global.b32 [%rd5], %r7;
ret;
"""


def kernel(text: str, names: tuple[str, ...] = ("data", "flag", "out")) -> SimpleNamespace:
    """What a launch takes of Triton's compiled kernel: two warps, 512 bytes of shared memory."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 {name}" for name in (*names, "scratch", "more"))
    return SimpleNamespace(
        asm={"ptx": HEADER.format(parameters=parameters) + text + "\n}\n"},
        src=SimpleNamespace(signature=dict.fromkeys(names, "*i32")),
        metadata=SimpleNamespace(num_warps=2, shared=512),
    )


def hand_over(send: str, receive: str, schedule) -> tuple[list[str], bool]:
    """(the reports, whether the words arrived)."""
    data, out, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), torch.zeros(4).int()
    execution = Execution(schedule)
    for rank, text in enumerate((send, receive)):
        with execution.on(rank):
            execution.launch("kernel", kernel(text), {"data": data, "flag": flag, "out": out}, (1,))
    try:
        execution.run()
    except Fault as fault:
        execution.log.reports.append(str(fault))
    return execution.log.reports, torch.equal(out, torch.arange(100, 164, dtype=torch.int32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hand_over_is_right(schedule) -> None:
    assert hand_over(SEND, RECEIVE, schedule) == ([], True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "side, old, new",
    [
        ("send", "bar.sync 0;\n", ""),
        ("send", "sys.release", "sys.relaxed"),
        ("send", "sys.release", "gpu.release"),
        ("receive", "sys.acquire", "sys.relaxed"),
        ("receive", "sys.acquire", "gpu.acquire"),
        ("receive", "// early", "ld.global.b32 %r8, [%rd2];"),
    ],
)  # fmt: skip
def test_a_weaker_hand_over_is_found(side, old, new, schedule) -> None:
    texts = {"send": SEND, "receive": RECEIVE}
    assert old in texts[side]
    texts[side] = texts[side].replace(old, new)
    reports, _ = hand_over(**texts, schedule=schedule)
    assert any(re.search(r"race: .* global memory .*snippet.ptx:7", report) for report in reports), reports


FILL = """mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [data];
mad.wide.u32 %rd2, %r1, 4, %rd1;
add.s32 %r2, %r1, 100;
st.global.b32 [%rd2], %r2;
ret;
"""


def hand_over_by_copies(schedule, flag_first: bool = False, waits: tuple[bool, bool] = (True, True)) -> tuple:
    """(the reports, whether the words arrived). A kernel of rank 0 fills a source, and fills it again at the end.
    Between, its copy engine sends the words and a flag. waits: whether the engine waits for the kernel, and the second
    kernel for the engine."""
    source, data, out = (torch.zeros(64, dtype=torch.int32) for _ in range(3))
    flag, one = torch.zeros(4).int(), torch.ones(1).int()
    execution = Execution(schedule)
    fill = kernel(FILL, ("data",))
    with execution.on(0):
        execution.launch("kernel", fill, {"data": source}, (1,))
    with execution.on(0, stream=1):
        if waits[0]:
            execution.wait(0)
        for number in (1, 0) if flag_first else (0, 1):
            copy(execution, (data, flag[:1])[number], (source, one)[number], "host.py", 7 + number)
    with execution.on(0):
        if waits[1]:
            execution.wait(1)
        execution.launch("kernel", fill, {"data": source}, (1,))
    with execution.on(1):
        execution.launch("kernel", kernel(RECEIVE), {"data": data, "flag": flag, "out": out}, (1,))
    execution.run()
    return execution.log.reports, torch.equal(out, torch.arange(100, 164, dtype=torch.int32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_hand_over(schedule) -> None:
    """To a kernel that already polls, or has yet to begin."""
    assert hand_over_by_copies(schedule) == ([], True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options, report",
    [
        ({"flag_first": True}, r"a read of .*snippet.ptx:7.*host.py:7|a write of .*host.py:7.*snippet.ptx:7"),
        ({"waits": (False, True)}, r"a read of .*host.py:7.*snippet.ptx:7|a write of .*snippet.ptx:7.*host.py:7"),
        ({"waits": (True, False)}, r"a write of .*snippet.ptx:7.*host.py:7|a read of .*host.py:7.*snippet.ptx:7"),
    ],
)  # fmt: skip
def test_a_weaker_hand_over_by_copies_is_found(options, report, schedule) -> None:
    reports, _ = hand_over_by_copies(schedule, **options)
    assert any(re.search(f"race: {report}", found) for found in reports), reports


def test_a_copy_is_whole() -> None:
    with pytest.raises(ValueError, match="contiguous tensors of equal, even sizes"):
        copy(Execution(), torch.zeros(4, 2)[:, 0], torch.zeros(4), "host.py", 7)


@pytest.mark.parametrize("number", [0, 1])
def test_each_barrier_of_shared_memory_matters(number) -> None:
    first, second, third = RECEIVE.split("bar.sync 0;\n")
    broken = (first + second + "bar.sync 0;\n" + third, first + "bar.sync 0;\n" + second + third)[number]
    reports = [report for schedule in SCHEDULES for report in hand_over(SEND, broken, schedule)[0]]
    assert any(
        "snippet.ptx:7 (ld.shared" in report or "snippet.ptx:7 (@%p1 st.shared" in report for report in reports
    ), reports


def execute(text: str) -> list[str]:
    """The reports of one launch, with one array of 64 integers."""
    execution = Execution()
    execution.launch("kernel", kernel(text, ("data",)), {"data": torch.zeros(64, dtype=torch.int32)}, (1,))
    return execution.log.reports


PLACE = "mov.u32 %r1, %tid.x;\nld.param.b64 %rd1, [data];\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nshl.b32 %r2, %r1, 2;\n"
COPY = PLACE + "cp.async.ca.shared.global [%r2], [%rd2], 4;\ncp.async.commit_group;\n"


@pytest.mark.parametrize(
    "text, report",
    [
        ("ld.shared.b32 %r3, [%r2];", "nothing has written"),
        ("xor.b32 %r3, %r1, 32;\nshl.b32 %r4, %r3, 2;\nst.shared.b32 [%r2], %r1;\nld.shared.b32 %r5, [%r4];",
         "a read of shared memory is not ordered after the write"),
        ("st.shared.b32 [4], %r1;", "lanes of one store write different values"),
    ],
)  # fmt: skip
def test_shared_memory(text, report) -> None:
    assert any(report in found for found in execute(PLACE + text + "\nret;"))


def test_copies_are_waited_for() -> None:
    reading = "ld.shared.b32 %r3, [%r2];\nret;"
    assert execute(COPY + "cp.async.wait_group 0;\n" + reading) == []
    for missing in ("", "cp.async.wait_group 1;\n"):
        assert any("where a copy is under way" in report for report in execute(COPY + missing + reading))


@pytest.mark.parametrize(
    "text, message",
    [
        ("ld.global.b32 %r3, [%rd2 + 4];", "outside of memory"),
        ("ld.global.v2.b32 {%r3, %r4}, [%rd2];", "misaligned"),
        ("st.shared.b32 [%r2 + 512], %r1;", "outside of 512 bytes of shared memory"),
        ("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L__BB0_1;\nbar.sync 0;\n$L__BB0_1:", "ended warps do not reach"),
        ("setp.lt.u32 %p1, %r1, 7;\n@%p1 bra $L__BB0_1;\n$L__BB0_1:", "lanes of one warp disagree"),
        ("setp.eq.b32 %p1, %r1, 0;\n$L__BB0_1:\n@%p1 ld.global.sys.acquire.b32 %r3, [%rd1];\nbra $L__BB0_1;", "hang"),
    ],
)  # fmt: skip
def test_what_cannot_go_on(text, message) -> None:
    with pytest.raises(Fault, match=message):
        execute(PLACE + text + "\nret;")


@pytest.mark.parametrize("text", ["vote.sync.any.pred %p1, %p2, -1;", "add.bf16x2 %r1, %r2, %r3;", "bar.sync 1, 32;"])
def test_unknown_instructions_are_errors(text) -> None:
    with pytest.raises(Unsupported, match=re.escape(text.split()[0])):
        Code(parse(kernel(text).asm["ptx"]))
