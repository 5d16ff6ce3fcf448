/* The flag, epoch and parity protocol by which the fused kernels exchange data inside a tensor-parallel group.
 *
 * Every rank pushes payload into slot[parity][source] of every other rank, publishes a flag there, waits for the
 * others' flags and reads its slots, for EPOCHS operations one after another. Checked in every interleaving: a value
 * read is the one of this epoch from that source (the assertions), and all ranks finish (no invalid end state).
 *
 * -DRANKS and -DEPOCHS are given. What stands for what; "point" is one of DESIGN section 5, "Protocol of the in-kernel
 * communication":
 *   epoch, ARRIVED        point 1: monotonic, never reset, compared by `flag - epoch >= 0`. Integers of 3 bits instead
 *                         of 32; FIRST makes the epoch pass from 3 to -4 during the run. The epoch is bumped between
 *                         kernels, when no warp of the rank runs.
 *   lead, other           two warps of one CTA. Both store one word per destination; lead stores the flags (point 2).
 *   payload, publication  the store buffer of the CTA: stores issued, not yet performed. `memory` performs them at any
 *                         later time and in any order, but for the order that a release makes.
 *   synced, ORDERED       point 2: a release waits for the words of its own warp and, by cumulativity, for those that
 *                         the other warp stored before `tl.debug_barrier()`. Weaker than PTX, which orders the words to
 *                         all destinations: here a flag waits only for those to its own destination.
 *   ANNOUNCED, fenced     `announce` in place of `publish`: the flags are relaxed, and wait for these words because lead
 *                         has executed a fence between its barrier and the flags.
 *   cta                   a barrier of the CTA: a rendezvous, lead sends and other receives.
 *   wait, then read       point 3: lead spins with acquire, one wait per source in ring order; the barrier inside the
 *                         scalar atomic hands its value to the other warp. Loads stay behind the wait, except
 *                         in MUTATE_HOISTED_WAIT.
 *   PARITY, end of kernel point 5: two slots, every rank waited for, the same order of operations, one stream: a kernel
 *                         starts after all warps of the one before have ended and its stores are performed.
 *
 *   RAISED                on rank 0 one operation raises between the bump and its kernel. The rank begins none after it, so
 *                         its peers wait for ever (in the kernels, until their waits expire): a valid end here.
 *
 * Not modelled: several CTAs and role bands, residency (point 7), several tiles per source, TMA and its proxy fence
 * (point 4), copy engines (point 6), waits that expire (point 8), the second workspace (shares nothing with the first).
 */
#define FIRST 2 /* flags and epoch before the first operation, as if many had gone before */
#define UNWRITTEN 255
#define LEAD 0
#define OTHER 1

#define BIT(dst) (1 << (dst))
#define PEERS(r) (((1 << RANKS) - 1) & ~BIT(r))
#define WARP(r, warp) ((r) * 2 + (warp))
#define FLAG(dst, src) ((dst) * RANKS + (src))
#define SLOT(dst, parity, src, warp) ((((dst) * 2 + (parity)) * RANKS + (src)) * 2 + (warp))
#define VALUE(src, e) ((src) * 8 + (e)) /* tells the source and, among the few epochs run, the epoch */
#define INT3(x) ((((x) & 7) ^ 4) - 4)   /* the 3-bit two's complement integer of the low bits of x */

#ifdef MUTATE_SLOT_ZERO
#define PARITY(e) 0
#else
#define PARITY(e) ((e) & 1)
#endif

#if defined(MUTATE_STALE_WAIT)
#define ARRIVED(flag, e) (INT3((flag) - (e)) >= -1)
#elif defined(MUTATE_SIGNED_COMPARE)
#define ARRIVED(flag, e) (INT3(flag) >= INT3(e))
#else
#define ARRIVED(flag, e) (INT3((flag) - (e)) >= 0)
#endif

#define ORDERED(src, dst) \
    (((payload[WARP(src, LEAD)] | (synced[src] -> payload[WARP(src, OTHER)] : 0)) & BIT(dst)) == 0)
#if defined(MUTATE_NO_RELEASE)
#define RELEASABLE(src, dst) true
#elif defined(MUTATE_ONE_RELEASE)
#define RELEASABLE(src, dst) ((dst) != ((src) + 1) % RANKS || ORDERED(src, dst))
#elif defined(ANNOUNCED)
#define RELEASABLE(src, dst) (!fenced[src] || ORDERED(src, dst))
#else
#define RELEASABLE(src, dst) ORDERED(src, dst)
#endif

#define rank (_pid % RANKS) /* processes are numbered in order of declaration: leads, others, memory */

