"""The decoder: one module for training, scoring and generation, holding this rank's slice of one pipeline stage.

Parameters are plain local tensors; tensor parallelism is explicit and costs nothing with one rank. What is computed is said here,
how is said by the :class:`~rlhf_spmd.kernels.Ops` that the decoder is built over. Short inputs are padded to ``min_rows``, as many
as its products ask for, so that a token's bits do not depend on its batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import Ops, choose_ops
from rlhf_spmd.kernels.packing import pad_rows, round_up
from rlhf_spmd.models.activations import keep_layer, keep_part, recompute_layer, recompute_part, save_on_host
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.attention import Attention, MixedHeadAttention
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.layer_kinds import REPLICATED, SCORE_BIAS
from rlhf_spmd.models.layers import Linear, RMSNorm
from rlhf_spmd.models.linear_attention import DeltaAttention, PackedDeltaAttention
from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.rope import rope_frequencies, rope_tables
from rlhf_spmd.models.router_balance import Routers
from rlhf_spmd.models.sharding import plan_params, vocab_range
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.tensor_parallel import gather_replicated, reduce_from_tp, scatter_from_tp, vocab_parallel_embedding
from rlhf_spmd.parallel.boxes import ParamShard, zero_shards
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.layout import stage_layers


def scattered_params(shards: Mapping[str, ParamShard], hidden_size: int, tp: int, sequence_parallel: bool) -> set[str]:
    """Return the names of the replicated parameters of which each tp rank computes only a part of the gradient.

    These are the replicated halves of adapters, and with sequence parallelism the vectors that act on the residual stream: norms, and
    biases that are added after a sum. A rank applies them to its tokens only. Parameters of mixtures and of latent attention see all
    tokens.
    """
    if tp == 1:
        return set()
    replicated = {name: shard.shape for name, shard in shards.items() if shard.replicated_on_tp}
    scattered = set(filter(is_adapter, replicated))
    if sequence_parallel:
        mixture = {name for name in replicated if name.rsplit(".", 2)[-2] in REPLICATED}
        latent = {name for name in replicated if ".latent." in name}
        scattered |= {name for name, shape in replicated.items() if shape == (hidden_size,)} - mixture - latent
    return scattered


def min_rows_of_layers(ops: Ops, spec: ModelSpec, tp: Group, fused_slices: int, expert_parallel_generation: bool) -> int:
    """Return the fewest rows with which the products of all layers are batch-invariant on this rank.

    All layers of the model count, because the stages must agree on the padding.
    """
    ranks = 0, 1, tp.rank, tp.size  # stage, pp, tp rank, tp
    shards = plan_params(spec, "none", *ranks, fused_slices, expert_parallel_generation=expert_parallel_generation)
    no_products = (SCORE_BIAS, "shared_gate")
    layers = [shard for name, shard in shards.items() if name.startswith("layers.") and name.split(".")[2] not in no_products]
    matrices = [shard.shape for shard in layers if len(shard.shape) == 2]
    return max(ops.min_rows(math.prod(shape), shape[1]) for shape in matrices)


class Decoder(nn.Module):
    """Stage ``stage`` of ``pp`` of a model, tensor-parallel over ``tp``. Parameters are allocated, not initialised.

    Arguments:

    - head: "lm", "value", "both" or "none"
    - fused_slices: number of training slices in a fused matrix, see ``plan_params``; t / t_g in a generation module
    - sequence_parallel: outside attention and MLP each tp rank holds 1 / t of the rows, between stages too. The bits of a forward pass
      are the same
    - ops: the arithmetic of all operations but the attention; None: the best for ``dtype`` and ``device``
    - lora: with these adapters
    - cp: the group that shares the tokens of each sequence, see ``context_parallel``; hidden states are of this rank's tokens
    - ep: the group that shares the experts, see ``experts``
    - expert_parallel_generation: the ranks of tp share the experts

    Attributes:

    - shards: ``plan_params`` of this rank; parameter names are its keys. With ``ep`` it has the experts of this rank
    - layer_ids: global indices of ``layers``
    - slices: t with sequence parallelism, else 1
    - scattered: names of the parameters whose gradients must be summed over tp, see :func:`scattered_params`
    - quantized: the matrices that are no parameters, because adapters have them in fewer bits

    A tied model with pp > 1 holds the shared matrix twice, see :attr:`tied_across_stages`.
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
        fused_slices: int = 1,
        sequence_parallel: bool = False,
        ops: Ops | None = None,
        lora: LoraConfig | None = None,
        cp: Group | None = None,
        ep: Group | None = None,
        expert_parallel_generation: bool = False,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.head_kind = head
        self.stage, self.pp = stage, pp
        self.tp = tp
        self.cp = cp or solo()
        self.ep = ep or solo()
        self.dtype = dtype
        self.ops = ops or choose_ops(dtype, device)
        shards = plan_params(spec, head, stage, pp, tp.rank, tp.size, fused_slices, lora, expert_parallel_generation)
        self.shards = zero_shards(shards, 0, 1, (self.ep.rank, self.ep.size))
        self.layer_ids = stage_layers(spec.num_hidden_layers, pp, stage)
        self.vocab_range = vocab_range(spec.vocab_size, tp.rank, tp.size)
        self.slices = tp.size if sequence_parallel else 1
        self.scattered = scattered_params(self.shards, spec.hidden_size, tp.size, sequence_parallel)
        self._random = lora is not None and lora.dropout > 0
        self.min_rows = min_rows_of_layers(self.ops, spec, tp, fused_slices, expert_parallel_generation)
        # no buffers: they must survive construction on the meta device
        self._frequencies = {kind: rope_frequencies(spec, kind) for kind in set(map(spec.rope_kind, self.layer_ids))}
        self.embed = self._build_matrix("embed", device)
        self.layers = self._build_layers(fused_slices, device, lora, expert_parallel_generation)
        self.keep_activations()
        self.norm: RMSNorm | None = None
        if self.is_last:
            self.norm = RMSNorm(self.ops, spec.hidden_size, spec.rms_norm_eps, spec.norm_unit_offset, dtype, device)
        self.head = self._build_matrix("head", device)
        self.value = self._build_matrix("value", device)
        bases = {name.removesuffix(".lora"): adapter.base for name, adapter in self.adapters.items()}
        self.quantized = {f"{name}.weight": base for name, base in bases.items() if base is not None}
        self._check_parameters()

    def _build_matrix(self, name: str, device: torch.device) -> Linear | None:
        """Return the holder of a matrix outside of the layers; None if the stage does not have it."""
        shard = self.shards.get(f"{name}.weight")
        return None if shard is None else Linear(shard.shape, False, self.dtype, device)

    def _build_layers(
        self, fused_slices: int, device: torch.device, lora: LoraConfig | None, expert_parallel_generation: bool
    ) -> nn.ModuleList:
        """Return the layers of the stage."""
        layers = nn.ModuleList()
        for local, layer in enumerate(self.layer_ids):
            block = self._build_block(local, layer, fused_slices, device, lora)
            if expert_parallel_generation and block.experts is not None:
                block.first_expert = block.experts.num_experts // self.tp.size * self.tp.rank
            layers.append(block)
        return layers

    def _build_block(self, local: int, layer: int, fused_slices: int, device: torch.device, lora: LoraConfig | None) -> Block:
        """Return a layer of the stage. ``local``: its number within the stage; ``layer``: its index in the model."""
        prefix = f"layers.{local}."
        kind = self.spec.attention_kind(layer)
        return Block(
            self.ops,
            self.spec,
            shards={name[len(prefix) :]: shard for name, shard in self.shards.items() if name.startswith(prefix)},
            index_of_kind=sum(self.spec.attention_kind(earlier) == kind for earlier in self.layer_ids[:local]),
            global_layer=layer,
            tp=self.tp,
            fused_slices=fused_slices,
            dtype=self.dtype,
            device=device,
            sequence_parallel=self.slices > 1,
            lora=lora,
            ep=self.ep,
        )

    def _check_parameters(self) -> None:
        """Check that parameters and quantized matrices are those of the plan, in name and shape."""
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        built |= {name: matrix.shape for name, matrix in self.quantized.items()}
        planned = {name: shard.shape for name, shard in self.shards.items()}
        assert built == planned, f"parameters {built} differ from the plan {planned}"

    def keep_activations(self, checkpointing: str = "none", offload: bool = False) -> None:
        """Set what the layers keep for their backward passes.

        - checkpointing "none": what each operation needs
        - "selective": the residual stream and the column-parallel products; norms, activations and attention are computed again
        - "full": the input of each layer
        - offload: what is kept goes to host memory

        With sequence parallelism gathered rows are never kept, but gathered again.
        """
        run_layer_again: Callable[..., Any] = partial(recompute_layer, random=True) if self._random else recompute_layer
        run_part_again: Callable[..., Any] = partial(recompute_part, random=True) if self._random else recompute_part
        self._run_layer: Callable[..., Tensor] = run_layer_again if checkpointing == "full" else keep_layer
        self._saving: Callable[..., Any] = save_on_host if offload else lambda *resident: contextlib.nullcontext()
        for block in self.layers:
            assert isinstance(block, Block)
            block.run_part = run_part_again if checkpointing == "selective" else keep_part
            block.run_entry = run_part_again if checkpointing == "none" and self.slices > 1 else block.run_part

    @property
    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters of this stage by name, such as ``layers.0.qkv.lora``."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Adapter)}

    def local_expert_params(self) -> list[nn.Parameter]:
        """Return the parameters of which each rank of ep has the rows of its experts; [] without expert parallelism."""
        return [param for name, param in self.named_parameters() if self.shards[name].by_expert and self.ep.size > 1]

    def enable_adapters(self, enabled: bool) -> None:
        """Let forward passes use the adapters as trained, the default; with ``enabled`` false those that training began with, or none
        if it began without."""
        for adapter in self.adapters.values():
            adapter.enabled = enabled

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows of the hidden state that this rank sends to the next stage for ``num_tokens`` tokens."""
        return round_up(max(num_tokens, self.min_rows), self.slices) // self.slices if self.slices > 1 else num_tokens

    @property
    def moe_syncs_host(self) -> bool:
        """Return True if the host waits in a forward pass until the device has chosen experts."""
        for block in self.layers:
            assert isinstance(block, Block)
            if block.experts is not None:
                if self.ep.size > 1:
                    return True
                hidden = self.spec.hidden_size
                num_experts = len(block.down.weight) // hidden
                gate_up = block.gate_up.weight.view(block.gate_up_slices, num_experts, -1, hidden).transpose(0, 1)
                down = block.down.weight.view(num_experts, 1, hidden, -1)
                if self.ops.moe_syncs_host(gate_up) or self.ops.moe_syncs_host(down):
                    return True
        return False

    @property
    def is_first(self) -> bool:
        """Return True for the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return True for the last stage."""
        return self.stage == self.pp - 1

    @property
    def tied_across_stages(self) -> bool:
        """Return True if first and last stage each hold a copy of the embedding. The gradients of both copies must then be added over
        ``Mesh.first_last_group``."""
        return self.spec.tie_word_embeddings and self.pp > 1 and self.head_kind in ("lm", "both")

    @property
    def head_weight(self) -> Tensor:
        """Return the weight [V_local, hidden] of the language-model head, or without one [1, hidden] of the value head. Last stage
        only."""
        linear = self.head if self.head is not None else self.embed
        assert linear is not None and self.is_last and self.head_kind != "none", (
            f"stage {self.stage} of {self.pp} with head {self.head_kind!r} has no head weight"
        )
        return linear.weight

    @property
    def value_weight(self) -> Tensor:
        """Return the weight [1, hidden] of the value head. Last stage only."""
        assert self.head_kind in ("value", "both"), f"this decoder has no value head, but {self.head_kind!r}"
        return self.head_weight if self.value is None else self.value.weight

    @property
    def num_linear(self) -> int:
        """Return the number of this stage's layers with linear attention."""
        return sum(self.spec.linear_attention_at(layer) is not None for layer in self.layer_ids)

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        head: Callable[[Decoder, Tensor], Any] | None = None,
        routers: Routers | None = None,
        delta_rule: DeltaAttention | None = None,
    ) -> Any:
        """Return the hidden state [T, hidden] behind this stage's layers, on the last stage behind the final norm.

        Collective over tp: every rank of it must call, in program order.

        - inputs: token ids [T] on the first stage, else the hidden state [T, hidden] of the stage before. With sequence parallelism
          the hidden state between stages is [num_rows(T), hidden], the rows of this rank
        - head: the last stage returns ``head(self, hidden)`` in place of the hidden state. It is called in here because FSDP gathers
          the root's parameters only during a forward pass
        - routers: chooses the experts of mixtures; None: each router by its logits
        - delta_rule: for layers with linear attention; None: each sequence of a PackedAttention begins with its first token
        """
        num_tokens = attention.positions.shape[0]
        rows = round_up(max(num_tokens, self.min_rows), self.slices)
        if self.embed is not None and self.is_first:
            leave_tp = scatter_from_tp if self.slices > 1 else reduce_from_tp
            x = vocab_parallel_embedding(pad_rows(inputs, rows), self.embed.weight, self.vocab_range[0], self.tp, leave_tp)
            if self.spec.embed_scale != 1:
                x = x * torch.tensor(self.spec.embed_scale, dtype=x.dtype).item()
        else:
            x = pad_rows(inputs, rows // self.slices)
        self._frequencies = {kind: frequency.to(x.device) for kind, frequency in self._frequencies.items()}
        positions = pad_rows(attention.positions, rows)
        tables = {kind: rope_tables(self.spec, freq, positions, x.dtype, kind) for kind, freq in self._frequencies.items()}
        if delta_rule is None and self.num_linear:
            delta_rule = PackedDeltaAttention(attention, self.ops.packed_delta)
        attentions: dict[str, Attention | DeltaAttention | None]  # by ModelSpec.attention_kind
        attentions = {"full": attention, "global": attention, "linear": delta_rule}
        if isinstance(attention, MixedHeadAttention):
            attentions |= {"full": attention.full, "global": attention.global_heads}
        for layer, block in zip(self.layer_ids, self.layers, strict=True):
            rope = tables[self.spec.rope_kind(layer)]
            layer_attention = attentions[self.spec.attention_kind(layer)]
            with self._saving(block, rope.cos, rope.sin):
                x = self._run_layer(block, x, rope, layer_attention, num_tokens, routers)
        if self.norm is not None:
            x = self.norm(x)
            x = gather_replicated(x, self.tp) if self.slices > 1 else x
        # a tensor of its own also where nothing is cut off: FSDP2 hooks the output of each module, and if this one were the last
        # block's, ranks with short and long inputs would run their collectives in different orders
        x = x[: num_tokens if self.is_last else self.num_rows(num_tokens)]
        return x if head is None or not self.is_last else head(self, x)
