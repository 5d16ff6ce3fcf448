"""What becomes of a parameter when it is cut: the module gets a DTensor, and others may still hold the old one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tpformer.torch_private import tree_leaves

# functions of torch that look at a tensor and not at its values
ASKED = frozenset(
    "__get__ __set__ __repr__ __hash__ __format__ __deepcopy__ __reduce_ex__ size dim numel stride detach "
    "is_contiguous is_floating_point is_complex data_ptr untyped_storage storage_offset element_size".split()
)
REPLACED_BY = "_replaced_by"  # on a parameter: the DTensor that has taken its place, for modules that are tied


class Replaced(nn.Parameter):
    """What a parameter is when a DTensor has taken its place: it never gets a gradient, and says so when it is asked.

    An optimizer that was made before, a list of parameters to clip, or a forward that keeps parameters in a list, a
    dict or a closure would go on without a word.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """ValueError for what computes with it, and for its gradient; what it is may be asked."""
        asked = getattr(function, "__name__", "")
        if function == Tensor.grad.__get__ or asked not in ASKED:
            shape = next(tuple(each.size()) for each in tree_leaves((args, kwargs)) if isinstance(each, Replaced))
            raise ValueError(
                f"the model no longer has this parameter of {shape}, because it has been cut over ranks: make "
                f"optimizers, and lists of parameters, after parallelize, and let the forward read it from its module"
            )
        return super().__torch_function__(function, types, args, kwargs or {})
