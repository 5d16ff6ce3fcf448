"""The executor finds what is wrong: each order, scope and barrier of a hand-over between ranks matters to it, and so
do bounds, alignment, what is never written and what is still being copied. Nothing compiles: PTX is written by hand."""

import re

import numpy as np
import pytest
import torch
from execution import PLAIN, SCHEDULES, Execution, written

from checks.execute.code import Code
from checks.execute.log import Log
from checks.execute.memory import Fault
from checks.execute.ptx import Unsupported, parse

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
WORDS = torch.arange(100, 164, dtype=torch.int32)


def hand_over(send: str, receive: str, schedule=PLAIN, owner: int = 0) -> tuple[Log, bool]:
    """(the log, whether the words arrived). owner: whose memory they are handed over in."""
    data, out, flag = torch.zeros_like(WORDS), torch.zeros_like(WORDS), torch.zeros(4).int()
    execution, arrays = Execution(schedule), {"data": data, "flag": flag, "out": out}
    for rank, text in enumerate((send, receive)):
        with execution.on(rank):
            execution.launch(f"kernel {rank}", written(text, (*arrays,)), arrays, (1,))
    execution.memory.add(data, rank=owner)
    try:
        execution.run()
    except Fault as fault:
        execution.log.reports.append(str(fault))
    return execution.log, torch.equal(out, WORDS)


def reports_of(send: str, receive: str) -> list[list[str]]:
    """The reports of a hand-over, for each schedule."""
    return [hand_over(send, receive, schedule)[0].reports for schedule in SCHEDULES]


def test_what_a_hand_over_counts() -> None:
    """Two warps wrote 64 words of 4 bytes into memory of rank 5; the acquire came after the release. A fence is one of
    its program, and comes before the flag; nobody waits for the flag to be set."""
    log, _ = hand_over(SEND, RECEIVE, owner=5)
    send, receive = log.counts["kernel 0", 0, 0], log.counts["kernel 1", 1, 0]
    assert send == {"written, rank 5": 256, "barriers": 1, "release": 1, "chain": 1, "flops": 0, "in flight": 0}
    assert receive["chain"] == 2 and receive["acquire"] == 1 and receive["barriers"] % 2 == 0
    assert (receive["read, rank 5"], receive["written, rank 1"], receive["in flight"]) == (256, 256, 4 * 32)
    log, _ = hand_over(FENCED_SEND.replace(SET, 3 * SET), RECEIVE)
    send, receive = log.counts["kernel 0", 0, 0], log.counts["kernel 1", 1, 0]
    assert (send["fence"], send["relaxed"], send["release"], send["chain"], receive["chain"]) == (1, 3, 0, 1, 2)


RELEASE, ACQUIRE = "@%p1 atom.global.sys.release.exch.b32 %r3, [%rd3 + 0], 1;", "@%p1 ld.global.sys.acquire.b32"
SET, POLL, FENCE = RELEASE.replace("release", "relaxed"), ACQUIRE.replace("acquire", "relaxed"), "fence.acq_rel.sys;\n"
FENCED_SEND = SEND.replace(RELEASE, FENCE + SET)
FENCED_RECEIVE = RECEIVE.replace(ACQUIRE, POLL).replace("shl.b32", f"{FENCE}shl.b32")
# another flag behind the first one, for which the receiver waits
SECOND, RECEIVE_SECOND = SET.replace("+ 0]", "+ 4]"), RECEIVE.replace("[%rd3 + 0]", "[%rd3 + 4]")
# a fence before a flag is set is a release, of several flags; one after a flag was read is an acquire
FENCED = [(FENCED_SEND, RECEIVE), (SEND, FENCED_RECEIVE), (FENCED_SEND, FENCED_RECEIVE)]
FENCED.append((FENCED_SEND.replace(SET, SET + SECOND), RECEIVE_SECOND))
FENCES = (FENCE, "fence.sc.sys;\n", "membar.sys;\n")


@pytest.mark.parametrize(
    "send, receive", [(SEND, RECEIVE), *((x.replace(FENCE, y), z.replace(FENCE, y)) for x, z in FENCED for y in FENCES)]
)
def test_a_hand_over_is_right(send, receive) -> None:
    for schedule in SCHEDULES:
        log, arrived = hand_over(send, receive, schedule)
        assert (log.reports, arrived) == ([], True), schedule


