"""Compile the kernels of latent attention for a Hopper GPU, which need not be there, at DeepSeek's sizes. Prints what
``compile_triton`` prints, and the threads of a program. Argument: fp32 or bf16."""

import json
import sys
from typing import Any

from compile_triton import compile_kernel, describe

from rlhf_spmd.kernels import triton_paged_attention
from rlhf_spmd.kernels.triton_latent import keys_to_pages, latent_tile

RANK, ROPE, NOPE = 512, 64, 128


def attention(form: str, dtype: str, heads: int, page: int) -> dict[str, Any]:
    shape = latent_tile(RANK, 4 if dtype == "fp32" else 2, page, form == "chunks")
    sizes = {
        "GROUP": heads,
        "PAGE": page,
        "DIM": RANK,
        "TAIL": ROPE,
        "WINDOW": 0,
        "CAPPED": False,
        "SINKS": False,
        "SPLIT": 512,
    }
    sizes |= {"LOGS": False} if form == "chunks" else {"TILED": page != 64, "PARTS": True}
    sizes |= {"BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "BLOCK_D": shape.elements}
    compiled = compile_kernel(getattr(triton_paged_attention, f"attend_{form}"), dtype, shape.options, **sizes)
    name = f"attend_{form}" + (f", {heads} heads" if heads > 16 else "")
    return {**describe(name, compiled), "threads": 32 * shape.warps}


if __name__ == "__main__":
    dtype = sys.argv[1]
    for form in ("singles", "chunks"):
        print(json.dumps(attention(form, dtype, heads=16, page=64)))
        print(json.dumps(attention(form, dtype, heads=128, page=16)))
    sizes = {"HEADS": 16, "NOPE": NOPE, "RANK": RANK, "ROPE": ROPE, "INTERLEAVED": True}
    sizes |= {"BLOCK_H": 16, "BLOCK_C": RANK, "BLOCK_E": ROPE // 2}
    compiled = compile_kernel(keys_to_pages, dtype, {"enable_fp_fusion": False}, **sizes)
    print(json.dumps(describe("keys_to_pages", compiled)))
