"""Triton's own launcher and TMA encoder, with a driver that has no GPU.

Triton compiles a kernel, packs its arguments and encodes its tensor maps as it does on a GPU. The driver, libcuda.c,
refuses what a driver would refuse, and notes the rest. No kernel runs.
"""
