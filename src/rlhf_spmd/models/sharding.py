"""Which slice of which Hugging Face tensor a rank holds, for any (stage, tp rank). Pure: no torch, no process group.

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

from rlhf_spmd.models.layer_kinds import BY_EXPERT, LATENT_NAMES, SCALAR, SCORE_BIAS, DeltaRule, Experts
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
    return (len(kv_heads_of(spec, tp_rank, tp)), spec.head_dim) if spec.latent is None else (1, spec.latent.entry)


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
        block = _plan_block(spec, layer, tp_rank, tp, fused_slices, expert_parallel_generation)
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


def tensor_shapes(spec: ModelSpec, head: str) -> dict[str, tuple[int, ...]]:
    """Return every Hugging Face tensor of the model with its global shape."""
    plan = plan_params(spec, head, 0, 1, 0, 1)
    return {box.name: box.shape for shard in plan.values() for box in shard.boxes}


def check_lora(spec: ModelSpec, lora: LoraConfig, where: str) -> None:
    """Raise ValueError where ``target_modules`` name what the model has not, or leave one of its layers without an adapter."""

    def modules(config: LoraConfig) -> dict[str, str]:
        plan = plan_params(spec, "none", 0, 1, 0, 1, lora=config)
        names = {box.name.split(".lora_")[0]: name for name, shard in plan.items() if is_adapter(name) for box in shard.boxes}
        return {f".{module}": name.split(".")[1] for module, name in names.items()}

    candidates = modules(LoraConfig(rank=1))
    suffixes = [] if lora.target_modules == ALL_LINEAR else lora.target_modules
    unknown = [suffix for suffix in suffixes if not any(module.endswith(f".{suffix}") for module in candidates)]
    if unknown or len(set(modules(lora).values())) < spec.num_hidden_layers:
        listed = ", ".join(sorted({module.rpartition(".")[2] for module in candidates}))
        wrong = f"the model has no matrix {unknown[0]!r}" if unknown else "some layers have none of these"
        raise ValueError(f"{where}.target_modules={lora.target_modules}: {wrong}; its layers have {listed}")


def _plan_block(
    spec: ModelSpec, layer: int, tp_rank: int, tp: int, fused_slices: int, expert_parallel_generation: bool
) -> dict[str, ParamShard]:
    """Return the parameters of one layer, by their names within it. ``layer``: its index in the model."""
    spec = spec.spec_for_layer(layer)
    names, hidden, dim = spec.names, spec.hidden_size, spec.head_dim
    heads = spec.num_attention_heads // tp
    kv = kv_heads_of(spec, tp_rank, tp)

    def tensor_name(name: str, expert: int = 0) -> str:
        return name.format(layer=layer, expert=expert)

    q_rows = RowSlice(tensor_name(names.q), tp_rank * heads * dim, heads * dim, spec.num_attention_heads * dim)
    k_rows = RowSlice(tensor_name(names.k), kv.start * dim, len(kv) * dim, spec.num_key_value_heads * dim)
    v_rows = k_rows._replace(tensor=tensor_name(names.v))
    qkv_slices, gate_up_slices = fused_slice_counts(spec, tp, fused_slices)
    parts = [q_rows, k_rows] if spec.keys_as_values else [q_rows, k_rows, v_rows]
    qkv = _gated_rows(parts, dim, qkv_slices) if spec.attention_gate else _interleave(parts, qkv_slices)
    plan = {"input_norm.weight": _replicated(tensor_name(names.input_norm), hidden)} if names.input_norm else {}
    delta = spec.delta_of(layer)
    if delta is not None:
        plan |= _plan_delta(delta, tensor_name(names.linear), hidden, tp_rank, tp, fused_slices)
    elif spec.latent is not None:
        plan |= _plan_latent(spec, layer, tp_rank * heads, heads)
        dim = spec.latent.value_dim
        q_rows = RowSlice(q_rows.tensor, tp_rank * heads * dim, heads * dim, spec.num_attention_heads * dim)
    else:
        plan["qkv.weight"] = _columns(qkv, hidden, ".weight")
    if delta is None:
        if spec.latent is None and spec.attention_bias:
            plan["qkv.bias"] = _columns(qkv, None, ".bias")
        if spec.qk_norm:
            for key, name, rows in (("q_norm.weight", names.q_norm, q_rows), ("k_norm.weight", names.k_norm, k_rows)):
                norm_rows = rows._replace(tensor=tensor_name(name))
                plan[key] = _columns([norm_rows], None) if spec.qk_norm_over_all_heads else _replicated(tensor_name(name), dim)
        if names.sinks:
            sink_rows = RowSlice(tensor_name(names.sinks), tp_rank * heads, heads, spec.num_attention_heads)
            plan["sinks.weight"] = _columns([sink_rows], None)
        plan["out.weight"] = _row_parallel([tensor_name(names.out) + ".weight"], hidden, q_rows)
        if spec.attention_out_bias:
            plan["out.bias"] = _replicated(tensor_name(names.out) + ".bias", hidden)
    if names.attention_norm:
        plan["attention_norm.weight"] = _replicated(tensor_name(names.attention_norm), hidden)
    if names.post_norm:
        plan["post_norm.weight"] = _replicated(tensor_name(names.post_norm), hidden)
    experts = spec.experts_of(layer)
    if experts is None:
        mlps, width = [(tensor_name(names.gate), tensor_name(names.up), tensor_name(names.down))], spec.intermediate_size
    else:
        count, width = experts.count // tp if expert_parallel_generation else experts.count, experts.intermediate_size
        expert_numbers = range(tp_rank * count, (tp_rank + 1) * count) if expert_parallel_generation else range(count)
        plan["router.weight"] = _replicated(tensor_name(names.router), experts.count, hidden)
        mlps = [
            (tensor_name(names.expert_gate, e), tensor_name(names.expert_up, e), tensor_name(names.expert_down, e))
            for e in expert_numbers
        ]
    if expert_parallel_generation and experts is not None:
        mlp_rows = RowSlice("", 0, width, width)
    else:
        mlp_rows = RowSlice("", tp_rank * width // tp, width // tp, width)
    gate_up_rows = [mlp_rows._replace(tensor=name) for gate, up, _ in mlps for name in (gate, up)]
    gate_up = _interleave(gate_up_rows, gate_up_slices)
    plan["gate_up.weight"] = _columns(gate_up, hidden, ".weight")
    plan["down.weight"] = _row_parallel([down + ".weight" for _, _, down in mlps], hidden, mlp_rows)
    if experts is not None and experts.biased:
        plan["router_bias.weight"] = _replicated(tensor_name(names.router_bias), experts.count)
        plan["gate_up_bias.weight"] = _columns(gate_up, None, ".bias")
        down_bias = _columns([RowSlice(down, 0, hidden, hidden) for _, _, down in mlps], None, ".bias")
        plan["down_bias.weight"] = replace(down_bias, replicated_on_tp=not expert_parallel_generation)
    if experts is not None:
        plan |= {name: replace(plan[name], by_expert=True) for key in BY_EXPERT if (name := f"{key}.weight") in plan}
        plan |= _plan_shared(spec, experts, layer, tp_rank, tp, gate_up_slices)
    if names.mlp_norm:
        plan["mlp_norm.weight"] = _replicated(tensor_name(names.mlp_norm), hidden)
    if names.scalar:
        plan[f"{SCALAR}.weight"] = _replicated(tensor_name(names.scalar), 1)
    return plan


def _plan_delta(rule: DeltaRule, prefix: str, hidden: int, tp_rank: int, tp: int, fused_slices: int) -> dict[str, ParamShard]:
    """Return the parameters of a layer's linear attention, its last matrix among them. Rows of the fused first matrix are in the order
    of :func:`_delta_rows`, channels of the convolution too."""
    keys, values = rule.key_heads // tp, rule.value_heads // tp
    plan = dict[str, ParamShard]()
    first_rows = _delta_rows(rule, prefix, range(tp_rank * keys, (tp_rank + 1) * keys), fused_slices)
    plan["qkv.weight"] = _columns(first_rows, hidden, ".weight")
    key_width, value_width = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    k_rows = RowSlice(prefix + "conv1d.weight", tp_rank * keys * rule.key_dim, keys * rule.key_dim, key_width)
    v_rows = RowSlice(prefix + "conv1d.weight", tp_rank * values * rule.value_dim, values * rule.value_dim, value_width)
    boxes, local, tail = [], 0, (1, rule.kernel)
    for rows in _interleave([k_rows, k_rows, v_rows], fused_slices):  # queries have the sizes of keys
        boxes.append(Box(rows.tensor, (rows.total, *tail), (rows.start, 0, 0), (rows.size, *tail), (local, 0, 0)))
        local += rows.size
    plan["mixer.conv.weight"] = ParamShard((local, *tail), tuple(boxes))
    head_rows = RowSlice(prefix + "A_log", tp_rank * values, values, rule.value_heads)
    plan["mixer.decay.weight"] = _columns([head_rows], None)
    plan["mixer.decay_bias.weight"] = _columns([head_rows._replace(tensor=prefix + "dt_bias")], None)
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
            if rule.fused:  # all parts of a key head lie together
                name, group_parts = ("in_proj_qkvz", range(4)) if i < 4 else ("in_proj_ba", range(4, 6))
                stride, before = sum(widths[j] for j in group_parts), sum(widths[j] for j in group_parts if j < i)
                total = stride * rule.key_heads
                rows += [RowSlice(prefix + name, head * stride + before, width, total) for head in slice_heads]
            else:
                together = range(3) if i < 3 else range(i, i + 1)
                before = sum(totals[j] for j in together if j < i)
                start, size = before + slice_heads.start * width, len(slice_heads) * width
                rows.append(RowSlice(prefix + name, start, size, sum(totals[j] for j in together)))
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


def _plan_latent(spec: ModelSpec, layer: int, first: int, heads: int) -> dict[str, ParamShard]:
    """Return the parameters of latent attention without the matrix behind it, for ``heads`` heads from the ``first`` on."""
    latent, hidden, total = spec.latent, spec.hidden_size, spec.num_attention_heads
    assert latent is not None
    names = {key: name.format(layer=layer) for key, name in LATENT_NAMES.items()}

    def head_columns(name: str, dim: int, width: int) -> ParamShard:
        return _columns([RowSlice(name + ".weight", first * dim, heads * dim, total * dim)], width)

    plan, ranks = dict[str, ParamShard](), {"q_a": latent.q_rank, "kv_a": latent.entry}
    for key, rank in ranks.items():
        if rank is not None:
            plan[f"latent.{key}.weight"] = _replicated(names[key] + ".weight", rank, hidden)
            if spec.attention_bias:
                plan[f"latent.{key}.bias"] = _replicated(names[key] + ".bias", rank)
        if key == "q_a":
            if rank is not None:
                plan["latent.q_a_norm.weight"] = _replicated(names["q_a_norm"] + ".weight", rank)
            q_name = spec.names.q.format(layer=layer) if rank is None else names["q_b"]
            plan["latent.q_b.weight"] = head_columns(q_name, latent.nope_dim + latent.rope_dim, rank or hidden)
    plan["latent.kv_a_norm.weight"] = _replicated(names["kv_a_norm"] + ".weight", latent.kv_rank)
    return plan | {"latent.kv_b.weight": head_columns(names["kv_b"], latent.nope_dim + latent.value_dim, latent.kv_rank)}


def _plan_shared(
    spec: ModelSpec, experts: Experts, layer: int, tp_rank: int, tp: int, fused_slices: int
) -> dict[str, ParamShard]:
    """Return the parameters of a mixture of experts beside router and experts: the scores' bias and the shared expert."""
    names, hidden, width, plan = spec.names, spec.hidden_size, experts.shared_size, dict[str, ParamShard]()
    if experts.score_biased:
        plan[f"{SCORE_BIAS}.weight"] = _replicated(names.score_bias.format(layer=layer), experts.count, 3)
    if width:
        gate, up, down = (name.format(layer=layer) for name in (names.shared_gate, names.shared_up, names.shared_down))
        gate_rows = RowSlice(gate, tp_rank * width // tp, width // tp, width)
        gate_up = _interleave([gate_rows, gate_rows._replace(tensor=up)], fused_slices)
        plan["shared_gate_up.weight"] = _columns(gate_up, hidden, ".weight")
        plan["shared_down.weight"] = _row_parallel([down + ".weight"], hidden, gate_rows)
    if experts.shared_gate:
        plan["shared_gate.weight"] = _replicated(names.shared_weight.format(layer=layer), 1, hidden)
    return plan


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
    boxes, local = [], 0
    for tensor, start, size, total in parts:
        boxes.append(Box(tensor + suffix, (total, *tail), (start, *zero), (size, *tail), (local, *zero)))
        local += size
    return ParamShard((local, *tail), tuple(boxes))


def _row_parallel(names: Sequence[str], rows: int, columns: RowSlice) -> ParamShard:
    """Return the shard of a row-parallel parameter: some columns of the tensors ``names`` of equal shape, one under the other.

    ``columns``: its start, size and total count columns; its tensor is not read.
    """
    shape, size = (rows, columns.total), (rows, columns.size)
    boxes = [Box(name, shape, (0, columns.start), size, (i * rows, 0)) for i, name in enumerate(names)]
    return ParamShard((len(names) * rows, columns.size), tuple(boxes))
