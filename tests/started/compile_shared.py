"""Compile the kernels that need most shared memory for GPUs of a compute capability, which need not be there, and print a line of JSON
for each: its name and bytes of shared memory. Arguments: the capability, as 89, and the bytes that a program may have there."""

import json
import sys

import compile_kernels
from compile_triton import compile_kernel
from triton.backends.compiler import GPUTarget

from rlhf_spmd.kernels import devices, triton_paged_attention, triton_products
from rlhf_spmd.kernels.triton_latent import latent_tile
from rlhf_spmd.kernels.triton_paged_attention import SPLIT_KEYS, TileShape


def attention(form: str, dtype: str, dim: int, page: int, shape: TileShape, group: int = 8, tail: int = 0) -> None:
    sizes = {
        "GROUP": group,
        "PAGE": page,
        "DIM": dim,
        "TAIL": tail,
        "WINDOW": 0,
        "CAPPED": False,
        "SINKS": False,
        "SPLIT": SPLIT_KEYS,
    }
    sizes |= {"LOGS": False} if form == "chunks" else {"TILED": False, "PARTS": True}
    sizes |= {"BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "BLOCK_D": shape.elements}
    made = compile_kernel(getattr(triton_paged_attention, f"attend_{form}"), dtype, shape.options, **sizes)
    print(json.dumps({"name": f"{form} {dtype} {dim} {page} {[*shape]}", "shared": made.metadata.shared}), flush=True)


def product(tile: triton_products.ProductTile) -> None:
    sizes = {"BIAS": False, "WHOLE": True, "GROUP": triton_products.GROUP_ROWS}
    sizes |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
    names = triton_products._product.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    made = compile_kernels.build(triton_products._product, types, set(names) - {"rows"}, tile.options, **sizes)
    print(json.dumps({"name": f"product {[*tile]}", "shared": made.metadata.shared}), flush=True)


if __name__ == "__main__":
    capability, room = map(int, sys.argv[1:])
    compile_kernels.TARGET = GPUTarget("cuda", capability, 32)
    devices.shared_memory = lambda: room
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        for dim in (128, 256, 512):
            for page in (64, 16) if itemsize == 2 else (64,):
                attention("chunks", dtype, dim, page, TileShape.of_chunks(dim, itemsize, page, 8))
            attention("singles", dtype, dim, 64, TileShape.of_singles(dim, itemsize, 64, 8))
        for form in ("chunks", "singles"):
            attention(form, dtype, 512, 64, latent_tile(512, itemsize, 64, form == "chunks"), 128, 64)
    for tile in {triton_products.choose_tile(1 << 14, columns, 2): None for columns in (1 << 14, 256)}:
        product(tile)
