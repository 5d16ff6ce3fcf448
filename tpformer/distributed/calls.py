"""What the ranks of a group call, in memory that they share: ranks that disagree are told, and by which two calls.

Belongs here: the words by which calls are compared, their texts, and what is said of ranks that disagree. Who records
what is in workspace.py, kernel_workspace.py and tpformer.ops; groups.py looks a group's calls up.

A call is one word of 64 bits: its number, and a hash of this call and all before it. A rank writes its word, then reads
those with that number of its two neighbours: if any ranks differ, two neighbours do. x86 may let the read overtake the
write, so that two ranks miss each other once. Their next words differ, too.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Hashable, Sequence

from .shared_memory import SharedMemory
from .sizes import PAGE, round_up

SLOTS = 2048  # calls that are kept: no host is so far ahead of another one, because a CUDA stream holds fewer kernels
TEXTS, TEXT_BYTES = 256, 192  # calls of which a rank keeps the text, and its bytes, with the hash in the first four
REASON_BYTES = 1024  # of what has broken a group
PAUSE = 1e-4  # seconds between two looks of a rank that waits, which it does where memory grows
MASK = 2**30 - 1  # of numbers and hashes, which wrap: Python is fastest with integers of 30 bits
NUMBER = 32  # the bit of a word where the number begins; the hash is below it
BROKEN = 2**63 - 1  # in the slots of all calls to come of a rank that has given the group up
KEPT = 64  # calls before that which stay


class Calls:
    """The calls of one group, as this rank sees them. `note` waits for nobody and costs about a microsecond.

    The memory has the words of all ranks for one number after the other, then each rank's texts and its reason.
    """

    def __init__(self, memory: SharedMemory, global_ranks: Sequence[int]) -> None:
        self.memory, self.global_ranks = memory, tuple(global_ranks)
        self.rank, self.ranks = memory.rank, memory.size
        self.failure: str | None = None
        """Why the group cannot go on; every later call raises it."""
        self.busy = threading.Lock()
        """Held by the thread that is in a collective of the group through shared memory."""
        self.holder: tuple[Hashable, int] | None = None
        """The call that holds it, and its thread."""
        start = memory.region_offset(0)
        self._words = memoryview(memory.buffer)[start : start + SLOTS * self.ranks * 8].cast("q")
        self._texts = start + round_up(SLOTS * self.ranks * 8, PAGE)
        self._peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        # if any ranks differ, two neighbours in the ring do
        self._neighbours = sorted({(self.rank + step) % self.ranks for step in (-1, 1)})
        self._digests: dict[Hashable, int] = {}
        self._learned = 0
        self._number = self._chain = 0

    @staticmethod
    def nbytes() -> int:
        """The memory that each rank brings."""
        return SLOTS * 8 + PAGE + TEXTS * TEXT_BYTES + REASON_BYTES

    def note(self, key: Hashable) -> int:
        """This rank makes a call now. The word is returned, for `compare`.

        key: (operation, shape, dtype, what else must be equal on all ranks, ...), in this order.
        Raises RuntimeError if another rank's call with that number is another one, and from then on for every call.
        """
        digest = self._digests.get(key)
        if digest is None:
            digest = self._learn(key)
        # where two ranks differ in one call, they differ in all hashes after it, until they differ in another call
        self._chain = chain = (digest - self._chain) & MASK
        self._number = number = (self._number + 1) & MASK
        words, at, own = self._words, number % SLOTS * self.ranks, number << NUMBER | chain
        words[at + self.rank] = own
        for peer in self._neighbours:
            if (other := words[at + peer]) != own and other >> NUMBER >= number:
                self._judge(own, waited=False)
        return own

    def compare(self, own: int) -> None:
        """RuntimeError unless all ranks have made the call of this word, for which this rank has waited."""
        words, at = self._words, (own >> NUMBER) % SLOTS * self.ranks
        for peer in self._peers:
            if words[at + peer] != own:
                self._judge(own, waited=True)

    def enter(self, key: Hashable) -> int:
        """`note` of a call during which no other thread, and no other call of this one, may use the group."""
        if not self.busy.acquire(blocking=False):
            self._refuse(key)
        self.holder = key, threading.get_ident()
        return self.note(key)

    def leave(self) -> None:
        """The end of what `enter` has begun. After an exception nobody comes here, and the group is given up."""
        self.holder = None
        self.busy.release()

    def fail(self, reason: str) -> None:
        """Give the group up: every later call of this rank raises the reason, and so does each peer's next call."""
        if self.failure is not None:
            return
        self.failure = reason
        self._digests.clear()  # so that every call comes to `_learn`
        at = self._texts_of(self.rank) + TEXTS * TEXT_BYTES
        text = reason.encode()[:REASON_BYTES]
        self.memory.buffer[at : at + len(text)] = text
        for step in range(1, SLOTS - KEPT):  # the last calls stay, for peers that compare them now
            at = (self._number + step) % SLOTS
            self._words[at * self.ranks + self.rank] = BROKEN

    def check(self) -> None:
        """RuntimeError if the group was given up, here or by a peer, or if calls are known to differ."""
        reason = self.found()
        if reason is not None:
            self.fail(reason)
            raise RuntimeError(reason)

    def meet(self, own: int, timeout: float) -> None:
        """Wait until all ranks have made the call of this word: before what a rank that makes another would not join.

        Raises RuntimeError as `note` does, and TimeoutError if a rank does not come in so many seconds.
        """
        deadline = time.monotonic() + timeout
        while late := [peer for peer in self._peers if self._word(own, peer) != own]:
            self._judge(own, waited=False)
            if time.monotonic() > deadline:
                self.fail(
                    f"rank {self.named(self.rank)} waited {timeout:g} s for rank {self.named(late[0])} in "
                    f"{self._call(own, self.rank)}: look at the output of that rank, which died, hangs, or was slow"
                )
                raise TimeoutError(self.failure)
            time.sleep(PAUSE)

    @property
    def _last(self) -> int:
        """The word of the last call that this rank has made."""
        return self._number << NUMBER | self._chain

    def meet_in_last(self, timeout: float) -> None:
        """`meet` in the last call that this rank has made."""
        self.meet(self._last, timeout)

    def found(self) -> str | None:
        """Why the ranks cannot go on, as far as the words of the last call say it."""
        return self.failure or self._reason(self._last, waited=False)

    def _learn(self, key: Hashable) -> int:
        """The hash of a call's text, which is kept for the other ranks."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        text = text_of(key).encode()
        digest = zlib.crc32(text) & MASK
        if len(self._digests) >= TEXTS:
            self._digests.clear()  # what is in use is learned, and written, again
        at = self._texts_of(self.rank) + self._learned % TEXTS * TEXT_BYTES
        entry = digest.to_bytes(4, "little") + text[: TEXT_BYTES - 4]
        self.memory.buffer[at : at + TEXT_BYTES] = entry.ljust(TEXT_BYTES, b"\0")
        self._learned += 1
        self._digests[key] = digest
        return digest

    def _refuse(self, key: Hashable) -> None:
        """Two calls at once: of two threads, or of one whose earlier call was left by an exception."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        held, thread = self.holder or (("a call",), 0)
        names = {each.ident: each.name for each in threading.enumerate()}
        if thread == threading.get_ident():
            reason = f"{text_of(held)} was left by an exception on rank {self.named(self.rank)}"
        else:
            reason = (
                f"thread {threading.current_thread().name} called {text_of(key)} on rank {self.named(self.rank)} while "
                f"thread {names.get(thread, 'that has ended')} was in {text_of(held)}: call a group's operations from "
                f"one thread at a time"
            )
        self.fail(f"{reason}; {LAST}")
        raise RuntimeError(self.failure)

    def _judge(self, own: int, waited: bool) -> None:
        """RuntimeError if the words of that number say that the ranks cannot go on."""
        reason = self._reason(own, waited)
        if reason is not None:
            self.fail(reason)
            raise RuntimeError(reason)

    def _reason(self, own: int, waited: bool) -> str | None:
        for peer in self._peers:
            other = self._word(own, peer)
            ahead = distance(other, own)
            if ahead == 0 and other not in (own, BROKEN):
                return self._disagreement(own, peer)
            if BROKEN in (other, self._word(own + (1 << NUMBER), peer)):
                return self._text(self._texts_of(peer) + TEXTS * TEXT_BYTES, REASON_BYTES)
            if ahead < 0 and waited:  # it came for another call, in an earlier slot
                return self._disagreement(max(self._column(peer), key=lambda word: distance(word, own)), peer)
        return None

    def _disagreement(self, own: int, peer: int) -> str:
        """The first two calls of this rank and a peer that differ, as far as they are kept."""
        for _ in range(SLOTS):
            before = self._before(own, self.rank)
            if before == self._before(own, peer) or distance(before, own) != -1:
                break
            own = before
        mine, theirs = (self._call(own, rank) for rank in (self.rank, peer))
        calls = sorted([(self.rank, mine), (peer, theirs)])
        both = ", ".join(f"rank {self.named(rank)}: {call}" for rank, call in calls)
        return f"the ranks made different calls: {both}; {REMEDY}"

    def _column(self, rank: int) -> list[int]:
        return self._words[rank :: self.ranks].tolist()

    def _word(self, own: int, rank: int) -> int:
        """A rank's word in the slot of another word."""
        return self._words[(own >> NUMBER) % SLOTS * self.ranks + rank]

    def _before(self, own: int, rank: int) -> int:
        """A rank's word in the slot before."""
        return self._word(own - (1 << NUMBER), rank)

    def _call(self, own: int, rank: int) -> str:
        """The text of the call that a rank has in the slot of a word."""
        before, word = self._before(own, rank), self._word(own, rank)
        digest = (word + before) & MASK
        first = self._texts_of(rank)
        for at in range(first, first + TEXTS * TEXT_BYTES, TEXT_BYTES):
            if self.memory.buffer[at : at + 4] == digest.to_bytes(4, "little"):
                return self._text(at + 4, TEXT_BYTES - 4)
        return "a call whose text is no longer kept"

    def _texts_of(self, rank: int) -> int:
        return self._texts + rank * (TEXTS * TEXT_BYTES + REASON_BYTES)

    def _text(self, at: int, nbytes: int) -> str:
        return self.memory.buffer[at : at + nbytes].rstrip(b"\0").decode(errors="ignore")

    def named(self, rank: int) -> str:
        """A rank of the group, with its rank in the world if that is another one."""
        whole = self.global_ranks[rank]
        return str(rank) if whole == rank else f"{rank} (global rank {whole})"


LAST = "the group cannot go on: restart from the last checkpoint"
REMEDY = "every rank must make the same ones, in the same order, with equal shapes and dtypes"


def distance(word: int, other: int) -> int:
    """How many calls a word's number is ahead of another's; the numbers wrap."""
    return ((word >> NUMBER) - (other >> NUMBER) + 2**29) % 2**30 - 2**29


def text_of(key: Hashable) -> str:
    """A call in words: "all_gather of (2, 4) float32, ...". Keys with equal texts are equal calls."""
    operation, *rest = key if isinstance(key, tuple) else (key,)
    if not rest:
        return str(operation)
    shape, dtype, *more = rest
    what = f"{operation} of {tuple(shape)} {str(dtype).removeprefix('torch.')}"
    return ", ".join([what, *map(str, filter(None, more))])
