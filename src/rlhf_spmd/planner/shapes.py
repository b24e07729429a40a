"""Input of the cost and memory models: a model's sizes, a call's rows, and the settings that it may run with. No tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.sharding import plan_whole_model
from rlhf_spmd.models.spec import ModelSpec


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder in elements.

    "Of a token" counts numbers, "of a layer" parameters; both are means over all layers where layers differ. Where some layers have
    linear attention, the sizes of softmax attention are averaged over all layers, too.
    """

    layers: int
    hidden: int
    queries: int  # of a token: heads * head_dim of the queries
    keys: int  # of a token: heads * head_dim of the keys; values are like keys
    kv_heads: int
    intermediate: int  # columns of the MLP that a token meets; in a mixture of experts those of all its experts
    vocab: int
    matmul_weights: float  # of a layer: matrix weights that a token is multiplied with
    layer: float  # parameters of a layer
    embed: int  # parameters of the embedding
    head: int  # parameters behind the last layer
    head_outputs: int  # of a token: numbers that the head makes: the vocabulary's size, or 1 for a value head
    tied: bool  # embedding and head are the same parameters
    expert_rows: float = 0.0  # of a token: rows that a layer makes for its experts; 0 without experts
    cache_entry: int = 0  # of a token: numbers that latent attention caches; 0 without it
    q_rank: int = 0  # of a token: numbers that queries of latent attention come from
    experts: float = 0.0  # of a layer: the parameters that ep divides
    gate_columns: float = 0.0  # of a layer: columns of its first product beside queries, keys and values
    mixer_floats: float = 0.0  # of a token: fp32 numbers that a layer keeps beside queries, keys and values
    row_state: float = 0.0  # fp32 numbers that a layer keeps of a row in generation
    expert_columns: float = 0.0  # those of ``intermediate`` in mixtures of experts
    linear_share: float = 0.0  # share of the layers that have linear attention
    global_keys: float = 0.0  # those of ``keys`` in layers with ``ModelSpec.global_heads``
    global_kv_heads: int = 1  # KV heads of these layers

    def rank_keys(self, tp: Any) -> Any:
        """Return a rank's part of ``keys``. If tp exceeds the KV heads, ranks hold copies."""
        local_keys = (self.keys - self.global_keys) / np.minimum(tp, self.kv_heads)
        return local_keys + self.global_keys / np.minimum(tp, self.global_kv_heads)

    def cached(self, tp: Any, num_entries: int = 1) -> Any:
        """Return the numbers of a token and layer in a rank's cache. If tp exceeds the KV heads, ranks hold copies, as they do of
        entries. ``num_entries``: pages that hold an entry."""
        return num_entries * self.cache_entry if self.cache_entry else 2 * self.rank_keys(tp)

    def first_product_outputs(self, tp: Any) -> Any:
        """Return the numbers that a layer's first products make of a token on a rank, without ``gate_columns``."""
        if not self.cache_entry:
            return self.queries / tp + 2 * self.rank_keys(tp)
        return self.cache_entry + self.q_rank / np.where(self.q_rank == self.queries, tp, 1)

    @property
    def params(self) -> float:
        """Return the parameters of the model."""
        return self.layers * self.layer + self.embed + self.head

    def stage_params(self, pp: Any, tp: Any) -> Any:
        """Return the parameters of the fullest (pipeline stage, tp slice), for numbers or arrays. Small replicated ones count as
        sliced."""
        per_stage = np.ceil(self.layers / np.asarray(pp)) * self.layer
        ends = np.where(np.asarray(pp) == 1, self.embed + self.head, max(self.embed, self.embed if self.tied else self.head))
        return (per_stage + ends) / tp

    def stage_experts(self, settings: CallSettings) -> np.ndarray:
        """Return the experts among :meth:`stage_params`, which ranks of ep share and ZeRO does not divide, [n]; 0 without ep."""
        return np.where(settings.ep > 1, np.ceil(self.layers / settings.pp) * self.experts / settings.tp, 0.0)

    def rank_params(self, settings: CallSettings) -> np.ndarray:
        """Return those of :meth:`stage_params` that ZeRO and ep leave on a rank, [n]."""
        experts = self.stage_experts(settings)
        rest = self.stage_params(settings.pp, settings.tp) - experts
        return np.asarray(rest / settings.dp_shard + experts / settings.ep)


