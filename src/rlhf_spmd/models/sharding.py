"""Which slice of which Hugging Face tensor a rank holds, for any (stage, tp rank). Pure: no tensors, no process group.

The keys are the parameter names of :class:`~rlhf_spmd.models.decoder.Decoder`; a fused parameter (q, k and v; gate and up)
has one box per Hugging Face tensor. Column-parallel matrices are split on dim 0, row-parallel ones on dim 1, the embedding
and the output head along the vocabulary.

A vocabulary that tp does not divide is cut at ``rank * vocab // tp``: slices differ by at most one row, and the cuts of a
smaller tp are among those of its multiples, so a training shard always lies inside one generation shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rlhf_spmd.models.layer_kinds import BY_EXPERT, LATENT_NAMES, SCALAR, SCORE_BIAS, DeltaRule, Experts, Latent
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.lora import ALL_LINEAR, LoraConfig, is_adapter, plan_adapters
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import Box, ParamShard
from rlhf_spmd.parallel.layout import stage_layers

HEAD_KINDS = ("lm", "value", "both", "none")


class RowSlice(NamedTuple):
    """Rows [start, start + size) of a Hugging Face tensor that has ``total`` rows. ``tensor``: its name, which may lack a suffix."""

    tensor: str
    start: int
    size: int
    total: int

    def share(self, index: int, shares: int) -> RowSlice:
        """Return the share number ``index`` of ``shares`` equal ones, which follow each other."""
        return self._replace(start=self.start + index * self.size // shares, size=self.size // shares)


class RankSlice(NamedTuple):
    """Which part of a layer a tensor-parallel rank holds. ``whole_experts``: some of the experts, not a slice of each."""

    tp_rank: int
    tp: int
    fused_slices: int
    whole_experts: bool

    def rows(self, tensor: str, total: int) -> RowSlice:
        """Return the rank's rows of a tensor with ``total`` rows, which tp divides."""
        return RowSlice(tensor, self.tp_rank * total // self.tp, total // self.tp, total)


def vocab_range(vocab_size: int, tp_rank: int, tp: int) -> tuple[int, int]:
    """Return the token ids [first, last) of a tensor-parallel rank."""
    return tp_rank * vocab_size // tp, (tp_rank + 1) * vocab_size // tp


def kv_heads_of(spec: ModelSpec, tp_rank: int, tp: int) -> range:
    """Return the KV heads of a rank: its slice, or, where tp exceeds their number, the head that its query heads share."""
    kv = spec.num_key_value_heads
    if tp <= kv:
        return range(tp_rank * (kv // tp), (tp_rank + 1) * (kv // tp))
    head = tp_rank * kv // tp
    return range(head, head + 1)


def cache_shape(spec: ModelSpec, tp_rank: int, tp: int) -> tuple[int, int]:
    """Return the number of heads that a rank caches in a layer of ``spec.kinds_of_heads()``, and the elements of each."""
    return (len(kv_heads_of(spec, tp_rank, tp)), spec.head_dim) if spec.latent is None else (1, spec.latent.cached_elements)


def fused_slice_counts(spec: ModelSpec, tp: int, fused_slices: int) -> tuple[int, int]:
    """Return the number of slices in qkv and in gate_up on a rank of ``tp``, see :func:`plan_params`: ``fused_slices``, but 1 for qkv
    where slices would cut KV heads."""
    cuts_kv_heads = spec.num_key_value_heads % (tp * fused_slices) != 0
    return 1 if cuts_kv_heads else fused_slices, fused_slices


def plan_params(
    spec: ModelSpec,
    head: str,
    stage: int,
    pp: int,
    tp_rank: int,
    tp: int,
    fused_slices: int = 1,
    lora: LoraConfig | None = None,
    expert_parallel_generation: bool = False,
) -> dict[str, ParamShard]:
    """Return the shape and boxes on this rank of each decoder parameter, in the order of ``Decoder.named_parameters()``.

    Raises ValueError where the layout does not fit. Layers are numbered from 0 within the stage.

    - head: "lm", "value", "both" (a value head beside the other) or "none"
    - fused_slices: number of training slices in a fused matrix of a generation rank. Training then has tp * fused_slices ranks for
      this rank's tp, and the rows of each of their slices stay together: [q0; k0; v0; q1; k1; v1] for two. Resharding needs this:
      every training slice is then one range of rows
    - lora: with these adapters, which need ``fused_slices`` 1
    - expert_parallel_generation: the rank has 1 / tp of the experts in place of a slice of each, which needs ``fused_slices`` 1
    """
    if head not in HEAD_KINDS:
        raise ValueError(f"head {head!r} is not one of {', '.join(HEAD_KINDS)}")
    for slices in sorted({tp, tp * fused_slices}):
        check_layout(spec, "layout", pp, slices, expert_parallel_generation=expert_parallel_generation)
    assert fused_slices == 1 or not expert_parallel_generation, f"{fused_slices} fused slices of experts that are not cut"
    assert 0 <= stage < pp and 0 <= tp_rank < tp, f"stage {stage} of {pp}, tp rank {tp_rank} of {tp}"
    names, hidden = spec.names, spec.hidden_size
    first, last = vocab_range(spec.vocab_size, tp_rank, tp)
    plan: dict[str, ParamShard] = {}

    def vocab_slice(name: str) -> ParamShard:
        box = Box(name, (spec.vocab_size, hidden), (first, 0), (last - first, hidden), (0, 0))
        return ParamShard(box.size, (box,))

    if stage == 0:
        plan["embed.weight"] = vocab_slice(names.embed)
    for local, layer in enumerate(stage_layers(spec.num_hidden_layers, pp, stage)):
        block = _plan_block(spec, layer, RankSlice(tp_rank, tp, fused_slices, expert_parallel_generation))
        for key, shard in {**block, **plan_adapters(block, lora)}.items():
            plan[f"layers.{local}.{key}"] = shard
    if stage == pp - 1:
        plan["norm.weight"] = _replicated(names.norm, hidden)
        if head == "value":
            plan["head.weight"] = _replicated(names.value_head, 1, hidden)
        elif head in ("lm", "both") and not (spec.tie_word_embeddings and pp == 1):
            plan["head.weight"] = vocab_slice(names.embed if spec.tie_word_embeddings else names.lm_head)
        if head == "both":
            plan["value.weight"] = _replicated(names.second_head, 1, hidden)
    return plan


def plan_whole_model(spec: ModelSpec, head: str, lora: LoraConfig | None = None) -> dict[str, ParamShard]:
    """Return :func:`plan_params` of one rank that holds the whole model."""
    return plan_params(spec, head, stage=0, pp=1, tp_rank=0, tp=1, lora=lora)


def tensor_shapes(spec: ModelSpec, head: str) -> dict[str, tuple[int, ...]]:
    """Return every Hugging Face tensor of the model with its global shape."""
    return {box.name: box.shape for shard in plan_whole_model(spec, head).values() for box in shard.boxes}


def check_lora(spec: ModelSpec, lora: LoraConfig, where: str) -> None:
    """Raise ValueError where ``target_modules`` name what the model has not, or leave one of its layers without an adapter."""

    def modules(config: LoraConfig) -> dict[str, str]:
        plan = plan_whole_model(spec, "none", config)
        names = {box.name.split(".lora_")[0]: name for name, shard in plan.items() if is_adapter(name) for box in shard.boxes}
        return {f".{module}": name.split(".")[1] for module, name in names.items()}

    candidates = modules(LoraConfig(rank=1))
    suffixes = [] if lora.target_modules == ALL_LINEAR else lora.target_modules
    unknown = [suffix for suffix in suffixes if not any(module.endswith(f".{suffix}") for module in candidates)]
    if unknown or len(set(modules(lora).values())) < spec.num_hidden_layers:
        listed = ", ".join(sorted({module.rpartition(".")[2] for module in candidates}))
        wrong = f"the model has no matrix {unknown[0]!r}" if unknown else "some layers have none of these"
        raise ValueError(f"{where}.target_modules={lora.target_modules}: {wrong}; its layers have {listed}")


def _plan_block(spec: ModelSpec, layer: int, rank: RankSlice) -> dict[str, ParamShard]:
    """Return the parameters of one layer, by their names within it. ``layer``: its index in the model."""
    spec = spec.spec_for_layer(layer)

    def norm(key: str) -> dict[str, ParamShard]:
        name = getattr(spec.names, key)
        return {f"{key}.weight": _replicated(name.format(layer=layer), spec.hidden_size)} if name else {}

    delta_rule = spec.linear_attention_at(layer)
    if delta_rule is None:
        attention = _plan_attention(spec, layer, rank)
    else:
        attention = _plan_delta(delta_rule, spec.names.linear.format(layer=layer), spec.hidden_size, rank)
    experts = spec.experts_at(layer)
    if experts is None:
        matrices = [name.format(layer=layer) for name in (spec.names.gate, spec.names.up, spec.names.down)]
        mlp = _plan_mlp([matrices], spec.hidden_size, rank.rows("", spec.intermediate_size), rank.fused_slices)
    else:
        mlp = _plan_mixture(spec, experts, layer, rank)
    plan = {**norm("input_norm"), **attention, **norm("attention_norm"), **norm("post_norm"), **mlp, **norm("mlp_norm")}
    if spec.names.scalar:
        plan[f"{SCALAR}.weight"] = _replicated(spec.names.scalar.format(layer=layer), 1)
    return plan


def _plan_attention(spec: ModelSpec, layer: int, rank: RankSlice) -> dict[str, ParamShard]:
    """Return the parameters of a layer's attention, where it is not linear."""
    names, hidden, dim = spec.names, spec.hidden_size, spec.head_dim
    q, k, v, out = (name.format(layer=layer) for name in (names.q, names.k, names.v, names.out))
    kv_heads = kv_heads_of(spec, rank.tp_rank, rank.tp)
    q_rows = rank.rows(q, spec.num_attention_heads * dim)
    k_rows = RowSlice(k, kv_heads.start * dim, len(kv_heads) * dim, spec.num_key_value_heads * dim)
    if spec.latent is not None:
        value_dim = spec.latent.value_dim
        plan = _plan_latent(spec, spec.latent, layer, rank)
    else:
        value_dim = dim
        parts = [q_rows, k_rows] if spec.keys_as_values else [q_rows, k_rows, k_rows._replace(tensor=v)]
        qkv_slices, _ = fused_slice_counts(spec, rank.tp, rank.fused_slices)
        qkv = _gated_rows(parts, dim, qkv_slices) if spec.attention_gate else _interleave(parts, qkv_slices)
        plan = {"qkv.weight": _columns(qkv, hidden, ".weight")}
        if spec.attention_bias:
            plan["qkv.bias"] = _columns(qkv, None, ".bias")
    if spec.qk_norm:
        for key, name, rows in (("q_norm", names.q_norm, q_rows), ("k_norm", names.k_norm, k_rows)):
            norm_rows = rows._replace(tensor=name.format(layer=layer))
            over_all_heads = spec.qk_norm_over_all_heads
            plan[f"{key}.weight"] = _columns([norm_rows], None) if over_all_heads else _replicated(norm_rows.tensor, dim)
    if names.sinks:
        plan["sinks.weight"] = _columns([rank.rows(names.sinks.format(layer=layer), spec.num_attention_heads)], None)
    plan["out.weight"] = _row_parallel([out + ".weight"], hidden, rank.rows("", spec.num_attention_heads * value_dim))
    if spec.attention_out_bias:
        plan["out.bias"] = _replicated(out + ".bias", hidden)
    return plan


def _gate_up_rows(mlps: Sequence[Sequence[str]], rows: RowSlice, fused_slices: int) -> list[RowSlice]:
    return _interleave([rows._replace(tensor=name) for gate, up, _ in mlps for name in (gate, up)], fused_slices)


def _plan_mlp(mlps: Sequence[Sequence[str]], hidden: int, rows: RowSlice, fused_slices: int) -> dict[str, ParamShard]:
    """Return the two fused matrices of one or several MLPs.

    - mlps: names of gate, up and down of each
    - rows: the rows of each gate and up, and the columns of each down, that the rank holds; its tensor is not read
    """
    return {
        "gate_up.weight": _columns(_gate_up_rows(mlps, rows, fused_slices), hidden, ".weight"),
        "down.weight": _row_parallel([down + ".weight" for _, _, down in mlps], hidden, rows),
    }


def _plan_mixture(spec: ModelSpec, experts: Experts, layer: int, rank: RankSlice) -> dict[str, ParamShard]:
    """Return the parameters of a layer's mixture of experts, of its router and of its shared expert."""
    names, hidden, width = spec.names, spec.hidden_size, experts.intermediate_size
    if rank.whole_experts:
        count = experts.num_experts // rank.tp
        local_experts = range(rank.tp_rank * count, (rank.tp_rank + 1) * count)
        rows = RowSlice("", 0, width, width)
    else:
        local_experts = range(experts.num_experts)
        rows = rank.rows("", width)
    matrices = names.expert_gate, names.expert_up, names.expert_down
    mlps = [[name.format(layer=layer, expert=expert) for name in matrices] for expert in local_experts]
    plan = {"router.weight": _replicated(names.router.format(layer=layer), experts.num_experts, hidden)}
    plan |= _plan_mlp(mlps, hidden, rows, rank.fused_slices)
    if experts.has_biases:
        plan["router_bias.weight"] = _replicated(names.router_bias.format(layer=layer), experts.num_experts)
        plan["gate_up_bias.weight"] = _columns(_gate_up_rows(mlps, rows, rank.fused_slices), None, ".bias")
        down_bias = _columns([RowSlice(down, 0, hidden, hidden) for _, _, down in mlps], None, ".bias")
        plan["down_bias.weight"] = replace(down_bias, replicated_on_tp=not rank.whole_experts)
    plan |= {name: replace(plan[name], by_expert=True) for key in BY_EXPERT if (name := f"{key}.weight") in plan}
    if experts.score_biased:
        plan[f"{SCORE_BIAS}.weight"] = _replicated(names.score_bias.format(layer=layer), experts.num_experts, 3)
    if experts.shared_size:
        shared = [name.format(layer=layer) for name in (names.shared_gate, names.shared_up, names.shared_down)]
        shared_plan = _plan_mlp([shared], hidden, rank.rows("", experts.shared_size), rank.fused_slices)
        plan |= {f"shared_{name}": shard for name, shard in shared_plan.items()}
    if experts.shared_gate:
        plan["shared_gate.weight"] = _replicated(names.shared_weight.format(layer=layer), 1, hidden)
    return plan


def _plan_delta(rule: DeltaRule, prefix: str, hidden: int, rank: RankSlice) -> dict[str, ParamShard]:
    """Return the parameters of a layer's linear attention, its last matrix among them. Rows of the fused first matrix are in the order
    of :func:`_delta_rows`, channels of the convolution too."""
    keys = rule.key_heads // rank.tp
    first_rows = _delta_rows(rule, prefix, range(rank.tp_rank * keys, (rank.tp_rank + 1) * keys), rank.fused_slices)
    plan = {"qkv.weight": _columns(first_rows, hidden, ".weight")}
    k_rows = rank.rows(prefix + "conv1d.weight", rule.key_heads * rule.key_dim)
    v_rows = rank.rows(prefix + "conv1d.weight", rule.value_heads * rule.value_dim)
    tail = 1, rule.kernel
    boxes = []
    local = 0
    for rows in _interleave([k_rows, k_rows, v_rows], rank.fused_slices):  # queries have the sizes of keys
        boxes.append(Box(rows.tensor, (rows.total, *tail), (rows.start, 0, 0), (rows.size, *tail), (local, 0, 0)))
        local += rows.size
    plan["mixer.conv.weight"] = ParamShard((local, *tail), tuple(boxes))
    plan["mixer.decay.weight"] = _columns([rank.rows(prefix + "A_log", rule.value_heads)], None)
    plan["mixer.decay_bias.weight"] = _columns([rank.rows(prefix + "dt_bias", rule.value_heads)], None)
    plan["mixer.norm.weight"] = _replicated(prefix + "norm.weight", rule.value_dim)
    plan["out.weight"] = _row_parallel([prefix + "out_proj.weight"], hidden, v_rows)
    return plan


def _delta_rows(rule: DeltaRule, prefix: str, heads: range, fused_slices: int) -> list[RowSlice]:
    """Return the rows of the first product of the key heads ``heads``: for each fused slice of these heads the queries, keys, values,
    gates of the output, rates and decays."""
    group = rule.value_heads // rule.key_heads
    # rows of a key head
    widths = (rule.key_dim, rule.key_dim, group * rule.value_dim, group * rule.value_dim, group, group)
    totals = [width * rule.key_heads for width in widths]
    parts = ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    rows: list[RowSlice] = []
    for index in range(fused_slices):
        slice_heads = heads[index * len(heads) // fused_slices : (index + 1) * len(heads) // fused_slices]
        for i, (name, width) in enumerate(zip(parts, widths, strict=True)):
            if rule.files_are_fused:  # all parts of a key head lie together
                name, tensor_parts = ("in_proj_qkvz", range(4)) if i < 4 else ("in_proj_ba", range(4, 6))
                stride = sum(widths[j] for j in tensor_parts)
                before = sum(widths[j] for j in tensor_parts if j < i)
                total = stride * rule.key_heads
                rows += [RowSlice(prefix + name, head * stride + before, width, total) for head in slice_heads]
            else:
                tensor_parts = range(3) if i < 3 else range(i, i + 1)
                start = sum(totals[j] for j in tensor_parts if j < i) + slice_heads.start * width
                total = sum(totals[j] for j in tensor_parts)
                rows.append(RowSlice(prefix + name, start, len(slice_heads) * width, total))
    return rows


def _gated_rows(parts: Sequence[RowSlice], dim: int, fused_slices: int) -> list[RowSlice]:
    """Return rows as :func:`_interleave` does, of a tensor of queries in which each head's gate follows its query, and of others.

    ``parts``: the queries, counted without gates, then keys and values. ``dim``: rows of a head. In the result, gates come behind the
    values."""
    queries, *others = parts
    rows: list[RowSlice] = []
    for index in range(fused_slices):
        share = queries.share(index, fused_slices)
        heads = range(share.start, share.start + share.size, dim)
        rows += [RowSlice(queries.tensor, 2 * start, dim, 2 * queries.total) for start in heads]
        rows += [part.share(index, fused_slices) for part in others]
        rows += [RowSlice(queries.tensor, 2 * start + dim, dim, 2 * queries.total) for start in heads]
    return rows


def _plan_latent(spec: ModelSpec, latent: Latent, layer: int, rank: RankSlice) -> dict[str, ParamShard]:
    """Return the parameters of latent attention without the matrix behind it."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    names = {key: name.format(layer=layer) for key, name in LATENT_NAMES.items()}

    def short_vector(key: str, size: int) -> dict[str, ParamShard]:
        plan = {f"latent.{key}.weight": _replicated(names[key] + ".weight", size, hidden)}
        if spec.attention_bias:
            plan[f"latent.{key}.bias"] = _replicated(names[key] + ".bias", size)
        return plan

    plan: dict[str, ParamShard] = {}
    if latent.q_rank is not None:
        plan |= short_vector("q_a", latent.q_rank)
        plan["latent.q_a_norm.weight"] = _replicated(names["q_a_norm"] + ".weight", latent.q_rank)
    q_name = spec.names.q.format(layer=layer) if latent.q_rank is None else names["q_b"]
    q_rows = rank.rows(q_name + ".weight", heads * (latent.nope_dim + latent.rope_dim))
    plan["latent.q_b.weight"] = _columns([q_rows], latent.q_rank or hidden)
    plan |= short_vector("kv_a", latent.cached_elements)
    plan["latent.kv_a_norm.weight"] = _replicated(names["kv_a_norm"] + ".weight", latent.kv_rank)
    kv_rows = rank.rows(names["kv_b"] + ".weight", heads * (latent.nope_dim + latent.value_dim))
    return plan | {"latent.kv_b.weight": _columns([kv_rows], latent.kv_rank)}


def _replicated(name: str, *shape: int) -> ParamShard:
    """Return the shard of a tensor of which every tp rank has all."""
    zeros = (0,) * len(shape)
    return ParamShard(shape, (Box(name, shape, zeros, shape, zeros),), replicated_on_tp=True)


def _interleave(parts: Sequence[RowSlice], fused_slices: int) -> list[RowSlice]:
    """Return the rows of a fused matrix: for each fused slice, that slice's share of every part, in the order of ``parts``.

    Parts with the same tensor name are in one Hugging Face tensor, one after the other; ``total`` counts the rows of the part.
    """
    totals: dict[str, int] = {}
    joined = []
    for part in parts:
        rows_before = totals.get(part.tensor, 0)
        totals[part.tensor] = rows_before + part.total
        joined.append(part._replace(start=rows_before + part.start))
    joined = [part._replace(total=totals[part.tensor]) for part in joined]
    return [part.share(index, fused_slices) for index in range(fused_slices) for part in joined]


def _columns(parts: Sequence[RowSlice], width: int | None, suffix: str = "") -> ParamShard:
    """Return the shard of a column-parallel parameter: the rows of ``parts``, one under the other. ``width``: elements of a row; None
    for a bias. ``suffix``: what the tensors' names lack."""
    tail = () if width is None else (width,)
    zero = () if width is None else (0,)
    boxes = []
    local = 0
    for tensor, start, size, total in parts:
        boxes.append(Box(tensor + suffix, (total, *tail), (start, *zero), (size, *tail), (local, *zero)))
        local += size
    return ParamShard((local, *tail), tuple(boxes))


def _row_parallel(names: Sequence[str], rows: int, columns: RowSlice) -> ParamShard:
    """Return the shard of a row-parallel parameter: some columns of the tensors ``names`` of equal shape, one under the other.

    ``columns``: its start, size and total count columns; its tensor is not read.
    """
    shape = rows, columns.total
    size = rows, columns.size
    boxes = [Box(name, shape, (0, columns.start), size, (i * rows, 0)) for i, name in enumerate(names)]
    return ParamShard((len(names) * rows, columns.size), tuple(boxes))
