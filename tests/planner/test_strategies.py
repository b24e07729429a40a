"""Placement strategies on any number of ranks (pure), and the trace of a step that they start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import yaml

import tasks
from algorithm_cases import CASES, CONFIGS
from outside.renamed import NAMES
from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.preflight import placing
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.train import RunPlan, prepare

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 24, 63, 1000)
HOST = 8
Pools = dict[str, tuple[int, ...]]


@cache
def ready(name: str, *more: str) -> RunPlan:
    """A run of 4 ranks; the strategies get its roles, and its step."""
    case = CASES[name]
    return prepare(str(CONFIGS / f"{case.config}.yaml"), tasks.settings(Path("unused"), 3, *case.overrides(), *more), 1)


@cache
def graph(name: str, *more: str) -> Graph:
    return trace(ready(name, *more))


def ppo(*overrides: str, size: int = 1) -> RunPlan:
    """The task of ``tasks``."""
    return prepare(str(tasks.task() / "ppo.json"), tasks.settings(Path("unused"), 3, *overrides), size)


def place(name: str, strategy: str, size: int, ratios: dict[str, float] | None = None, *more: str) -> Pools:
    """Role, or ``role.method`` that runs elsewhere, -> ranks."""
    config = PlacementConfig(strategy, ratios=ratios or {})
    plans = placing.roles_on_pools(ready(name, *more).roles, config, size, min(size, HOST), lambda: graph(name, *more))
    pools = {role: plan.pool.ranks for role, plan in plans.items()}
    return pools | {f"{role}.{method}": call.pool.ranks for role, plan in plans.items() for method, call in plan.calls.items()}


def disjoint(pools: Pools, *names: str) -> bool:
    ranks = [rank for name in names for rank in pools[name]]
    return len(ranks) == len(set(ranks))


MODELS = {
    "ppo": (("actor", "critic"), ("reference",)),
    "grpo": (("actor",), ("reference",)),
    "remax": (("actor",), ("reference",)),
    "safe_rlhf": (("actor", "critic", "cost_critic"), ("reference", "cost")),
}
PROMISES: dict[str, Callable[[Pools, tuple[str, ...], tuple[str, ...], int], bool]] = {
    "colocate": lambda pools, trained, frozen, size: all(len(ranks) == size for ranks in pools.values()),
    "split": lambda pools, trained, frozen, size: disjoint(pools, "actor", *(trained[1:2] or frozen[:1])),
    "standalone": lambda pools, trained, frozen, size: disjoint(pools, *trained, *frozen),
    "interleave": lambda pools, trained, frozen, size: (
        disjoint(pools, *trained)
        and disjoint(pools, *frozen)
        and len(pools.get("actor.generate_sequences", pools["actor"])) == size
        and sum(len(pools[role]) for role in frozen) == size
    ),
    "separate": lambda pools, trained, frozen, size: (
        all(disjoint(pools, "actor.generate_sequences", role) for role in (*trained, *frozen, "reward", "compute"))
        and len({pools[role] for role in (*trained, *frozen)}) == 1
    ),
}


@pytest.mark.parametrize("strategy", PROMISES)
@pytest.mark.parametrize("name", MODELS)
def test_a_strategy_keeps_its_promise_on_any_number_of_ranks(name: str, strategy: str) -> None:
    trained, frozen = MODELS[name]
    needed = {"colocate": 1, "interleave": max(len(trained), len(frozen)), "standalone": len(trained) + len(frozen)}
    least = needed.get(strategy, 2)
    for size in SIZES:
        if size < least:
            with pytest.raises(ValueError, match=rf"^placement\.strategy='{strategy}' needs .*{least} ranks.* has {size};"):
                place(name, strategy, size)
            continue
        pools = place(name, strategy, size)
        assert {rank for ranks in pools.values() for rank in ranks} == set(range(size))
        assert PROMISES[strategy](pools, trained, frozen, size), (size, pools)


def test_shares_follow_the_work_and_whole_hosts() -> None:
    """Actor and critic of one size do the same beside generation; Safe-RLHF's actor learns from texts, too."""
    pools = place("ppo", "interleave", 64)
    assert len(pools["actor"]) == len(pools["critic"]) == 32
    pools = place("safe_rlhf", "interleave", 64)
    assert [len(pools[role]) for role in ("actor", "critic", "cost_critic", "reference", "cost")] == [24, 16, 24, 32, 32]
    alone = place("ppo", "standalone", 64)
    assert len(alone["actor"]) in (1, 2, 4, 8), "8 prompts are dealt evenly to the generation replicas"
    assert len(alone["critic"]) > len(alone["reference"]), "which does not train"
    assert alone["reward"] == alone["actor"], "a rule scores where the responses are made"


