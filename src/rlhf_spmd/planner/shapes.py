"""Input of the cost and memory models: a model's sizes, a call's rows, and the settings that it may run with. No tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from rlhf_spmd.models.lora import LoraConfig, is_adapter
from rlhf_spmd.models.sharding import plan_whole_model
from rlhf_spmd.models.spec import ModelSpec

Numbers = np.ndarray | float  # one for all settings, or an array [n]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder in elements.

    Numbers for a token and parameters of a layer are means over all layers. Where some layers have linear attention, the sizes of
    softmax attention are averaged over all layers, too.
    """

    # sizes
    num_layers: int
    hidden: int  # numbers of a token in the residual stream
    kv_heads: int
    vocab: int
    ties_embeddings: bool  # embedding and head are the same parameters
    # numbers for a token
    query_dims: int  # heads * head_dim of the queries
    key_dims: int  # heads * head_dim of the keys; values are like keys
    intermediate: int  # columns of the MLP; in a mixture of experts those of all experts of the token
    head_outputs: int  # numbers that the head makes: the vocabulary's size, or 1 for a value head
    # parameters
    matmul_weights: float  # of a layer: matrix weights that a token is multiplied with
    layer_params: float  # of a layer
    embed_params: int  # of the embedding
    head_params: int  # behind the last layer
    expert_params: float = 0.0  # of a layer: the parameters that ep divides
    # numbers for a token, 0 in models without what they describe
    expert_rows: float = 0.0  # rows that a layer makes for its experts
    expert_columns: float = 0.0  # those of ``intermediate`` in mixtures of experts
    cache_entry: int = 0  # numbers that latent attention caches
    q_rank: int = 0  # numbers that queries of latent attention come from
    gate_columns: float = 0.0  # columns of a layer's first product beside queries, keys and values
    mixer_floats: float = 0.0  # fp32 numbers that a layer keeps beside queries, keys and values
    global_key_dims: float = 0.0  # those of ``key_dims`` in layers with ``ModelSpec.global_heads``
    # other sizes
    global_kv_heads: int = 1  # KV heads of these layers
    row_state: float = 0.0  # fp32 numbers that a layer keeps of a row in generation
    linear_share: float = 0.0  # share of the layers that have linear attention

    def rank_key_dims(self, tp: Numbers) -> Numbers:
        """Return a rank's part of ``key_dims``. If tp exceeds the KV heads, ranks hold copies."""
        local_dims = (self.key_dims - self.global_key_dims) / np.minimum(tp, self.kv_heads)
        return local_dims + self.global_key_dims / np.minimum(tp, self.global_kv_heads)

    def cached_numbers(self, tp: Numbers, num_entries: int = 1) -> Numbers:
        """Return the numbers in a rank's cache for a token and layer.

        If tp exceeds the KV heads, ranks hold copies, as they do of the entries of latent attention. ``num_entries``: pages that
        hold such an entry.
        """
        return num_entries * self.cache_entry if self.cache_entry else 2 * self.rank_key_dims(tp)

    def first_product_outputs(self, tp: Numbers) -> Numbers:
        """Return the numbers that a layer's first products make for a token on a rank, without ``gate_columns``."""
        if not self.cache_entry:
            return self.query_dims / tp + 2 * self.rank_key_dims(tp)
        return self.cache_entry + self.q_rank / np.where(self.q_rank == self.query_dims, tp, 1)

    @property
    def params(self) -> float:
        """Return the parameters of the model."""
        return self.num_layers * self.layer_params + self.embed_params + self.head_params

    def stage_params(self, pp: Numbers, tp: Numbers) -> Numbers:
        """Return the parameters of the fullest (pipeline stage, tp slice), for numbers or arrays.

        Small replicated parameters count as sliced.
        """
        per_stage = np.ceil(self.num_layers / np.asarray(pp)) * self.layer_params
        larger_end = max(self.embed_params, self.embed_params if self.ties_embeddings else self.head_params)
        ends = np.where(np.asarray(pp) == 1, self.embed_params + self.head_params, larger_end)
        return (per_stage + ends) / tp

    def stage_expert_params(self, settings: CallSettings) -> np.ndarray:
        """Return the experts' part of :meth:`stage_params`, which ranks of ep share and ZeRO does not divide, [n]; 0 without ep."""
        return np.where(settings.ep > 1, np.ceil(self.num_layers / settings.pp) * self.expert_params / settings.tp, 0.0)

    def rank_params(self, settings: CallSettings) -> np.ndarray:
        """Return the part of :meth:`stage_params` that ZeRO and ep leave on a rank, [n]."""
        experts = self.stage_expert_params(settings)
        other_params = self.stage_params(settings.pp, settings.tp) - experts
        return np.asarray(other_params / settings.dp_shard + experts / settings.ep)


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
    num_layers = spec.num_hidden_layers
    numel: dict[str, int] = {}
    expert_numel = 0
    for name, shard in plan_whole_model(spec, head).items():
        part = name.split(".")[0]
        shard_numel = int(np.prod(shard.shape))
        numel[part] = numel.get(part, 0) + shard_numel
        expert_numel += shard_numel * shard.by_expert
    softmax_layers = [spec.spec_for_layer(layer) for layer in range(num_layers) if spec.linear_attention_at(layer) is None]
    softmax = _softmax_sizes(spec, softmax_layers)
    mixer_columns, linear = _linear_sizes(spec, softmax["query_dims"] * spec.attention_gate)
    mixtures = [experts for layer in range(num_layers) if (experts := spec.experts_at(layer)) is not None]
    expert_columns = sum(experts.columns_per_token for experts in mixtures)
    columns = expert_columns + spec.intermediate_size * (num_layers - len(mixtures))
    routers = sum(experts.num_router_outputs for experts in mixtures)
    attention_weights = sum(layer_spec.attention_numel for layer_spec in softmax_layers) / num_layers
    other_columns = mixer_columns + 3 * (columns / num_layers) + routers / num_layers
    return ModelShape(
        num_layers=num_layers,
        hidden=spec.hidden_size,
        intermediate=int(columns / num_layers),
        vocab=spec.vocab_size,
        matmul_weights=attention_weights + spec.hidden_size * other_columns,
        layer_params=numel["layers"] / num_layers,
        embed_params=numel["embed"],
        head_params=numel.get("head", 0) + numel.get("norm", 0) + numel.get("value", 0),
        head_outputs=1 if head == "value" else spec.vocab_size if head in ("lm", "both") else 0,
        ties_embeddings=spec.tie_word_embeddings and head in ("lm", "both"),
        expert_rows=sum(experts.experts_per_token for experts in mixtures) / num_layers,
        expert_params=expert_numel / num_layers,
        expert_columns=expert_columns / num_layers,
        **softmax,
        **linear,
    )


