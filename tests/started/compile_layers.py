"""Compile the Triton kernels of a layer for a Hopper GPU, which need not be there, and print a table of them: registers, bytes of
stack and of shared memory. Arguments: parts of the names of those that are wanted, if not all; fp32 or bf16."""

import sys
from typing import Any

import triton
from compile_head import usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import triton_layers, triton_qkv
from rlhf_spmd.kernels.packing import HeadShape

TYPES = {"slots": "*i64", "scales": "*fp32", "parts": "*fp32", "eps": "fp32", "head_elements": "i64"}
COUNTS = ("rows", "per_program", "programs", "tokens", "written")
STRIDES = ("q_stride", "q_head", "k_stride", "k_head", "v_stride", "v_head")


def compile_kernel(kernel: Any, dtype: str, warps: int, **sizes: Any) -> Any:
    """As for tensors of ``dtype`` whose memory begins at multiples of 16 bytes, and strides that are multiples of 16."""
    names = kernel.arg_names
    types = dict.fromkeys(names, f"*{dtype}") | dict.fromkeys((*COUNTS, *STRIDES), "i32") | TYPES
    signature = {name: "constexpr" if name in sizes else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    even = {name for name in names if signature[name].startswith("*")} | {*STRIDES, "head_elements"}
    aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in even}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, **triton_layers.OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def variants() -> list[tuple[str, Any, int, dict[str, Any]]]:
    """(name, kernel, warps, sizes): norms of several widths, gates, and heads of Qwen3, Llama and of fused blocks."""
    found: list[tuple[str, Any, int, dict[str, Any]]] = []
    for n in (64, 1024, 2048, 4096, 8192, 16384):
        block_r, block_n, warps = triton_layers.rows_of(n)
        sizes = {"N": n, "BLOCK_R": block_r, "BLOCK_N": block_n, "PLUS_ONE": False}
        for adds in (False, True):
            label = f"{'add_' * adds}norm {n}"
            found.append((label, triton_layers._norm, warps, {**sizes, "ADDS": adds}))
            found.append((f"{label} backward", triton_layers._norm_backward, warps, {**sizes, "ADDS": adds}))
    found.append(("sum_programs", triton_layers._sum_programs, 4, {"N": 2048, "BLOCK_P": 64, "BLOCK_N": 32}))
    for gelu in (False, True):
        gate = {"N": 6144, "GELU": gelu, "BLOCK": triton_layers.TILE // 2}
        found.append((f"gate {'gelu' if gelu else 'silu'}", triton_layers._gate, 4, gate))
        found.append((f"gate {'gelu' if gelu else 'silu'} backward", triton_layers._gate_backward, 4, gate))
    shapes = [(True, 128, 1), (False, 128, 1), (False, 64, 1), (True, 80, 1), (True, 256, 1), (True, 128, 2)]
    for normed, dim, blocks, pairs in [*((*shape, shape[1] // 2) for shape in shapes), (False, 128, 1, 32)]:
        shape = HeadShape(16, 8, dim, blocks)
        block_h, block_d = triton_qkv.head_blocks(shape, 32)
        sizes = {"Q": 16, "KV": 8, "DIM": dim, "BLOCKS": blocks, "NORMED": normed, "PLUS_ONE": False}
        sizes |= {"BLOCK_H": block_h, "BLOCK_D": block_d, "PAIRS": pairs, "INTERLEAVED": 2 * pairs < dim}
        label = f"heads {'normed ' * normed}{dim}{f' in {blocks} blocks' if blocks > 1 else ''}"
        label += f" turned in {pairs} pairs" if 2 * pairs < dim else ""
        for paged in (False, True):
            heads = 24 if blocks == 1 and not paged else 32
            found.append((f"{label}{' to pages' * paged}", triton_qkv._heads, 4, {**sizes, "HEADS": heads, "PAGED": paged}))
        found.append((f"{label} backward", triton_qkv._heads_backward, 4, sizes))
    return found


if __name__ == "__main__":
    *wanted, dtype = sys.argv[1:]
    print("| kernel | warps | registers | stack | shared memory |\n|---|--:|--:|--:|--:|")
    for name, kernel, warps, sizes in variants():
        if not wanted or any(part in name for part in wanted):
            compiled = compile_kernel(kernel, dtype, warps, **sizes)
            figures = (warps, *usage(compiled.asm["cubin"]), compiled.metadata.shared)
            print(f"| {name} | {' | '.join(map(str, figures))} |", flush=True)
