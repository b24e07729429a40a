"""Compile the kernels of exact arithmetic on GPUs for a Hopper GPU, which need not be there, and print a line of JSON for each.

Of products: their tensor cores' instructions. Of attention: the layouts of scores and sums, which a query's order of additions follows
from; ``form`` is ``chunks`` (and packed sequences) or ``singles``.
"""

import json
import re
from typing import Any

from compile_kernels import build
from compile_triton import compile_kernel, describe

from rlhf_spmd.kernels import triton_paged_attention
from rlhf_spmd.kernels import triton_products as products
from rlhf_spmd.kernels.triton_paged_attention import SPLIT_KEYS, TileShape

HEADS = ((2, 128, 0), (6, 80, 700), (8, 256, 700), (20, 128, 0))  # query heads of a KV head, head_dim, window


def product(tile: products.ProductTile, dtype: str, out: str, whole: bool) -> dict[str, Any]:
    kernel, names = products._product, products._product.arg_names
    sizes = {"BIAS": not whole, "WHOLE": whole, "GROUP": products.GROUP_ROWS}
    sizes |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
    pointers = dict.fromkeys(("x", "weight", "bias"), f"*{dtype}") | {"out": f"*{out}"}
    types = dict.fromkeys(names, "i32") | pointers
    made = build(kernel, types, set(names) - {"rows"}, tile.options, **sizes)
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)\.(\S+)", made.asm["ptx"])
    return {**describe("product", made), "dtype": dtype, "tile": tile[:2], "products": sorted(set(map(".".join, found)))}


def attention(form: str, dtype: str, group: int, dim: int, window: int) -> dict[str, Any]:
    itemsize = 4 if dtype == "fp32" else 2
    of = TileShape.of_invariant_chunks if form == "chunks" else TileShape.of_singles
    shape = of(dim, itemsize, 64, group)
    sizes = {"GROUP": group, "PAGE": 64, "DIM": dim, "TAIL": 0, "WINDOW": window, "CAPPED": window > 0, "SINKS": False}
    sizes |= {"SPLIT": SPLIT_KEYS}
    sizes |= {"LOGS": True} if form == "chunks" else {"TILED": False, "PARTS": True}
    sizes |= {"BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "BLOCK_D": shape.elements}
    made = compile_kernel(getattr(triton_paged_attention, f"attend_{form}"), dtype, shape.options, **sizes)
    layouts = sorted(set(re.findall(r"nvidia_mma<\{[^}]*\}>", made.asm["ttgir"])))
    shown = {"form": form, "dtype": dtype, "heads": (group, dim, window), "rows": shape.rows, "layouts": layouts}
    return {**describe("attention", made), **shown}


if __name__ == "__main__":
    for tile in products.HALF_TILES:
        print(json.dumps(product(tile, "bf16", "bf16", whole=True)))
    print(json.dumps(product(products.HALF_TILES[0], "bf16", "fp32", whole=False)))
    for tile in products.WIDE_TILES:
        print(json.dumps(product(tile, "fp32", "fp32", whole=True)))
    for heads in HEADS:
        for form in ("chunks", "singles"):
            print(json.dumps(attention(form, "bf16", *heads)))
    for form in ("chunks", "singles"):
        print(json.dumps(attention(form, "fp32", 2, 128, 0)))
