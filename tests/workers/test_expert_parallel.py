"""Experts in parallel: one rank's numbers whatever ranks share the experts; the bytes that travel; what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_runs import (
    GPT_OSS,
    LENGTHS,
    LLAMA,
    OPTIM,
    QWEN3_MOE,
    STEADY,
    assert_same,
    build,
    check_half_precision,
    cut,
    drawn,
    go,
    half_precision,
    joined,
    next_token_loss,
    rows_of,
    score,
    single,
    special_batches,
    together,
    train,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.models.expert_parallel import COUNTS, LABEL, check_ep
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout
from rlhf_spmd.reshard.holdings import held_by
from rlhf_spmd.workers.rank_shards import rank_shards

QWEN3 = {**QWEN3_MOE, "num_experts": 8}
SHARED = {
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
    **SHARED,
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
MODELS = {
    "qwen3_moe": QWEN3,
    "gpt_oss": GPT_OSS,
    "glm4_moe": SHARED,
    "all": {**QWEN3, "num_experts": 4, "num_experts_per_tok": 4},
    "deep": {**QWEN3, "num_hidden_layers": 4},
    "latent": LATENT,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), MODELS)


@pytest.mark.parametrize(
    ("kind", "layout", "micro", "options"),
    [
        ("qwen3_moe", Layout(dp=2, ep=2), [2, 3], {}),
        ("qwen3_moe", Layout(dp=4, ep=4), [1, 2, 1, 1], {"activation_checkpointing": "full"}),
        ("qwen3_moe", Layout(dp=4, ep=2, zero=1), [2, 1, 1, 1], {"activation_checkpointing": "selective"}),
        ("gpt_oss", Layout(dp=2, ep=2, zero=2), [2, 3], {}),
        ("glm4_moe", Layout(dp=2, ep=2, zero=3), [3, 1], {}),
        ("glm4_moe", Layout(dp=4, ep=2, zero=3, zero_size=2), [1, 1, 2, 1], {}),
        ("qwen3_moe", Layout(dp=4, ep=4, zero=3, zero_size=2), [1, 1, 2, 1], {}),
        ("gpt_oss", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), [3, 2], {}),
        ("glm4_moe", Layout(tp=2, cp=2, ep=2, zero=1), [2], {}),
        ("qwen3_moe", Layout(pp=2, dp=2, ep=2, zero=2), [4, 3], {}),
        ("qwen3_moe", Layout(dp=2, cp=2, ep=4), [2, 2], {}),
        ("latent", Layout(tp=2, dp=2, ep=2, zero=2), [2, 3], {}),
        ("gpt_oss", Layout(pp=2, cp=2, ep=2), [3], {"activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_training_is_the_same_as_on_one_rank(
    models: dict[str, str], kind: str, layout: Layout, micro: list[int], options: dict[str, Any]
) -> None:
    assert_same(together(run_ranks(layout.size, train, models[kind], layout, micro, "lm", options)), single(models[kind], "lm"))


def test_chunks_of_layers_and_a_value_model_too(models: dict[str, str]) -> None:
    layout = Layout(pp=2, vpp=2, dp=2, ep=2, zero=1)
    got = together(run_ranks(4, train, models["deep"], layout, [3, 2], "lm", {}))
    assert_same(got, single(models["deep"], "lm"))
    got = together(run_ranks(2, train, models["glm4_moe"], Layout(dp=2, ep=2, zero=3), [3, 2], "value", {}))
    assert_same(got, single(models["glm4_moe"], "value"))


@pytest.mark.parametrize(
    "options", [{"lora": LoraConfig(rank=2)}, {"optim": replace(OPTIM, name="muon")}], ids=["lora", "muon"]
)
@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2, zero=3), Layout(tp=2, dp=2, ep=2)], ids=str)
def test_adapters_and_muon_too(models: dict[str, str], layout: Layout, options: dict[str, Any]) -> None:
    want = together(run_ranks(1, train, models["qwen3_moe"], Layout(), [1], "lm", options))
    micro = [2] * layout.dp
    assert_same(together(run_ranks(4, train, models["qwen3_moe"], layout, micro, "lm", options)), want, 1e-9)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, ep=2, zero=2)], ids=str)
def test_half_precision_sums_gradients_in_fp32(models: dict[str, str], layout: Layout) -> None:
    check_half_precision(run_ranks(2, half_precision, models["all"], layout), models["all"])


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, ep=2, zero=3)], ids=str)
def test_a_rank_without_rows_computes_for_the_others(models: dict[str, str], layout: Layout) -> None:
    want = joined(run_ranks(1, special_batches, models["qwen3_moe"], Layout()))
    assert_same(joined(run_ranks(2, special_batches, models["qwen3_moe"], layout)), want)


def test_log_probs_are_the_same_bits(models: dict[str, str]) -> None:
    """Products are of one row's numbers whatever other rows its expert gets."""
    (want,) = run_ranks(1, score, models["qwen3_moe"], Layout(), [2])
    for layout in (Layout(cp=2, ep=2), Layout(cp=4, ep=4)):
        for rows in run_ranks(layout.size, score, models["qwen3_moe"], layout, [2]):
            assert all(torch.equal(row, one) for row, one in zip(rows, want, strict=True))


