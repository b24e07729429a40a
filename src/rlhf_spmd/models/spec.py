"""What a model is: a description of a decoder that names no family's code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_spmd.data.tokenizer import end_token_ids
from rlhf_spmd.kernels import AttentionRule
from rlhf_spmd.models.keys import check_factors, longest_row, read_positive, read_rope, read_size, reject_unless
from rlhf_spmd.models.layer_kinds import DeltaRule, Experts, Latent

RopeKind = Literal["local", "global"] | None  # see ModelSpec.rope_kind


@dataclass(frozen=True)
class Names:
    """Hugging Face tensor names. ``{layer}`` is the global layer index; linear names lack ``.weight`` and ``.bias``."""

    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    value_head: str = "score.weight"
    second_head: str = "v_head.weight"  # the value head of a model that has both; no Hugging Face class has it
    input_norm: str | None = "model.layers.{layer}.input_layernorm.weight"  # before the attention
    post_norm: str | None = "model.layers.{layer}.post_attention_layernorm.weight"  # before the MLP
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    out: str = "model.layers.{layer}.self_attn.o_proj"
    sinks: str | None = None  # one of each query head
    q_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    attention_norm: str | None = None  # norm of the attention's output, before it is added
    mlp_norm: str | None = None  # norm of the MLP's output, before it is added
    router: str = "model.layers.{layer}.mlp.gate.weight"
    router_bias: str = "model.layers.{layer}.mlp.router.bias"
    score_bias: str = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert.gate_proj"
    shared_up: str = "model.layers.{layer}.mlp.shared_expert.up_proj"
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj"
    shared_weight: str = "model.layers.{layer}.mlp.shared_expert_gate.weight"
    scalar: str | None = None  # what a layer's output is multiplied by; no optimizer changes it
    linear: str = "model.layers.{layer}.linear_attn."  # what the names of linear attention begin with


@dataclass(frozen=True)
class ModelSpec:
    """A normalised decoder architecture. Sizes count elements; what a family does not set is as in Llama.

    Sizes:

    - family: ``model_type`` of config.json
    - head_dim: elements of a head; with ``latent`` those of queries and keys
    - rms_norm_eps: epsilon of all norms

    Rotary embeddings:

    - rope_theta: the base of the frequencies
    - rope_scaling: None for plain rotary embeddings
    - local_rope_theta: theta of the layers with a window, where it is another
    - partial_rotary_factor: the part of a head, its first dims, that is rotated
    - interleaved_rope: pairs are neighbours, not a dim of the first half and one of the second
    - unrotated: layers without rotary embeddings
    - query_growth: (beta, n): rotated queries at position p are multiplied by 1 + beta * log(1 + floor(p / n))

    Attention:

    - global_heads: KV heads and head size of layers without a window, where they are others
    - keys_as_values: layers with ``global_heads`` have no matrix of values: what the keys come from serves as both
    - value_norm: values have a norm per head, without weights
    - latent: queries, keys and values come from short vectors
    - attention_bias: q, k and v have biases, or with ``latent`` the matrices that make the short vectors
    - attention_out_bias: the matrix behind the attention has a bias
    - qk_norm: q and k have a norm, one per head
    - qk_norm_over_all_heads: they have one norm over all heads instead
    - attention_gate: q_proj also makes a gate of each head, behind its query; its sigmoid multiplies the attention's output
    - attention_scale: the factor of the scores; None: 1 / sqrt(head_dim)
    - attention_softcap: scores are c * tanh(scores / c)
    - windows: one entry per layer, or none where no layer has a window

    Logits, norms and scales:

    - logit_softcap: logits are c * tanh(logits / c)
    - norm_unit_offset: norms multiply by 1 + weight
    - embed_scale: the factor of the embeddings, rounded to their dtype
    - residual_scale: the factor of what a layer adds to the residual stream
    - logit_scale: the factor of the logits
    - experts, delta_rule: what layers have in place of an MLP, and of attention

    Files and rows:

    - tie_word_embeddings: the matrix of the head is that of the embedding
    - max_position_embeddings: tokens of the longest row
    - hidden_act: "silu" or "gelu_tanh"
    - eos_token_ids: tokens that end a response
    - hf_config: the raw config.json, kept for export
    - names: the tensors' names
    - text_prefix: part of the tensors' names in a directory that holds a vision tower as well
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    local_rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    interleaved_rope: bool = False
    unrotated: tuple[int, ...] = ()
    query_growth: tuple[float, int] | None = None
    global_heads: tuple[int, int] | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    latent: Latent | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_all_heads: bool = False
    attention_gate: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    logit_softcap: float | None = None
    norm_unit_offset: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    delta_rule: DeltaRule | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    names: Names = Names()
    text_prefix: str = ""

    @property
    def rotated_dims(self) -> int:
        """Return the number of dims of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor) if self.latent is None else self.latent.rope_dim

    def spec_for_layer(self, layer: int) -> ModelSpec:
        """Return the spec with the heads of one layer, by its global index."""
        if self.global_heads is None:
            return self
        if self.windows[layer] is not None:
            return replace(self, keys_as_values=False)
        return replace(self, num_key_value_heads=self.global_heads[0], head_dim=self.global_heads[1])

    def has_global_heads(self, layer: int) -> bool:
        """Return True if a layer, by its global index, has ``global_heads``."""
        return self.global_heads is not None and self.windows[layer] is None

    def attention_kind(self, layer: int) -> Literal["full", "global", "linear"]:
        """Return the attention of a layer, by its global index: "linear"; "global" with ``global_heads``; else "full"."""
        if self.linear_attention_at(layer) is not None:
            return "linear"
        return "global" if self.has_global_heads(layer) else "full"

    def supports_fused_layer(self, layer: int) -> bool:
        """Return True if :meth:`~rlhf_spmd.kernels.Ops.fused_layer` knows all that a layer computes, by its global index."""
        plain_attention = (
            self.latent is None and self.delta_rule is None and self.names.sinks is None and self.query_growth is None
        )
        return plain_attention and not self.value_norm and self.experts_at(layer) is None and self.names.scalar is None

    def kinds_of_heads(self) -> list[ModelSpec]:
        """Return :meth:`spec_for_layer` for one layer of each kind: without ``global_heads``, then with them."""
        layers = {self.has_global_heads(layer): layer for layer in range(self.num_hidden_layers)}
        return [self.spec_for_layer(layers[kind]) for kind in sorted(layers)]

    @property
    def attention_numel(self) -> int:
        """Return the elements of the matrices of a layer's attention, where it is not linear."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.latent is not None:
            return self.latent.matrix_numel(hidden, heads)
        return (
            hidden * self.head_dim * ((2 + self.attention_gate) * heads + (2 - self.keys_as_values) * self.num_key_value_heads)
        )

    def attention_rule(self, layer: int) -> AttentionRule:
        """Return the attention's scale, softcap and window in a layer, by its global index."""
        scale = 1 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale
        return AttentionRule(scale, self.attention_softcap, self.windows[layer] if self.windows else None)

    def rope_kind(self, layer: int) -> RopeKind:
        """Return the rotary embeddings of a layer, by its global index: "local" with ``local_rope_theta``, "global" with
        ``rope_theta``; None without rotary embeddings."""
        if layer in self.unrotated:
            return None
        has_window = self.attention_rule(layer).window is not None
        return "local" if has_window and self.local_rope_theta is not None else "global"

    def linear_attention_at(self, layer: int) -> DeltaRule | None:
        """Return the linear attention of a layer, by its global index; None where it has attention."""
        return self.delta_rule if self.delta_rule is not None and layer in self.delta_rule.layers else None

    def experts_at(self, layer: int) -> Experts | None:
        """Return the mixture of experts of a layer, by its global index; None where it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts


def with_end_tokens(spec: ModelSpec, tokenizer: Any, template: str | None = None) -> ModelSpec:
    """Return ``spec`` with all tokens that end a response.

    They are those that the model's files name, the end token of ``tokenizer`` (None: there is none), and the token that closes the
    assistant's turn in ``template``, by default the template of the tokenizer."""
    end_tokens = (token for token in end_token_ids(tokenizer, template) if token < spec.vocab_size)
    return replace(spec, eos_token_ids=tuple(sorted({*spec.eos_token_ids, *end_tokens})))