# to which only the other warp comes
FENCE_OF_THE_OTHER = f"setp.lt.u32 %p2, %r1, 32;\n@%p2 bra $L__BB0_1;\n{FENCE}$L__BB0_1:\n"
# as compilers move the first loads of a K loop to before a wait: copies that are begun there may read at once
EARLY_COPY = "shl.b32 %r8, %r1, 2;\ncp.async.ca.shared.global [%r8 + 64], [%rd2], 4, 4;\ncp.async.commit_group;\n"
LATE_END = "cp.async.wait_group 0;\nld.shared"
RECEIVE_EARLY = RECEIVE.replace("@%p1 ld", f"{4 * EARLY_COPY}@%p1 ld").replace("ld.shared", LATE_END)
# what is weaker -> (send, receive)
WEAKER = {
    "a release does not order what follows it": (SEND.replace(RELEASE, RELEASE + SECOND), RECEIVE_SECOND),
    "no barrier": (SEND.replace("bar.sync 0;\n", ""), RECEIVE),
    "relaxed flag": (SEND.replace("sys.release", "sys.relaxed"), RECEIVE),
    "release of gpu scope": (SEND.replace("sys.release", "gpu.release"), RECEIVE),
    "relaxed poll": (SEND, RECEIVE.replace("sys.acquire", "sys.relaxed")),
    "acquire of gpu scope": (SEND, RECEIVE.replace("sys.acquire", "gpu.acquire")),
    "early load": (SEND, RECEIVE.replace("// early", "ld.global.b32 %r8, [%rd2];")),
    "early copy": (SEND, RECEIVE_EARLY),
    "no fence": (FENCED_SEND.replace(FENCE, ""), RECEIVE),
    "fence of gpu scope": (FENCED_SEND.replace(FENCE, "fence.acq_rel.gpu;"), RECEIVE),
    "its old name": (FENCED_SEND.replace(FENCE, "membar.gl;"), RECEIVE),
    "flag of gpu scope": (FENCED_SEND.replace("sys.relaxed", "gpu.relaxed"), RECEIVE),
    "no barrier before the fence": (FENCED_SEND.replace("bar.sync 0;", ""), RECEIVE),
    "fence before the barrier": (FENCED_SEND.replace("bar.sync 0;", "").replace(FENCE, FENCE + "bar.sync 0;\n"),
        RECEIVE),
    "store after the fence": (FENCED_SEND.replace(FENCE, FENCE + "@%p1 st.global.b32 [%rd2], %r2;\n"), RECEIVE),
    "fence in the other warp": (FENCED_SEND.replace(FENCE, FENCE_OF_THE_OTHER), RECEIVE),
    "no fence after the poll": (SEND, FENCED_RECEIVE.replace(FENCE, "")),
    "gpu scope after the poll": (SEND, FENCED_RECEIVE.replace(FENCE, "fence.sc.gpu;")),
    "poll of gpu scope": (SEND, FENCED_RECEIVE.replace("sys.relaxed", "gpu.relaxed")),
    "fence after the barrier": (SEND,
        FENCED_RECEIVE.replace(FENCE, "").replace("ld.global.b32", FENCE + "ld.global.b32")),
}  # fmt: skip


@pytest.mark.parametrize("name", WEAKER)
def test_a_weaker_hand_over_is_found(name) -> None:
    """As a race in global memory, of both sides' only line."""
    assert WEAKER[name] not in [(SEND, RECEIVE), *FENCED]
    for reports in reports_of(*WEAKER[name]):
        assert any(re.search(r"race: .* global memory .*snippet.ptx:7", report) for report in reports), reports


@pytest.mark.parametrize("number", [0, 1])
def test_each_barrier_of_shared_memory_matters(number) -> None:
    before, behind = RECEIVE.replace("bar.sync 0;\n", "", 1), "".join(RECEIVE.rsplit("bar.sync 0;\n", 1))
    reports = [report for reports in reports_of(SEND, (before, behind)[number]) for report in reports]
    assert any(re.search(r"snippet.ptx:7 \((ld|@%p1 st).shared", report) for report in reports), reports


def execute(text: str, data: torch.Tensor | None = None) -> list[str]:
    """The reports of one launch, with one array of 64 integers."""
    execution = Execution()
    data = torch.zeros(64, dtype=torch.int32) if data is None else data
    execution.launch("kernel", written(text, ("data",)), {"data": data}, (1,))
    return execution.log.reports


