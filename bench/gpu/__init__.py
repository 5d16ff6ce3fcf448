"""One GPU for a limited time: what is measured on it, in which order, and what is known at the end (docs/gpu.md).

items.py lists what there is to measure; schedule.py runs it, one subprocess at a time; state.py keeps what came of it;
table.py shows it.
"""
