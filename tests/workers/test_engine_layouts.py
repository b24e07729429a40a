"""The training engine: one rank's losses, norms and weights in every layout, which are those of transformers with torch's AdamW."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_runs import (
    CONFIGS,
    COUNT,
    GPT_OSS,
    LENGTHS,
    LLAMA,
    OPTIM,
    QWEN3_MOE,
    STEADY,
    STEPS,
    TOTAL_UPDATES,
    assert_same,
    build,
    check_half_precision,
    check_single_precision,
    cut,
    go,
    half_precision,
    joined,
    local_boxes,
    log_probs_at,
    next_token_loss,
    rows_of,
    single,
    special_batches,
    together,
    train,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.checkpoint.manifest import PARAM
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.kernels import choose_ops
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, generation_layout, resolve_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.reshard.holdings import held_by
from rlhf_spmd.workers.objective import MicroBatch
from rlhf_spmd.workers.optim_config import learning_rate
from rlhf_spmd.workers.rank_shards import rank_shards
from rlhf_spmd.workers.train_engine import TrainEngine

EXPERTS = {**QWEN3_MOE, "num_experts": 8}
SHARED_EXPERT = {
    **LLAMA,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
}
LATENT = {
    **SHARED_EXPERT,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_interleave": True,
}
DEEP = {"initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    # layers that four, six and eight stages cut unevenly
    "5 layers": {**CONFIGS["untied"], **DEEP, "num_hidden_layers": 5},
    "6 layers, tied": {**CONFIGS["tied"], **DEEP, "num_hidden_layers": 6},
    "9 layers": {**CONFIGS["qwen3"], **DEEP, "num_hidden_layers": 9},
    "windows": {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 3},
    "sinks": GPT_OSS,
    "wide router": {**GPT_OSS, "num_local_experts": 16},  # its bias is as long as the residual stream is wide
    "experts": EXPERTS,
    "4 experts of 4": {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 4},
    "experts, 4 layers": {**EXPERTS, "num_hidden_layers": 4},
    "shared expert": SHARED_EXPERT,
    "latent": LATENT,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), MODELS)


FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
OFFLOAD = {"activation_offload": True}
BALANCE = {"router_aux_loss_coef": 0.3}
# model, layout, micro-batches of each replica (of 7 rows: the last ones may be empty), head, options of the engine
CASES: list[Any] = [
    ("untied", Layout(), [3], "lm", {}),
    ("tied", Layout(tp=2), [2], "lm", {}),
    ("untied", Layout(pp=2), [4], "lm", {}),
    ("tied", Layout(dp=2), [2, 3], "lm", {}),
    ("untied", Layout(dp=2, zero=1), [3, 3], "lm", FULL),
    ("untied", Layout(dp=2, zero=3), [2, 5], "lm", {}),
    ("qwen2", Layout(pp=2, dp=2, zero=2), [1, 4], "lm", {}),
    ("shared_kv", Layout(tp=2, dp=2, zero=3), [2, 2], "lm", {}),
    ("shared_kv", Layout(tp=4), [2], "lm", {}),
    ("qwen3", Layout(tp=2, dp=2, zero=1), [2, 2], "lm", FULL),
    ("tied", Layout(pp=2, dp=2, zero=1), [4, 3], "value", {}),
    # ZeRO over a part of dp
    ("untied", Layout(dp=4, zero=1, zero_size=2), [2, 3, 1, 2], "lm", {}),
    pytest.param("tied", Layout(dp=4, zero=2, zero_size=2), [2, 3, 1, 2], "lm", {}, marks=pytest.mark.long),
    pytest.param("tied", Layout(dp=4, zero=3, zero_size=2), [2, 3, 1, 2], "lm", {}, marks=pytest.mark.long),
    ("tied", Layout(dp=4, zero=3, zero_size=1), [2, 3, 1, 2], "lm", {}),
    pytest.param("tied", Layout(tp=2, dp=4, zero=3, zero_size=2), [2, 1, 2, 1], "lm", {}, marks=pytest.mark.long),
    pytest.param("tied", Layout(pp=2, dp=4, zero=2, zero_size=2), [2, 1, 2, 1], "lm", {}, marks=pytest.mark.long),
    # interleaved 1F1B
    ("6 layers, tied", Layout(pp=2, vpp=3), [9], "value", {}),
    ("9 layers", Layout(pp=4, vpp=2), [6], "lm", {}),
    ("9 layers", Layout(pp=2, tp=2, vpp=2, sequence_parallel=True), [5], "lm", {}),
    ("5 layers", Layout(pp=2, dp=2, zero=2, vpp=2), [1, 4], "lm", {}),
    ("6 layers, tied", Layout(pp=2, dp=2, zero=3, vpp=2), [3, 6], "lm", {}),
    # ranks that share the tokens of a row; two KV heads are copied to four
    ("untied", Layout(cp=4), [2], "lm", {}),
    ("shared_kv", Layout(cp=2, tp=2, zero=2), [2], "lm", {}),
    ("tied", Layout(cp=2, pp=2, zero=3), [4], "lm", FULL),
    ("qwen3", Layout(cp=2, dp=2, zero=1), [2, 3], "lm", SELECTIVE),
    ("untied", Layout(cp=2, dp=2, zero=3, zero_size=2), [1, 3], "lm", {}),
    ("tied", Layout(cp=2, zero=3), [3], "value", {}),
    ("windows", Layout(cp=2), [3], "lm", {}),
    ("sinks", Layout(cp=2, tp=2, sequence_parallel=True), [3], "lm", {}),
    ("wide router", Layout(tp=2, sequence_parallel=True), [3], "lm", BALANCE),
    # ranks that share experts; with the load-balancing loss, whose metrics are reported
    ("experts", Layout(dp=4, ep=4), [1, 2, 1, 1], "lm", FULL),
    ("experts", Layout(dp=4, ep=2, zero=1), [2, 1, 1, 1], "lm", SELECTIVE),
    ("experts", Layout(dp=2, cp=2, ep=4), [2, 2], "lm", BALANCE | SELECTIVE),
    ("experts, 4 layers", Layout(pp=2, vpp=2, dp=2, ep=2, zero=1), [3, 2], "lm", BALANCE),
    ("shared expert", Layout(dp=2, ep=2, zero=3), [3, 1], "value", {}),
    ("shared expert", Layout(dp=4, ep=2, zero=3, zero_size=2), [1, 1, 2, 1], "lm", BALANCE | FULL),
    ("shared expert", Layout(tp=2, cp=2, ep=2, zero=1), [2], "lm", BALANCE),
    ("sinks", Layout(dp=2, ep=2, zero=2), [2, 5], "lm", BALANCE | SELECTIVE),
    ("sinks", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), [3, 2], "lm", {}),
    ("sinks", Layout(pp=2, cp=2, ep=2), [3], "lm", FULL),
    ("latent", Layout(tp=2, dp=2, ep=2, zero=2), [2, 3], "lm", {}),
    # the load-balancing loss of ranks that share no experts
    ("shared expert", Layout(), [4], "lm", BALANCE),
    ("experts", Layout(tp=2), [2], "lm", BALANCE | SELECTIVE),
    ("experts", Layout(pp=2), [3], "lm", BALANCE | OFFLOAD),
    ("experts", Layout(cp=4), [7], "lm", BALANCE | SELECTIVE),  # fewer tokens than ranks
]


@pytest.mark.parametrize(("kind", "layout", "micro", "head", "options"), CASES, ids=str)
def test_training_is_the_same_as_on_one_rank(
    models: dict[str, str], kind: str, layout: Layout, micro: list[int], head: str, options: dict[str, Any]
) -> None:
    numeric = {key: value for key, value in options.items() if key in BALANCE}
    reference = single(models[kind], head, **numeric)
    result = together(run_ranks(layout.size, train, models[kind], layout, micro, head, options))
    assert_same(result, reference)
    assert ("moe/load_balancing_loss" in result[0][0]) == bool(numeric)
    assert head == "lm" or result[1]["score.weight"].abs().max() > 0


def test_one_rank_equals_transformers_and_torch_adamw(models: dict[str, str]) -> None:
    """transformers computes norms in fp32 even in an fp64 model."""
    from transformers import AutoModelForCausalLM

    path = models["tied"]
    reports, weights = together(run_ranks(1, train, path, Layout(), [2], "lm", {"optim": STEADY}))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1, eps=1e-3)
    for step, report in enumerate(reports):
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows_of(step, LLAMA["vocab_size"]):
            log_probs = model(row[None]).logits[0].log_softmax(-1)
            loss = loss - log_probs[:-1].gather(1, row[1:, None]).sum() / COUNT
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = learning_rate(OPTIM, step, TOTAL_UPDATES)
        adamw.step()
        assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert report["grad_norm"] > 0.5, "clipping must have something to do"
    for name, tensor in model.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def score(
    world: Any, path: str, layout: Layout, num_micro_batches: Sequence[int], dtype: torch.dtype = torch.float64
) -> dict[int, Tensor]:
    """The log-probs of this replica's rows by their number, on its last stage."""
    engine = build(world, path, layout, optim=None, dtype=dtype)
    assert not any(p.requires_grad for p in engine.parameters().values())
    replica = engine.mesh.dp_rank
    count = num_micro_batches[replica]
    rows = rows_of(0, engine.spec.vocab_size)
    batches = cut(rows, layout.dp, replica, count, max(num_micro_batches[: layout.dp]))

    def head(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> Tensor:
        return log_probs_at(decoder, hidden, torch.arange(len(batch.tokens)), batch.tokens.roll(-1))

    for _ in range(2):
        outputs = engine.forward(batches, head)
    for output, batch in zip(outputs, batches, strict=True):
        assert (output is None) == (not engine.mesh.last_stage or not len(batch.lengths))
    if not engine.mesh.last_stage:
        return {}
    numbers = range(len(rows))[replica :: layout.dp]
    order = [number for i in range(count) for number in numbers[i::count]]
    log_probs = torch.cat([output for output in outputs if output is not None]).split([len(rows[number]) for number in order])
    return {number: part[:-1] for number, part in zip(order, log_probs, strict=True)}  # the last label is of another row


@pytest.mark.parametrize(
    ("kind", "layout", "micro"),
    [
        ("tied", Layout(tp=2, dp=2, zero=1), [2, 2]),
        ("6 layers, tied", Layout(pp=2, dp=2, zero=3, vpp=3), [1, 5]),
        ("untied", Layout(cp=4), [2]),
        ("experts", Layout(cp=2, ep=2), [2]),
    ],
    ids=str,
)
def test_scores_are_those_of_one_rank(models: dict[str, str], kind: str, layout: Layout, micro: list[int]) -> None:
    """In fp64 up to the order of sums. Where only tokens are shared, a row's bits in fp32 do not depend on the rows beside it, if this
    processor's products are exact."""
    (reference,) = run_ranks(1, score, models[kind], Layout(), [2])
    for index, rows in enumerate(run_ranks(layout.size, score, models[kind], layout, micro)):
        at = layout.coordinate(index)
        expected = range(len(LENGTHS))[at.dp :: layout.dp] if at.pp == layout.pp - 1 else ()
        assert set(rows) == set(expected)
        for number, row in rows.items():
            torch.testing.assert_close(row, reference[number], rtol=1e-12, atol=1e-12)
    if layout.cp > 1 and choose_ops(torch.float32, torch.device("cpu")).is_batch_invariant(torch.float32):
        (reference,) = run_ranks(1, score, models[kind], Layout(), [2], torch.float32)
        for rows in run_ranks(layout.size, score, models[kind], layout, micro, torch.float32):
            assert all(torch.equal(row, reference[number]) for number, row in rows.items())


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("tied", Layout(dp=2)),
        ("tied", Layout(dp=4, zero=1, zero_size=2)),
        ("6 layers, tied", Layout(pp=2, dp=2, zero=3, vpp=2)),
        ("experts", Layout(dp=2, ep=2)),
        ("experts", Layout(dp=2, ep=2, zero=3)),
    ],
    ids=str,
)
def test_replicas_without_rows_and_gradients_over_two_calls(models: dict[str, str], kind: str, layout: Layout) -> None:
    result = joined(run_ranks(layout.size, special_batches, models[kind], layout))
    assert_same(result, joined(run_ranks(1, special_batches, models[kind], Layout())))