@pytest.mark.parametrize(
    ("strategy", "ratios", "expected"),
    [
        ("split", "actor: 0.25", "actor: 2, critic: 6"),
        ("split", "critic: 0.75", "actor: 2, critic: 6"),
        ("standalone", "critic: 0.5", "critic: 4"),
        ("standalone", "actor.generate_sequences: 0.5", "actor.generate_sequences: 4, reward: 4"),
        ("interleave", "actor: 0.875", "actor: 7, critic: 1, actor.generate_sequences: 8"),
        ("separate", "actor.generate_sequences: 0.25", "actor.generate_sequences: 2, critic: 6"),
        ("separate", "actor: 0.75", "actor: 6, actor.generate_sequences: 2, reference: 6"),
        (
            "colocate",
            "critic: 0.5, reference: 0.5, critic.compute_values: 0.25",
            "critic: 4, critic.compute_values: 2, actor: 8",
        ),
    ],
)
def test_ratios(strategy: str, ratios: str, expected: str) -> None:
    pools = place("ppo", strategy, 8, yaml.safe_load(f"{{{ratios}}}"))
    assert {name: len(ranks) for name, ranks in pools.items()}.items() >= yaml.safe_load(f"{{{expected}}}").items()
    assert strategy != "colocate" or disjoint(pools, "critic", "reference")


def test_ratios_are_rounded_to_whole_layouts() -> None:
    tp = tuple(f"models.actor.{key}.tp=2" for key in ("layout", "generation"))
    prepared = ppo(*tp, size=2)
    config = PlacementConfig("separate", ratios={"actor.generate_sequences": 0.4})
    plans = placing.roles_on_pools(prepared.roles, config, 16, 16, lambda: trace(prepared))
    call = plans["actor"].calls["generate_sequences"]
    assert len(call.pool.ranks) == 6 and plans["actor"].generation is call.shape.generation and call.shape.layout.tp == 2


def test_no_role_is_known_by_name() -> None:
    """PPO with other names has the same places, in the same names."""
    algorithm = json.loads((tasks.task() / "ppo.json").read_text())["algorithm"]
    path = Path(tasks.other_task({**algorithm, "name": "outside.renamed"}, "actor"))
    path.write_text(path.read_text().replace('"models": {"actor"', '"models": {"writer"'))
    overrides = tasks.settings(Path("unused"), 3, f"models.writer.path={tasks.task() / 'actor'}", "models.writer.dtype=float64")
    jobs = prepare(str(path), overrides, 1), ppo("models.reference.path=null")
    for strategy, size in product(PROMISES, (3, 5, 8, 64)):
        placed = [
            placing.roles_on_pools(job.roles, PlacementConfig(strategy), size, min(size, HOST), partial(trace, job))
            for job in jobs
        ]
        for role, other in NAMES.items():
            renamed, usual = placed[0][other], placed[1][role]
            assert renamed.pool.ranks == usual.pool.ranks, (strategy, size, role)
            calls = [{name: call.pool.ranks for name, call in plan.calls.items()} for plan in (renamed, usual)]
            assert calls[0] == calls[1]


def test_the_followers_of_the_policy_are_those_of_its_weights() -> None:
    """A reference of the actor's own weights is on its side, one of another model is not."""
    for more, role in ((("models.reference.path=null",), "actor"), ((), "critic")):
        job = ppo(*more)
        plans = placing.roles_on_pools(job.roles, PlacementConfig("split"), 8, 8, partial(trace, job))
        assert plans["reference"].pool == plans[role].pool


def calls_and_edges(traced: Graph) -> tuple[list[str], set[tuple[str, str]]]:
    calls = [f"{node.role.name}.{node.spec.name}" for node in traced.nodes]
    return calls, {(calls[a], calls[b]) for a, b, _ in traced.edges()}


