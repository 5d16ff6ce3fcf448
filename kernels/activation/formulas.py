"""The activations and their derivatives on the device, one element at a time, in float32.

Belongs here: what element-wise kernels and the epilogues of GEMMs share. Formulas are those of reference.py.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """tl.sigmoid without the three instructions by which its exponential handles results below 2**-126."""
    result, _ = sigmoid_and_rest(x)
    return result


@triton.jit
def sigmoid_and_rest(x):
    """sigmoid(x), and 1 - sigmoid(x) without cancellation."""
    exponential = tl.exp2(x * -1.4426950408889634)  # infinite only where x < 0
    result = 1.0 / (1.0 + exponential)
    return result, tl.where(x < 0.0, 1.0 - result, exponential * result)


@triton.jit
def normal_tail(x):
    """Phi(-|x|) of the normal distribution, and exp(-x**2 / 2), in float32.

    Their quotient is a polynomial in s = |x| / (|x| + 5). Its constant is 1/2, its other coefficients are a weighted
    least-squares fit; with it x * Phi(x) is off by at most 2.2e-9 before rounding. In float32 this is as accurate as
    (1 + erf(-|x| / sqrt 2)) / 2, and more accurate where that cancels. It takes fewer instructions: with erf's an
    element-wise kernel would be bound by them, not by memory.
    """
    magnitude = tl.abs(x)
    s = magnitude / (magnitude + 5.0)
    bell = tl.exp2(x * (x * -0.7213475204444817))
    tail = 1.0971336 * s - 3.6620913
    tail = tail * s + 5.9603216
    tail = tail * s - 6.1181078
    tail = tail * s + 4.2553165
    tail = tail * s - 1.9947117
    tail = (tail * s + 0.5) * bell
    return tail, bell


@triton.jit
def activate(x, KIND: tl.constexpr):
    """gelu (erf), gelu_tanh, silu, relu2 or "" (none), in float32; formulas in activation/reference.py."""
    if KIND == "gelu":
        tail, _ = normal_tail(x)
        x = tl.maximum(x, 0.0) - tl.abs(x) * tail
    elif KIND == "gelu_tanh":
        x = x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
    elif KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays one, unlike with tl.maximum
        x = positive * positive
    return x


@triton.jit
def differentiate(x, KIND: tl.constexpr):
    """The activation and its derivative at x, in float32."""
    if KIND == "gelu":
        tail, bell = normal_tail(x)
        cumulative = tl.where(x < 0.0, tail, 1.0 - tail)
        value = x * cumulative
        slope = cumulative + x * 0.3989422804014327 * bell
    elif KIND == "gelu_tanh":
        weight, rest = sigmoid_and_rest(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
        value = x * weight
        slope = weight + value * rest * (1.5957691216057308 + 0.21406444881780076 * (x * x))
    elif KIND == "silu":
        weight, rest = sigmoid_and_rest(x)
        value = x * weight
        slope = weight + value * rest
    elif KIND == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    else:
        value = x
        slope = x * 0.0 + 1.0
    return value, slope
