"""The flops and bytes of each kernel by hand, for small sizes."""

from importlib import import_module

import pytest

pytest.importorskip("triton")

# (kernel, arguments and options of its cost, flops and bytes)
CASES: list[tuple[str, tuple, dict, tuple[int, int]]] = [
    # operands * m * f * itemsize with operands 2, 6 (x, gate, da, dx, dgate, a), 3 and 4 (x, da, dx, a)
    ("activation", (2, 3, 4), {}, (60, 48)),
    ("activation", (2, 3, 4, True, True), {}, (288, 144)),
    ("activation", (5, 7, 2, True, False), {}, (700, 210)),
    ("activation", (5, 7, 2, False, True), {}, (840, 280)),
    # gate, up and the result, 3 R F itemsize; backward da, gate, up, two gradients and the result, 6 R F itemsize; a
    # weight of 4 bytes for each row, in the backward a gradient, too
    ("weighted_activation", (2, 3, 4), {}, (126, 80)),
    ("weighted_activation", (5, 7, 2, True), {}, (1820, 460)),
    # a sum for each element of a row; rows in, sums out, 4 bytes for each position
    ("combine", (6, 3, 2, 5, 4), {}, (30, 204)),
    # the logits once (twice backward), three float32 a token
    ("cross_entropy", (2, 5, 4), {}, (50, 64)),
    ("cross_entropy", (2, 5, 4, True), {}, (40, 104)),
    # x is read, y is written, and every row has 8 bytes of start
    ("dropout", (2, 3, 4), {}, (6, 64)),
    # x, residual, z; bias; starts. Then dz, dx; dbias; starts
    ("finish", (2, 3, 4), {"bias": True, "dropout": True, "residual": True}, (18, 3 * 24 + 12 + 16)),
    ("finish", (2, 3, 4), {"residual": True}, (6, 3 * 24)),
    ("finish", (2, 3, 4), {"bias": True, "dropout": True, "backward": True}, (12, 2 * 24 + 12 + 16)),
    ("finish", (2, 3, 4), {"bias": True, "residual": True, "backward": True}, (6, 24 + 12)),
    # rows 2*8*4 = 64 bytes, statistics 4*2*2 = 16, weights 2*4*4 = 32, flops 7*8
    ("norm", (2, 4, 4), {}, (56, 112)),
    ("norm", (3, 10, 2, "rmsnorm"), {}, (120, 172)),  # 2*30*2 + 4*3 + 2*10*2
    ("norm", (3, 10, 2, "layernorm", True), {}, (330, 244)),  # 3*30*2 + 8*3 + 2*10*2
    ("norm", (3, 10, 2, "layernorm", True), {"residual": True}, (360, 304)),  # dresidual: 30*2 more
    # x, residual, z, y: 4*8*4, statistics 16, weight, bias and the linear's bias 3*4*4, starts 8*2
    ("norm", (2, 4, 4), {"bias": True, "dropout": True, "residual": True}, (80, 208)),
    ("norm", (3, 10, 2, "rmsnorm"), {"bias": True}, (150, 252)),  # x, z, y: 3*30*2, 4*3, 3*10*2
    # in blocks: x is read, 3 x 2 bytes of exponents and one a value are written; two flops a value more
    ("norm", (3, 256, 2, "rmsnorm"), {"blocks": True}, (6 * 768, 2 * 768 + 768 + 6 + 12 + 2 * 512)),
    ("norm", (3, 256, 2, "rmsnorm", True), {"residual": True, "blocks": True},
        (12 * 768, 2 * 4 * 768 + 768 + 6 + 12 + 2 * 512)),
    ("activation", (3, 256, 2), {"gated": True, "blocks": True}, (22 * 768, 2 * 2 * 768 + 768 + 6)),
    ("activation", (3, 256, 2, True, True), {"blocks": True}, (54 * 768, 2 * 5 * 768 + 3 * (768 + 6))),
    # dz is read, and 8 bytes of each row; blocks are in the place of dx, and beside what a bias is summed of
    ("finish", (3, 256, 2), {"bias": True, "dropout": True, "backward": True, "blocks": True},
        (4 * 768, 2 * 768 + 2 * 256 + 8 * 3 + 768 + 6)),
    ("finish", (3, 256, 2), {"bias": True, "backward": True, "blocks": True}, (3 * 768, 2 * 768 + 2 * 256 + 768 + 6)),
    # x, a byte a value, one for each of 3 x 2 blocks; then two copies of 2 x 1 blocks of 128 x 128
    ("quantize", (3, 256, 2), {}, (2 * 768, 3 * 768 + 6)),
    ("quantize", (256, 128, 4, 128, 2), {}, (2 * 32768, 6 * 32768 + 4)),
    ("quantized_matmul", (3, 128, 256, 2), {}, (6 * 32768, 3 * 256 + 32768 + 6 + 2 + 768)),
    ("quantized_grouped_matmul", (3, 128, 256, 2, 4), {}, (6 * 32768, 3 * 256 + 2 * 32768 + 6 + 4 + 3 * 128 * 4)),
    # 3 flops an element; q and k in and out, and 8 bytes of position and cos + sin of d / 2 float32 a token
    ("rope", (2, 3, 1, 4, 2), {}, (96, 176)),
    # 5 flops a score, and in the forward one for each expert chosen; logits and scores 4 bytes each (backward: scores
    # and dlogits), 8 bytes for each expert of a token
    ("route", (3, 8, 2), {}, (168, 240)),
    ("route", (3, 8, 2, True), {}, (120, 240)),
    # master and moments in and out, 4 bytes each; the gradient, and the copy
    ("update", (10, 2, 2), {}, (160, 10 * (2 + 24 + 2))),
    ("update", (10, 4), {"optimizer": "sgd"}, (70, 10 * (4 + 16))),
    ("update", (10, 2, 2), {"optimizer": "plain sgd"}, (50, 10 * (2 + 8 + 2))),
    ("matmul", (3, 5, 7, 2), {}, (210, 2 * (21 + 35 + 15))),
    ("grouped_matmul", (12, 5, 7, 3, 2), {}, (2 * 12 * 5 * 7, 2 * (12 * (5 + 7) + 3 * 5 * 7))),
    # the shards that arrive, and the tokens of 4 ranks
    ("all_gather_matmul", (8, 3, 5, 4, 2), {}, (240, 2 * (40 + 15 + 24 + 30))),
    ("all_gather_grouped_matmul", (6, 3, 5), {"groups": 2, "tokens": 8, "world": 4, "itemsize": 2},
     (180, 2 * (6 * 8 + 4 * 2 * 15 + 30))),
    # 8 rows of 2 blocks, 128 columns, of 4 ranks: 6 rows arrive
    ("all_gather_quantized_matmul", (8, 128, 256, 4, 2), {},
     (2 * 8 * 32768, 8 * 258 + 32768 + 2 + 2 * 8 * 128 + 6 * 258)),
    # 6 rows of 2 blocks, of 2 groups; of 8 tokens 6 arrive
    ("all_gather_quantized_grouped_matmul", (6, 128, 256), {"groups": 2, "tokens": 8, "world": 4, "itemsize": 2},
     (2 * 6 * 32768, 6 * 258 + 6 * 128 * 2 + 4 * 2 * (32768 + 2) + 6 * 258)),
    # partial sums once out and once in; then one shot, and two
    ("matmul_reduce_scatter", (8, 3, 5, 4, 2), {}, (240 + 24, 2 * (40 + 15 + 6) + 4 * 24)),
    ("matmul_all_reduce", (8, 3, 5, 4, 2), {"one_shot": True}, (240 + 24, 2 * (40 + 15 + 24 + 192))),
    ("matmul_all_reduce", (8, 3, 5, 4, 2), {"one_shot": False}, (240 + 24, 2 * (40 + 15 + 24 + 96))),
    # of blocks: 8 rows and a weight of 2 blocks along K, then as above
    ("quantized_matmul_reduce_scatter", (8, 128, 256, 4), {},
     (2 * 8 * 32768 + 1024, 8 * 258 + 32768 + 2 + 2 * (256 + 2 * 1024))),
    ("quantized_matmul_all_reduce", (8, 128, 256, 4, 2), {"one_shot": True},
     (2 * 8 * 32768 + 1024, 8 * 258 + 32768 + 2 + 2 * (1024 + 8 * 1024))),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments, options, expected", CASES)
def test_costs_are_those_by_hand(name: str, arguments: tuple, options: dict, expected: tuple[int, int]) -> None:
    of_blocks = (
        "quantized_matmul_reduce_scatter",
        "quantized_matmul_all_reduce",
        "all_gather_quantized_grouped_matmul",
    )
    folder = name.replace("quantized_", "") if name in of_blocks else "dropout" if name == "finish" else name
    module = import_module(f"tpformer.kernels.{folder}.reference")
    assert getattr(module, f"{name}_cost")(*arguments, **options) == expected