def adapter_numel(spec: ModelSpec, lora: LoraConfig) -> float:
    """Return the elements of the adapters of an average layer."""
    plan = plan_whole_model(spec, "none", lora) if lora.rank else {}
    return sum(float(np.prod(shard.shape)) for name, shard in plan.items() if is_adapter(name)) / spec.num_hidden_layers


def quantized_numel(spec: ModelSpec, lora: LoraConfig) -> float:
    """Return the elements of the matrices of an average layer that are quantized to ``lora.bits``."""
    plan = plan_whole_model(spec, "none", lora) if lora.bits is not None else {}
    matrices = [name.replace(".lora.a", ".weight") for name in plan if name.endswith(".lora.a")]
    return sum(float(np.prod(plan[name].shape)) for name in matrices) / spec.num_hidden_layers


@cache
def shape_of(spec: ModelSpec, head: str) -> ModelShape:
    """Return the sizes of a model with this ``head``, as ``models.sharding.plan_params`` names it."""
    numel: dict[str, int] = {}
    divided = 0
    for name, shard in plan_whole_model(spec, head).items():
        part = name.split(".")[0]
        numel[part] = numel.get(part, 0) + int(np.prod(shard.shape))
        divided += int(np.prod(shard.shape)) * shard.by_expert
    # share: of layers with attention
    share = 1.0 if spec.delta_rule is None else 1 - len(spec.delta_rule.layers) / spec.num_hidden_layers
    attending_layers = [layer for layer in range(spec.num_hidden_layers) if spec.linear_attention_at(layer) is None]
    attending = [spec.spec_for_layer(layer) for layer in attending_layers]
    queries = sum(layer_spec.num_attention_heads * layer_spec.head_dim for layer_spec in attending) // spec.num_hidden_layers
    keys = sum(layer_spec.num_key_value_heads * layer_spec.head_dim for layer_spec in attending) // spec.num_hidden_layers
    gates, delta = queries * spec.attention_gate, spec.delta_rule
    linear = 0.0 if delta is None else delta.columns * (1 - share)
    out = 0.0 if delta is None else delta.value_heads * delta.value_dim * (1 - share)
    columns = expert_columns = routers = rows = 0.0
    for layer in range(spec.num_hidden_layers):
        experts = spec.experts_at(layer)
        columns += spec.intermediate_size if experts is None else experts.columns_per_token
        expert_columns += 0 if experts is None else experts.columns_per_token
        routers += 0 if experts is None else experts.num_router_outputs
        rows += 0 if experts is None else experts.experts_per_token
    columns, routers = columns / spec.num_hidden_layers, routers / spec.num_hidden_layers
    matrices = sum(layer_spec.attention_numel for layer_spec in attending) / spec.num_hidden_layers
    matmul_weights = matrices + spec.hidden_size * (linear + out + 3 * columns + routers)
    head_outputs = 1 if head == "value" else spec.vocab_size if head in ("lm", "both") else 0
    global_keys = sum(
        math.prod(spec.global_heads or ()) for layer in range(spec.num_hidden_layers) if spec.has_global_heads(layer)
    )
    return ModelShape(
        layers=spec.num_hidden_layers,
        hidden=spec.hidden_size,
        queries=queries,
        keys=keys,
        kv_heads=spec.num_key_value_heads,
        intermediate=int(columns),
        vocab=spec.vocab_size,
        matmul_weights=matmul_weights,
        layer=numel["layers"] / spec.num_hidden_layers,
        embed=numel["embed"],
        head=numel.get("head", 0) + numel.get("norm", 0) + numel.get("value", 0),
        head_outputs=head_outputs,
        tied=spec.tie_word_embeddings and head in ("lm", "both"),
        expert_rows=rows / spec.num_hidden_layers,
        cache_entry=0 if spec.latent is None else spec.latent.cached_elements,
        q_rank=0 if spec.latent is None else spec.latent.q_rank or queries,
        experts=divided / spec.num_hidden_layers,
        gate_columns=gates + linear,
        mixer_floats=2 * gates + (0.0 if delta is None else delta.saved_numbers_per_token * (1 - share)),
        row_state=0.0 if delta is None else (delta.state_numel + delta.channels * (delta.kernel - 1)) * (1 - share),
        expert_columns=expert_columns / spec.num_hidden_layers,
        linear_share=1 - share,
        global_keys=global_keys / spec.num_hidden_layers,
        global_kv_heads=spec.global_heads[0] if spec.global_heads else 1,
    )


