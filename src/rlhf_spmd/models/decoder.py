"""The decoder: one module for training, scoring and generation, holding this rank's slice of one pipeline stage.

Parameters are plain local tensors; tensor parallelism is explicit and costs nothing with one rank. What is computed is said here,
how is said by the :class:`~rlhf_spmd.kernels.Ops` that the decoder is built over. Short inputs are padded to ``min_rows``, as many
as its products ask for, so that a token's bits do not depend on its batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import Ops, choose_ops
from rlhf_spmd.kernels.packing import pad_rows, round_up
from rlhf_spmd.models.activations import run, run_again, run_part, run_part_again, save_on_host
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.attention import Attention, MixedHeadAttention
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.layer_kinds import SCORE_BIAS, WHOLE
from rlhf_spmd.models.layers import Linear, RMSNorm
from rlhf_spmd.models.linear_attention import DeltaAttention, PackedDeltaAttention
from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.rope import rope_frequencies, rope_tables
from rlhf_spmd.models.router_balance import Routers
from rlhf_spmd.models.sharding import plan_params, vocab_range
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.tensor_parallel import (
    gather_whole,
    reduce_from_tp,
    scatter_from_tp,
    vocab_parallel_embedding,
)
from rlhf_spmd.parallel.boxes import zero_shards
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.layout import stage_layers


class Decoder(nn.Module):
    """Stage ``stage`` of ``pp`` of a model, tensor-parallel over ``tp``. Parameters are allocated, not initialised.

    ``head``: "lm", "value", "both" or "none". ``shards`` is plan_params of this rank; parameter names are its keys. ``layer_ids`` are
    the global indices of ``layers``. ``blocks``: the order inside fused parameters, see plan_params; a generation module takes t / t_g.
    A tied model with pp > 1 holds the shared matrix twice, see :attr:`tied_across_stages`. ``ops``: the arithmetic of all operations
    but the attention; unless given, the best for ``dtype`` and ``device``.

    ``sequence_parallel``: outside attention and MLP each tp rank holds 1 / t of the rows (``slices`` is t), between stages too; the
    gradients of the parameters named in ``scattered`` are then parts, to be summed over tp. The forward pass has the same bits.
    ``cp``: the group that shares the tokens of each sequence, see ``context_parallel``: hidden states are of this rank's tokens.
    ``ep``: the group that shares the experts, see ``experts``; ``shards`` has those of this rank.
    ``expert_parallel_generation``: the ranks of tp share them.
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
        ep: Group | None = None,
        expert_parallel_generation: bool = False,
    ) -> None:
        super().__init__()
        device, self.cp, self.ep = torch.device(device), cp or solo(), ep or solo()
        self.spec, self.head_kind, self.stage, self.pp, self.tp = spec, head, stage, pp, tp
        self.dtype, self.ops = dtype, ops or choose_ops(dtype, device)
        shards = plan_params(spec, head, stage, pp, tp.rank, tp.size, blocks, lora, expert_parallel_generation)
        self.shards = zero_shards(shards, 0, 1, (self.ep.rank, self.ep.size))
        self.layer_ids = stage_layers(spec.num_hidden_layers, pp, stage)
        self.vocab_range = vocab_range(spec.vocab_size, tp.rank, tp.size)
        self.slices = tp.size if sequence_parallel else 1
        # Replicated vectors of this size act on the residual stream: norms, and biases that are added after a sum. With sequence
        # parallelism each rank applies them to its own tokens only. Parameters of a mixture see all tokens.
        whole_on_tp = {name: shard.shape for name, shard in self.shards.items() if shard.whole_on_tp}
        mixture = {name for name in whole_on_tp if name.rsplit(".", 2)[-2] in WHOLE}
        latent = {name for name in whole_on_tp if ".latent." in name}  # they see all tokens, too
        residual = {name for name, shape in whole_on_tp.items() if shape == (spec.hidden_size,)} - mixture - latent
        halves = set(filter(is_adapter, whole_on_tp))
        self.scattered = (halves if tp.size > 1 else set()) | (residual if self.slices > 1 else set())
        self._random = lora is not None and lora.dropout > 0
        every_layer = "none", 0, 1, tp.rank, tp.size, blocks, None, expert_parallel_generation
        every_shard = plan_params(spec, *every_layer)  # stages must agree on the padding
        products = (
            name for name in every_shard if name.startswith("layers.") and name.split(".")[2] not in (SCORE_BIAS, "shared_gate")
        )
        matrices = [every_shard[name].shape for name in products if len(every_shard[name].shape) == 2]
        self.min_rows = max(self.ops.min_rows(math.prod(shape), shape[1]) for shape in matrices)
        # no buffers: they must survive construction on the meta device
        self._frequencies = {local: rope_frequencies(spec, local) for local in set(map(spec.local_rope, self.layer_ids))}

        def holder(name: str) -> Linear | None:
            shard = self.shards.get(f"{name}.weight")
            return None if shard is None else Linear(shard.shape, False, dtype, device)

        self.embed = holder("embed")
        self.layers = nn.ModuleList()
        for number, layer in enumerate(self.layer_ids):
            prefix = f"layers.{number}."
            kind = spec.attention_kind(layer)
            index = sum(spec.attention_kind(other) == kind for other in list(self.layer_ids)[:number])
            shards = {name[len(prefix) :]: shard for name, shard in self.shards.items() if name.startswith(prefix)}
            parallel = self.slices > 1, lora, self.ep
            block = Block(self.ops, spec, shards, index, layer, tp, blocks, dtype, device, *parallel)
            if expert_parallel_generation and block.experts is not None:
                block.first_expert = block.experts.count // tp.size * tp.rank
            self.layers.append(block)
        self.keep_activations()
        norm = (self.ops, spec.hidden_size, spec.rms_norm_eps, spec.norm_plus_one)
        self.norm = RMSNorm(*norm, dtype, device) if self.is_last else None
        self.head = holder("head")
        self.value = holder("value")
        bases = {f"{name.removesuffix('.lora')}.weight": adapter.base for name, adapter in self.adapters.items()}
        self.quantized = {name: base for name, base in bases.items() if base is not None}
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        built |= {name: matrix.shape for name, matrix in self.quantized.items()}
        planned = {name: shard.shape for name, shard in self.shards.items()}
        assert built == planned, f"parameters {built} differ from the plan {planned}"

    def keep_activations(self, checkpointing: str = "none", offload: bool = False) -> None:
        """Set what the layers keep for their backward passes. ``checkpointing``: "none": what each operation needs; "selective": the
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

    @property
    def adapters(self) -> dict[str, Adapter]:
        """By name, as ``layers.0.qkv.lora``."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Adapter)}

    def own_experts(self) -> list[nn.Parameter]:
        """The parameters of which each rank of ep holds its own part; [] without experts in parallel."""
        return [param for name, param in self.named_parameters() if self.shards[name].by_expert and self.ep.size > 1]

    def enable_adapters(self, enabled: bool) -> None:
        """Let passes be of the model with its adapters, the default, or with those that training began with, if any."""
        for adapter in self.adapters.values():
            adapter.enabled = enabled

    def num_rows(self, num_tokens: int) -> int:
        """Rows of the hidden state that this rank hands to the next stage for ``num_tokens`` tokens."""
        return round_up(max(num_tokens, self.min_rows), self.slices) // self.slices if self.slices > 1 else num_tokens

    @property
    def moe_syncs_host(self) -> bool:
        """True if a forward pass lets the host wait for the device, to see which experts were chosen."""
        for block in self.layers:
            assert isinstance(block, Block)
            if block.experts is not None:
                if self.ep.size > 1:
                    return True
                blocks, hidden = block.gate_up_blocks, self.spec.hidden_size
                count = len(block.down.weight) // hidden
                entry = block.gate_up.weight.view(blocks, count, -1, hidden).transpose(0, 1)
                if any(map(self.ops.moe_syncs_host, (entry, block.down.weight.view(count, 1, hidden, -1)))):
                    return True
        return False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def tied_across_stages(self) -> bool:
        """First and last stage each hold a copy of the embedding, whose gradients must be added over ``Mesh.first_last_group``."""
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

    @property
    def num_linear(self) -> int:
        """Layers of this stage with linear attention."""
        return sum(self.spec.delta_of(layer) is not None for layer in self.layer_ids)

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        head: Callable[[Decoder, Tensor], Any] | None = None,
        routers: Routers | None = None,
        delta_rule: DeltaAttention | None = None,
    ) -> Any:
        """Token ids [T] (first stage) or hidden [T, hidden] -> hidden [T, hidden], after the final norm on the last stage.

        With sequence parallelism the hidden state between stages is [num_rows(T), hidden]: this rank's rows.
        With ``head`` the last stage returns ``head(self, hidden)`` instead: called in here so that under FSDP the root's
        parameters are gathered. ``routers``: through which the routers of mixtures choose. ``delta_rule``: for layers with linear
        attention; None: sequences of a PackedAttention begin.

        Collective over tp: every rank of it must call, in program order.
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
        if delta_rule is None and self.num_linear:
            delta_rule = PackedDeltaAttention(attention, self.ops.packed_delta)
        contexts: dict[str, Attention | DeltaAttention | None]
        contexts = {"full": attention, "global": attention, "linear": delta_rule}
        if isinstance(attention, MixedHeadAttention):
            contexts |= {"full": attention.full, "global": attention.global_heads}
        for layer, block in zip(self.layer_ids, self.layers, strict=True):
            rope = tables[self.spec.local_rope(layer)]
            with self._saving(block, rope.cos, rope.sin):
                x = self._run_layer(block, x, rope, contexts[self.spec.attention_kind(layer)], num_tokens, routers)
        if self.norm is not None:
            x = self.norm(x)
            x = gather_whole(x, self.tp) if self.slices > 1 else x
        # a tensor of its own also where nothing is cut off: FSDP2 hooks the output of each module, and if this one were the last
        # block's, ranks with short and long inputs would run their collectives in different orders
        x = x[: num_tokens if self.is_last else self.num_rows(num_tokens)]
        return x if head is None or not self.is_last else head(self, x)