def test_a_trace_has_what_a_step_does_and_takes_no_rows() -> None:
    """The calls in order, who reads from whom, and rows of the configured sizes."""
    prepared = ready("ppo")
    traced = trace(prepared)
    calls, edges = calls_and_edges(traced)
    assert calls[0] == "actor.generate_sequences" and calls[-2:] == ["critic.update", "actor.update"]
    assert {node.num_rows for node in traced.nodes} == {tasks.PROMPTS * 4}
    assert edges >= {("actor.generate_sequences", "reward.compute_reward"), ("critic.compute_values", "critic.update")}
    row_ids = [[node.inputs[0].rows.row_ids.tolist() for node in each.nodes] for each in (traced, trace(prepared))]
    assert row_ids[0] == row_ids[1], "the first trace took rows from the loader"
    path = tasks.other_task({"name": "outside.one_step_late", "ppo_mini_batch_size": 4}, "actor", "reference")
    calls, edges = calls_and_edges(trace(prepare(path, tasks.settings(Path("unused"), 3), 1)))
    assert calls[-1] == "actor.update" and ("actor.generate_sequences", "actor.update") not in edges, (
        "the step trains on the rollout of the one before"
    )


def test_a_strategy_of_ones_own() -> None:
    plans = ppo("placement.strategy=outside.last_ranks", size=4).roles
    assert plans["actor"].pool.ranks == (2, 3) and len(plans["reference"].pool.ranks) == 4


def test_a_strategy_of_ones_own_that_errs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, result, message in (
        ("mapping", "{role: [0] for role in roles}", "returned dict; its place.. must return an Assignment"),
        ("slip", "cluster.all_ranks", "failed: AttributeError"),
        ("place", "Assignment({'teacher': cluster.everyone})", "places 'teacher', which is no role and no call"),
    ):
        lines = "from rlhf_spmd.planner.cluster import Assignment", "def place(graph, cluster, roles):", f"    return {result}"
        (tmp_path / "erring").mkdir(exist_ok=True)
        (tmp_path / "erring" / f"{name}.py").write_text("\n".join(lines))
        with pytest.raises(ValueError, match=f"placement.strategy='erring.{name}' {message}"):
            ppo(f"placement.strategy=erring.{name}", size=4)


@pytest.mark.parametrize("strategy", ["separate", "interleave"])
def test_settings_of_a_call_that_the_strategy_moves(strategy: str) -> None:
    """They go with the pool that the strategy gives it."""
    generate = "models.actor.calls.generate_sequences"
    overrides = ((), (f"{generate}.layout.tp=2", f"{generate}.delta=true"))
    moved, sliced = (
        ppo(f"placement.strategy={strategy}", *more, size=4).roles["actor"].calls["generate_sequences"] for more in overrides
    )
    assert sliced.pool == moved.pool and (moved.shape.layout.tp, sliced.shape.layout.tp) == (1, 2)
    with pytest.raises(ValueError, match=r"generation.pp=1, .*generation.tp=2: .*calls.generate_sequences.layout says as well"):
        ppo(f"placement.strategy={strategy}", f"{generate}.layout.tp=2", "models.actor.generation.tp=2", size=4)


def test_hosts_that_prompts_do_not_divide_by() -> None:
    """Whole hosts where they go round, else parts of them."""
    prepared = ppo("placement.strategy=separate", size=4)  # 8 prompts
    plans = placing.roles_on_pools(ready("ppo").roles, PlacementConfig("separate"), 6, 3, lambda: graph("ppo"))
    assert len(prepared.roles["actor"].calls["generate_sequences"].pool.ranks) == 2
    assert len(plans["actor"].calls["generate_sequences"].pool.ranks) == 2


@pytest.mark.parametrize("scores", ["with a function", "with a model"])
def test_functions_score_where_rows_are_generated_ahead_of_training(scores: str) -> None:
    """On the training ranks they would wait until training ends, and training of the next step would wait for their scores."""
    model = (f"models.reward.path={tasks.task() / 'critic'}", "reward.function=null") if scores == "with a model" else ()
    for ahead in (0, 1):
        roles = ppo("placement.strategy=separate", f"rollout.max_staleness={ahead}", *model, size=4).roles
        generating = roles["actor"].calls["generate_sequences"].pool.ranks
        assert not set(generating) & set(roles["actor"].pool.ranks)
        expected = generating if ahead and not model else roles["actor"].pool.ranks
        assert roles["reward"].pool.ranks == expected


def test_generation_ahead_needs_an_algorithm_that_generates() -> None:
    more = "models.actor.path=" + str(tasks.task() / "actor"), "rollout.max_staleness=1", "run.test_freq=0"
    rows = f"data.path={tasks.pairs()}", "data.train_batch_size=8", "data.val_path=null"
    with pytest.raises(ValueError, match=r"rollout.max_staleness=1: dpo trains no role that generates"):
        prepare(str(CONFIGS / "quickstart_dpo.yaml"), tasks.settings(Path("unused"), 3, *more, *rows), 2)
