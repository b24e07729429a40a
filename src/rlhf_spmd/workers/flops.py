"""What a step computes, in floating-point operations, and what the device could do: model FLOPs utilisation."""

from __future__ import annotations

import os
import time
from functools import cache

import torch

from rlhf_spmd.kernels import can, wait
from rlhf_spmd.models.spec import ModelSpec


def forward_flops(spec: ModelSpec, num_tokens: float, mean_length: float) -> float:
    """FLOPs of one forward pass over ``num_tokens`` tokens in sequences of ``mean_length``.

    Two per matrix weight and token (of experts, those that a token takes), and causal attention: 2 * heads * head_dim * length
    per layer and token (half of the square), or with a window, what of that it leaves.
    """
    attention_width = spec.num_attention_heads * spec.head_dim
    kv_width = spec.num_key_value_heads * spec.head_dim
    weights, keys = spec.vocab_size * spec.hidden_size, 0.0
    for layer in range(spec.num_hidden_layers):
        experts, window = spec.experts_of(layer), spec.attention_rule(layer).window
        columns = 3 * spec.intermediate_size
        if experts is not None:
            columns = experts.count + 3 * experts.per_token * experts.intermediate_size
        weights += spec.hidden_size * (2 * attention_width + 2 * kv_width + columns)
        seen = min(window or mean_length, mean_length)
        keys += seen * (1 - seen / (2 * mean_length)) if mean_length else 0.0  # how many a query sees, on average
    return num_tokens * (2.0 * weights + 4.0 * attention_width * keys)


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype, local_size: int = 1) -> float:
    """FLOP/s of square matrix products on this rank's device, the best of three: the peak that utilisation is measured by.

    On CPUs by the time that this process computes, times the cores that it has (its threads, at most its share of the cores among
    ``local_size`` ranks): what other processes compute meanwhile does not make the peak lower. Measured once in a process: it takes a
    quarter of a second on CPUs, and a notebook trains more than once.
    """
    on_gpu = can(device).streams
    size, clock = (8192, time.perf_counter) if on_gpu else (768, time.process_time)
    cores = 1.0 if on_gpu else min(torch.get_num_threads(), len(os.sched_getaffinity(0)) / local_size)
    a, b = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first is warm-up, and the best of the others counts
        start = clock()
        a @ b
        wait(device)
        best = min(best, clock() - start)
    return 2.0 * size**3 / best * cores
