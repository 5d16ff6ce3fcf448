"""`python -m bench.compile`: every kernel compiles for GPUs that are not there, and what comes out is asserted on."""