PLACE = "mov.u32 %r1, %tid.x;\nld.param.b64 %rd1, [data];\nmad.wide.u32 %rd2, %r1, 4, %rd1;\nshl.b32 %r2, %r1, 2;\n"
COPY = PLACE + "cp.async.ca.shared.global [%r2], [%rd2], 4, 4;\ncp.async.commit_group;\n"
READ = "ld.shared.b32 %r3, [%r2];"
CROSSED = "xor.b32 %r3, %r1, 32;\nshl.b32 %r4, %r3, 2;\nst.shared.b32 [%r2], %r1;\nld.shared.b32 %r5, [%r4];"


@pytest.mark.parametrize("text, report", [
    (PLACE + READ, "nothing has written"),
    (PLACE + CROSSED, "a read of shared memory is not ordered after a write"),
    (PLACE + "st.shared.b32 [4], %r1;", "lanes of one store write different values"),
    (COPY + READ, "a read of shared memory during a copy"),
    (COPY + "cp.async.wait_group 1;\n" + READ, "a read of shared memory during a copy"),
    (COPY + "cp.async.wait_group 0;\n" + READ, ""),
])  # fmt: skip
def test_shared_memory(text, report) -> None:
    found = execute(text + "\nret;")
    assert any(report in each for each in found) if report else not found


THREADS = np.arange(64)
FIRST = THREADS // 32 * 32  # of a thread's warp
NEGATIVE = "add.s32 %r3, %r1, -8;\n"  # the first lanes of the first warp: integers are signed
BYTES = "mov.b32 %r3, 0x00FF807F;\nmov.b32 %r4, 0x00332211;\n"  # 7f 80 ff 00, then 11 22 33 00


@pytest.mark.parametrize("text, expected", [
    (NEGATIVE + "redux.sync.min.s32 %r5, %r3, -1;", FIRST - 8),
    (NEGATIVE + "redux.sync.max.s32 %r5, %r3, -1;", FIRST + 23),
    (NEGATIVE + "redux.sync.add.s32 %r5, %r3, 5;", 2 * FIRST - 14),  # of lanes 0 and 2
    ("shfl.sync.idx.b32 %r5, %r1, 5, 31, -1;", FIRST + 5),
    ("shfl.sync.bfly.b32 %r5, %r1, 6, 31, -1;", THREADS ^ 6),
    # a lane that has none so far below keeps its own value
    ("shfl.sync.up.b32 %r5, %r1, 4, 0, -1;", np.where(THREADS - FIRST < 4, THREADS, THREADS - 4)),
    # by number, or 8 more for a byte's sign
    (BYTES + "prmt.b32 %r5, %r3, %r4, 0x7701U;", 0x00007F80),
    (BYTES + "prmt.b32 %r5, %r3, %r4, 0x4210;", 0x11FF807F),
    (BYTES + "prmt.b32 %r5, %r3, %r4, 0xA98D;", 0xFFFF0000),
])  # fmt: skip
def test_lanes_of_a_warp_and_bytes_of_a_word(text, expected) -> None:
    data = torch.zeros(64, dtype=torch.int32)
    assert not execute(f"{PLACE}{text}\nst.global.b32 [%rd2], %r5;\nret;", data)
    assert (data.numpy() == np.broadcast_to(expected, 64).astype(np.uint32).view(np.int32)).all()


@pytest.mark.parametrize("text, message", [
    ("ld.global.b32 %r3, [%rd2 + 4];", "outside of global memory"),
    ("ld.global.v2.b32 {%r3, %r4}, [%rd2];", "misaligned"),
    ("st.shared.b32 [%r2 + 512], %r1;", "outside of shared memory"),
    ("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L__BB0_1;\nbar.sync 0;\n$L__BB0_1:", "ended warps do not reach"),
    ("setp.lt.u32 %p1, %r1, 7;\n@%p1 bra $L__BB0_1;\n$L__BB0_1:", "lanes of one warp disagree"),
    ("setp.eq.b32 %p1, %r1, 0;\n$L__BB0_1:\n@%p1 ld.global.sys.acquire.b32 %r3, [%rd1];\nbra $L__BB0_1;", "hang"),
])  # fmt: skip
def test_what_cannot_go_on(text, message) -> None:
    with pytest.raises(Fault, match=message):
        execute(PLACE + text + "\nret;")


@pytest.mark.parametrize("text", ["vote.sync.any.pred %p1, %p2, -1;", "add.bf16x2 %r1, %r2, %r3;", "bar.sync 1, 32;"])
def test_unknown_instructions_are_errors(text) -> None:
    with pytest.raises(Unsupported, match=re.escape(text.split()[0])):
        Code(parse(written(text, ()).asm["ptx"]))
