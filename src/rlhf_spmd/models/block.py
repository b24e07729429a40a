"""One transformer layer: attention and MLP, or mixture of experts, with their norms, on one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import HeadShape, LayerOptions, LayerParts, Ops
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.models.activations import keep_part
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.attention import Attention, WritesPages
from rlhf_spmd.models.experts import MixtureWeights, mix_experts
from rlhf_spmd.models.latent_attention import LatentAttention
from rlhf_spmd.models.layer_kinds import REPLICATED, SCALAR, SCORE_BIAS
from rlhf_spmd.models.layers import Linear, RMSNorm, norm_over_all_heads, norm_values, split_gates
from rlhf_spmd.models.linear_attention import DeltaAttention, LinearMixer
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.rope import Rope
from rlhf_spmd.models.router_balance import Routers
from rlhf_spmd.models.sharding import fused_slice_counts, kv_heads_of
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.tensor_parallel import copy_to_tp, gather_to_tp, reduce_from_tp, scatter_from_tp
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group


def head_shape_of(spec: ModelSpec, num_heads: int, num_kv_heads: int, fused_slices: int) -> HeadShape:
    """Return how the heads of a rank lie in the product of qkv."""
    norms_and_rotation = spec.rms_norm_eps, spec.norm_unit_offset, spec.interleaved_rope
    return HeadShape(num_heads, num_kv_heads, spec.head_dim, fused_slices, *norms_and_rotation)


class Block(nn.Module):
    """One transformer layer on one tensor-parallel rank.

    - shards: the part of ``plan_params`` for this layer, by the names within the block
    - index_of_kind: counts the stage's layers of the same :meth:`ModelSpec.attention_kind`
    - global_layer: counts the layers of the model
    - fused_slices: number of training slices in a fused matrix, see ``plan_params``
    - ep: the ranks that share the experts
    """

    qkv: Linear
    gate_up: Linear
    down: Linear
    first_expert: int | None = None  # this rank's first, where the ranks of tp share the experts; None: it has a slice of each

    def __init__(
        self,
        ops: Ops,
        spec: ModelSpec,
        shards: dict[str, ParamShard],
        index_of_kind: int,
        global_layer: int,
        tp: Group,
        fused_slices: int,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
        lora: LoraConfig | None,
        ep: Group,
    ) -> None:
        super().__init__()
        spec = spec.spec_for_layer(global_layer)

        def linear(name: str) -> Linear:
            matrix = shards[f"{name}.weight"]
            adapter = None
            if lora is not None and f"{name}.lora.a" in shards:
                shapes = [shards[f"{name}.lora.{side}"].shape for side in "ab"]
                adapter = Adapter(ops, matrix, shapes, lora, dtype, device)
            return Linear(matrix.shape, f"{name}.bias" in shards, dtype, device, adapter)

        def norm(size: int, eps: float = spec.rms_norm_eps) -> RMSNorm:
            return RMSNorm(ops, size, eps, spec.norm_unit_offset, dtype, device)

        self.ops = ops
        self.index_of_kind = index_of_kind
        self.global_layer = global_layer
        self.tp, self.ep = tp, ep
        self._to_all_rows = gather_to_tp if sequence_parallel else copy_to_tp
        self._sum_over_tp = scatter_from_tp if sequence_parallel else reduce_from_tp
        # how the parts of the layer run: as they are, or so that the backward pass computes them again
        self.run_entry: Callable[..., Any] = keep_part
        self.run_part: Callable[..., Any] = keep_part
        self.rule = spec.attention_rule(global_layer)
        self.experts = spec.experts_at(global_layer)
        self.gelu = spec.hidden_act == "gelu_tanh"
        qkv_slices, self.gate_up_slices = fused_slice_counts(spec, tp.size, fused_slices)
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_attention_heads // tp.size
        self.kv_copies = max(tp.size // spec.num_key_value_heads, 1)
        self.num_kv_heads = len(kv_heads_of(spec, tp.rank, tp.size))
        self.head_shape = head_shape_of(spec, self.num_heads, self.num_kv_heads, qkv_slices)
        self.residual_scale = spec.residual_scale
        self.qk_norm_over_all_heads = spec.qk_norm_over_all_heads
        self.input_norm = norm(spec.hidden_size) if spec.names.input_norm else None
        self.latent: LatentAttention | None = None
        if spec.latent is None:
            self.qkv = linear("qkv")
        else:
            self.latent = LatentAttention(ops, spec.latent, self.num_heads, spec.interleaved_rope, tp, linear, norm)
        self.q_norm = norm(*shards["q_norm.weight"].shape) if "q_norm.weight" in shards else None
        self.k_norm = norm(*shards["k_norm.weight"].shape) if "k_norm.weight" in shards else None
        self.sinks = linear("sinks") if "sinks.weight" in shards else None
        self.has_output_gate = spec.attention_gate
        delta_rule = spec.linear_attention_at(global_layer)
        mixer_args = index_of_kind, tp, fused_slices, spec.rms_norm_eps, dtype, device
        self.mixer = None if delta_rule is None else LinearMixer(ops, delta_rule, shards, *mixer_args)
        self.out = linear("out")
        self.attention_norm = norm(spec.hidden_size) if spec.names.attention_norm else None
        self.post_norm = norm(spec.hidden_size) if spec.names.post_norm else None
        for name in ("gate_up", "down") if self.experts is None else self.experts.matrices:
            setattr(self, name, linear(name))
            if name == SCORE_BIAS:
                getattr(self, name).requires_grad_(False)
        self.mlp_norm = norm(spec.hidden_size) if spec.names.mlp_norm else None
        self.value_norm = spec.value_norm
        self.keys_as_values = spec.keys_as_values
        self.scalar = linear(SCALAR).requires_grad_(False) if spec.names.scalar else None
        self.adapters = [part for part in self.modules() if isinstance(part, Adapter)]
        may_fuse = spec.supports_fused_layer(global_layer) and tp.size == qkv_slices == self.gate_up_slices == 1
        self._fused_layer = self._fuse(shards["down.weight"].shape[-1]) if may_fuse else None

    def _fuse(self, inner: int) -> Callable[..., Tensor | None] | None:
        """Return :meth:`Ops.fused_layer` of this layer; None with quantized matrices. ``inner``: columns of the MLP."""
        if any(adapter.base for adapter in self.adapters):
            return None
        attention = self.input_norm, self.qkv, self.q_norm, self.k_norm, self.out, self.attention_norm
        parts = LayerParts(*attention, self.post_norm, self.gate_up, self.down, self.mlp_norm)
        options = LayerOptions(self.head_shape, inner, self.gelu, self.qk_norm_over_all_heads, self.residual_scale)
        return self.ops.fused_layer(parts, options, self.rule, self.index_of_kind)

    def forward(
        self, x: Tensor, rope: Rope, attention: Attention | DeltaAttention, num_tokens: int, routers: Routers | None = None
    ) -> Tensor:
        """Return the residual stream behind the layer, in the shape of ``x``.

        - x: the residual stream before the layer [R, hidden]; with sequence parallelism the R / t rows of this rank
        - rope: the tables of all R rows
        - attention: a DeltaAttention for a layer with linear attention
        - num_tokens: rows from this one on are padding
        - routers: chooses the experts of mixtures; None: the router by its logits
        """
        if self._fused_layer is not None and not torch.is_grad_enabled() and not any(part.adds for part in self.adapters):
            fused = self._fused_layer(x, rope.cos, rope.sin, attention, num_tokens)
            if fused is not None:
                return fused
        # products are passed on at once: under a name they would stay in memory to the layer's end
        partial_sum = self.run_part(self._mix, rope, attention, num_tokens, *self.run_entry(self._enter_tp_region, x))
        mixed = self._leave_tp_region(partial_sum, self.out, self.attention_norm, "attention")
        if self.experts is None:
            x, gate_up = self.run_entry(self._add_and_enter, x, mixed)
            partial_sum = self.run_part(self._activate, gate_up)
        else:
            x, partial_sum = self.run_part(self._mix_experts, x, mixed, routers)
        x = x + self._leave_tp_region(partial_sum, self.down, self.mlp_norm, "mlp")
        return x if self.scalar is None else x * self.scalar.weight

    def _enter_tp_region(self, recomputed: bool, x: Tensor) -> tuple[Tensor, ...]:
        """Return the qkv product of the first norm: all rows, of the columns of this rank. With latent attention return two products.
        ``x``: [R, hidden], or the rows of this rank."""
        x = x if self.input_norm is None else self.input_norm(x)
        if self.latent is not None:
            return self.latent.enter(self._to_all_rows(x, self.tp), recomputed)
        return (self._product_of_all_rows(x, self.qkv, recomputed),)

    def _add(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + mixed, and the MLP's input: the norm of the sum, or the sum itself where there is no norm."""
        if self.post_norm is not None:
            return self.post_norm.add(x, mixed)
        total = x + mixed
        return total, total

    def _add_and_enter(self, recomputed: bool, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + mixed, in the rows of :meth:`_enter_tp_region`, and the first product of the MLP."""
        x, normed = self._add(x, mixed)
        return x, self._product_of_all_rows(normed, self.gate_up, recomputed)

    def _product_of_all_rows(self, x: Tensor, linear: Linear, recomputed: bool) -> Tensor:
        """Return the column-parallel product of all rows. ``x``: [R, hidden], or the rows of this rank."""
        return linear.product(self.ops, self._to_all_rows(x, self.tp), recomputed, linear.bias)

    def _mix(
        self,
        recomputed: bool,
        rope: Rope,
        attention: Attention | DeltaAttention,
        num_tokens: int,
        qkv: Tensor,
        *keys_values: Tensor,
    ) -> Tensor:
        """Return the attention's output [R, hidden]: the part of this rank, to be summed over tp. ``qkv`` [R, (Hq + 2 Hkv) * D] and
        ``keys_values`` are the products of :meth:`_enter_tp_region`."""
        if self.mixer is not None:
            assert isinstance(attention, DeltaAttention)
            mixed = self.mixer(qkv[:num_tokens], attention)
        elif self.latent is not None:
            assert not isinstance(attention, DeltaAttention)
            mixed = self.latent.attend((qkv, *keys_values), rope, attention, num_tokens, self.index_of_kind, self.rule)
        elif self.has_output_gate:
            qkv, gates = split_gates(qkv, self.head_shape)
            mixed = self._attend(qkv, rope, attention, num_tokens) * gates[:num_tokens].sigmoid()
        else:
            mixed = self._attend(qkv, rope, attention, num_tokens)
        return self.out.product(self.ops, pad_rows(mixed.flatten(1), qkv.shape[0]), recomputed)

    def _attend(self, qkv: Tensor, rope: Rope, attention: Attention | DeltaAttention, num_tokens: int) -> Tensor:
        """Return the attention of the tokens [num_tokens, Hq, D]. ``qkv``: [R, (Hq + 2 Hkv) * D]."""
        assert not isinstance(attention, DeltaAttention)
        norms: tuple[Tensor | None, ...] = None, None
        if self.value_norm:
            qkv = norm_values(self.ops, qkv, self.head_shape, self.keys_as_values)
        if self.q_norm is not None and self.k_norm is not None:
            if self.qk_norm_over_all_heads:
                qkv = norm_over_all_heads(self.ops, qkv, self.q_norm, self.k_norm, self.head_shape, self.kv_copies, self.tp)
            else:  # each rank applies the replicated weights to its own heads only: their gradients are sums over tp
                norms = copy_to_tp(self.q_norm.weight, self.tp), copy_to_tp(self.k_norm.weight, self.tp)
        inputs = qkv, (norms[0], norms[1]), rope.cos, rope.sin, self.head_shape
        rule = self.rule if self.sinks is None else replace(self.rule, sinks=self.sinks.weight)
        if not torch.is_grad_enabled() and isinstance(attention, WritesPages):
            q = self.ops.heads_to_pages(*inputs, attention.page_target(self.index_of_kind))
            q = q if rope.growth is None else q * rope.growth
            return attention.attend_written(self.index_of_kind, q[:num_tokens], rule)
        q, k, v = self.ops.split_heads(*inputs)
        q = q if rope.growth is None else q * rope.growth
        if num_tokens < qkv.shape[0]:  # also a slice of all rows would be a copy in the backward pass
            q, k, v = (x[:num_tokens] for x in (q, k, v))
        return attention.attend(self.index_of_kind, q, k, v, rule)

    def _activate(self, recomputed: bool, gate_up: Tensor) -> Tensor:
        """Return the MLP's output [R, hidden] from its first product ``gate_up`` [R, 2n]: this rank's part, to be summed over tp."""
        rows = gate_up.shape[0]
        inner = self.ops.gated_activation(gate_up.view(rows * self.gate_up_slices, -1), self.gelu).view(rows, -1)
        return self.down.product(self.ops, inner, recomputed)

    def _mix_experts(self, recomputed: bool, x: Tensor, mixed: Tensor, routers: Routers | None) -> tuple[Tensor, Tensor]:
        """Return x + mixed, [R, hidden] or the rows of this rank, and the output of the mixture of experts [R, hidden]: this rank's
        part, to be summed over tp."""
        assert self.experts is not None
        x, normed = self._add(x, mixed)
        rows = self._to_all_rows(normed, self.tp)
        weights = {name: getattr(self, name).weight for name in self.experts.matrices}
        # every rank weighs its own slices of the experts: the gradients of replicated parameters are sums over tp
        weights |= {name: copy_to_tp(weights[name], self.tp) for name in REPLICATED if name in weights}
        if self.tp.rank and self.first_expert is None and "down_bias" in weights:  # the first rank's part of the sum has it
            weights["down_bias"] = weights["down_bias"] * 0
        output = mix_experts(
            self.ops,
            rows,
            MixtureWeights(**weights),
            self.experts,
            self.gelu,
            self.gate_up_slices,
            choose=None if routers is None else partial(routers.route, self.ops, self.global_layer),
            ep=self.ep,
            first=self.first_expert,
        )
        return x, output

    def _leave_tp_region(self, partial_sum: Tensor, linear: Linear, norm: RMSNorm | None, label: str) -> Tensor:
        """Return the sum over tp of the parts of a row-parallel product, plus its bias, after ``norm`` if there is one."""
        total = self._sum_over_tp(partial_sum, self.tp, label)
        total = total if linear.bias is None else total + linear.bias
        total = total if norm is None else norm(total)
        return total if self.residual_scale == 1 else total * self.residual_scale
