"""The decoder: one module for training, scoring and generation, holding this rank's slice of one pipeline stage.

Parameters are plain local tensors; tensor parallelism is explicit and costs nothing with one rank. Exactness (see
``attention``): short inputs are padded to ``min_rows``, so a token's bits do not depend on its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_spmd.models.attention import exact_rows, pad_rows
from rlhf_spmd.models.layers import Linear, RMSNorm, rope_frequencies, rope_tables, rotate, swiglu
from rlhf_spmd.models.sharding import fused_blocks, plan_params, vocab_range
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.tensor_parallel import copy_to_tp, reduce_from_tp, vocab_parallel_embedding
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import stage_layers


class Attention(Protocol):
    """What a forward pass needs to know about its tokens."""

    positions: Tensor  # [T]

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rotated -> [T, Hq, D]. ``layer_index`` counts from 0 within the stage."""


class Block(nn.Module):
    """One transformer layer on one tensor-parallel rank. ``shards``: its part of plan_params, names within the block."""

    def __init__(
        self,
        spec: ModelSpec,
        shards: dict[str, ParamShard],
        index: int,
        tp: Group,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()

        def linear(name: str) -> Linear:
            return Linear(shards[f"{name}.weight"].shape, f"{name}.bias" in shards, dtype, device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, spec.rms_norm_eps, dtype, device)

        self.index, self.tp = index, tp
        self.qkv_blocks, self.gate_up_blocks = fused_blocks(spec, tp.size, blocks)
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_attention_heads // tp.size
        self.num_kv_heads = (shards["qkv.weight"].shape[0] // spec.head_dim - self.num_heads) // 2
        self.input_norm = norm(spec.hidden_size)
        self.qkv = linear("qkv")
        self.q_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.out = linear("out")
        self.post_norm = norm(spec.hidden_size)
        self.gate_up = linear("gate_up")
        self.down = linear("down")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, num_tokens: int) -> Tensor:
        """x [max(T, min_rows), hidden] -> the same; rows from ``num_tokens`` on are padding."""
        normal = copy_to_tp(self.input_norm(x), self.tp)
        q, k, v = self._heads(F.linear(normal, self.qkv.weight, self.qkv.bias), cos, sin)
        mixed = attention.attend(self.index, q[:num_tokens], k[:num_tokens], v[:num_tokens])
        mixed = pad_rows(mixed.flatten(1), x.shape[0])
        x = x + self._leave(mixed, self.out, "attention")
        gate_up = F.linear(copy_to_tp(self.post_norm(x), self.tp), self.gate_up.weight)
        inner = swiglu(gate_up.view(x.shape[0] * self.gate_up_blocks, -1)).view(x.shape[0], -1)
        return x + self._leave(inner, self.down, "mlp")

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (Hq + 2 Hkv) * D] -> q [T, Hq, D], k and v [T, Hkv, D], q and k normed (where the family does) and rotated."""
        heads, kv = self.num_heads, self.num_kv_heads
        per_head = qkv.view(qkv.shape[0], heads + 2 * kv, self.head_dim)
        if self.qkv_blocks > 1:
            blocks = per_head.view(qkv.shape[0], self.qkv_blocks, -1, self.head_dim)
            parts = blocks.split([n // self.qkv_blocks for n in (heads, kv, kv)], 2)
            per_head = torch.cat([part.flatten(1, 2) for part in parts], 1)
        if self.q_norm is None or self.k_norm is None:
            qk, v = per_head.split([heads + kv, kv], 1)
            q, k = rotate(qk, cos, sin).split([heads, kv], 1)
            return q, k, v
        q, k, v = per_head.split([heads, kv, kv], 1)
        # each rank applies the replicated weights to its own heads only: their gradients are sums over tp
        with_heads = [(q, self.q_norm), (k, self.k_norm)]
        q, k = (rotate(norm(x, copy_to_tp(norm.weight, self.tp)), cos, sin) for x, norm in with_heads)
        return q, k, v

    def _leave(self, x: Tensor, linear: Linear, label: str) -> Tensor:
        """A row-parallel matrix; its bias, which every rank holds whole, is added after the sum."""
        total = reduce_from_tp(F.linear(x, linear.weight), self.tp, label)
        return total if linear.bias is None else total + linear.bias


class Decoder(nn.Module):
    """Stage ``stage`` of ``pp`` of a model, tensor-parallel over ``tp``. Parameters are allocated, not initialised.

    ``head``: "lm", "value" or "none". ``shards`` is plan_params of this rank; parameter names are its keys. ``layer_ids`` are
    the global indices of ``layers``. ``blocks``: the order inside fused parameters, see plan_params; a generation module takes
    t / t_g. A tied model with pp > 1 holds the shared matrix twice, see :attr:`tied_ends`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        head: str,
        stage: int,
        pp: int,
        tp: Group,
        dtype: torch.dtype,
        device: torch.device | str,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.spec, self.head_kind, self.stage, self.pp, self.tp = spec, head, stage, pp, tp
        self.dtype = dtype
        self.shards = plan_params(spec, head, stage, pp, tp.rank, tp.size, blocks)
        self.layer_ids = stage_layers(spec.num_hidden_layers, pp, stage)
        self.vocab_range = vocab_range(spec.vocab_size, tp.rank, tp.size)
        self.activation_checkpointing = False
        matrices = [shard.shape for name, shard in self.shards.items() if name.startswith("layers.") and len(shard.shape) == 2]
        self.min_rows = max(exact_rows(math.prod(shape)) for shape in matrices)
        self._frequencies = rope_frequencies(spec)  # no buffer: it must survive construction on the meta device

        def holder(name: str) -> Linear | None:
            shard = self.shards.get(f"{name}.weight")
            return None if shard is None else Linear(shard.shape, False, dtype, device)

        self.embed = holder("embed")
        self.layers = nn.ModuleList()
        for index in range(len(self.layer_ids)):
            prefix = f"layers.{index}."
            shards = {name[len(prefix) :]: shard for name, shard in self.shards.items() if name.startswith(prefix)}
            self.layers.append(Block(spec, shards, index, tp, blocks, dtype, device))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device) if self.is_last else None
        self.head = holder("head")
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        planned = {name: shard.shape for name, shard in self.shards.items()}
        assert built == planned, f"parameters {built} differ from the plan {planned}"

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def tied_ends(self) -> bool:
        """First and last stage each hold a copy of the embedding, whose gradients must be added over ``Mesh.ends``."""
        return self.spec.tie_word_embeddings and self.pp > 1 and self.head_kind == "lm"

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of the shared matrix where :attr:`tied_ends`, on the first and the last stage; else None."""
        holder = (self.embed if self.is_first else self.head) if self.tied_ends else None
        return None if holder is None else holder.weight

    @property
    def head_weight(self) -> Tensor:
        """[V_local, hidden] of the language-model head, or [1, hidden] of the value head. Last stage only."""
        holder = self.head if self.head is not None else self.embed
        assert holder is not None and self.is_last and self.head_kind != "none", (
            f"stage {self.stage} of {self.pp} with head {self.head_kind!r} has no head weight"
        )
        return holder.weight

    def forward(self, inputs: Tensor, attention: Attention, head: Callable[[Decoder, Tensor], Any] | None = None) -> Any:
        """Token ids [T] (first stage) or hidden [T, hidden] -> hidden [T, hidden], after the final norm on the last stage.

        With ``head`` the last stage returns ``head(self, hidden)`` instead: called in here so that under FSDP the root's
        parameters are gathered. Collective over tp: every rank of it must call, in program order.
        """
        num_tokens = inputs.shape[0]
        inputs = pad_rows(inputs, self.min_rows)
        if self.embed is not None and self.is_first:
            x = vocab_parallel_embedding(inputs, self.embed.weight, self.vocab_range[0], self.tp)
        else:
            x = inputs
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        cos, sin = rope_tables(self._frequencies, pad_rows(attention.positions, self.min_rows), x.dtype)
        for block in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attention, num_tokens, use_reentrant=False)
            else:
                x = block(x, cos, sin, attention, num_tokens)
        if self.norm is not None:
            x = self.norm(x)
        x = x[:num_tokens]
        return x if head is None or not self.is_last else head(self, x)
