"""The decoder: one module for training, scoring and generation, holding this rank's slice of one pipeline stage.

Parameters are plain local tensors; tensor parallelism is explicit and costs nothing with one rank. What is computed is said here,
how is said by the :class:`~rlhf_spmd.kernels.Ops` that the decoder is built over. Short inputs are padded to ``min_rows``, as many
as its products ask for, so that a token's bits do not depend on its batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import HeadShape, LayerOptions, Ops, choose_ops
from rlhf_spmd.kernels.packing import pad_rows, round_up
from rlhf_spmd.models.activations import run, run_again, run_part, run_part_again, save_on_host
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.attention import Attention, WritesPages
from rlhf_spmd.models.expert_config import CORRECTION, WHOLE
from rlhf_spmd.models.experts import MixtureWeights, mix_experts
from rlhf_spmd.models.layers import Linear, RMSNorm, whole_norms
from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.rope import Rope, rope_frequencies, rope_tables
from rlhf_spmd.models.sharding import fused_blocks, plan_params, vocab_range
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.tensor_parallel import (
    copy_to_tp,
    gather_to_tp,
    gather_whole,
    reduce_from_tp,
    scatter_from_tp,
    vocab_parallel_embedding,
)
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.layout import stage_layers


class Block(nn.Module):
    """One transformer layer on one tensor-parallel rank. ``shards``: its part of plan_params, names within the block.

    ``index`` counts within the stage, ``layer`` within the model.
    """

    gate_up: Linear
    down: Linear

    def __init__(
        self,
        ops: Ops,
        spec: ModelSpec,
        shards: dict[str, ParamShard],
        index: int,
        layer: int,
        tp: Group,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
        lora: LoraConfig | None,
    ) -> None:
        super().__init__()

        def linear(name: str) -> Linear:
            matrix, adapter = shards[f"{name}.weight"], None
            if lora is not None and f"{name}.lora.a" in shards:
                shapes = [shards[f"{name}.lora.{side}"].shape for side in "ab"]
                adapter = Adapter(ops, matrix, shapes, lora, dtype, device)
            return Linear(matrix.shape, f"{name}.bias" in shards, dtype, device, adapter)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(ops, size, spec.rms_norm_eps, spec.norm_plus_one, dtype, device)

        self.ops, self.index, self.tp = ops, index, tp
        self._enter_tp = gather_to_tp if sequence_parallel else copy_to_tp
        self._leave_tp = scatter_from_tp if sequence_parallel else reduce_from_tp
        # how the parts of the layer run: as they are, or so that the backward pass computes them again
        self.run_entry: Callable[..., Any] = run_part
        self.run_part: Callable[..., Any] = run_part
        self.rule, self.experts = spec.attention_rule(layer), spec.experts_of(layer)
        self.gelu = spec.hidden_act == "gelu_tanh"
        qkv_blocks, self.gate_up_blocks = fused_blocks(spec, tp.size, blocks)
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_attention_heads // tp.size
        self.kv_copies = max(tp.size // spec.num_key_value_heads, 1)
        self.num_kv_heads = (shards["qkv.weight"].shape[0] // spec.head_dim - self.num_heads) // 2
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        self.head_shape = HeadShape(*heads, qkv_blocks, spec.rms_norm_eps, spec.norm_plus_one, spec.interleaved_rope)
        self.residual_scale, self.whole_qk_norm = spec.residual_scale, spec.whole_qk_norm
        self.input_norm = norm(spec.hidden_size) if spec.names.input_norm else None
        self.qkv = linear("qkv")
        self.q_norm = norm(*shards["q_norm.weight"].shape) if spec.qk_norm else None
        self.k_norm = norm(*shards["k_norm.weight"].shape) if spec.qk_norm else None
        self.sinks = linear("sinks") if spec.names.sinks else None
        self.out = linear("out")
        self.attention_norm = norm(spec.hidden_size) if spec.names.attention_norm else None
        self.post_norm = norm(spec.hidden_size) if spec.names.post_norm else None
        for name in ("gate_up", "down") if self.experts is None else self.experts.matrices:
            setattr(self, name, linear(name))
            if name == CORRECTION:
                getattr(self, name).requires_grad_(False)
        self.mlp_norm = norm(spec.hidden_size) if spec.names.mlp_norm else None
        attention = (self.input_norm, self.qkv, self.q_norm, self.k_norm, self.out, self.attention_norm)
        parts = (*attention, self.post_norm, self.gate_up, self.down, self.mlp_norm)
        sizes = *heads, shards["down.weight"].shape[-1]
        switches = spec.norm_plus_one, self.gelu, spec.interleaved_rope, spec.whole_qk_norm
        options = LayerOptions(spec.rms_norm_eps, *switches, spec.residual_scale)
        self.adapters = [part for part in self.modules() if isinstance(part, Adapter)]
        alone = tp.size == qkv_blocks == self.gate_up_blocks == 1 and self.experts is None
        alone = alone and self.sinks is None and spec.query_growth is None
        alone = alone and not any(one.base for one in self.adapters)
        self._whole = ops.layer(parts, sizes, options, self.rule, index) if alone else None

    def forward(self, x: Tensor, rope: Rope, attention: Attention, num_tokens: int) -> Tensor:
        """x [R, hidden] -> the same: all rows, of which those from ``num_tokens`` on are padding, or with sequence parallelism
        this rank's R / t of them. ``rope`` is of all R rows."""
        if self._whole is not None and not torch.is_grad_enabled() and not any(one.enabled for one in self.adapters):
            whole = self._whole(x, rope.cos, rope.sin, attention, num_tokens)
            if whole is not None:
                return whole
        qkv = self.run_entry(self._enter, x)
        partial = self.run_part(self._mix, qkv, rope, attention, num_tokens)
        mixed = self._leave(partial, self.out, self.attention_norm, "attention")
        if self.experts is None:
            x, gate_up = self.run_entry(self._add_and_enter, x, mixed)
            partial = self.run_part(self._activate, gate_up)
        else:
            x, partial = self.run_part(self._mix_experts, x, mixed)
        return x + self._leave(partial, self.down, self.mlp_norm, "mlp")

    def _enter(self, recomputed: bool, x: Tensor) -> Tensor:
        """The first norm and the qkv product: [R, hidden], or this rank's rows of it -> all rows of this rank's columns."""
        return self._product_of_all_rows(x if self.input_norm is None else self.input_norm(x), self.qkv, recomputed)

    def _add(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """x + mixed, and what of it goes into the MLP."""
        if self.post_norm is not None:
            return self.post_norm.add(x, mixed)
        total = x + mixed
        return total, total

    def _add_and_enter(self, recomputed: bool, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """x + mixed, which are as in :meth:`_enter`, and of that the norm before the MLP and its first product."""
        x, normed = self._add(x, mixed)
        return x, self._product_of_all_rows(normed, self.gate_up, recomputed)

    def _product_of_all_rows(self, x: Tensor, linear: Linear, recomputed: bool) -> Tensor:
        return linear.product(self.ops, self._enter_tp(x, self.tp), recomputed, linear.bias)

    def _mix(self, recomputed: bool, qkv: Tensor, rope: Rope, attention: Attention, num_tokens: int) -> Tensor:
        """The attention, and this rank's part of its output matrix: [R, (Hq + 2 Hkv) * D] -> [R, hidden], to be summed."""
        mixed = self._attend(qkv, rope, attention, num_tokens)
        return self.out.product(self.ops, pad_rows(mixed.flatten(1), qkv.shape[0]), recomputed)

    def _attend(self, qkv: Tensor, rope: Rope, attention: Attention, num_tokens: int) -> Tensor:
        """[R, (Hq + 2 Hkv) * D] -> the tokens' attention [num_tokens, Hq, D]."""
        norms: tuple[Tensor | None, ...] = None, None
        if self.q_norm is not None and self.k_norm is not None:
            if self.whole_qk_norm:
                qkv = whole_norms(self.ops, qkv, self.q_norm, self.k_norm, self.head_shape, self.kv_copies, self.tp)
            else:  # each rank applies the replicated weights to its own heads only: their gradients are sums over tp
                norms = copy_to_tp(self.q_norm.weight, self.tp), copy_to_tp(self.k_norm.weight, self.tp)
        parts = qkv, (norms[0], norms[1]), rope.cos, rope.sin, self.head_shape
        rule = self.rule if self.sinks is None else replace(self.rule, sinks=self.sinks.weight)
        if not torch.is_grad_enabled() and isinstance(attention, WritesPages):
            q = self.ops.heads_to_pages(*parts, attention.page_target(self.index))
            q = q if rope.growth is None else q * rope.growth
            return attention.attend_written(self.index, q[:num_tokens], rule)
        q, k, v = self.ops.heads(*parts)
        q = q if rope.growth is None else q * rope.growth
        if num_tokens < qkv.shape[0]:  # also a slice of all rows would be a copy in the backward pass
            q, k, v = (x[:num_tokens] for x in (q, k, v))
        return attention.attend(self.index, q, k, v, rule)

    def _activate(self, recomputed: bool, gate_up: Tensor) -> Tensor:
        """The gated activation, and this rank's part of the last matrix: [R, 2n] -> [R, hidden], to be summed."""
        rows = gate_up.shape[0]
        inner = self.ops.gated(gate_up.view(rows * self.gate_up_blocks, -1), self.gelu).view(rows, -1)
        return self.down.product(self.ops, inner, recomputed)

    def _mix_experts(self, recomputed: bool, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """x + mixed, [R, hidden] or this rank's rows of it; of that the norm and the mixture of experts [R, hidden], to be summed."""
        assert self.experts is not None
        x, normed = self._add(x, mixed)
        rows = self._enter_tp(normed, self.tp)
        weights = {name: getattr(self, name).weight for name in self.experts.matrices}
        # every rank weighs its own slices of the experts: the gradients of what it has whole are sums over tp
        weights |= {name: copy_to_tp(weights[name], self.tp) for name in WHOLE if name in weights}
        if self.tp.rank and "down_bias" in weights:  # the first rank's part of the sum has it
            weights["down_bias"] = weights["down_bias"] * 0
        return x, mix_experts(self.ops, rows, MixtureWeights(**weights), self.experts, self.gelu, self.gate_up_blocks)

    def _leave(self, partial: Tensor, linear: Linear, norm: RMSNorm | None, label: str) -> Tensor:
        """The sum of a row-parallel matrix's parts; its bias, which every rank holds whole, is added after the sum; the norm."""
        total = self._leave_tp(partial, self.tp, label)
        total = total if linear.bias is None else total + linear.bias
        total = total if norm is None else norm(total)
        return total if self.residual_scale == 1 else total * self.residual_scale


class Decoder(nn.Module):
    """Stage ``stage`` of ``pp`` of a model, tensor-parallel over ``tp``. Parameters are allocated, not initialised.

    ``head``: "lm", "value", "both" or "none". ``shards`` is plan_params of this rank; parameter names are its keys. ``layer_ids`` are
    the global indices of ``layers``. ``blocks``: the order inside fused parameters, see plan_params; a generation module takes t / t_g.
    A tied model with pp > 1 holds the shared matrix twice, see :attr:`tied_ends`. ``ops``: the arithmetic of all operations but the
    attention; unless given, the best for ``dtype`` and ``device``.

    ``sequence_parallel``: outside attention and MLP each tp rank holds 1 / t of the rows (``slices`` is t), between stages too; the
    gradients of the parameters named in ``scattered`` are then parts, to be summed over tp. The forward pass has the same bits.
    ``cp``: the group that shares the tokens of each sequence, see ``context_parallel``: hidden states are of this rank's tokens.
    ``lora``: with these adapters, whose replicated halves are ``scattered`` in any case; ``quantized``: what is no parameter.
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
        sequence_parallel: bool = False,
        ops: Ops | None = None,
        lora: LoraConfig | None = None,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        device, self.cp = torch.device(device), cp or solo()
        self.spec, self.head_kind, self.stage, self.pp, self.tp = spec, head, stage, pp, tp
        self.dtype, self.ops = dtype, ops or choose_ops(dtype, device)
        self.shards = plan_params(spec, head, stage, pp, tp.rank, tp.size, blocks, lora)
        self.layer_ids = stage_layers(spec.num_hidden_layers, pp, stage)
        self.vocab_range = vocab_range(spec.vocab_size, tp.rank, tp.size)
        self.slices = tp.size if sequence_parallel else 1
        # Replicated vectors of this size act on the residual stream: norms, and biases that are added after a sum. With sequence
        # parallelism each rank applies them to its own tokens only. Parameters of a mixture see all tokens.
        whole_on_tp = {name: shard.shape for name, shard in self.shards.items() if shard.whole_on_tp}
        mixture = {name for name in whole_on_tp if name.rsplit(".", 2)[-2] in WHOLE}
        residual = {name for name, shape in whole_on_tp.items() if shape == (spec.hidden_size,)} - mixture
        halves = set(filter(is_adapter, whole_on_tp))
        self.scattered = (halves if tp.size > 1 else set()) | (residual if self.slices > 1 else set())
        self._random = lora is not None and lora.dropout > 0
        whole = plan_params(spec, "none", 0, 1, tp.rank, tp.size, blocks)  # of all layers: stages must agree on the padding
        products = (
            name for name in whole if name.startswith("layers.") and name.split(".")[2] not in (CORRECTION, "shared_gate")
        )
        matrices = [whole[name].shape for name in products if len(whole[name].shape) == 2]
        self.min_rows = max(self.ops.min_rows(math.prod(shape), shape[1]) for shape in matrices)
        # no buffers: they must survive construction on the meta device
        self._frequencies = {local: rope_frequencies(spec, local) for local in set(map(spec.local_rope, self.layer_ids))}

        def holder(name: str) -> Linear | None:
            shard = self.shards.get(f"{name}.weight")
            return None if shard is None else Linear(shard.shape, False, dtype, device)

        self.embed = holder("embed")
        self.layers = nn.ModuleList()
        for index, layer in enumerate(self.layer_ids):
            prefix = f"layers.{index}."
            shards = {name[len(prefix) :]: shard for name, shard in self.shards.items() if name.startswith(prefix)}
            self.layers.append(Block(self.ops, spec, shards, index, layer, tp, blocks, dtype, device, self.slices > 1, lora))
        self.keep_activations()
        norm = (self.ops, spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)
        self.norm = RMSNorm(*norm, dtype, device) if self.is_last else None
        self.head = holder("head")
        self.value = holder("value")
        adapters = {
            f"{name.removesuffix('.lora')}.weight": part for name, part in self.named_modules() if isinstance(part, Adapter)
        }
        self.quantized = {name: part.base for name, part in adapters.items() if part.base is not None}
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        built |= {name: matrix.shape for name, matrix in self.quantized.items()}
        planned = {name: shard.shape for name, shard in self.shards.items()}
        assert built == planned, f"parameters {built} differ from the plan {planned}"

    def keep_activations(self, checkpointing: str = "none", offload: bool = False) -> None:
        """What the layers keep for their backward passes. ``checkpointing``: "none": what each operation needs; "selective": the
        residual stream and the column-parallel products, from which norms, activations and the attention are computed
        again; "full": the input of each layer. ``offload``: in host memory.

        With sequence parallelism rows that were gathered are not kept but gathered again, in every case.
        """
        again: Callable[..., Any] = run_again
        part_again: Callable[..., Any] = run_part_again
        if self._random:
            again, part_again = partial(run_again, random=True), partial(run_part_again, random=True)
        self._run_layer: Callable[..., Tensor] = again if checkpointing == "full" else run
        self._saving: Callable[..., Any] = save_on_host if offload else lambda *resident: contextlib.nullcontext()
        for block in self.layers:
            assert isinstance(block, Block)
            block.run_part = part_again if checkpointing == "selective" else run_part
            block.run_entry = part_again if checkpointing == "none" and self.slices > 1 else block.run_part

    def enable_adapters(self, enabled: bool) -> None:
        """Whether passes are of the model with its adapters, which is usual, or of the model without."""
        for part in self.modules():
            if isinstance(part, Adapter):
                part.enabled = enabled

    def num_rows(self, num_tokens: int) -> int:
        """Rows of the hidden state that this rank hands to the next stage for ``num_tokens`` tokens."""
        return round_up(max(num_tokens, self.min_rows), self.slices) // self.slices if self.slices > 1 else num_tokens

    @property
    def waits_for_experts(self) -> bool:
        """Whether a forward pass lets the host wait for the device, to see which experts were chosen."""
        for block in self.layers:
            assert isinstance(block, Block)
            if block.experts is not None:
                count, blocks, hidden = block.experts.count, block.gate_up_blocks, self.spec.hidden_size
                entry = block.gate_up.weight.view(blocks, count, -1, hidden).transpose(0, 1)
                if any(map(self.ops.waits_for_experts, (entry, block.down.weight.view(count, 1, hidden, -1)))):
                    return True
        return False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def tied_ends(self) -> bool:
        """First and last stage each hold a copy of the embedding, whose gradients must be added over ``Mesh.ends``."""
        return self.spec.tie_word_embeddings and self.pp > 1 and self.head_kind in ("lm", "both")

    @property
    def head_weight(self) -> Tensor:
        """[V_local, hidden] of the language-model head, or [1, hidden] of a value head without one. Last stage only."""
        holder = self.head if self.head is not None else self.embed
        assert holder is not None and self.is_last and self.head_kind != "none", (
            f"stage {self.stage} of {self.pp} with head {self.head_kind!r} has no head weight"
        )
        return holder.weight

    @property
    def value_weight(self) -> Tensor:
        """[1, hidden] of the value head. Last stage only."""
        assert self.head_kind in ("value", "both"), f"this decoder has no value head, but {self.head_kind!r}"
        return self.head_weight if self.value is None else self.value.weight

    def forward(self, inputs: Tensor, attention: Attention, head: Callable[[Decoder, Tensor], Any] | None = None) -> Any:
        """Token ids [T] (first stage) or hidden [T, hidden] -> hidden [T, hidden], after the final norm on the last stage.

        With sequence parallelism the hidden state between stages is [num_rows(T), hidden]: this rank's rows.
        With ``head`` the last stage returns ``head(self, hidden)`` instead: called in here so that under FSDP the root's
        parameters are gathered. Collective over tp: every rank of it must call, in program order.
        """
        num_tokens = attention.positions.shape[0]
        rows = round_up(max(num_tokens, self.min_rows), self.slices)
        if self.embed is not None and self.is_first:
            leave = scatter_from_tp if self.slices > 1 else reduce_from_tp
            x = vocab_parallel_embedding(pad_rows(inputs, rows), self.embed.weight, self.vocab_range[0], self.tp, leave)
            if self.spec.embed_scale != 1:
                x = x * torch.tensor(self.spec.embed_scale, dtype=x.dtype).item()
        else:
            x = pad_rows(inputs, rows // self.slices)
        self._frequencies = {local: frequency.to(x.device) for local, frequency in self._frequencies.items()}
        positions = pad_rows(attention.positions, rows)
        dtype, frequencies = x.dtype, self._frequencies.items()
        tables = {local: rope_tables(self.spec, frequency, positions, dtype, local) for local, frequency in frequencies}
        for layer, block in zip(self.layer_ids, self.layers, strict=True):
            rope = tables[self.spec.local_rope(layer)]
            with self._saving(block, rope.cos, rope.sin):
                x = self._run_layer(block, x, rope, attention, num_tokens)
        if self.norm is not None:
            x = self.norm(x)
            x = gather_whole(x, self.tp) if self.slices > 1 else x
        # a tensor of its own also where nothing is cut off: FSDP2 hooks the output of each module, and if this one were the last
        # block's, ranks with short and long inputs would run their collectives in different orders
        x = x[: num_tokens if self.is_last else self.num_rows(num_tokens)]
        return x if head is None or not self.is_last else head(self, x)
