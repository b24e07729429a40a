"""Context parallelism: one rank's numbers whatever ranks share a row's tokens; the bytes that they send; what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_runs import (
    CONFIGS,
    GPT_OSS,
    LENGTHS,
    LLAMA,
    OPTIM,
    QWEN3_MOE,
    assert_same,
    build,
    cut,
    next_token_loss,
    rows_of,
    score,
    single,
    together,
    train,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.models.context_parallel import check_cp, own_tokens
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.parallel.collectives import RECORDER, Group, solo
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, generation_layout, resolve_layout
from rlhf_spmd.reshard.holdings import held_by
from rlhf_spmd.workers.rank_shards import rank_shards

WINDOWS = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kinds = {name: CONFIGS[name] for name in ("untied", "tied", "shared_kv", "qwen3")}
    return write_models(
        tmp_path_factory.mktemp("models"),
        {
            **kinds,
            "experts": QWEN3_MOE,
            "windows": WINDOWS,
            "sinks": GPT_OSS,
            "wide router": {**GPT_OSS, "num_local_experts": 16},
        },
    )


@pytest.mark.parametrize(
    ("kind", "layout", "micro", "options"),
    [
        ("untied", Layout(cp=2), [3], {}),
        ("untied", Layout(cp=4), [2], {}),  # 2 KV heads, which are copied
        ("shared_kv", Layout(cp=2, tp=2, zero=2), [2], {}),
        ("tied", Layout(cp=2, pp=2, zero=3), [4], {"activation_checkpointing": "full"}),
        ("qwen3", Layout(cp=2, dp=2, zero=1), [2, 3], {"activation_checkpointing": "selective"}),
        ("untied", Layout(cp=2, dp=2, zero=3, zero_size=2), [1, 3], {}),
        ("untied", Layout(cp=2, tp=2, sequence_parallel=True), [3], {}),
        ("tied", Layout(cp=2, pp=2, vpp=1), [2], {}),
        ("experts", Layout(cp=2), [2], {}),
        ("windows", Layout(cp=2), [3], {}),
        ("sinks", Layout(cp=2, tp=2), [3], {}),
        ("wide router", Layout(tp=2, sequence_parallel=True), [3], {}),  # its bias is as long as the residual stream is wide
    ],
    ids=str,
)
def test_training_is_the_same_as_on_one_rank(
    models: dict[str, str], kind: str, layout: Layout, micro: list[int], options: dict[str, Any]
) -> None:
    assert_same(together(run_ranks(layout.size, train, models[kind], layout, micro, "lm", options)), single(models[kind], "lm"))


def test_a_value_model_too(models: dict[str, str]) -> None:
    layout = Layout(cp=2, zero=3)
    assert_same(together(run_ranks(2, train, models["tied"], layout, [3], "value", {})), single(models["tied"], "value"))


@pytest.mark.parametrize(
    "options", [{"lora": LoraConfig(rank=2)}, {"optim": replace(OPTIM, name="muon")}], ids=["lora", "muon"]
)
def test_adapters_and_muon_too(models: dict[str, str], options: dict[str, Any]) -> None:
    layout = Layout(cp=2, dp=2, zero=3, zero_size=2)
    want = together(run_ranks(1, train, models["untied"], Layout(), [1], "lm", options))
    assert_same(together(run_ranks(4, train, models["untied"], layout, [2, 2], "lm", options)), want, 1e-9)


def test_log_probs_are_the_same_bits(models: dict[str, str]) -> None:
    """Attention is exact per head, and all else per token."""
    want = run_ranks(1, score, models["untied"], Layout(), [2])[0]
    for layout in (Layout(cp=2), Layout(cp=4)):
        for rows in run_ranks(layout.size, score, models["untied"], layout, [2]):
            assert all(torch.equal(row, one) for row, one in zip(rows, want, strict=True))


def _sent(world: Any, path: str, layout: Layout) -> tuple[int, int]:
    """Bytes of all-to-alls that this rank sends in a forward pass, and in one with its backward pass."""
    engine = build(world, path, layout)
    batches, counts = cut(rows_of(0, engine.spec.vocab_size), 1, 0, 1), [RECORDER.sent["context_parallel"]]
    engine.forward(batches, lambda decoder, hidden, batch: next_token_loss(decoder, hidden, batch)[0])
    counts.append(RECORDER.sent["context_parallel"])
    engine.forward_backward(batches, next_token_loss)
    counts.append(RECORDER.sent["context_parallel"])
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(cp=2, tp=2)], ids=str)
def test_bytes_are_those_of_the_formula(models: dict[str, str], layout: Layout) -> None:
    """2 (Hq + Hkv') D numbers a token and layer each way, (c - 1) / c of them to other ranks."""
    cp, dim = layout.cp, LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    heads, kv = LLAMA["num_attention_heads"] // layout.tp, max(LLAMA["num_key_value_heads"] // layout.tp, cp)
    tokens = math.ceil(sum(LENGTHS) / cp)
    forward = LLAMA["num_hidden_layers"] * tokens * 2 * (heads + kv) * dim * 8 * (cp - 1) // cp
    assert set(run_ranks(layout.size, _sent, models["untied"], layout)) == {(forward, 2 * forward)}


def test_each_token_is_on_one_rank() -> None:
    x, parts = torch.arange(1, 12), []
    for rank in range(4):
        cp = replace(solo(), name="cp", ranks=(0, 1, 2, 3), rank=rank)
        assert isinstance(cp, Group)
        parts.append(own_tokens(x, cp))
    assert [len(part) for part in parts] == [3] * 4
    assert torch.equal(torch.stack(parts, 1).flatten(), torch.cat([x, torch.zeros(1, dtype=x.dtype)]))


@pytest.mark.parametrize(
    ("config", "tp", "cp", "allowed"),
    [
        (LLAMA, 1, 3, "1, 2, 4"),
        (LLAMA, 2, 4, "1, 2"),
        ({**LLAMA, "num_attention_heads": 12, "hidden_size": 48}, 1, 8, "1, 2, 4, 6, 12"),
    ],
)
def test_ranks_that_cannot_share_the_heads(config: dict[str, Any], tp: int, cp: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"models.actor.layout.cp={cp}: .*; allowed: {allowed}$"):
        check_cp(spec_from_config(config, "config.json"), tp, cp, "models.actor.layout")


def test_the_equation_of_a_layout() -> None:
    assert resolve_layout(LayoutConfig(tp=2, cp=2, zero=3), 8, "layout") == Layout(tp=2, dp=2, cp=2, zero=3)
    with pytest.raises(ValueError, match=r"pp\(1\) \* tp\(2\) \* dp\(1\) \* cp\(2\) = 4 ranks, but the pool has 6"):
        resolve_layout(LayoutConfig(tp=2, cp=2), 6, "layout")
    assert str(Layout(tp=2, cp=4)) == "pp(1) * tp(2) * dp(1) cp(4)"


def test_a_thousand_ranks_hold_each_part_of_the_model_once() -> None:
    """Copies are the ranks of dp and cp, and in generation each of them is a replica."""
    spec = spec_from_config({**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64}, "config.json")
    layout = Layout(pp=2, tp=4, dp=16, cp=8, zero=3, zero_size=8)
    generation = generation_layout(layout, 1, 2)
    assert (layout.size, layout.copies, generation.dp, len(generation.micro_dp_group(0))) == (1024, 128, 512, 4)
    sizes: dict[int, int] = {}
    for index in range(layout.size):
        at, group = layout.coordinate(index), layout.shard_group(index)
        assert group[0] <= index <= group[-1] and len(group) == 8 and len(layout.replicate_group(index)) == 16
        if at.dp == 0:  # one copy
            held = held_by(layout, lambda pp, tp: rank_shards(spec, "lm", layout, pp, tp), index)
            sizes[index] = sum(box.numel for shard in held.values() for box in shard.boxes if not shard.whole_on_tp)
    one = [rank_shards(spec, "lm", layout, pp, tp) for pp in range(2) for tp in range(4)]
    assert sum(sizes.values()) == sum(
        box.numel for held in one for shard in held.values() for box in shard.boxes if not shard.whole_on_tp
    )
