"""Compile the Triton kernel of one token of linear attention for a Hopper GPU, which need not be there, and print a table: registers,
bytes of stack and of shared memory. Argument: fp32 or bf16."""

import sys

import triton
from compile_head import usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import DeltaShape, triton_delta
from rlhf_spmd.kernels.triton_layers import OPTIONS

SHAPES = DeltaShape(16, 32, 128, 128, 4), DeltaShape(16, 64, 128, 128, 4), DeltaShape(8, 16, 128, 128, 4, 2)

if __name__ == "__main__":
    dtype, kernel = sys.argv[1], triton_delta._mix_token
    names = kernel.arg_names
    types = dict.fromkeys(names, f"*{dtype}") | {"memory": "*fp32", "slots": "*i64", "positions": "*i64", "rows": "i32"}
    types |= {"query_scale": "fp32", "eps": "fp32"}
    print("| kernel | warps | registers | stack | shared memory |\n|---|--:|--:|--:|--:|")
    for shape in SHAPES:
        sizes, warps = triton_delta.sizes_of(shape)
        signature = {name: "constexpr" if name in sizes else types[name] for name in names}
        constants = {(names.index(name),): value for name, value in sizes.items()}
        even = (i for i, name in enumerate(names) if signature[name].startswith("*"))
        source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in even})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **OPTIONS})
        print(
            f"| {tuple(shape)} | {warps} | {' | '.join(map(str, usage(compiled.asm['cubin'])))} | {compiled.metadata.shared} |"
        )
