"""Compile the experts' kernels for a Hopper GPU, which need not be there. Of each: name, registers, bytes of stack, wide loads."""

from typing import Any

import triton
from compile_head import usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import triton_experts as ours

TYPES = {"places": "*i64", "ends": "*i32", "hidden": "i32", "size": "i32"}
UNALIGNED = ("places", "weights", "grad_weights")  # read one by one


def compile_kernel(kernel: Any, **sizes: Any) -> Any:
    names = kernel.arg_names
    types = {name: "constexpr" if name in sizes else TYPES.get(name, "*bf16") for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    aligned = [name for name in names if name not in sizes and name not in UNALIGNED]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compile(ASTSource(kernel, types, constants, hints), target=GPUTarget("cuda", 90, 32), options=ours.OPTIONS)


if __name__ == "__main__":
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (ours._sum_rows, {"K": 8, "WEIGHTED": True}),
        (ours._sum_rows, {"K": 8, "WEIGHTED": False}),
        (ours._sum_rows_backward, {"K": 8}),
        (ours._clear_idle, {}),
    ]
    for kernel, sizes in kernels:
        made = compile_kernel(kernel, **sizes, BLOCK=ours.BLOCK)
        print(made.metadata.name, *usage(made.asm["cubin"]), made.asm["ptx"].count("ld.global.v"))