def standard_spec(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """Return the spec from the keys of ``config`` that all families share. ``flags``: fields of ModelSpec that the family sets; they
    override the keys. Raises ValueError naming ``source`` and key."""
    heads = read_size(config, source, "num_attention_heads")
    hidden = read_size(config, source, "hidden_size")
    if "head_dim" not in flags and config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{source}: hidden_size={hidden} is not divisible by num_attention_heads={heads}; set 'head_dim'")
    rope_theta, rope_scaling = read_rope(config, source, "partial_rotary_factor" in flags)
    context = read_size(config, source, "max_position_embeddings", 2048)
    fields: dict[str, Any] = {
        "family": config["model_type"],
        "vocab_size": read_size(config, source, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read_size(config, source, "intermediate_size"),
        "num_hidden_layers": read_size(config, source, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": read_size(config, source, "num_key_value_heads", heads),
        "head_dim": read_size(config, source, "head_dim", hidden // heads),
        "rms_norm_eps": read_positive(config.get("rms_norm_eps", 1e-6), source, "rms_norm_eps"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": longest_row(rope_scaling, context),
        "eos_token_ids": end_ids(config.get("eos_token_id"), source) or (),
    }
    spec = ModelSpec(**{**fields, **flags})
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise ValueError(
            f"{source}: num_attention_heads={spec.num_attention_heads} is not divisible by "
            f"num_key_value_heads={spec.num_key_value_heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(f"{source}: head_dim={spec.head_dim} must be even for rotary embeddings")
    check_factors(spec.rope_scaling, spec.rotated_dims // 2, source)
    if "hidden_act" not in flags:
        reject_unless(config, source, "hidden_act", "silu")
    return spec


def read_windows(config: Mapping[str, Any], source: str, pattern: int | None = None) -> tuple[int | None, ...]:
    """Return ``ModelSpec.windows`` from the key ``sliding_window``: the window of every layer, or with ``pattern`` of the layers that
    ``layer_types`` calls "sliding_attention". Without that key these are all but every ``pattern``-th layer. Raises ValueError."""
    layers = read_size(config, source, "num_hidden_layers")
    if pattern is None:
        return () if config.get("sliding_window") is None else (read_size(config, source, "sliding_window"),) * layers
    default_types = ["full_attention" if layer % pattern == 0 else "sliding_attention" for layer in range(1, layers + 1)]
    types = config.get("layer_types") or default_types
    if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"{source}: 'layer_types' is {types!r}; it must call each of the num_hidden_layers={layers} layers "
            "'sliding_attention' or 'full_attention'"
        )
    return tuple(read_size(config, source, "sliding_window") if kind == "sliding_attention" else None for kind in types)


def end_ids(value: Any, source: str) -> tuple[int, ...] | None:
    """Return the end-of-sequence ids that a file's ``eos_token_id`` names; None where it names none. Raises ValueError."""
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{source}: 'eos_token_id' is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def read_expert_counts(
    config: Mapping[str, Any], source: str, key: str, num_experts: int, experts_per_token: int
) -> tuple[int, int]:
    """Return the number of experts, which is under ``key``, and the number that a token takes. ``num_experts`` and
    ``experts_per_token`` are the defaults. Raises ValueError naming the keys."""
    num_experts = read_size(config, source, key, num_experts)
    experts_per_token = read_size(config, source, "num_experts_per_tok", experts_per_token)
    if experts_per_token > num_experts:
        raise ValueError(f"{source}: num_experts_per_tok={experts_per_token} exceeds {key}={num_experts}")
    return num_experts, experts_per_token
