"""Compile the experts' kernels for a Hopper GPU, which need not be there. Of each: name, registers, bytes of stack, wide loads."""

from typing import Any

import triton
from compile_head import usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import triton_experts as ours
from rlhf_spmd.kernels import triton_route

TYPES = {"places": "*i64", "ends": "*i32", "hidden": "i32", "size": "i32"}
TYPES |= {"order": "*i64", "numbers": "*i64", "first": "i32", "own": "i32"}
TYPES |= {"chosen": "*i64", "logits": "*fp32", "grad_logits": "*fp32", "count": "i32", "scale": "fp32", "tiny": "fp32"}
TYPES |= {"alpha": "fp32", "limit": "fp32", "n": "i32"}
UNALIGNED = ("places", "weights", "grad_weights", "chosen", "scale", "tiny", "alpha", "limit")  # read one by one


def compile_kernel(kernel: Any, options: dict[str, Any], **sizes: Any) -> Any:
    names = kernel.arg_names
    types = {name: "constexpr" if name in sizes else TYPES.get(name, "*bf16") for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    aligned = [name for name in names if name not in sizes and name not in UNALIGNED]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compile(ASTSource(kernel, types, constants, hints), target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (ours._sum_rows, {"K": 8, "WEIGHTED": True}),
        (ours._sum_rows, {"K": 8, "WEIGHTED": False}),
        (ours._sum_rows_backward, {"K": 8}),
        (ours._clear_idle, {}),
        (ours._own_choices, {}),
        (ours._places, {}),
        (ours._clamped_gate, {"BACK": False}),
        (ours._clamped_gate, {"BACK": True}),
    ]
    softmax = {"K": 8, "SCORING": 0, "NORMALISE": True, "BLOCK_K": 8}  # Qwen3-30B-A3B; then DeepSeek-V3
    sigmoid = {"K": 8, "SCORING": 1, "NORMALISE": True, "BLOCK_K": 8}
    alone = {
        "CORRECTED": False,
        "GIVEN": False,
        "GROUPS": 1,
        "TOP_GROUPS": 1,
        "BEST": 2,
        "SIZE": 128,
        "BLOCK_G": 1,
        "BLOCK_S": 128,
    }
    grouped = {
        "CORRECTED": True,
        "GIVEN": False,
        "GROUPS": 8,
        "TOP_GROUPS": 4,
        "BEST": 2,
        "SIZE": 32,
        "BLOCK_G": 8,
        "BLOCK_S": 32,
    }
    routers: list[tuple[Any, dict[str, Any]]] = [
        (triton_route._route, softmax | alone),
        (triton_route._route, sigmoid | grouped),
        (triton_route._route, sigmoid | grouped | {"GIVEN": True}),
        (triton_route._route_backward, softmax | {"BLOCK_S": 128}),
        (triton_route._route_backward, sigmoid | {"BLOCK_S": 256}),
    ]
    for kernel, sizes in kernels:
        made = compile_kernel(kernel, ours.OPTIONS, **sizes, BLOCK=ours.BLOCK)
        print(made.metadata.name, *usage(made.asm["cubin"]), made.asm["ptx"].count("ld.global.v"))
    for kernel, sizes in routers:
        made = compile_kernel(kernel, triton_route.OPTIONS, **sizes)
        print(made.metadata.name, *usage(made.asm["cubin"]), made.asm["ptx"].count("ld.global.v"))
