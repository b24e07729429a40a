"""What training keeps in memory, and what keeping less costs: one process, random weights, no data.

    python scripts/bench/activations.py --out activations.json [--device cuda] [--hidden 4096 --layers 4 --rows 16 --length 4096]

``layers``: forward and backward passes of a decoder's layers for each ``models.<role>.activation_checkpointing``, on a GPU also with
``activation_offload``. Kept: bytes of tensors between the passes; peak: at the worst moment, gradients of the weights included.
``products``: floating-point operations of the matrix products in both passes over those of the forward pass.
``head``: log-probs of labels and their gradients from hidden states: ours in chunks, torch's ``linear_cross_entropy`` with and
without chunks (one sum over all rows: it has no temperature and no entropy), and logits held whole. Peak without the gradients
that are the result; ``chunks``: in units of what ours may hold, a chunk of logits and those kept for the backward
pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

from live_memory import LiveMemory
from measure import machine_facts, median, table
from rlhf_spmd.kernels import suspended
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 4), ("vocab", 32000), ("rows", 8), ("length", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder = build(args)
    columns = {
        "layers": ("case", "kept_mib", "peak_mib", "products", "seconds"),
        "head": ("case", "peak_mib", "chunks", "seconds"),
    }
    report: dict[str, Any] = {
        "machine": {**machine_facts(), "torch": torch.__version__, "device": args.device, "threads": torch.get_num_threads()},
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "layers": list(layer_cases(decoder, args)),
        "head": list(head_cases(decoder, args)),
    }
    for part, keys in columns.items():
        rows = [[case[key] if key == "case" else f"{case[key]:.3g}" for key in keys] for case in report[part]]
        print(table([key.replace("_mib", ", MiB") for key in keys], rows, 1), end="\n\n")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


def build(args: argparse.Namespace) -> Decoder:
    hidden = args.hidden
    config = {
        "model_type": "llama",
        "vocab_size": args.vocab,
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // 3 // 64) * 64,
        "num_hidden_layers": args.layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 256, 1),
    }
    decoder = Decoder(spec_from_config(config, "bench"), "lm", 0, 1, solo(), getattr(torch, args.dtype), args.device)
    init_random(decoder, 0)
    return decoder


def layer_cases(decoder: Decoder, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ids = torch.randint(args.vocab, (args.rows * args.length,), device=args.device)
    attention = PackedAttention([args.length] * args.rows, args.device)

    def forward(decoder: Decoder = decoder) -> torch.Tensor:
        return decoder(ids, attention).square().mean()

    with suspended():
        plain = build(args)  # the counter sees the products of torch only
    for offload in (False, True) if args.device != "cpu" else (False,):
        for checkpointing in CHECKPOINTING:
            decoder.keep_activations(checkpointing, offload)
            forward()
            plain.keep_activations(checkpointing, offload)
            with suspended(), FlopCounterMode(display=False) as counter:
                loss = forward(plain)
                once = counter.get_total_flops()
                loss.backward()
            both = counter.get_total_flops()
            seconds, kept, peak = measured(args, forward, decoder.zero_grad)
            name = checkpointing + (" on the host" if offload else "")
            yield {"case": name, "kept_mib": kept, "peak_mib": peak, "products": both / once, "seconds": seconds}


def head_cases(decoder: Decoder, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tokens = args.rows * args.length
    hidden = torch.randn(tokens, args.hidden, device=args.device).to(decoder.dtype).requires_grad_()
    weight, labels = decoder.head_weight, torch.randint(args.vocab, (tokens,), device=args.device)
    cases: dict[str, Callable[[], Any]] = {
        "ours": lambda: -token_log_probs(decoder, hidden, labels)[0].sum(),
        "ours, with entropies": lambda: (
            -sum(x.sum() for x in token_log_probs(decoder, hidden, labels, entropy=True) if x is not None)
        ),
        "whole logits": lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum"),
    }
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
        chunked = torch.nn.LinearCrossEntropyOptions()
        cases["linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, labels, reduction="sum")
        cases["linear_cross_entropy, chunked"] = lambda: F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=chunked
        )

    def clear() -> None:
        hidden.grad = None
        decoder.zero_grad()

    gradients = (hidden.nbytes + weight.nbytes) / MIB
    ops = decoder.ops
    rows = max(ops.chunk_logits // args.vocab, 64)
    whole = rows >= min(ops.backward_rows, tokens) or tokens * args.vocab <= ops.small_head
    rows += min(ops.small_head // args.vocab, tokens) if whole and ops.keeps_logits else 0
    chunk = 4 * args.vocab * rows / MIB
    for name, case in cases.items():
        seconds, _, peak = measured(args, case, clear)
        peak -= gradients
        yield {"case": name, "peak_mib": peak, "chunks": peak / chunk, "seconds": seconds}


def measured(
    args: argparse.Namespace, forward: Callable[[], torch.Tensor], clear: Callable[[], None]
) -> tuple[float, float, float]:
    """Median seconds of forward and backward (on CPU those of one thread at work); MiB kept between
    them, and at most. ``clear`` drops the gradients."""
    seconds = []
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    for _ in range(args.repeats + 1):
        clear()
        synchronize(args)
        begin = clock()
        forward().backward()
        synchronize(args)
        seconds.append(clock() - begin)
    clear()
    kept, peak = memory_of(args, forward)
    clear()
    return median(seconds[1:]), kept, peak


def synchronize(args: argparse.Namespace) -> None:
    if args.device != "cpu":
        torch.cuda.synchronize()


def memory_of(args: argparse.Namespace, forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
    if args.device == "cpu":
        with LiveMemory() as memory:
            loss = forward()
            kept = memory.live
            loss.backward()
        return kept / MIB, memory.peak / MIB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


if __name__ == "__main__":
    main()
