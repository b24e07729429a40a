"""Compile the Triton attention for a Hopper GPU, which need not be there, and print the PTX of its kernels. Argument: fp32 or bf16."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.generation import triton_attention as ours

TYPES = {
    "tiles": "*i32",
    "table": "*i32",
    "slots": "*i64",
    "parts": "*fp32",
    "scale": "fp32",
    "cap": "fp32",
    "head_elements": "i64",
}


def compile_kernel(kernel: Any, dtype: str, **sizes: Any) -> str:
    names = kernel.arg_names
    pointers = dict.fromkeys(("q", "k", "v", "pages", "out"), f"*{dtype}")
    types = {name: "constexpr" if name in sizes else (pointers | TYPES).get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    source = ASTSource(kernel, types, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=ours.OPTIONS).asm["ptx"]


if __name__ == "__main__":
    dtype = sys.argv[1]
    sizes = {"GROUP": 6, "DIM": 80, "WINDOW": 700, "SPLIT": ours.SPLIT_KEYS, "BLOCK_M": ours.tile_rows(6), "BLOCK_D": 128}
    for parts in (True, False):
        print(compile_kernel(ours._attend, dtype, PAGE=16, CAPPED=True, PARTS=parts, BLOCK_N=32, **sizes))
    print(compile_kernel(ours._add_parts, dtype, **sizes))
    print(compile_kernel(ours._write, dtype, DIM=80, BLOCK_D=128))