def test_random_weights_are_those_of_one_rank(models: dict[str, str]) -> None:
    (want,) = run_ranks(1, drawn, models["gpt_oss"], Layout())
    assert_same(joined(run_ranks(4, drawn, models["gpt_oss"], Layout(tp=2, dp=2, ep=2))), joined([want]), 0.0)


def test_checkpoints_are_the_same_in_every_layout(models: dict[str, str], tmp_path: Path) -> None:
    """Two steps in one layout, two more in another: the weights of four steps; and a resumed run has the bits of the whole one."""
    one, ep2, ep4 = Layout(), Layout(dp=2, ep=2, zero=1), Layout(dp=4, ep=4)
    path, options = models["glm4_moe"], {"optim": STEADY}
    (want,) = run_ranks(1, go, path, one, options, range(4), "", "")
    for number, (first, second) in enumerate([(ep2, one), (one, ep2), (ep2, ep4), (ep2, ep2)]):
        saved = tmp_path / str(number)
        saved.mkdir()
        run_ranks(first.size, go, path, first, options, range(2), "", str(saved))
        (step,) = (saved / "checkpoints").glob("step_*")
        resumed = run_ranks(second.size, go, path, second, options, range(2, 4), str(step), "")
        reports, weights = joined(resumed)
        assert_same((reports, weights), (joined([want])[0][2:], joined([want])[1]))
    whole = run_ranks(ep2.size, go, path, ep2, options, range(4), "", "")
    for (_, got), (_, boxes) in zip(resumed, whole, strict=True):
        assert all(torch.equal(mine[-1], theirs[-1]) for mine, theirs in zip(got, boxes, strict=True))


def test_an_export_has_the_bytes_of_its_source(models: dict[str, str], tmp_path: Path) -> None:
    for kind, layout in (("gpt_oss", Layout(tp=2, dp=2, ep=2)), ("glm4_moe", Layout(pp=2, dp=2, ep=2, zero=3))):
        made = tmp_path / kind
        made.mkdir()
        run_ranks(layout.size, go, models[kind], layout, {}, range(2, 2), "", str(made))
        checkpoint, source = made / "checkpoints" / "step_2", Path(models[kind])
        out = export_hugging_face(checkpoint, "actor", source, tmp_path / f"{kind} export", dtype=torch.float32)
        found, wanted = (load_file(next(iter(sorted(place.glob("*.safetensors"))))) for place in (out, source))
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _sent(world: Any, path: str, layout: Layout) -> tuple[int, list[int], list[int]]:
    """The fewest rows of a product; bytes of rows, and of their numbers, that this rank sends in a forward pass, and in one with its
    backward pass."""
    engine = build(world, path, layout)
    batches, counts = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 1), list[list[int]]()
    for run in (lambda: engine.forward(batches, _no_head), lambda: engine.forward_backward(batches, next_token_loss)):
        before = [RECORDER.sent[label] for label in (LABEL, COUNTS)]
        run()
        counts.append([RECORDER.sent[label] - sent for label, sent in zip((LABEL, COUNTS), before, strict=True)])
    return engine.chunks[0].min_rows, counts[0], counts[1]