def poisoned(world: Any, path: str, layout: Layout) -> tuple[str, bool]:
    """The error of a step in which one replica's loss is NaN, and whether the weights stayed."""
    engine = build(world, path, layout)
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}

    def loss(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = next_token_loss(decoder, hidden, batch)
        return (value * torch.nan if engine.mesh.dp_rank == 1 else value), stats

    engine.forward_backward(cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 2), loss)
    with pytest.raises(FloatingPointError) as error:
        engine.optimizer_step()
    return str(error.value), all(torch.equal(before[name], tensor) for name, tensor in engine.local_tensors().items())


@pytest.mark.parametrize("zero", [0, 3])
def test_non_finite_gradients_stop_all_ranks_before_the_step(models: dict[str, str], zero: int) -> None:
    results = run_ranks(4, poisoned, models["untied"], Layout(pp=2, dp=2, zero=zero))
    assert results == [("gradient norm is nan at optimizer step 0", True)] * 4


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        ("untied", Layout(), torch.bfloat16),
        ("untied", Layout(tp=2, dp=2, zero=1), torch.bfloat16),
        ("untied", Layout(pp=2, dp=2, zero=2), torch.bfloat16),
        ("untied", Layout(dp=4, zero=3, zero_size=2), torch.bfloat16),
        ("4 experts of 4", Layout(dp=2, ep=2), torch.bfloat16),
        ("tied", Layout(tp=2), torch.float32),
        ("tied", Layout(pp=2, dp=2, zero=3), torch.float32),
    ],
    ids=str,
)
def test_lower_precision_follows_fp64(models: dict[str, str], kind: str, layout: Layout, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        check_half_precision(run_ranks(layout.size, half_precision, models[kind], layout), models[kind])
    else:
        options = {"dtype": dtype, "optim": STEADY}
        check_single_precision(run_ranks(layout.size, train, models[kind], layout, [2, 2], "lm", options), models[kind])


def drawn(world: Any, path: str, layout: Layout) -> Any:
    """The boxes of random weights."""
    mesh = build_mesh(world, range(layout.size), layout)
    options = {"dtype": torch.float64, "device": torch.device("cpu"), "seed": 7}
    engine = TrainEngine(read_spec(path), None, "lm", mesh, None, **options)
    return [{}], local_boxes(engine)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("6 layers, tied", Layout(pp=2, dp=2, zero=3, vpp=3)), ("sinks", Layout(tp=2, dp=2, ep=2))],
    ids=str,
)
def test_random_weights_are_the_same_in_every_layout(models: dict[str, str], kind: str, layout: Layout) -> None:
    reference = joined(run_ranks(1, drawn, models[kind], Layout()))
    assert_same(joined(run_ranks(4, drawn, models[kind], layout)), reference, 0.0)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("6 layers, tied", Layout(pp=2, dp=2, zero=3, vpp=2), Layout(tp=2)),
        ("6 layers, tied", Layout(pp=4), Layout(pp=2, tp=2, vpp=3)),
        ("untied", Layout(dp=4, zero=3, zero_size=2), Layout(dp=2, zero=3)),
        ("shared expert", Layout(), Layout(dp=2, ep=2, zero=1)),
        ("shared expert", Layout(dp=2, ep=2, zero=1), Layout(dp=4, ep=4)),
    ],
    ids=str,
)
def test_a_checkpoint_loads_into_another_layout(
    models: dict[str, str], tmp_path: Path, kind: str, first: Layout, second: Layout
) -> None:
    """A step in one layout and the next in another one are the run of one rank. Weights are written once, however many copies there
    are."""
    path = models[kind]
    written = together(run_ranks(first.size, go, path, first, {}, range(1), "", str(tmp_path)))[1]
    checkpoint = tmp_path / "checkpoints" / "step_1"
    pieces = read_manifest(checkpoint).pieces_of("actor", PARAM)
    sizes = {name: sum(math.prod(piece.size) for piece in parts) for name, parts in pieces.items()}
    assert sizes == {name: tensor.numel() for name, tensor in written.items()}
    result = joined(run_ranks(second.size, go, path, second, {}, range(1, STEPS), str(checkpoint), ""))
    reports, weights = single(path, "lm")
    assert_same(result, ([reports[1] | {"loss": 0.0}], weights))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("sinks", Layout(tp=2, dp=2, ep=2)), ("shared expert", Layout(pp=2, dp=2, ep=2, zero=3))],
    ids=str,
)
def test_an_export_has_the_bytes_of_its_source(models: dict[str, str], tmp_path: Path, kind: str, layout: Layout) -> None:
    source = Path(models[kind])
    run_ranks(layout.size, go, models[kind], layout, {}, range(2, 2), "", str(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step_2"
    exported = export_hugging_face(checkpoint, "actor", source, tmp_path / "export", dtype=torch.float32)
    tensors, expected = (load_file(min(place.glob("*.safetensors"))) for place in (exported, source))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


# -- without ranks


WIDE = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({**LLAMA, **WIDE}, Layout(pp=2, tp=4, dp=16, cp=8, zero=3, zero_size=8)),
        ({**EXPERTS, **WIDE, "num_experts": 32}, Layout(pp=2, tp=2, dp=64, cp=4, ep=16, zero=3, zero_size=8)),
    ],
    ids=["cp", "ep"],
)
def test_a_thousand_ranks_hold_each_part_of_the_model_once(config: dict[str, Any], layout: Layout) -> None:
    """In each copy: experts by ep, all else by ZeRO."""
    spec = spec_from_config(config, "config.json")
    assert layout.size == 1024
    neighbours = max(layout.ep, layout.dp_shard)
    sizes = {False: 0, True: 0}
    for index in range(layout.size):
        group, copies = layout.ep_group(index), layout.expert_copies(index)
        assert len(group) == layout.ep and set(group) & set(copies) == {index}
        assert len(layout.shard_group(index)) == 8 and index in layout.shard_group(index)
        if index in layout.along(index, "dp", "cp")[:neighbours]:
            shards = held_by(layout, lambda pp, tp: rank_shards(spec, "lm", layout, pp, tp), index)
            for shard in shards.values():
                sizes[shard.by_expert] += 0 if shard.replicated_on_tp else sum(box.numel for box in shard.boxes)
    plans = [rank_shards(spec, "lm", layout, pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]
    for by_expert, divided in ((True, layout.ep), (False, layout.dp_shard)):
        shards = [
            shard for plan in plans for shard in plan.values() if shard.by_expert == by_expert and not shard.replicated_on_tp
        ]
        assert sizes[by_expert] == neighbours // divided * sum(box.numel for shard in shards for box in shard.boxes)


def test_the_equation_of_a_layout() -> None:
    assert resolve_layout(LayoutConfig(tp=2, cp=2, zero=3), 8, "layout") == Layout(tp=2, dp=2, cp=2, zero=3)
    assert resolve_layout(LayoutConfig(tp=2, cp=2, ep=4), 8, "layout") == Layout(tp=2, dp=2, cp=2, ep=4)
    assert resolve_layout(LayoutConfig(zero=2, zero_size=4), 4, "layout") == Layout(dp=4, zero=2), "null means all of dp"
    hybrid = Layout(pp=2, tp=2, dp=8, zero=3, zero_size=4)
    assert str(hybrid) == "pp(2) * tp(2) * dp(8) zero(3) zero_size(4)"
    assert str(Layout(tp=2, dp=4, cp=4, ep=2, zero=1)) == "pp(1) * tp(2) * dp(4) cp(4) ep(2) zero(1)"
    assert (hybrid.dp_shard, hybrid.dp_replicate) == (4, 2)
    assert hybrid.shard_group(11) == [9, 11, 13, 15] and hybrid.same_shard_group(11) == [3, 11]
    assert Layout(dp=4).dp_shard == Layout(dp=4, zero=3, zero_size=1).dp_shard == 1
    generation = generation_layout(Layout(pp=2, tp=4, dp=16, cp=8), 1, 2)
    assert (generation.dp, len(generation.micro_dp_group(0))) == (512, 4), "each rank of cp is a replica"


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, "config.json")


