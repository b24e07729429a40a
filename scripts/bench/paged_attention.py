"""The Triton attention over pages alone, with the heads of qwen3_0.6b: decoding in GB/s beside a copy, prefill in TFLOP/s.

    python scripts/bench/paged_attention.py --out paged_attention.json       under a minute on a GPU
    python scripts/bench/paged_attention.py --device cpu --quick             in Triton's interpreter, to try the script

Decoding: one token of each row, all rows of one context; bytes are those of keys and values. As in a graph, the table has room for
--longest tokens a row, so most of its splits are empty. Prefill: one prompt, the products of a causal mask. A case reads layer after
layer, so that what it reads does not lie in the L2 cache. Seconds are those of ``attend``, which writes the new tokens' keys.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from measure import add_device, device_facts, line, machine_facts, machine_rates, median, save, table, timed
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.sequence import Request, SequenceState, SequenceWork
from rlhf_spmd.kernels import AttentionRule

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 64
RULE = AttentionRule(HEAD_DIM**-0.5, None, None)
COLUMNS = ["case", "rows", "tokens", "us", "GB/s", "of a copy", "TFLOP/s"]


def build_cache(pages: int, layers: int, device: str) -> KVCache:
    backend = build_backend("triton", torch.bfloat16, torch.device(device))
    cache = KVCache(layers, KV_HEADS, HEAD_DIM, pages, PAGE, torch.bfloat16, torch.device(device), backend)
    for layer in cache.pages:
        layer.normal_()
    return cache


def measured(step: Callable[[int], Any], layers: int, device: str, seconds: float) -> float:
    """Seconds of a layer, the median of several turns over all of them."""

    def turn() -> None:
        for layer in range(layers):
            step(layer)

    turn()
    return median(timed(turn, seconds, 3, device)[0]) / layers


def decoding(rows: int, context: int, longest: int, device: str, seconds: float) -> dict[str, Any]:
    """On a GPU by a graph of as many layers as read 4 GB, as the generator runs it."""
    held = -(-context // PAGE)
    layer_bytes = 2 * KV_HEADS * HEAD_DIM * 2 * rows * context
    layers = max(min((4 << 30) // layer_bytes, 64), 2) if device == "cuda" else 1
    cache = build_cache(rows * held, layers, device)
    pages = torch.zeros(rows, -(-longest // PAGE), dtype=torch.int32, device=device)
    pages[:, :held] = torch.randperm(rows * held, device=device).view(rows, held)
    positions = torch.full((rows,), context - 1, device=device)
    attention = cache.backend.decoding(positions, pages, cache, HEADS)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

    def all_layers() -> None:
        for layer in range(layers):
            attention.attend(layer, q, k, v, RULE)

    all_layers()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        took = measured(lambda _: graph.replay(), 1, device, seconds) / layers
    else:
        took = measured(lambda layer: attention.attend(layer, q, k, v, RULE), layers, device, seconds)
    return {"case": "decode", "rows": rows, "tokens": context, "seconds": took, "bytes_per_s": layer_bytes / took}


def prefill(tokens: int, device: str, seconds: float) -> dict[str, Any]:
    layers = 4 if device == "cuda" else 1
    cache = build_cache(-(-tokens // PAGE), layers, device)
    row = SequenceState(Request(0, 0, [0] * tokens, 1), pages=list(range(cache.num_pages)))
    attention = cache.backend.for_step([SequenceWork(row, 0, tokens, True)], cache, HEADS)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    took = measured(lambda layer: attention.attend(layer, q, k, v, RULE), layers, device, seconds)
    flops = 2 * HEADS * HEAD_DIM * tokens * (tokens + 1)
    return {"case": "prefill", "rows": 1, "tokens": tokens, "seconds": took, "flops_per_s": flops / took}


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for rows in args.rows:
        for context in args.contexts:
            yield decoding(rows, context, max(args.longest, context), args.device, args.seconds)
    for tokens in args.prompts:
        yield prefill(tokens, args.device, args.seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[350, 900, 2048, 8192])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--longest", type=int, default=16384, help="tokens of a row that the table has room for")
    parser.add_argument("--seconds", type=float, default=0.5, help="of repetitions of a case")
    parser.add_argument("--quick", action="store_true", help="a few rows and tokens")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.contexts, args.prompts, args.longest, args.seconds = [1], [70], [20], 600, 0.0
    return args


def main() -> None:
    args = parse()
    if args.device == "cpu":  # before anything imports triton, whose interpreter wants the tests' repairs
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
        import triton_device  # noqa: F401
    rates = {} if args.quick else machine_rates(1, ["bfloat16"], args.device)
    report: dict[str, Any] = {"machine": machine_facts() | device_facts(args.device), "rates": rates, "cases": []}
    print(table(COLUMNS, [], 1), flush=True)
    for case in cases(args):
        report["cases"].append(case)
        if case["case"] == "prefill":
            rate = ["", "", f"{case['flops_per_s'] / 1e12:.3g}"]
        else:
            share = f"{case['bytes_per_s'] / rates['copy_bytes']:.2f}" if rates else ""
            rate = [f"{case['bytes_per_s'] / 1e9:.3g}", share, ""]
        print(line([case["case"], str(case["rows"]), str(case["tokens"]), f"{case['seconds'] * 1e6:.1f}", *rate]), flush=True)
    save(report, args.out)


if __name__ == "__main__":
    main()
