"""Which slice of which Hugging Face tensor a rank holds, for any (stage, tp rank). Pure: no torch, no process group.

The keys are the parameter names of :class:`~rlhf_spmd.models.decoder.Decoder`; a fused parameter (q, k and v; gate and up)
has one box per Hugging Face tensor. Column-parallel matrices are split on dim 0, row-parallel ones on dim 1, the embedding
and the output head along the vocabulary.

A vocabulary that tp does not divide is cut at ``rank * vocab // tp``: slices differ by at most one row, and the cuts of a
smaller tp are among those of its multiples, so a training shard always lies inside one generation shard.
"""

from __future__ import annotations

from dataclasses import replace

from rlhf_spmd.models.layer_kinds import BY_EXPERT, LATENT_NAMES, SCALAR, SCORE_BIAS, DeltaRule, Experts
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.lora import ALL_LINEAR, LoraConfig, is_adapter, plan_adapters
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import Box, ParamShard
from rlhf_spmd.parallel.layout import stage_layers

HEAD_KINDS = ("lm", "value", "both", "none")


def vocab_range(vocab_size: int, tp_rank: int, tp: int) -> tuple[int, int]:
    """Token ids [first, last) of a tensor-parallel rank."""
    return tp_rank * vocab_size // tp, (tp_rank + 1) * vocab_size // tp


