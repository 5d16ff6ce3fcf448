"""The compile check on the shipped kernels: each way to break the protocol in them is caught by the named rule."""

from functools import cache

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

import torch
from compile_kernels import NO_BARRIER
from mutations import Edit, chain, move, mutated, replace
from triton.runtime.jit import JITCallable
from turns import in_turns

from checks.compile import compiler
from checks.compile.cases import Case
from checks.compile.rules import judge
from checks.compile.shipped import cases
from tpformer.kernels import protocol, tile
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul_kernel as grouped_gather
from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul_kernel as gather
from tpformer.kernels.all_gather_quantized_matmul.kernel import all_gather_quantized_matmul_kernel as gather_of_blocks
from tpformer.kernels.configurations import TILES
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce_kernel as reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter_kernel as scatter
from tpformer.kernels.matmul_reduce_scatter.kernel import push_tile

UNAVAILABLE = compiler.unavailable()
pytestmark = [pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)), pytest.mark.proof]

# of every kernel that talks to other ranks, the variant to break: of GEMMs one that pushes, and both shots
GATHER, SCATTER = "all_gather_matmul_kernel dgrad", "matmul_reduce_scatter_kernel finish"
ONE_SHOT, TWO_SHOT = "matmul_all_reduce_kernel one-shot", "matmul_all_reduce_kernel two-shot"
AWAIT, GROUPED = "await_gathered_kernel 8 ranks", "all_gather_grouped_matmul_kernel dgrad"
BLOCKS, SCATTER_OF_BLOCKS, GROUPED_OF_BLOCKS = (
    "all_gather_quantized_matmul_kernel 3 weights, push",
    "matmul_reduce_scatter_kernel blocks, finish",
    "all_gather_grouped_matmul_kernel blocks, dgrad",
)
VARIANTS = [GATHER, SCATTER, ONE_SHOT, TWO_SHOT, AWAIT, GROUPED, BLOCKS, SCATTER_OF_BLOCKS, GROUPED_OF_BLOCKS]
SOME, OTHERS = VARIANTS[::2], VARIANTS[1::2]
ANNOUNCING = [ONE_SHOT, TWO_SHOT]
UNFENCED = {"fences", "fence_before_flag"}


@cache
def shipped() -> dict[str, Case]:
    """The cases of sm_90, bfloat16 and one tile by kernel and variant; those of float32 have it in their name."""
    suffixes = {torch.bfloat16: "", torch.float32: " float32"}
    tiles = None, TILES["small"], TILES["exact"], TILES["quantized_small"]
    return {
        f"{case.kernel} {case.name}{suffixes[case.dtype]}": case
        for case in cases()
        if case.capability == 90 and case.tile in tiles and case.dtype in suffixes
    }


def broken_rules(name: str) -> set[str]:
    violations = judge(shipped()[name])["violations"]
    rules = {violation.partition(":")[0] for violation in violations}
    assert "fails" not in rules, violations
    return rules


