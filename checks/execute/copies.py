"""Copies by a copy engine, as kernels of one warp for a stream of their own.

Belongs here: what an engine does, as PTX, so that copies are interleaved and checked as programs are.
"""

from types import SimpleNamespace

from torch import Tensor

from .session import Execution

# An engine has done all of a copy before it begins the stream's next one, so whoever sees the word knows of them all.
FLAG = """setp.eq.b32 %p1, %r1, 0;
ld.global.b32 %r2, [%rd1];
@%p1 atom.global.sys.release.exch.b32 %r3, [%rd2], %r2;
"""
PAYLOAD = """mov.u32 %r2, 0;
$L__BB0_1:
setp.lt.u32 %p1, %r1, {units};
mad.wide.u32 %rd3, %r1, 2, %rd1;
mad.wide.u32 %rd4, %r1, 2, %rd2;
@%p1 ld.global.b16 %rs1, [%rd3];
@%p1 st.global.b16 [%rd4], %rs1;
add.u32 %r1, %r1, 32;
add.u32 %r2, %r2, 32;
setp.lt.u32 %p2, %r2, {units};
@%p2 bra $L__BB0_1;
"""
COPY = """.file 1 "{file}"
.visible .entry copy(
.param .u64 source,
.param .u64 target,
.param .u64 scratch,
.param .u64 more
)
{{
.reg .pred %p<3>;
.reg .b16 %rs<2>;
.reg .b32 %r<4>;
.reg .b64 %rd<5>;
.loc 1 {line} 0
mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [source];
ld.param.b64 %rd2, [target];
{body}ret;
}}
"""


def copy(execution: Execution, target: Tensor, source: Tensor, file: str, line: int) -> None:
    """Put a copy between tensors of equal sizes into the execution's current stream; reports name the line of a file.

    A copy of 4 bytes sets a flag: it is one store, which releases what its stream did before. Others move two bytes at
    a time, and release nothing. ValueError for tensors with gaps or odd sizes.
    """
    if not (target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes) or source.nbytes % 2:
        raise ValueError(f"a copy takes contiguous tensors of equal, even sizes, not {target.shape} and {source.shape}")
    body = FLAG if source.nbytes == 4 else PAYLOAD.format(units=source.nbytes // 2)
    kernel = SimpleNamespace(
        asm={"ptx": COPY.format(file=file, line=line, body=body)},
        src=SimpleNamespace(signature={"source": "*u8", "target": "*u8"}),
        metadata=SimpleNamespace(num_warps=1, shared=0),
    )
    execution.launch("copy", kernel, {"source": source, "target": target}, (1,))