def _no_head(decoder: Any, hidden: Any, batch: Any) -> None:
    return None


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, ep=2), Layout(cp=4, ep=4), Layout(tp=2, dp=2, ep=2), Layout(dp=4, ep=2)], ids=str
)
def test_bytes_are_those_of_the_formula(models: dict[str, str], layout: Layout) -> None:
    """2 * per_token * hidden numbers a token and layer each way, (ep - 1) / ep of them to other ranks, where a token takes all experts;
    and E integers."""
    spec = spec_from_config(MODELS["all"], "config")
    ep, layers = layout.ep, spec.num_hidden_layers
    parts = [sum(LENGTHS[rank :: layout.dp]) for rank in range(layout.dp)]
    for index, (least, forward, both) in enumerate(run_ranks(layout.size, _sent, models["all"], layout)):
        at, group = layout.coordinate(index), [layout.coordinate(rank) for rank in layout.ep_group(index)]
        tokens = {one: max(-(-parts[one.dp] // layout.cp), least) for one in group}
        leaving = tokens[at] * (ep - 1)  # rows for the experts of others, of one expert each
        returning = sum(number for one, number in tokens.items() if one != at)  # results for others' tokens, of one expert here
        rows = layers * (leaving + returning) * (4 // ep) * spec.hidden_size * 8
        numbers = layers * 4 * 8 * (ep - 1) // ep
        assert forward == [rows, numbers]
        assert both == [2 * rows, numbers]


def test_where_experts_are_on_a_thousand_ranks() -> None:
    """Each part of the model once in each copy, whatever else is divided; experts by ep and not by ZeRO."""
    config = {**QWEN3, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64, "num_experts": 32}
    spec = spec_from_config(config, "config.json")
    layout = Layout(pp=2, tp=2, dp=64, cp=4, ep=16, zero=3, zero_size=8)
    assert (layout.size, layout.copy_ranks) == (1024, 16)
    sizes = {False: 0, True: 0}
    for index in range(layout.size):
        group, copies = layout.ep_group(index), layout.expert_copies(index)
        assert len(group) == 16 and len(copies) == 16 and set(group) & set(copies) == {index}
        if index not in layout.ep_group(layout.along(index, "dp", "cp")[0]):
            continue
        held = held_by(layout, lambda pp, tp: rank_shards(spec, "lm", layout, pp, tp), index)
        for shard in held.values():
            sizes[shard.by_expert] += sum(box.numel for box in shard.boxes) if not shard.whole_on_tp else 0
    one = [rank_shards(spec, "lm", layout, pp, tp) for pp in range(2) for tp in range(2)]
    for by_expert, copies_there in ((True, 1), (False, 2)):  # 16 neighbours hold two copies of what ZeRO divides over 8
        whole = sum(
            box.numel
            for held in one
            for shard in held.values()
            for box in shard.boxes
            if shard.by_expert == by_expert and not shard.whole_on_tp
        )
        assert sizes[by_expert] == copies_there * whole > 0


@pytest.mark.parametrize(
    ("config", "ep", "message"),
    [
        (LLAMA, 2, "models.actor.layout.ep=2: model_type 'llama' has no experts to share; allowed: 1"),
        (QWEN3, 3, "models.actor.layout.ep=3: must divide the model's 8 experts; allowed: 1, 2, 4, 8"),
    ],
)
def test_models_that_cannot_be_shared(config: dict[str, Any], ep: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_ep(spec_from_config(config, "config.json"), ep, "models.actor.layout")


def test_the_equation_of_a_layout() -> None:
    assert resolve_layout(LayoutConfig(tp=2, cp=2, ep=4), 8, "layout") == Layout(tp=2, dp=2, cp=2, ep=4)
    assert str(Layout(dp=4, ep=2, zero=1)) == "pp(1) * tp(1) * dp(4) ep(2) zero(1)"
    with pytest.raises(ValueError, match=r"^layout: ep=3 must divide dp \* cp = 4; allowed: 1, 2, 4$"):
        resolve_layout(LayoutConfig(tp=2, ep=3), 8, "layout")
