"""The model checker spin searches every interleaving of the fused kernels' protocol, and finds no error. `protocol.pml`
says what is modelled. The search is complete for 2 and for 3 ranks. Each mutation is one real mistake, and must read a
wrong value."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from turns import in_turns

MODEL = Path(__file__).with_name("protocol.pml")
# ranks -> epochs. A slot is used again after two epochs, and the model's integers wrap every 8 epochs. The model of 3
# ranks and 3 epochs already has 8 million states.
EPOCHS = {2: 20, 3: 3}

ANNOUNCED = ("-DANNOUNCED",)  # the flags are relaxed, behind a fence; otherwise each is released
RAISED = ("-DRAISED",)  # an operation of rank 0 raises between the bump and its kernel
MUTATIONS = {
    "SLOT_ZERO": "both parities use slot 0: a rank one epoch ahead overwrites what a slow one still reads",
    "STALE_WAIT": "the wait accepts the flag of the epoch before",
    "SIGNED_COMPARE": "flag >= epoch instead of flag - epoch >= 0: wrong where the epoch wraps",
    "NO_BARRIER": "no barrier before the release or the fence: it does not cover the stores of the other warp",
    "NO_RELEASE": "the flag is stored relaxed: it overtakes the payload",
    "HOISTED_WAIT": "received data is loaded before the wait",
    "ONE_RELEASE": "the first flag is released, and the others are relaxed: they overtake the payload",
    "GOES_ON": "a rank begins another operation after one that raised: its flag is taken for that one's",
    "NO_FENCE": "an announcement's flags are stored without a fence: they overtake the payload",
}
# each of 2 ranks has one flag to set
OTHERS = {(2, "ONE_RELEASE"), *itertools.product(EPOCHS, ("NO_FENCE", "GOES_ON"))}
PUBLISHED = sorted({*itertools.product(EPOCHS, MUTATIONS)} - OTHERS)
MUTATED = [
    *((*case, ()) for case in PUBLISHED),
    *((*case, ANNOUNCED) for case in itertools.product(EPOCHS, ("NO_FENCE", "NO_BARRIER"))),
    *((ranks, "GOES_ON", RAISED) for ranks in EPOCHS),
]

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(600),  # they take 15 s of a core, and more where many share it
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs the model checker spin (spinroot.com) on PATH"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc, to build spin's verifier"),
]


def check_model(folder: Path, ranks: int, *mutations: str, options: tuple[str, ...] = (), depth: int = 10_000) -> str:
    """Build the verifier of protocol.pml in a folder, run it, and return what it prints. The search is exact: states
    are compressed (COLLAPSE), never hashed away. 3 ranks take 0.6 GB."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550)
        assert command[0] == "./pan" or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    # -P: spin preprocesses with gcc unless told
    defines = [f"-DRANKS={ranks}", f"-DEPOCHS={EPOCHS[ranks]}", *options, *(f"-DMUTATE_{name}" for name in mutations)]
    run("spin", "-Pcc -E -x c", *defines, "-a", str(MODEL))
    optimise = "-O0" if mutations else "-O2"  # a mutation is found so fast that building takes longer
    run("cc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c")
    table = 24 if ranks == 3 and not mutations else 18  # log2 of the hash table's size, which need not grow
    return run("./pan", f"-m{depth}", f"-w{table}")


def errors(report: str) -> int:
    found = re.search(r"depth reached \d+, errors: (\d+)", report)
    assert found, f"no verdict in\n{report}"
    return int(found[1])


def is_complete(report: str) -> bool:
    truncated = ("Search not completed", "max search depth too small", "out of memory", "MEMLIM", "hash-compact")
    return "Full statespace search for" in report and not any(words in report for words in truncated)


@pytest.mark.parametrize("options, ranks", in_turns(itertools.product([(), ANNOUNCED, RAISED], EPOCHS), proof=False))
def test_protocol_has_no_error(tmp_path, ranks, options):
    report = check_model(tmp_path, ranks, options=options)
    assert errors(report) == 0 and is_complete(report), report
    for kind in ("assertion violations\t+", "invalid end states\t+"):
        assert kind in report, f"not checked: {kind}\n{report}"
    # every statement of both warps was executed, their last included
    for process in ("lead", "other"):
        assert re.search(rf"unreached in proctype {process}\n\t\(0 of \d+ states\)", report), report


@pytest.mark.parametrize("ranks, mutation, options", in_turns(MUTATED, proof=False))
def test_mutation_reads_a_wrong_value(tmp_path, ranks, mutation, options):
    report = check_model(tmp_path, ranks, mutation, options=options)
    assert errors(report) >= 1, f"not found: {MUTATIONS[mutation]}\n{report}"
    assert re.search(r"pan:\d+: assertion violated \(slot\[.*\]==.*epoch\[", report), report


def test_truncated_search_is_noticed(tmp_path):
    assert not is_complete(check_model(tmp_path, 2, depth=50))
