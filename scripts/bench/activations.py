"""What training keeps in memory, and what keeping less costs: one process, random weights, no data.

    python scripts/bench/activations.py --out activations.json [--device cuda --hidden 4096 --layers 4 --rows 16 --length 4096]

``layers``: forward and backward passes of a decoder's layers for each ``models.<role>.activation_checkpointing``, on a GPU also
with ``activation_offload``. Kept: bytes of tensors between the passes; peak: at the worst moment, gradients of the weights
included. ``products``: floating-point operations of the matrix products in both passes over those of the forward pass.
``head``: log-probs of labels and their gradients from hidden states: ours in chunks, torch's ``linear_cross_entropy`` with and
without chunks (one sum over all rows: it has no temperature and no entropy), and logits held whole. Peak without the gradients
that are the result; ``chunks``: in units of what ours may hold, a chunk of logits and those kept for the backward pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from measure import MIB, ROOT, machine_facts, median, run_parts, save, settle, table
from rlhf_spmd.kernels import dispatch
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo


@dataclass(frozen=True)
class Shape:
    hidden: int = 512
    layers: int = 4
    vocab: int = 32000
    rows: int = 8
    length: int = 256
    repeats: int = 3
    device: str = "cpu"
    dtype: str = "float32"
    out: Path | None = None


def build(shape: Shape) -> Decoder:
    config = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": -(-8 * shape.hidden // 3 // 64) * 64,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // 64,
        "num_key_value_heads": max(shape.hidden // 256, 1),
    }
    decoder = Decoder(spec_from_config(config, "bench"), "lm", 0, 1, solo(), getattr(torch, shape.dtype), shape.device)
    init_random(decoder, 0)
    return decoder


def layer_cases(decoder: Decoder, shape: Shape) -> Iterator[dict[str, Any]]:
    ids = torch.randint(shape.vocab, (shape.rows * shape.length,), device=shape.device)
    attention = PackedAttention([shape.length] * shape.rows, shape.device)

    def forward(decoder: Decoder = decoder) -> Tensor:
        return decoder(ids, attention).square().mean()

    with mock.patch.object(dispatch, "_load", return_value=None):
        plain = build(shape)  # the counter sees the products of torch only
    for offload, checkpointing in product((False, True) if shape.device != "cpu" else (False,), CHECKPOINTING):
        decoder.keep_activations(checkpointing, offload)
        forward()
        plain.keep_activations(checkpointing, offload)
        with mock.patch.object(dispatch, "_load", return_value=None), FlopCounterMode(display=False) as counter:
            loss = forward(plain)
            once = counter.get_total_flops()
            loss.backward()
        seconds, kept, peak = measured(shape, forward, decoder.zero_grad)
        name = checkpointing + (" on the host" if offload else "")
        products = counter.get_total_flops() / once
        yield {"case": name, "kept_mib": kept, "peak_mib": peak, "products": products, "seconds": seconds}


def head_cases(decoder: Decoder, shape: Shape) -> Iterator[dict[str, Any]]:
    tokens = shape.rows * shape.length
    hidden = torch.randn(tokens, shape.hidden, device=shape.device).to(decoder.dtype).requires_grad_()
    weight, labels = decoder.head_weight, torch.randint(shape.vocab, (tokens,), device=shape.device)

    def ours(entropy: bool) -> Tensor:
        log_probs, entropies = token_log_probs(decoder, hidden, labels, entropy=entropy)
        return -log_probs.sum() if entropies is None else -log_probs.sum() - entropies.sum()

    cases: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, False),
        "ours, with entropies": partial(ours, True),
        "whole logits": lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum"),
    }
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
        theirs = partial(F.linear_cross_entropy, hidden, weight, labels, reduction="sum")
        cases["linear_cross_entropy"] = theirs
        cases["linear_cross_entropy, chunked"] = partial(theirs, options=torch.nn.LinearCrossEntropyOptions())

    def clear() -> None:
        hidden.grad = None
        decoder.zero_grad()

    ops, gradients = decoder.ops, (hidden.nbytes + weight.nbytes) / MIB
    rows = max(ops.chunk_logits // shape.vocab, 64)
    whole = rows >= min(ops.backward_rows, tokens) or tokens * shape.vocab <= ops.small_head
    rows += min(ops.small_head // shape.vocab, tokens) if whole and ops.keeps_logits else 0
    for name, case in cases.items():
        seconds, _, peak = measured(shape, case, clear)
        chunks = (peak - gradients) / (4 * shape.vocab * rows / MIB)
        yield {"case": name, "peak_mib": peak - gradients, "chunks": chunks, "seconds": seconds}


def measured(shape: Shape, forward: Callable[[], Tensor], clear: Callable[[], None]) -> tuple[float, float, float]:
    """Median seconds of forward and backward (on CPU those of one thread at work); MiB kept between them, and at most. ``clear`` drops
    the gradients."""
    seconds = []
    clock = time.process_time if shape.device == "cpu" else time.perf_counter
    for _ in range(shape.repeats + 1):
        clear()
        settle(shape.device)
        begin = clock()
        forward().backward()
        settle(shape.device)
        seconds.append(clock() - begin)
    clear()
    kept, peak = memory_of(shape, forward)
    clear()
    return median(seconds[1:]), kept, peak


def memory_of(shape: Shape, forward: Callable[[], Tensor]) -> tuple[float, float]:
    if shape.device == "cpu":
        sys.path.append(str(ROOT / "tests" / "helpers"))
        from live_memory import LiveMemory

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


def activations(shape: Shape) -> None:
    torch.set_num_threads(1)
    decoder = build(shape)
    report: dict[str, Any] = {"machine": machine_facts(shape.device), "settings": {**vars(shape), "out": None}}
    for part, cases in (("layers", layer_cases), ("head", head_cases)):
        report[part] = list(cases(decoder, shape))
        print(table(report[part], " ".join(report[part][0])), end="\n\n")
    save(report, shape.out)


if __name__ == "__main__":
    run_parts(activations)