def _softmax_sizes(spec: ModelSpec, layers: Sequence[ModelSpec]) -> dict[str, Any]:
    """Return the fields of :class:`ModelShape` that describe softmax attention. ``layers``: those that have it."""
    num_layers = spec.num_hidden_layers
    query_dims = sum(layer_spec.num_attention_heads * layer_spec.head_dim for layer_spec in layers) // num_layers
    global_heads = spec.global_heads or ()
    num_global_layers = sum(spec.has_global_heads(layer) for layer in range(num_layers))
    return {
        "query_dims": query_dims,
        "key_dims": sum(layer_spec.num_key_value_heads * layer_spec.head_dim for layer_spec in layers) // num_layers,
        "kv_heads": spec.num_key_value_heads,
        "cache_entry": 0 if spec.latent is None else spec.latent.cached_elements,
        "q_rank": 0 if spec.latent is None else spec.latent.q_rank or query_dims,
        "global_key_dims": num_global_layers * math.prod(global_heads) / num_layers,
        "global_kv_heads": global_heads[0] if global_heads else 1,
    }


def _linear_sizes(spec: ModelSpec, gates: int) -> tuple[float, dict[str, Any]]:
    """Return the columns and rows of an average layer's matrices for linear attention, and the fields of :class:`ModelShape` that
    describe it.

    ``gates``: columns of the gates of softmax attention, which are in the same fields.
    """
    delta = spec.delta_rule
    if delta is None:
        return 0.0, {"gate_columns": gates, "mixer_floats": 2 * gates}
    softmax_share = 1 - len(delta.layers) / spec.num_hidden_layers
    share = 1 - softmax_share
    columns = delta.columns * share
    fields_of_shape = {
        "gate_columns": gates + columns,
        "mixer_floats": 2 * gates + delta.saved_numbers_per_token * share,
        "row_state": (delta.state_numel + delta.channels * (delta.kernel - 1)) * share,
        "linear_share": share,
    }
    return columns + delta.value_heads * delta.value_dim * share, fields_of_shape


class DecodePhase(NamedTuple):
    """Decode steps of a replica that take about equally long: their number, rows in each, and tokens in the cache of a row."""

    steps: Numbers
    rows: np.ndarray
    context: float


def mean_age(lengths: np.ndarray) -> float:
    """Return the mean tokens of a row over all decode steps, while rows grow to these lengths one token at a time."""
    return float((lengths**2).mean() / lengths.mean() / 2)