@dataclass(frozen=True)
class Workload:
    """The rows of one call, and the optimizer steps (``mini_batches``) of each epoch if it trains.

    ``prompt``: tokens of an average prompt. ``responses``: response lengths at equally likely quantiles, ascending, so their
    mean is the mean length and the last one is the longest. ``group``: rows that have the same prompt.
    """

    rows: int
    prompt: float
    responses: tuple[float, ...]
    mini_batches: int = 1
    epochs: int = 1
    group: int = 1

    @property
    def response(self) -> float:
        """Return the tokens of an average response."""
        return sum(self.responses) / len(self.responses)

    @property
    def length(self) -> float:
        """Return the tokens of an average row."""
        return self.prompt + self.response

    @property
    def longest(self) -> float:
        """Return the tokens of a row with the longest response."""
        return self.prompt + self.responses[-1]

    def micro_batches(self, rows: float, settings: CallSettings) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of micro-batches of each replica, and the tokens of each on a rank, [n] both.

        ``rows`` rows are dealt evenly over dp.
        """
        replica_rows = np.maximum(np.ceil(rows / settings.dp), 1)
        count = np.ceil(replica_rows / np.maximum(settings.micro_tokens * settings.cp // self.length, 1))
        return count, replica_rows * self.length / count / settings.cp

    def tokens_through_layers(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a micro-batch that go through the layers: rows of a group have their prompt in common."""
        sharing = np.clip(tokens / self.length, 1, self.group)
        return tokens * (self.response + self.prompt / sharing) / self.length


@dataclass(frozen=True)
class CallSettings:
    """Settings of a call that are compared: n alternatives, each field an int64 array [n].

    ``cp``: ranks that share the tokens of a row. ``ep``: neighbours that share the experts. ``micro_tokens``: token budget of a
    micro-batch on a rank. ``zero_size``: ranks of dp * cp that ZeRO shards over, 0 for all.
    ``checkpointing``: index into ``models.activations.CHECKPOINTING``. ``sequence_parallel``: 0 or 1. For generation ``dp``
    counts replicas, ``max_num_seqs`` the rows in flight on each, and ``graphs`` is 1 if decode steps are captured as CUDA
    graphs.
    """

    pp: np.ndarray
    tp: np.ndarray
    dp: np.ndarray
    zero: np.ndarray
    zero_size: np.ndarray
    micro_tokens: np.ndarray
    checkpointing: np.ndarray
    sequence_parallel: np.ndarray
    max_num_seqs: np.ndarray
    graphs: np.ndarray
    cp: np.ndarray
    ep: np.ndarray

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def size(self) -> np.ndarray:
        """Return the ranks of the layout, [n]."""
        return self.pp * self.tp * self.dp * self.cp

    @property
    def dp_shard(self) -> np.ndarray:
        """Return the neighbouring ranks of dp * cp that share one copy of what ZeRO shards, 1 without ZeRO."""
        return np.where(self.zero > 0, np.where(self.zero_size > 0, self.zero_size, self.dp * self.cp), 1)

    @property
    def dp_replicate(self) -> np.ndarray:
        """Return the copies of the model over dp * cp, [n]."""
        return self.dp * self.cp // self.dp_shard

    def take(self, index: Any) -> CallSettings:
        """Return the alternatives at ``index``, which is numbers or a mask."""
        return CallSettings(*(np.atleast_1d(getattr(self, f.name)[index]) for f in fields(self)))

    def set(self, **values: Any) -> CallSettings:
        """Return the alternatives with some fields replaced by numbers or arrays [n]."""
        shape = self.pp.shape
        return replace(self, **{name: np.broadcast_to(np.asarray(x, dtype=np.int64), shape) for name, x in values.items()})

    def alternative(self, index: int) -> dict[str, int]:
        """Return one alternative, field by field."""
        return {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}


def call_settings(layouts: Sequence[tuple[int, int, int]], **options: Sequence[int]) -> CallSettings:
    """Return all combinations of (pp, tp, dp) with these values of other fields. A field without values has its default."""
    defaults = {"zero": 0, "zero_size": 0, "micro_tokens": 16384, "checkpointing": 0, "sequence_parallel": 0}
    defaults |= {"max_num_seqs": 256, "graphs": 0, "cp": 1, "ep": 1}
    values = [options.get(name, (default,)) for name, default in defaults.items()]
    rows = [(*layout, *rest) for layout in layouts for rest in product(*values)]
    return CallSettings(*np.array(rows, dtype=np.int64).reshape(-1, 3 + len(defaults)).T)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
