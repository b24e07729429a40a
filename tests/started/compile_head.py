"""Compile the head's kernels for a Hopper GPU, which need not be there. Of each form: name, registers, bytes of stack, wide loads."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhf_spmd.kernels import triton_lm_head as ours

POINTERS = {
    "logits": "*fp32",
    "labels": "*i64",
    "log_z": "*fp32",
    "grads": "*fp32",
    "entropies": "*fp32",
    "entropy_grads": "*fp32",
    "scales": "*fp32",
}
DIVISIBLE = ("logits", "out", "stride", "width")  # by 16, as a vocabulary of 151,936 has it: what Triton finds when it runs


def compile_kernel(kernel: Any, out: str, options: dict[str, Any], **sizes: Any) -> Any:
    names = kernel.arg_names
    types = {name: POINTERS.get(name, "i32") for name in names} | {"out": f"*{out}", "scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(sizes, "constexpr")
    constants = {(names.index(name),): value for name, value in sizes.items()}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in DIVISIBLE}
    return triton.compile(ASTSource(kernel, types, constants, hints), target=GPUTarget("cuda", 90, 32), options=options)


def usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, on which what does not fit into them lies."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(binary)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for capped in (False, True):
        for entropy in (False, True):
            sizes = {"CAPPED": capped, "ENTROPY": entropy, "BLOCK": ours.BLOCK}
            for kernel, out, options in (
                (ours._statistics, "fp32", ours.STATISTICS),
                (ours._gradients, "fp32", ours.GRADIENTS),
                (ours._gradients, "bf16", ours.GRADIENTS),
            ):
                more = {"SCALES": False} if kernel is ours._statistics else {}
                made = compile_kernel(kernel, out, options, **sizes, **more)
                wide = made.asm["ptx"].count("ld.global.v4")
                print(made.metadata.name, out, int(capped), int(entropy), *usage(made.asm["cubin"]), wide)
                if "-v" in sys.argv:
                    print(made.asm["ptx"])