@dataclass(frozen=True)
class Workload:
    """The rows of one call, and the optimizer steps (``mini_batches``) of each epoch if it trains.

    - prompt: tokens of an average prompt
    - responses: lengths at equally likely quantiles, ascending: their mean is the mean length, and the last one is the longest
    - group: rows that have the same prompt
    - row_share: rows of the replica that is estimated, as a multiple of the mean, a number or [n]
    - largest_share: the same of the replica with most rows, which decides the number of micro-batches of all
    - in_flight: rows that are generated at a time, of which ``rows`` end in a step and the others go on in the next one; 0: all rows
      end in the step that they begin in
    - recomputed: those in flight whose tokens are computed again when a step begins
    """

    rows: int
    prompt: float
    responses: tuple[float, ...]
    mini_batches: int = 1
    epochs: int = 1
    group: int = 1
    row_share: Numbers = 1.0
    largest_share: Numbers = 1.0
    in_flight: int = 0
    recomputed: int = 0

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

        ``rows`` rows are dealt over dp.
        """
        replica_rows = np.maximum(np.ceil(rows * self.row_share / settings.dp), 1)
        most_rows = np.maximum(np.ceil(rows * self.largest_share / settings.dp), replica_rows)
        count = np.ceil(most_rows / np.maximum(settings.micro_tokens * settings.cp // self.length, 1))
        return count, replica_rows * self.length / count / settings.cp

    def on_part_of(self, share: float) -> Workload:
        """Return the work of a share of the replicas, at least one group."""

        def scaled(rows: int) -> int:
            return max(int(rows * share), self.group) if rows else 0

        return replace(self, rows=scaled(self.rows), in_flight=scaled(self.in_flight), recomputed=scaled(self.recomputed))

    def replica_rows(self, rows: int, settings: CallSettings) -> np.ndarray:
        """Return the rows of a replica [n] if complete groups of ``rows`` rows are dealt over dp."""
        return np.maximum(np.ceil(rows * self.row_share / self.group / settings.dp), 1) * self.group

    def decode_phases(self, settings: CallSettings, capacity: Numbers) -> Iterator[DecodePhase]:
        """Yield the decode steps of a replica that can have ``capacity`` rows in flight.

        While rows wait, each takes the place of one that ends. Then fewer and fewer are left. With ``in_flight`` new groups begin
        when a step begins, and it ends when as many have ended. Of the groups that began k steps ago, those are left whose longest
        row has more than k T tokens, for T decode steps in a step. All groups that are left are those in flight, which gives T.
        """
        rows = self.replica_rows(self.rows, settings)
        lengths = np.array(self.responses)
        if self.in_flight:
            decoding = np.minimum(capacity, rows * self.response / self._steps_in_flight(lengths))
            yield DecodePhase(rows * self.response / decoding, decoding, self.prompt + mean_age(lengths))
            return
        at_once = np.maximum(np.minimum(capacity, rows), 1)
        yield DecodePhase((rows - at_once) * self.response / at_once, at_once, self.prompt + mean_age(lengths))
        for index, (begin, end) in enumerate(pairwise([0.0, *self.responses])):
            if end > begin:
                alive = np.maximum(at_once * (1 - index / len(lengths)), 1)
                yield DecodePhase(end - begin, alive, self.prompt + (begin + end) / 2)

    def _steps_in_flight(self, lengths: np.ndarray) -> float:
        """Return the decode steps T of a step with rows in flight: sum over k of P(a group has more than k T tokens) is the ratio of
        groups in flight to groups that end."""
        ratio = self.in_flight / self.rows
        too_few = 0.0
        enough = float(lengths[-1])
        while enough - too_few > 1e-3 * enough:
            steps = (too_few + enough) / 2
            ages = np.arange(0.0, lengths[-1], steps)
            ended = np.searchsorted(lengths, ages, side="right") / len(lengths)
            if (1 - ended**self.group).sum() > ratio:
                too_few = steps
            else:
                enough = steps
        return enough

    def prefill_tokens(self, settings: CallSettings) -> np.ndarray:
        """Return the tokens [n] that a replica computes before it decodes: a prompt for each group, and those of ``recomputed``."""
        prompts = self.replica_rows(self.rows, settings) / self.group * self.prompt
        if not self.recomputed:
            return prompts
        row_tokens = self.prompt / self.group + mean_age(np.array(self.responses))
        return prompts + self.replica_rows(self.recomputed, settings) * row_tokens

    def tokens_through_layers(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a micro-batch that go through the layers: rows of a group have their prompt in common."""
        sharing = np.clip(tokens / self.length, 1, self.group)
        return tokens * (self.response + self.prompt / sharing) / self.length


@dataclass(frozen=True)
class CallSettings:
    """Settings of a call that are compared: n alternatives, each field an int64 array [n].

    - dp: replicas
    - zero_size: ranks of dp * cp that ZeRO shards over; 0: all
    - micro_tokens: token budget of a micro-batch on a rank
    - checkpointing: index into ``models.activations.CHECKPOINTING``
    - sequence_parallel: 0 or 1
    - max_num_seqs: rows in flight on each replica in generation
    - graphs: 1 if decode steps are captured as CUDA graphs
    - cp: ranks that share the tokens of a row
    - ep: neighbours that share the experts
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
        """Return the alternatives at ``index``: numbers or a mask."""
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
