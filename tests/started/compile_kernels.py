"""Compile the kernels of layers, heads, experts or linear attention for a Hopper GPU, which need not be there. Prints a line of JSON
for each: registers of a thread, bytes of its stack and of shared memory, and wide loads. Arguments: a part, and for ``layers`` and
``delta`` fp32 or bf16."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import DeltaShape, triton_delta, triton_experts, triton_layers, triton_lm_head, triton_qkv, triton_route
from rlhf_spmd.kernels.layer_args import HeadShape

TARGET = GPUTarget("cuda", 90, 32)
FLOATS = ("logits", "log_z", "grads", "entropies", "entropy_grads", "scales", "parts", "memory", "grad_logits")
TYPES = {
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(("labels", "slots", "positions", "row_of_pair", "pair_of_row", "local_ids", "expert_ids"), "*i64"),
    **dict.fromkeys(("scale", "cap", "eps", "query_scale", "tiny", "alpha", "limit"), "fp32"),
    **dict.fromkeys(
        ("rows", "per_program", "programs", "tokens", "written", "hidden", "size", "first", "num_local", "count", "n"), "i32"
    ),
    **dict.fromkeys(("q_stride", "q_head", "k_stride", "k_head", "v_stride", "v_head"), "i32"),
    **{"ends": "*i32", "head_elements": "i64"},
}


def build(kernel: Any, types: Mapping[str, str], aligned: Collection[str], options: Mapping[str, Any], **sizes: Any) -> Any:
    """``types`` of what is no constant; ``aligned``: what is divisible by 16, which Triton uses."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    hints: dict[Any, Any] = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned and name not in sizes
    }
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=TARGET, options=dict(options))


def usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, on which what does not fit into them lies."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(binary)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    figures = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert figures, dump
    return int(figures[1]), int(figures[2])


def show(name: str, kernel: Any, types: Mapping[str, str], aligned: Collection[str], options: Any, **sizes: Any) -> None:
    compiled = build(kernel, types, aligned, options, **sizes)
    registers, stack = usage(compiled.asm["cubin"])
    figures = {"registers": registers, "stack": stack, "shared": compiled.metadata.shared}
    print(json.dumps({"name": name, **figures, "loads": compiled.asm["ptx"].count("ld.global.v")}), flush=True)


def head() -> None:
    """For a vocabulary of a multiple of 16."""
    aligned = "logits", "out", "stride", "width"
    for capped in (False, True):
        for entropy in (False, True):
            sizes = {"CAPPED": capped, "ENTROPY": entropy, "BLOCK": triton_lm_head.BLOCK}
            for kernel, out, options, more in (
                (triton_lm_head._statistics, "*fp32", triton_lm_head.STATISTICS, {"SCALES": False}),
                (triton_lm_head._gradients, "*fp32", triton_lm_head.GRADIENTS, {}),
                (triton_lm_head._gradients, "*bf16", triton_lm_head.GRADIENTS, {}),
            ):
                types = dict.fromkeys(kernel.arg_names, "i32") | TYPES | {"out": out}
                show(kernel.__name__, kernel, types, aligned, options, **sizes, **more)


def experts() -> None:
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (triton_experts._sum_rows, {"K": 8, "WEIGHTED": True}),
        (triton_experts._sum_rows, {"K": 8, "WEIGHTED": False}),
        (triton_experts._sum_rows_backward, {"K": 8}),
        (triton_experts._clear_idle, {}),
        (triton_experts._local_choices, {}),
        (triton_experts._rows_of_pairs, {}),
        (triton_experts._clamped_gate, {"BACK": False}),
        (triton_experts._clamped_gate, {"BACK": True}),
    ]
    softmax = {"K": 8, "SCORING": 0, "NORMALISE": True, "BLOCK_K": 8}  # Qwen3-30B-A3B
    sigmoid = {"K": 8, "SCORING": 1, "NORMALISE": True, "BLOCK_K": 8}  # DeepSeek-V3
    rule = {
        "BIASED": False,
        "GIVEN": False,
        "GROUPS": 1,
        "TOP_GROUPS": 1,
        "BEST": 2,
        "SIZE": 128,
        "BLOCK_G": 1,
        "BLOCK_S": 128,
    }
    grouped = rule | {"BIASED": True, "GROUPS": 8, "TOP_GROUPS": 4, "SIZE": 32, "BLOCK_G": 8, "BLOCK_S": 32}
    routers: list[tuple[Any, dict[str, Any]]] = [
        (triton_route._route, softmax | rule),
        (triton_route._route, sigmoid | grouped),
        (triton_route._route, sigmoid | grouped | {"GIVEN": True}),
        (triton_route._route_backward, softmax | {"BLOCK_S": 128}),
        (triton_route._route_backward, sigmoid | {"BLOCK_S": 256}),
    ]
    read_one_by_one = {"row_of_pair", "weights", "grad_weights", "expert_ids", "scale", "tiny", "alpha", "limit"}
    for kernel, sizes in (*((kernel, sizes | {"BLOCK": triton_experts.BLOCK}) for kernel, sizes in kernels), *routers):
        options = triton_experts.OPTIONS if "BLOCK" in sizes else triton_route.OPTIONS
        types = dict.fromkeys(kernel.arg_names, "*bf16") | TYPES | {"rows": "*bf16"}
        show(kernel.__name__, kernel, types, set(kernel.arg_names) - read_one_by_one, options, **sizes)