byte epoch[RANKS] = FIRST;
byte flag[RANKS * RANKS] = FIRST;
byte slot[RANKS * 2 * RANKS * 2] = UNWRITTEN;
byte payload[RANKS * 2];  /* per warp: destinations whose word is buffered; its value follows from the epoch */
byte publication[RANKS];  /* destinations whose flag is buffered */
bit synced[RANKS];        /* the words of the other warp are ordered before the release */
bit fenced[RANKS];        /* ANNOUNCED: the words are ordered before the flags */
bit raised;               /* RAISED: it has */
chan cta[RANKS] = [0] of { bit };

/* One step for both words of a source: each is then checked at every moment at which it could be loaded. */
inline read(src) {
    d_step {
        assert(slot[SLOT(rank, PARITY(epoch[rank]), src, LEAD)] == VALUE(src, epoch[rank]));
        assert(slot[SLOT(rank, PARITY(epoch[rank]), src, OTHER)] == VALUE(src, epoch[rank]))
    }
}

#ifdef MUTATE_HOISTED_WAIT
#define RECEIVE(wait) read(src); wait
#else
#define RECEIVE(wait) wait; read(src)
#endif

#ifdef RAISED
#define EXPIRES end_wait: /* whoever waits here may wait for ever */
#else
#define EXPIRES
#endif

/* Stores to all destinations are issued in one step: until it is performed nobody can tell when a store was issued. */
active [RANKS] proctype lead() {
    byte src, count;
#ifdef MUTATE_GOES_ON
next:
#endif
    do
    :: count < EPOCHS ->
#ifdef RAISED
        if
        :: rank == 0 && !raised ->
            atomic {
                raised = 1;
                count++;
                epoch[rank] = (epoch[rank] + 1) & 7
            }
#ifdef MUTATE_GOES_ON
            goto next
#else
            break
#endif
        :: true
        fi;
#endif
        atomic {
            count++;
            epoch[rank] = (epoch[rank] + 1) & 7;
            synced[rank] = 0;
            fenced[rank] = 0;
            payload[WARP(rank, LEAD)] = PEERS(rank)
        }
        cta[rank]!0; /* launch */
#ifndef MUTATE_NO_BARRIER
        cta[rank]!0; /* tl.debug_barrier() */
#endif
        atomic {
#if defined(ANNOUNCED) && !defined(MUTATE_NO_FENCE)
            fenced[rank] = 1;
#endif
            publication[rank] = PEERS(rank);
            src = (rank + 1) % RANKS
        }
        do
        :: src != rank ->
            RECEIVE(EXPIRES ARRIVED(flag[FLAG(rank, src)], epoch[rank]); cta[rank]!0);
            src = (src + 1) % RANKS
        :: else -> break
        od;
        cta[rank]!0; /* end of kernel */
        payload[WARP(rank, LEAD)] == 0 && payload[WARP(rank, OTHER)] == 0 && publication[rank] == 0
    :: else -> break
    od
}

active [RANKS] proctype other() {
    byte src, count;
    do
    :: count < EPOCHS ->
#ifdef RAISED
end_launch:
#endif
        atomic {
            cta[rank]?_;
            count++;
            payload[WARP(rank, OTHER)] = PEERS(rank)
        }
#ifndef MUTATE_NO_BARRIER
        atomic { cta[rank]?_; synced[rank] = 1 }
#endif
        src = (rank + 1) % RANKS;
        do
        :: src != rank ->
            RECEIVE(EXPIRES cta[rank]?_);
            src = (src + 1) % RANKS
        :: else -> break
        od;
        cta[rank]?_
    :: else -> break
    od
}

#define PERFORM_WORD(src, dst, warp) \
    atomic { \
        (payload[WARP(src, warp)] & BIT(dst)) != 0 -> \
        payload[WARP(src, warp)] = payload[WARP(src, warp)] & ~BIT(dst); \
        slot[SLOT(dst, PARITY(epoch[src]), src, warp)] = VALUE(src, epoch[src]) \
    }
#define PERFORM_FLAG(src, dst) \
    atomic { \
        (publication[src] & BIT(dst)) != 0 && RELEASABLE(src, dst) -> \
        publication[src] = publication[src] & ~BIT(dst); \
        flag[FLAG(dst, src)] = epoch[src] \
    }
#define LINK(src, dst) \
    :: PERFORM_WORD(src, dst, LEAD) \
    :: PERFORM_WORD(src, dst, OTHER) \
    :: PERFORM_FLAG(src, dst)

active proctype memory() {
end: /* idle memory is a valid end */
    do
    LINK(0, 1)
    LINK(1, 0)
#if RANKS == 3
    LINK(0, 2)
    LINK(2, 0)
    LINK(1, 2)
    LINK(2, 1)
#endif
    od
}
