"""Floating-point operations of a step, and the peak of the device: for model FLOPs utilisation."""

from __future__ import annotations

import os
import re
import time
from functools import cache

import torch

from rlhf_spmd.kernels import capabilities, wait
from rlhf_spmd.models.spec import ModelSpec

# TFLOP/s of dense matrix products in bf16 and fp16, and in fp32 without TF32, from NVIDIA's data sheets at the end of 2025. Keys: a
# device's name after "NVIDIA", which FORM may follow. 0: the data sheets disagree.
RATED = {
    "A100": (312.0, 19.5),
    "A10": (125.0, 31.2),
    "H100 80GB HBM3": (989.4, 67.0),  # SXM
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H200": (989.4, 67.0),
    "H200 NVL": (835.0, 60.0),
    "B200": (2250.0, 0.0),
    "L40S": (362.0, 91.6),
    "GeForce RTX 4090": (165.2, 82.6),
}
FORM = r"([ -](SXM\d|PCIe|PCIE|\d+GB|HBM\w+))*"


def forward_flops(spec: ModelSpec, num_tokens: float, mean_length: float) -> float:
    """Return the FLOPs of one forward pass over ``num_tokens`` tokens in sequences of ``mean_length``.

    Two per matrix weight and token (only the experts that a token uses), and causal attention: 2 * heads * head_dim * length per
    layer and token (half of the square), or less with a window; with linear attention three products of each head's state.
    """
    numel = spec.vocab_size * spec.hidden_size
    products = 0.0
    state = 0
    for layer in range(spec.num_hidden_layers):
        experts = spec.experts_at(layer)
        window = spec.attention_rule(layer).window
        columns = 3 * spec.intermediate_size
        if experts is not None:
            columns = experts.num_router_outputs + 3 * experts.columns_per_token
        delta = spec.linear_attention_at(layer)
        if delta is not None:
            numel += spec.hidden_size * (delta.columns + delta.value_heads * delta.value_dim + columns)
            state += 3 * delta.state_numel
            continue
        layer_spec = spec.spec_for_layer(layer)
        numel += layer_spec.attention_numel + spec.hidden_size * columns
        seen = min(window or mean_length, mean_length)
        keys = seen * (1 - seen / (2 * mean_length)) if mean_length else 0.0  # that a query sees, on average
        value_dim = layer_spec.head_dim if spec.latent is None else spec.latent.value_dim
        products += spec.num_attention_heads * (layer_spec.head_dim + value_dim) * keys
    return num_tokens * 2.0 * (numel + state + products)


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype, local_size: int = 1) -> float:
    """Return FLOP/s of square matrix products on this rank's device, the best of three: the peak for utilisation.

    On CPUs it counts this process's own CPU time, times its cores (its threads, at most its share of the cores among ``local_size``
    ranks), so other processes do not lower the peak. It is measured once per process: that takes a quarter of a second on CPUs, and
    a notebook trains more than once.
    """
    on_gpu = capabilities(device).streams
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


def rated_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return FLOP/s of a GPU by its data sheet (RATED).

    It is None on CPUs, for cards that are not in the table, for parts of a card (MIG), and in fp32 if TF32 is allowed.
    """
    return rating_of(torch.cuda.get_device_name(device), dtype) if capabilities(device).streams else None


def rating_of(name: str, dtype: torch.dtype) -> float | None:
    """Return :func:`rated_flops` of a card with this driver name."""
    name = name.removeprefix("NVIDIA ")
    fitting = [card for card in RATED if re.fullmatch(re.escape(card) + FORM, name)]
    if not fitting or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    half, single = RATED[max(fitting, key=len)]
    if dtype == torch.float32:
        return single * 1e12 if single and torch.get_float32_matmul_precision() == "highest" else None
    return half * 1e12
