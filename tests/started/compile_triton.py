"""Compile the Triton attention for a Hopper GPU, which need not be there, and print a line of JSON for each kernel: its registers and
bytes of stack, shared memory, and how often instructions stand in its PTX. Argument: fp32 or bf16.

``products``: multiplications of the matrix products of a thread that stand there, where these are not tensor cores' work.
"""

import json
import re
import sys
from typing import Any

from compile_kernels import build, usage

from rlhf_spmd.kernels import triton_paged_attention
from rlhf_spmd.kernels.triton_paged_attention import SPLIT_KEYS, TileShape

TYPES = {
    "tiles": "*i32",
    "table": "*i32",
    "slots": "*i64",
    "positions": "*i64",
    "parts": "*fp32",
    "log_sums": "*fp32",
    "sinks": "*fp32",
    "arrived": "*i32",
    "scale": "fp32",
    "cap": "fp32",
    "eps": "fp32",
    "head_elements": "i64",
}
# others are multiples of 16, which Triton uses
UNALIGNED = {"table_stride", "num_splits", "kv_heads", "heads", "tokens", "scale", "cap", "eps", "written"}
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "mma.sync": "mma.sync", "cp.async": r"cp.async.c[ag]\.", "fma": "fma.rn"}


def compile_kernel(kernel: Any, dtype: str, options: dict[str, Any], **sizes: Any) -> Any:
    pointers = dict.fromkeys(("q", "k", "v", "pages", "out", "short", "weight", "cos", "sin"), f"*{dtype}")
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers | TYPES
    return build(kernel, types, set(kernel.arg_names) - UNALIGNED, options, **sizes)


def describe(name: str, compiled: Any, products: int = 0) -> dict[str, Any]:
    registers, stack = usage(compiled.asm["cubin"])
    facts = {"name": name, "registers": registers, "stack": stack, "shared": compiled.metadata.shared}
    counts = {key: len(re.findall(it, compiled.asm["ptx"])) for key, it in INSTRUCTIONS.items()}
    return {**facts, "products": products, "instructions": counts}


def attention(form: str, dtype: str, group: int, page: int, dim: int, window: int, sinks: bool = False) -> dict[str, Any]:
    itemsize = 4 if dtype == "fp32" else 2
    if form == "chunks":
        shape, extra = TileShape.of_chunks(dim, itemsize, page, group), {"LOGS": False}
    else:
        shape, extra = TileShape.of_singles(dim, itemsize, page, group), {"TILED": window > 0, "PARTS": window == 0}
    sizes = {
        "GROUP": group,
        "PAGE": page,
        "DIM": dim,
        "TAIL": 0,
        "WINDOW": window,
        "CAPPED": window > 0 and not sinks,
        "SINKS": sinks,
        "SPLIT": SPLIT_KEYS,
        **extra,
    }
    sizes |= {"BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "BLOCK_D": shape.elements}
    compiled = compile_kernel(getattr(triton_paged_attention, f"attend_{form}"), dtype, shape.options, **sizes)
    walks = (2 + (window > 0)) if form == "chunks" else 1
    products = walks * 2 * shape.rows * shape.keys * shape.elements // (32 * shape.warps)
    kind = ", sinks" if sinks else ", windows" if window else ", wide" if dim > 256 else ""
    return describe(f"attend_{form}{kind}", compiled, products)


if __name__ == "__main__":
    dtype = sys.argv[1]
    for form in ("chunks", "singles"):
        print(json.dumps(attention(form, dtype, group=2, page=64, dim=128, window=0)))
        print(json.dumps(attention(form, dtype, group=6, page=16, dim=80, window=700)))
        if dtype == "bf16":  # Gemma 4, gpt-oss
            print(json.dumps(attention(form, dtype, group=8, page=64, dim=512, window=0)))
            print(json.dumps(attention(form, dtype, group=8, page=64, dim=64, window=128, sinks=True)))
    located = compile_kernel(triton_paged_attention.locate_rows, dtype, {"num_warps": 1}, PAGE=16, BLOCK_H=8)
    print(json.dumps(describe("locate_rows", located)))
    print(json.dumps(describe("write", compile_kernel(triton_paged_attention.write, dtype, {}, DIM=80, BLOCK_D=128))))
