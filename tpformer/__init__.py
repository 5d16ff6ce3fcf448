"""tpformer: tensor-parallel transformer training on plain PyTorch and Triton.

Import from the subpackages: `tpformer.layers` (drop-in modules), `tpformer.models` (GPT), `tpformer.ops`
(differentiable operations). Importing any of them needs neither a GPU nor triton.
"""

__version__ = "0.1.0"
