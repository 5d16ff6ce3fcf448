"""Newton-Schulz orthogonalisation, Muon's step: the specification (torch only), its coefficients, and the cost.

Letters: a matrix of m x n, m <= n once it lies down; N iterations.
"""

import torch
from torch import Tensor

from ..cost import Cost
from ..operands import FLOATS, require, unknown

Coefficients = tuple[tuple[float, float, float], ...]

# Keller Jordan's, which torch.optim.Muon, Moonlight and Megatron-LM have: singular values end in 0.68 ... 1.13.
_QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
# arXiv:2505.16932, whose iterations differ, with a safety factor of 1.02; nanochat and modded-nanogpt have them.
_POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
COEFFICIENTS = {"quintic": _QUINTIC, "polar_express": _POLAR_EXPRESS}
SCALES = ("rms", "spectral")
EPS = 1e-7  # torch's: a norm below it counts as it, so that a matrix of zeros stays one


@torch.no_grad()
def newton_schulz(x: Tensor, coefficients: Coefficients = _QUINTIC) -> Tensor:
    """The matrix with x's singular vectors and singular values near 1: about U V^T of x = U S V^T.

    Math:     x / |x|; then of each (a, b, c): A = x x^T; x = a x + (b A + c A A) x, of the matrix that lies down
    Shapes:   x and the result (rows, columns), of a floating dtype; both may be transposed views
    Numerics: all in x's dtype. Singular values of x below about 1e-3 |x| stay below 1. Zeros stay zeros
    Traffic:  see newton_schulz_cost
    Source:   Jordan et al. 2024 (kellerjordan.github.io/posts/muon), as torch.optim.Muon, which always computes in
              bfloat16
    """
    require("newton_schulz", x, ("x", x, x.shape[:1] + x.shape[-1:], FLOATS))
    stands = x.shape[0] > x.shape[1]
    x = x.mT if stands else x
    x = x / torch.linalg.vector_norm(x).clamp(min=EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if stands else x


def newton_schulz_cost(rows: int, columns: int, itemsize: int, iterations: int = 5) -> Cost:
    """Each iteration has two products of m x m x n and one of m x m x m. Each reads its operands and writes its result
    once, and the two sums read what they add to."""
    m, n = sorted((rows, columns))
    flops = iterations * (4 * m * m * n + 2 * m**3)
    elements = iterations * (4 * m * n + 5 * m * m) + 2 * m * n
    return Cost(flops, elements * itemsize)


def muon_scale(rows: int, columns: int, scale: str = "rms") -> float:
    """What an orthogonalised matrix is multiplied by, besides the learning rate, by its whole shape.

    rms: 0.2 sqrt(max(rows, columns)), so that its elements are about as large as those of a step of AdamW, and one
    learning rate serves both (Moonlight, arXiv:2502.16982). spectral: sqrt(max(1, rows / columns)) (Jordan).
    """
    if scale == "rms":
        return 0.2 * max(rows, columns) ** 0.5
    if scale == "spectral":
        return max(1.0, rows / columns) ** 0.5
    raise unknown("scale", scale, SCALES)