def layers(dtype: str) -> None:
    """Of a width of 2,048 and heads of 128, as in Qwen3-1.7B, and of heads that are rotated in part."""
    block_r, block_n, warps = triton_layers.rows_of(2048)
    norm = {"N": 2048, "BLOCK_R": block_r, "BLOCK_N": block_n, "UNIT_OFFSET": False}
    gate = {"N": 6144, "BLOCK": triton_layers.TILE // 2}
    kernels: list[tuple[Any, int, dict[str, Any]]] = [
        (triton_layers._sum_programs, 4, {"N": 2048, "BLOCK_P": 64, "BLOCK_N": 32})
    ]
    for flag in (False, True):
        kernels += [(kernel, warps, norm | {"ADDS": flag}) for kernel in (triton_layers._norm, triton_layers._norm_backward)]
        kernels += [(kernel, 4, gate | {"GELU": flag}) for kernel in (triton_layers._gate, triton_layers._gate_backward)]
    block_h, block_d = triton_qkv.head_blocks(HeadShape(16, 8, 128, 1), 32)
    heads = {"Q": 16, "KV": 8, "DIM": 128, "BLOCKS": 1, "UNIT_OFFSET": False, "BLOCK_H": block_h, "BLOCK_D": block_d}
    normed, turned = (
        heads | {"NORMED": True, "PAIRS": 64, "INTERLEAVED": False},
        heads | {"NORMED": False, "PAIRS": 32, "INTERLEAVED": True},
    )
    kernels += [(triton_qkv._heads, 4, normed | {"HEADS": 32, "PAGED": True}), (triton_qkv._heads_backward, 4, normed)]
    kernels += [(triton_qkv._heads, 4, turned | {"HEADS": 32 if paged else 24, "PAGED": paged}) for paged in (False, True)]
    kernels.append((triton_qkv._heads_backward, 4, turned))
    for kernel, warps, sizes in kernels:
        types = dict.fromkeys(kernel.arg_names, f"*{dtype}") | TYPES
        aligned = {name for name in kernel.arg_names if types[name].startswith("*") or "_stride" in name or "head" in name}
        show(kernel.__name__, kernel, types, aligned, {"num_warps": warps, **triton_layers.OPTIONS}, **sizes)


def delta(dtype: str) -> None:
    """Qwen3-Next, Qwen3.5, and two tensor-parallel slices side by side."""
    kernel = triton_delta._delta_rule_step
    types = dict.fromkeys(kernel.arg_names, f"*{dtype}") | TYPES
    aligned = {name for name in kernel.arg_names if types[name].startswith("*")}
    for shape in (DeltaShape(16, 32, 128, 128, 4), DeltaShape(16, 64, 128, 128, 4), DeltaShape(8, 16, 128, 128, 4, 2)):
        sizes, warps = triton_delta.sizes_of(shape)
        show(kernel.__name__, kernel, types, aligned, {"num_warps": warps, **triton_layers.OPTIONS}, **sizes)


if __name__ == "__main__":
    part, *dtypes = sys.argv[1:]
    {"head": head, "experts": experts, "layers": layers, "delta": delta}[part](*dtypes)