def kv_heads_of(spec: ModelSpec, tp_rank: int, tp: int) -> range:
    """KV heads that a rank holds: its slice, or, where tp exceeds their number, the one that its query heads share."""
    kv = spec.num_key_value_heads
    if tp <= kv:
        return range(tp_rank * (kv // tp), (tp_rank + 1) * (kv // tp))
    head = tp_rank * kv // tp
    return range(head, head + 1)


def cache_shape(spec: ModelSpec, tp_rank: int, tp: int) -> tuple[int, int]:
    """Heads that a rank caches in a layer of ``spec.kinds_of_heads()``, and elements of each."""
    return (len(kv_heads_of(spec, tp_rank, tp)), spec.head_dim) if spec.latent is None else (1, spec.latent.entry)


def fused_blocks(spec: ModelSpec, tp: int, blocks: int) -> tuple[int, int]:
    """Blocks of (qkv, gate_up) on a rank of tp slices, see :func:`plan_params`; qkv has one where KV heads would be cut."""
    whole_kv_heads = spec.num_key_value_heads % (tp * blocks) == 0
    return blocks if whole_kv_heads else 1, blocks


def plan_params(
    spec: ModelSpec,
    head: str,
    stage: int,
    pp: int,
    tp_rank: int,
    tp: int,
    blocks: int = 1,
    lora: LoraConfig | None = None,
    expert_parallel_generation: bool = False,
) -> dict[str, ParamShard]:
    """Decoder parameter name -> shape and boxes on this rank, in the order of ``Decoder.named_parameters()``.

    ``head``: "lm", "value", "both" (a value head beside the other) or "none". Layers are numbered from 0 within the stage.
    ``blocks``: the rank holds the slices of as many ranks of a layout with tp * blocks, and fused parameters keep theirs together,
    [q0; k0; v0; q1; k1; v1] for two: each finer slice is then a slice of this one, which resharding needs. Raises ValueError
    where the layout does not fit. ``lora``: with these adapters, which need ``blocks`` 1.
    ``expert_parallel_generation``: the rank has 1 / tp of the experts in place of a slice of each, which needs ``blocks`` 1, too.
    """
    if head not in HEAD_KINDS:
        raise ValueError(f"head {head!r} is not one of {', '.join(HEAD_KINDS)}")
    for slices in sorted({tp, tp * blocks}):
        check_layout(spec, "layout", pp, slices, expert_parallel_generation=expert_parallel_generation)
    assert blocks == 1 or not expert_parallel_generation, f"{blocks} blocks of whole experts"
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
        block = _plan_block(spec, layer, tp_rank, tp, blocks, expert_parallel_generation)
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
    """Every Hugging Face tensor of the whole model with its global shape."""
    plan = plan_params(spec, head, 0, 1, 0, 1)
    return {box.name: box.shape for shard in plan.values() for box in shard.boxes}


def check_lora(spec: ModelSpec, lora: LoraConfig, where: str) -> None:
    """Raise ValueError where ``target_modules`` name what the model has not, or leave one of its layers without an adapter."""

    def modules(config: LoraConfig) -> dict[str, str]:
        plan = plan_params(spec, "none", 0, 1, 0, 1, lora=config)
        names = {box.name.split(".lora_")[0]: name for name, shard in plan.items() if is_adapter(name) for box in shard.boxes}
        return {f".{module}": name.split(".")[1] for module, name in names.items()}

    every = modules(LoraConfig(rank=1))
    ends = [] if lora.target_modules == ALL_LINEAR else lora.target_modules
    unknown = [end for end in ends if not any(module.endswith(f".{end}") for module in every)]
    if unknown or len(set(modules(lora).values())) < spec.num_hidden_layers:
        listed = ", ".join(sorted({module.rpartition(".")[2] for module in every}))
        wrong = f"the model has no matrix {unknown[0]!r}" if unknown else "some layers have none of these"
        raise ValueError(f"{where}.target_modules={lora.target_modules}: {wrong}; its layers have {listed}")


def _plan_block(
    spec: ModelSpec, layer: int, tp_rank: int, tp: int, blocks: int, expert_parallel_generation: bool
) -> dict[str, ParamShard]:
    spec = spec.spec_for_layer(layer)
    names, hidden, dim = spec.names, spec.hidden_size, spec.head_dim
    heads = spec.num_attention_heads // tp
    kv = kv_heads_of(spec, tp_rank, tp)
    q_rows = (tp_rank * heads * dim, heads * dim, spec.num_attention_heads * dim)
    kv_rows = (kv.start * dim, len(kv) * dim, spec.num_key_value_heads * dim)
    qkv_blocks, gate_up_blocks = fused_blocks(spec, tp, blocks)

    def at(name: str, expert: int = 0) -> str:
        return name.format(layer=layer, expert=expert)

    parts = [(at(names.q), q_rows), (at(names.k), kv_rows), (at(names.v), kv_rows)][: 3 - spec.keys_as_values]
    qkv = _gated_rows(parts, dim, qkv_blocks) if spec.attention_gate else _interleave(parts, qkv_blocks)
    plan = {"input_norm.weight": _replicated(at(names.input_norm), hidden)} if names.input_norm else {}
    delta = spec.delta_of(layer)
    if delta is not None:
        plan |= _plan_delta(delta, at(names.linear), hidden, tp_rank, tp, blocks)
    elif spec.latent is not None:
        plan |= _plan_latent(spec, layer, tp_rank * heads, heads)
        dim = spec.latent.value_dim
        q_rows = tp_rank * heads * dim, heads * dim, spec.num_attention_heads * dim
    else:
        plan["qkv.weight"] = _columns(qkv, hidden, ".weight")
    if delta is None:
        if spec.latent is None and spec.attention_bias:
            plan["qkv.bias"] = _columns(qkv, None, ".bias")
        if spec.qk_norm:
            for key, name, rows in (("q_norm.weight", names.q_norm, q_rows), ("k_norm.weight", names.k_norm, kv_rows)):
                plan[key] = _columns([(at(name), *rows)], None) if spec.whole_qk_norm else _replicated(at(name), dim)
        if names.sinks:
            rows = tp_rank * heads, heads, spec.num_attention_heads
            plan["sinks.weight"] = _columns([(at(names.sinks), *rows)], None)
        plan["out.weight"] = _row_parallel([at(names.out) + ".weight"], hidden, *q_rows)
        if spec.attention_out_bias:
            plan["out.bias"] = _replicated(at(names.out) + ".bias", hidden)
    if names.attention_norm:
        plan["attention_norm.weight"] = _replicated(at(names.attention_norm), hidden)
    if names.post_norm:
        plan["post_norm.weight"] = _replicated(at(names.post_norm), hidden)
    experts = spec.experts_of(layer)
    if experts is None:
        mlps, width = [(at(names.gate), at(names.up), at(names.down))], spec.intermediate_size
    else:
        count, width = experts.count // tp if expert_parallel_generation else experts.count, experts.intermediate_size
        numbers = range(tp_rank * count, (tp_rank + 1) * count) if expert_parallel_generation else range(count)
        plan["router.weight"] = _replicated(at(names.router), experts.count, hidden)
        mlps = [(at(names.expert_gate, e), at(names.expert_up, e), at(names.expert_down, e)) for e in numbers]
    mlp_rows = (tp_rank * width // tp, width // tp, width)
    if expert_parallel_generation and experts is not None:
        mlp_rows = (0, width, width)
    gate_up = _interleave([(name, mlp_rows) for gate, up, _ in mlps for name in (gate, up)], gate_up_blocks)
    plan["gate_up.weight"] = _columns(gate_up, hidden, ".weight")
    plan["down.weight"] = _row_parallel([down + ".weight" for _, _, down in mlps], hidden, *mlp_rows)
    if experts is not None and experts.biased:
        plan["router_bias.weight"] = _replicated(at(names.router_bias), experts.count)
        plan["gate_up_bias.weight"] = _columns(gate_up, None, ".bias")
        down_bias = _columns([(down, 0, hidden, hidden) for _, _, down in mlps], None, ".bias")
        plan["down_bias.weight"] = replace(down_bias, whole_on_tp=not expert_parallel_generation)
    if experts is not None:
        plan |= {name: replace(plan[name], by_expert=True) for key in BY_EXPERT if (name := f"{key}.weight") in plan}
        plan |= _plan_shared(spec, experts, layer, tp_rank, tp, gate_up_blocks)
    if names.mlp_norm:
        plan["mlp_norm.weight"] = _replicated(at(names.mlp_norm), hidden)
    if names.scalar:
        plan[f"{SCALAR}.weight"] = _replicated(at(names.scalar), 1)
    return plan


def _plan_delta(rule: DeltaRule, prefix: str, hidden: int, tp_rank: int, tp: int, blocks: int) -> dict[str, ParamShard]:
    """Linear attention up to its last matrix: rows of the fused first one are in the order of :func:`_delta_rows`, those of the
    convolution alike."""
    keys, values = rule.key_heads // tp, rule.value_heads // tp
    first, plan = _delta_rows(rule, prefix, range(tp_rank * keys, (tp_rank + 1) * keys), blocks), dict[str, ParamShard]()
    plan["qkv.weight"] = _columns(first, hidden, ".weight")
    k, v = (tp_rank * keys * rule.key_dim, keys * rule.key_dim), (tp_rank * values * rule.value_dim, values * rule.value_dim)
    before = 0, rule.key_heads * rule.key_dim, 2 * rule.key_heads * rule.key_dim
    channels = [(offset + start, count) for offset, (start, count) in zip(before, (k, k, v), strict=True)]
    boxes, local, tail = [], 0, (1, rule.kernel)
    for block in range(blocks):
        for start, count in channels:
            start, count = start + block * count // blocks, count // blocks
            boxes.append(Box(prefix + "conv1d.weight", (rule.channels, *tail), (start, 0, 0), (count, *tail), (local, 0, 0)))
            local += count
    plan["mixer.conv.weight"] = ParamShard((local, *tail), tuple(boxes))
    rows = tp_rank * values, values, rule.value_heads
    plan["mixer.decay.weight"] = _columns([(prefix + "A_log", *rows)], None)
    plan["mixer.decay_bias.weight"] = _columns([(prefix + "dt_bias", *rows)], None)
    plan["mixer.norm.weight"] = _replicated(prefix + "norm.weight", rule.value_dim)
    plan["out.weight"] = _row_parallel([prefix + "out_proj.weight"], hidden, *v, rule.value_heads * rule.value_dim)
    return plan


def _delta_rows(rule: DeltaRule, prefix: str, heads: range, blocks: int) -> list[tuple[str, int, int, int]]:
    """(tensor, first row, rows, its rows) of the first product of these key heads: for each block of them, queries, keys, values, gates
    of the output, rates, decays."""
    group = rule.value_heads // rule.key_heads
    # rows of a key head
    widths = (rule.key_dim, rule.key_dim, group * rule.value_dim, group * rule.value_dim, group, group)
    totals = [width * rule.key_heads for width in widths]
    parts = ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    rows: list[tuple[str, int, int, int]] = []
    for block in range(blocks):
        some = heads[block * len(heads) // blocks : (block + 1) * len(heads) // blocks]
        for i, (name, width) in enumerate(zip(parts, widths, strict=True)):
            if rule.fused:  # all parts of a key head lie together
                name, group_parts = ("in_proj_qkvz", range(4)) if i < 4 else ("in_proj_ba", range(4, 6))
                stride, before = sum(widths[j] for j in group_parts), sum(widths[j] for j in group_parts if j < i)
                rows += [(prefix + name, head * stride + before, width, stride * rule.key_heads) for head in some]
            else:
                together = range(3) if i < 3 else range(i, i + 1)
                before = sum(totals[j] for j in together if j < i)
                rows.append((prefix + name, before + some.start * width, len(some) * width, sum(totals[j] for j in together)))
    return rows


def _gated_rows(parts: list[tuple[str, tuple[int, int, int]]], dim: int, blocks: int) -> list[tuple[str, int, int, int]]:
    """Return rows as :func:`_interleave` does, where each query is followed by its gate. Gates come behind the values."""
    (q, (start, count, total)), *others = parts
    gated: list[tuple[str, int, int, int]] = []
    for block in range(blocks):
        first, rows = 2 * (start + block * count // blocks), count // blocks
        gated += [(q, first + 2 * row, dim, 2 * total) for row in range(0, rows, dim)]
        gated += [(name, start_of + block * n // blocks, n // blocks, of) for name, (start_of, n, of) in others]
        gated += [(q, first + 2 * row + dim, dim, 2 * total) for row in range(0, rows, dim)]
    return gated


def _plan_latent(spec: ModelSpec, layer: int, first: int, heads: int) -> dict[str, ParamShard]:
    """Latent attention without the matrix behind it, for ``heads`` heads from the ``first`` on."""
    latent, hidden, total = spec.latent, spec.hidden_size, spec.num_attention_heads
    assert latent is not None
    names = {key: name.format(layer=layer) for key, name in LATENT_NAMES.items()}

    def of_heads(name: str, dim: int, width: int) -> ParamShard:
        return _columns([(name + ".weight", first * dim, heads * dim, total * dim)], width)

    plan, ranks = dict[str, ParamShard](), {"q_a": latent.q_rank, "kv_a": latent.entry}
    for key, rank in ranks.items():
        if rank is not None:
            plan[f"latent.{key}.weight"] = _replicated(names[key] + ".weight", rank, hidden)
            if spec.attention_bias:
                plan[f"latent.{key}.bias"] = _replicated(names[key] + ".bias", rank)
        if key == "q_a":
            if rank is not None:
                plan["latent.q_a_norm.weight"] = _replicated(names["q_a_norm"] + ".weight", rank)
            of_q = spec.names.q.format(layer=layer) if rank is None else names["q_b"]
            plan["latent.q_b.weight"] = of_heads(of_q, latent.nope_dim + latent.rope_dim, rank or hidden)
    plan["latent.kv_a_norm.weight"] = _replicated(names["kv_a_norm"] + ".weight", latent.kv_rank)
    return plan | {"latent.kv_b.weight": of_heads(names["kv_b"], latent.nope_dim + latent.value_dim, latent.kv_rank)}


def _plan_shared(spec: ModelSpec, experts: Experts, layer: int, tp_rank: int, tp: int, blocks: int) -> dict[str, ParamShard]:
    """Return what a mixture has beside router and experts."""
    names, hidden, width, plan = spec.names, spec.hidden_size, experts.shared_size, dict[str, ParamShard]()
    if experts.score_biased:
        plan[f"{SCORE_BIAS}.weight"] = _replicated(names.score_bias.format(layer=layer), experts.count, 3)
    if width:
        gate, up, down = (name.format(layer=layer) for name in (names.shared_gate, names.shared_up, names.shared_down))
        rows = tp_rank * width // tp, width // tp, width
        gate_up = _interleave([(gate, rows), (up, rows)], blocks)
        plan["shared_gate_up.weight"] = _columns(gate_up, hidden, ".weight")
        plan["shared_down.weight"] = _row_parallel([down + ".weight"], hidden, *rows)
    if experts.shared_gate:
        plan["shared_gate.weight"] = _replicated(names.shared_weight.format(layer=layer), 1, hidden)
    return plan


def _replicated(name: str, *shape: int) -> ParamShard:
    zeros = (0,) * len(shape)
    return ParamShard(shape, (Box(name, shape, zeros, shape, zeros),), whole_on_tp=True)


def _interleave(parts: list[tuple[str, tuple[int, int, int]]], blocks: int) -> list[tuple[str, int, int, int]]:
    """The first block of the rows (start, count, total) of every name, then the second of every one, and so on.

    A name that is there several times is one tensor, of all their rows one after the other.
    """
    totals: dict[str, int] = {}
    before = []
    for name, (_, _, total) in parts:
        before.append(totals.get(name, 0))
        totals[name] = before[-1] + total
    return [
        (name, offset + start + block * count // blocks, count // blocks, totals[name])
        for block in range(blocks)
        for offset, (name, (start, count, _)) in zip(before, parts, strict=True)
    ]


def _columns(parts: list[tuple[str, int, int, int]], width: int | None, suffix: str = "") -> ParamShard:
    """Rows [start, start + count) of each (name, start, count, total), one under the other; ``width`` None for a bias. ``suffix``: what
    the names lack."""
    tail = () if width is None else (width,)
    zero = () if width is None else (0,)
    boxes, local = [], 0
    for name, start, count, total in parts:
        boxes.append(Box(name + suffix, (total, *tail), (start, *zero), (count, *tail), (local, *zero)))
        local += count
    return ParamShard((local, *tail), tuple(boxes))


def _row_parallel(names: list[str], rows: int, start: int, count: int, total: int) -> ParamShard:
    """Columns [start, start + count) of tensors of equal shape, one under the other."""
    boxes = [Box(name, (rows, total), (0, start), (rows, count), (i * rows, 0)) for i, name in enumerate(names)]
    return ParamShard((len(names) * rows, count), tuple(boxes))
