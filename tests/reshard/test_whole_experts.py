"""Plans from any training layout to whole experts on the tp ranks of generation: exact, as few bytes as can be, what becomes a view."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest

from engine_runs import GPT_OSS, LLAMA, QWEN3_MOE
from ranks import run_ranks
from reshard_cases import Simulated, generation_shards, generation_shards_at, layout_of, train_shards, train_shards_at
from reshard_generation import generate_in_layout, transitions
from reshard_plans import check_plans
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layout_rules import check_generation_ep, check_layout
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.reshard import choose_method, missing_elements


def spec_of(config: dict[str, Any], **more: int) -> ModelSpec:
    return spec_from_config(
        {**config, "vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, **more}, "config.json"
    )


QWEN3 = spec_of(QWEN3_MOE, num_experts=8, moe_intermediate_size=12, head_dim=4)
SPECS = [QWEN3, spec_of(GPT_OSS)]
CASES = [
    (Layout(tp=2), 1, 2),
    (Layout(tp=4), 1, 4),
    (Layout(tp=4), 1, 2),
    (Layout(pp=2, tp=2), 1, 2),
    (Layout(pp=2, tp=2), 1, 4),
    (Layout(dp=4, ep=4), 1, 4),
    (Layout(dp=4, ep=2, zero=1), 1, 4),
    (Layout(dp=4, ep=4, zero=3, zero_size=2), 1, 2),
    (Layout(dp=4, zero=3), 2, 2),
    (Layout(tp=2, dp=2, ep=2), 1, 4),
    (Layout(tp=2, cp=2, ep=2, zero=1), 2, 2),
    (Layout(pp=2, dp=4, ep=2, zero=2), 1, 4),
    (Layout(pp=2, vpp=1, tp=2, dp=2, ep=2), 2, 2),
]


@pytest.mark.parametrize(("train", "pp", "tp"), CASES, ids=str)
def test_plans_are_exact(train: Layout, pp: int, tp: int) -> None:
    """Every element once, none that the rank has, and training parameters come back from where they are."""
    number = CASES.index((train, pp, tp))
    for turn, name in enumerate(("zero_redundancy", ("full_gather", "naive_groups")[number // 2 % 2])):
        layout = layout_of(name, train, pp, tp, expert_parallel_generation=True)
        check_plans(Simulated(name, layout, SPECS[(number + turn) % 2]))


def elements(shards: Any, by_expert: bool) -> int:
    return sum(box.numel for shard in shards.values() if shard.by_expert == by_expert for box in shard.boxes)


@pytest.mark.parametrize(
    ("train", "tp", "lacks"),
    [
        (Layout(tp=4), 4, Fraction(3, 4)),
        (Layout(tp=2, dp=2, ep=2), 4, Fraction(1, 2)),
        (Layout(tp=2, dp=4, ep=4, zero=1), 8, Fraction(1, 2)),
        (Layout(dp=4, ep=4, zero=2), 4, Fraction(0)),
        (Layout(dp=8, ep=8), 4, Fraction(1, 2)),
    ],
    ids=str,
)
def test_elements_that_come_by_formula(train: Layout, tp: int, lacks: Fraction) -> None:
    """M/g are a rank's experts; of these it has slices of columns or whole experts, by what training gave it."""
    run = Simulated("zero_redundancy", layout_of("zero_redundancy", train, 1, tp, expert_parallel_generation=True), QWEN3)
    one = plan_params(QWEN3, "lm", 0, 1, 0, 1)
    for index, (plan, held, wanted) in enumerate(zip(run.plans, run.train, run.wanted, strict=True)):
        experts = {name: shard for name, shard in wanted.items() if shard.by_expert}
        assert elements(experts, True) == elements(one, True) // tp
        assert missing_elements(held, experts) == elements(experts, True) * lacks
        assert plan.transfer.received(index) == missing_elements(held, wanted)


def test_what_is_in_place_becomes_a_view() -> None:
    """Equal experts are held once; with equal tp all the rest is."""
    for train, tp, by_expert in ((Layout(dp=4, ep=4), 4, True), (Layout(tp=4), 4, False)):
        run = Simulated("zero_redundancy", layout_of("zero_redundancy", train, 1, tp, expert_parallel_generation=True), QWEN3)
        for plan, held in zip(run.plans, run.train, strict=True):
            own = {name for name, shard in held.items() if shard.by_expert == by_expert}
            alike = {name for name, shard in held.items() if shard.replicated_on_tp}
            assert own <= set(plan.locations) <= own | alike
            assert all(len({piece.target.parameter for piece in plan.locations[name]}) == 1 for name in own)


@pytest.mark.parametrize("train", [Layout(dp=4, ep=4), Layout(tp=4)], ids=str)
def test_transitions(train: Layout) -> None:
    """Experts that are equal are held once; those that are not stay beside the others."""
    layout = layout_of("zero_redundancy", train, 1, 4, expert_parallel_generation=True)
    for result in run_ranks(4, transitions, QWEN3, "zero_redundancy", layout, "free", 5000):
        assert result["bytes"][0] == result["planned"] and result["transient"] <= result["bound"]


@pytest.mark.parametrize("number", range(2))
def test_forward_with_whole_experts(number: int) -> None:
    for train, tp in ((Layout(tp=2, dp=2, ep=2), 4), (Layout(tp=4), 2)):
        layout = layout_of("zero_redundancy", train, 1, tp, expert_parallel_generation=True)
        assert max(run_ranks(4, generate_in_layout, SPECS[number], "zero_redundancy", layout)) < 1e-12


def test_hundreds_of_ranks() -> None:
    """A rank plans alone, and stays within a copy of the model."""
    spec = spec_of(QWEN3_MOE, num_experts=32, moe_intermediate_size=12, head_dim=4, num_hidden_layers=4)
    train = Layout(pp=4, tp=2, dp=16, cp=4, ep=16, zero=1, zero_size=16)
    layout = layout_of("zero_redundancy", train, 1, 8, expert_parallel_generation=True)
    method = choose_method("zero_redundancy", layout)
    sides = train_shards_at(spec, train), generation_shards_at(spec, layout)
    for index in (0, 77, train.size - 1):
        plan = method.plan(layout, index, *sides, 1 << 20)
        wanted = generation_shards(spec, layout, index)
        assert plan.transfer.received(index) == missing_elements(train_shards(spec, train, index), wanted)
        assert len(method.gather_ranks(layout, index)) <= 128


def test_what_cannot_be() -> None:
    where = "models.actor.generation"
    key = f"{where}.tp"
    for spec, ep, tp, message in (
        (QWEN3, 4, 8, f"{where}.ep=4: the tp ranks share the experts, and {key} is 8; allowed: 1 and 8"),
        (QWEN3, 2, 1, f"{where}.ep=2: the tp ranks share the experts, and {key} is 1; allowed: 1"),
        (spec_of(LLAMA), 8, 8, f"{where}.ep=8: models of llama have 0 experts to share; allowed: 1"),
        (SPECS[1], 8, 8, f"{where}.ep=8: models of {SPECS[1].family} have 4 experts to share; allowed: 1, 2, 4"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_generation_ep(spec, ep, tp, where, key)
    assert check_generation_ep(QWEN3, 8, 8, where, key) and not check_generation_ep(QWEN3, 1, 8, where, key)


def test_columns_need_not_divide() -> None:
    check_layout(QWEN3, "layout", tp=8, expert_parallel_generation=True)
    with pytest.raises(ValueError, match=r"^layout.tp=8: does not divide moe_intermediate_size=12"):
        check_layout(QWEN3, "layout", tp=8)
