"""What a transport's GEMMs multiply: here matrices as they are. How the ranks talk does not depend on it.

Belongs here: Products, whose methods transports call. Those of blocks of e4m3 are in quantized.py.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.finish import Dropout, Norm
from tpformer.kernels.norm.reference import Statistics
from tpformer.kernels.pack.format import Packed
from tpformer.kernels.quantize.format import Blocks

from ..implementation import implementation

Factor: TypeAlias = Tensor | Blocks  # a matrix of rows as GEMMs take it
Kept: TypeAlias = Tensor | Packed  # what a forward has kept


class Products:
    """GEMMs of matrices as they are, of any dtype and device. A factor is the matrix itself.

    Letters: rows (M, K), a weight (N, K); E experts' matrices (E, N, K), whose R dispatched rows lie by expert.
    """

    name = "plain"
    in_blocks = False
    """Whether they multiply blocks of e4m3. Norms and activations then write their results as blocks, which `factor`
    and `sent` take as they take rows."""

    def factor(self, x: Any) -> Any:
        """Rows x (M, K) as GEMMs take them: x itself, or its blocks. A weight gradient is made of factors, too."""
        return x

    def activated(self, x: Tensor, activation: str | None, gate: Tensor | None) -> Any:
        """The factor of act(x), or of act(gate) * x."""
        forward = implementation("activation", x).activation_forward
        return self.factor(forward(x, activation, gate, blocks=self.in_blocks))

    def derivative(
        self, da: Tensor, x: Kept, activation: str | None, gate: Kept | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """The backward of `activated`: (dx, dgate, the factor that it gave, made again). dx may take da's memory."""
        return implementation("activation", x).activation_backward(da, x, activation, gate)

    def norm_gradients(
        self, dy: Tensor, x: Kept, statistics: Statistics, norm: Norm, dresidual: Tensor | None, private: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """norm_backward of kernels/norm: (dx, dweight or None, dbias or None). private: nobody sees dx but the row
        linear that made x, and takes dx as it is."""
        return implementation("norm", x).norm_backward(dy, x, statistics, norm, dresidual)

    def show(self, *gradients: Tensor | None) -> None:
        """Gradients that `derivative` gave go where others may see them, and write them."""

    def finish_gradient(self, dy: Tensor, dropout: Dropout | None, bias: bool) -> tuple[Factor, Tensor | None]:
        """finish_backward of kernels/dropout: (what gathers and `factor` take, for nobody else, dbias or None)."""
        return implementation("dropout", dy).finish_backward(dy, dropout, bias)

    def sent(self, x: Any) -> Tensor:
        """Rows x (M, K) as they travel: a row of the result for each row."""
        return x

    def received(self, rows: Tensor) -> Factor:
        """The factor of rows that `sent` made, of any ranks."""
        return rows

    def right(self, weight: Tensor, transposed: bool) -> Any:
        """What `product` multiplies rows by: W^T of a weight (N, K) if transposed, else W. Made once for all rows."""
        return weight.t() if transposed else weight

    def product(self, x: Any, right: Any, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x right + added, written to `out` if it is given. added: a bias, or `out` itself, which is added to."""
        if out is None:  # which torch would take, but more slowly
            return torch.mm(x, right) if added is None else torch.addmm(added, x, right)
        return torch.mm(x, right, out=out) if added is None else torch.addmm(added, x, right, out=out)

    def linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`product` of rows and a whole weight's W^T, in a call instead of three."""
        return F.linear(x, weight, bias)

    def matrix(self, factor: Any, dtype: torch.dtype) -> Tensor:
        """The rows (M, K) that a factor stands for, in the dtype of those that it is of. Weight gradients are products
        of such rows: a factor of several is made a matrix once."""
        return factor

    def expert_right(self, weights: Tensor, transposed: bool) -> Any:
        """What `expert_product` multiplies rows by: each expert's W^T, or its W if transposed."""
        return weights, transposed

    def expert_product(self, x: Any, right: Any, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        """Each of R rows times the matrix of its expert: grouped_matmul of kernels/grouped_matmul."""
        weights, transposed = right
        grouped = implementation("grouped_matmul", x).grouped_matmul
        return grouped(x, weights, offsets, index, transposed=transposed)


PLAIN = Products()


def tensors_of(factor: Factor) -> tuple[Tensor, ...]:
    """The tensors of a factor."""
    return (factor,) if isinstance(factor, Tensor) else tuple(factor)


def held(*factors: Factor | None) -> list[Tensor]:
    """The tensors of some factors, which a queue keeps."""
    return [part for factor in factors if factor is not None for part in tensors_of(factor)]


def rows_of(factor: Factor, rows: slice | Tensor) -> Factor:
    """Some rows of a factor."""
    if isinstance(factor, Tensor):
        return factor[rows]
    values, exponents = factor
    return Blocks(values.view(torch.uint8)[rows].view(values.dtype), exponents[:, rows].contiguous())