SIZES = "allowed: 1, 2, 4, 8, or null: all of them"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: check_layout(spec_of(LLAMA), "layout", cp=3), r"cp=3: .*; allowed: 1, 2, 4$"),
    (lambda: check_layout(spec_of(LLAMA), "layout", tp=2, cp=4), r"cp=4: .*; allowed: 1, 2$"),
    (
        lambda: resolve_layout(LayoutConfig(tp=2, cp=2), 6, "layout"),
        re.escape("pp(1) * tp(2) * dp(1) * cp(2) = 4 ranks, but the pool has 6"),
    ),
    (
        lambda: resolve_layout(LayoutConfig(tp=2, ep=3), 8, "layout"),
        r"^layout: ep=3 must divide dp \* cp = 4; allowed: 1, 2, 4$",
    ),
    (lambda: resolve_layout(LayoutConfig(vpp=2), 1, "layout"), "layout: vpp=2 .* pp=1; set vpp=1 or pp"),
    (lambda: check_section(LayoutConfig(pp=2, vpp=0), "layout"), "vpp=0: must be at least 1"),
    *(
        (
            lambda config=config: resolve_layout(config, 8, "layout"),
            rf"^layout.zero_size={size}: must divide dp \* cp = 8; {SIZES}$",
        )
        for config, size in ((LayoutConfig(zero=3, zero_size=3), 3), (LayoutConfig(zero=1, zero_size=16), 16))
    ),
    (
        lambda: resolve_layout(LayoutConfig(zero_size=4), 8, "layout"),
        "^layout.zero_size=4 needs layout.zero 1, 2 or 3, and that is 0$",
    ),
]


@pytest.mark.parametrize(("check", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_layouts_that_cannot_be_are_refused(check: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check()