LATE = {"no_load_before_wait"}
PUSHED_LATE = "tl.range(begin, reach(limit, 1) * end,"
# function, edit, rules that must be broken, in which kernels
MUTATIONS: dict[str, tuple[JITCallable, Edit, set[str], list[str]]] = {
    "no barrier before the release": (protocol.publish, replace("barrier()", "pass"), NO_BARRIER, VARIANTS),
    "no release": (protocol.publish, replace('sem="release"', 'sem="relaxed"'), {"releases"}, SOME),
    "a plain store": (protocol.publish, replace("tl.atomic_xchg(", "tl.store(flag, epoch)  # "), {"releases"},
        [SCATTER, AWAIT]),
    "release of gpu scope": (protocol.publish, replace('"sys"', '"gpu"'), {"system_scope", "releases"}, OTHERS),
    "wait of gpu scope": (protocol.poll, replace('"sys"', '"gpu"'), {"system_scope", "acquires"}, SOME),
    "no acquire": (protocol.poll, replace('sem="acquire"', 'sem="relaxed"'), {"acquires"}, OTHERS),
    "no fence before the flags": (protocol.announce, replace("fence.acq_rel.sys; ", ""), UNFENCED, ANNOUNCING),
    "fence of gpu scope": (protocol.announce, replace("acq_rel.sys", "acq_rel.gpu"), UNFENCED, ANNOUNCING),
    "no barrier before the fence": (protocol.announce, replace("tl.debug_barrier()", "pass"),
        {"barrier_before_release"}, ANNOUNCING),
    "a release of one flag before the others": (
        protocol.announce, chain(replace("fence.acq_rel.sys; ", ""), replace(
            'sem="relaxed"', 'sem="release" if step == 1 else "relaxed"'
        )), UNFENCED | {"releases", "flags"}, ANNOUNCING,
    ),
    "a store behind the fence": (
        protocol.announce, replace("pack=1\n        )\n", "pack=1\n        )\n        tl.store(flags[0], 0)\n"),
        {"fence_before_flag"}, ANNOUNCING,
    ),
    "no proxy fence": (protocol.order_tma_after_acquire, replace("if TMA:", "if False:"), {"fence_before_tma_load"},
        [GATHER, BLOCKS]),
    "a relaxed count of tiles": (push_tile, replace('"acq_rel"', '"relaxed"'), {"system_scope"}, [SCATTER]),
    "a count of tiles below gpu scope": (push_tile, replace('"gpu"', '"cta"'), {"system_scope"}, [SCATTER_OF_BLOCKS]),
    # with 16-bit partials one for the shared memory happens to stand there
    "no barrier before the count of tiles": (push_tile, replace("barrier()", "pass"), NO_BARRIER,
        [f"{SCATTER} float32"]),
    "wait behind the tiles of the chunk": (gather,
        move("limit = wait(me, own_flags, chunk", "linear_tiles(problem, slot"), LATE, [GATHER]),
    "wait behind the tiles of a chunk's blocks": (gather_of_blocks,
        move("limit = wait(me, own_flags, chunk", "quantized_tiles(problem, slot"), LATE, [BLOCKS]),
    "wait behind the tiles of a rank's tokens": (grouped_gather,
        move("limit = wait(me, own_flags, source", "before = (before + tiles)"), LATE,
        [GROUPED, GROUPED_OF_BLOCKS]),
    "finishing wait behind its loads": (scatter, move("limit = wait(me, own_flags + row_block", "for unit in"), LATE,
        [SCATTER, SCATTER_OF_BLOCKS]),
    "reducing wait behind its loads": (reduce,
        move("limit = wait(me, own_flags + tile,", f"for piece in {PUSHED_LATE} STEP)"), LATE, ANNOUNCING),
    "wait for a sum behind its load": (reduce,
        move("limit = wait(me, own_flags + tiles", f"for piece in {PUSHED_LATE} COPIED)"), LATE, [TWO_SHOT]),
    "loads that wait for the step before": (
        tile.linear_tiles,
        chain(
            replace("begin - programs, steps - 1, begin", "begin - programs, 0, begin"),
            replace(
                "        step += 1\n        if step == steps:\n            tile, step = tile + programs, 0\n",
                "        if step == 0:\n            tile += programs\n",
            ),
            replace(
                "        if i == last:\n",
                "        step = tl.where(step == steps - 1, 0, step + 1)\n        if step == 0:\n",
            ),
        ),
        {"loads_run_ahead"}, [GATHER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutation", in_turns(MUTATIONS, proof=False))
def test_a_mutation_is_caught(mutation: str) -> None:
    function, edit, rules, names = MUTATIONS[mutation]
    with mutated(function, edit):
        found = {name: broken_rules(name) for name in names}
    for name in names:
        assert found[name] >= rules and bool(found[name]) == bool(rules), (name, found[name])


def test_a_wait_in_the_k_loop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for travels there beside `problem`."""
    arrival = "(me, own_flags, chunk, limit)"
    to_tiles = chain(
        replace("limit = wait(me, own_flags, chunk, limit)", "pass"),
        replace("TILE.m) * tiles_n\n", "TILE.m) * tiles_n\n    chunk = me.rank\n"),
        replace("linear_tiles(problem,", f"linear_tiles((problem, {arrival}),"),
    )
    first, loop = "    TILE: tl.constexpr = FORM.tile\n", "programs) * steps):\n"
    in_loop = chain(
        replace(first, f"{first}    problem, arrival = problem\n    me, flag, peer, limit = arrival\n"),
        replace(loop, f"{loop}        limit = wait(me, flag, peer, limit)\n"),
    )
    monkeypatch.setattr(tile, "wait", protocol.wait, raising=False)
    with mutated(gather, to_tiles), mutated(tile.linear_tiles, in_loop):
        assert "no_wait_in_dot_loop" in broken_rules(GATHER)


def test_every_kernel_that_communicates_is_broken_here() -> None:
    assert {case.kernel for case in cases() if case.releases} == {name.split()[0] for name in VARIANTS}


def test_a_mutation_reaches_callers_and_is_undone() -> None:
    source, key = protocol.publish.src, scatter.cache_key
    with mutated(protocol.publish, replace("sys", "gpu")):
        assert protocol.publish.src != source and (other := scatter.cache_key) != key
    assert protocol.publish.src == source and scatter.cache_key != other


@pytest.mark.parametrize("name", in_turns([*VARIANTS, f"{SCATTER} float32"], first=5))
def test_the_kernels_as_they_are_pass(name: str) -> None:
    """After all mutations."""
    assert broken_rules(name) == set()
