"""Executes the PTX that Triton compiles for sm_80 on a CPU, and finds races in it.

Launchers run unchanged, inside `session.Execution`. Tests show it for every kernel in three dtypes, with tensor-core
products and asynchronous copies into shared memory, alone and in groups, with copies by copy engines, and for a
transformer block. An opcode that is not known is an error.
Accesses beyond a storage, misaligned ones, reads of shared memory that nothing has written and accesses that no
barrier, release and acquire order are found, and named with the Python lines of both sides.

What it does not execute: TMA, wgmma and other code of sm_90 and later, branches on which the lanes of a warp disagree,
what ptxas makes of the PTX, and paths that no launch takes.
"""
