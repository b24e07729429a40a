"""How many bytes a cache may take beside what is on the device."""

from __future__ import annotations

import torch

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.devices import allocated_bytes, free_bytes, total_bytes
from rlhf_spmd.models.decoder import Block, Decoder


def cache_room(config: GenerationConfig, decoder: Decoder, device: torch.device, local_size: int, pending: float) -> float:
    """Bytes. ``local_size``: ranks of this host, which share its memory on CPUs. ``pending``: what else will be allocated before the
    first step has ended."""
    on_host = not capabilities(device).streams
    share, free = config.memory_share(on_host), free_bytes(device, local_size)
    if on_host:
        return share * (free - pending)
    total, others = total_bytes(device, local_size), pending + step_bytes(config, decoder)
    return room_on_device(share, total, allocated_bytes(device), free, others)


def room_on_device(share: float, total: float, used: float, free: float, others: float) -> float:
    """As vLLM counts: ``share`` of a device's ``total`` memory holds all that this process has there, ``used``, what it works with
    besides, ``others``, and the cache. Never more than is ``free``. Pure."""
    return min(share * total - used, free) - others


def step_bytes(config: GenerationConfig, decoder: Decoder) -> float:
    """What a step of ``decoder`` allocates: a prefill's rows, or the logits of all rows in flight and what is drawn from, once more
    where steps are captured as graphs."""
    block = decoder.layers[0]
    assert isinstance(block, Block)
    spec, size = decoder.spec, decoder.dtype.itemsize
    queries, keys = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    columns = spec.intermediate_size / decoder.tp.size
    row = 4 * spec.hidden_size + queries + 2 * keys + max(3 * columns, 3 * queries + 3 * keys)
    copies = 2 + (2 * decoder.tp.size if decoder.tp.size > 1 else 0)
    logits = 4 * config.max_num_seqs * spec.vocab_size / decoder.tp.size * copies if decoder.is_last else 0.0
    captures = config.captures(next(decoder.parameters()).device, decoder.tp.size, decoder.pp)
    return size * config.max_num_batched_tokens * row + logits * (1 + captures)
