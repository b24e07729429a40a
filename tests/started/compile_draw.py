"""Compile the Triton draws for a Hopper GPU, which need not be there. Prints of each kernel its name, registers, bytes of stack and of
shared memory, and whether additions were fused with multiplications."""

from typing import Any

from compile_kernels import build, usage

from rlhf_spmd.kernels import triton_draw as draw
from rlhf_spmd.kernels import triton_filter as chosen

TYPES = {
    **dict.fromkeys(("scores", "logits", "temperatures", "top_p", "min_p", "gathered", "tempered", "plain"), "*fp32"),
    **dict.fromkeys(("top_k", "counts", "ids", "plans"), "*i32"),
    **dict.fromkeys(("keys", "positions", "tokens"), "*i64"),
    **dict.fromkeys(("tiles", "masses"), "*fp64"),
}


def compile_kernel(kernel: Any, warps: int, **sizes: Any) -> None:
    types = dict.fromkeys(kernel.arg_names, "i32") | TYPES
    aligned = {name for name in kernel.arg_names if types[name].startswith("*") or "stride" in name}
    built = build(kernel, types, aligned, {**draw.OPTIONS, "num_warps": warps}, **sizes)
    print(kernel.__name__, *usage(built.asm["cubin"]), built.metadata.shared, built.asm["ptx"].count("fma.rn.f32"))


if __name__ == "__main__":
    for same, tempered in ((True, False), (False, True)):
        compile_kernel(draw._sum_tiles, 4, SAME=same, GREEDY=False, TEMPERED=tempered, SIZE=draw.TILE)
    compile_kernel(draw._pick, 4, SIZE=draw.TILE, TILES=64, WIDTH=draw.BLOCK)
    compile_kernel(chosen._count_weights, 4, SIZE=draw.TILE, TILES=64)
    compile_kernel(chosen._gather_candidates, 8, SIZE=draw.TILE, TILES=64, ROOM=chosen.CANDIDATES)
    compile_kernel(chosen._pick_filtered, 8, TILES=64, ROOM=chosen.CANDIDATES, SIZE=chosen.CHUNK, TRIES=chosen.PIVOTS)
