"""Simulation against schedules made by hand; ``exact`` is the best of all plans of small problems, and the others are never better."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from rlhf_spmd.config.registry import find
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.problem import (
    CallNode,
    Choice,
    Extent,
    Option,
    Plan,
    Problem,
    RankRange,
    num_ranks,
    runs_of_equals,
    simulate,
    start_times,
)
from rlhf_spmd.planner.search import NoFasterPlanError, NoPlanError, exact, mcmc
from rlhf_spmd.planner.search import enumerate as enumerate_roles
from rlhf_spmd.planner.search.candidates import RankRanges, range_extents
from rlhf_spmd.planner.search.phase_scheduling import HalvesPacking
from tiers import tiers


def random_problem(seed: int, ahead: int = 0, unequal: bool = False) -> Problem:
    """3 to 8 ranks, 2 or 3 roles, up to 5 calls, some movable; memory that binds. Whole numbers, so sums are exact. At most
    8,000 plans. ``unequal``: devices of two or three kinds, each with seconds of its own."""
    rng = random.Random(seed)
    while True:
        problem = draw_problem(rng, ahead)
        problem = with_kinds(problem, rng) if unequal else problem
        ranges = RankRanges(problem)
        counts = [
            sum(len(ranges.by_extent.get(o.extent, ())) for o in call.options) for call in problem.calls if not call.shares_home
        ]
        if math.prod(counts) <= 8000:
            return problem


def draw_problem(rng: random.Random, ahead: int) -> Problem:
    size, local = rng.choice([(4, 4), (4, 2), (6, 2), (8, 4), (8, 8), (3, 4)])
    roles = [f"r{n}" for n in range(rng.choice([2, 2, 3]))]
    order = roles + rng.choices(roles, k=rng.choice([1, 2]))
    rng.shuffle(order)
    homes = {role: rng.choice([n for n, its in enumerate(order) if its == role]) for role in roles}
    sizes = rng.sample([n for n in (1, 2, 3, 4, 6, 8) if n <= size], k=2)
    calls: list[CallNode] = []
    at_home = {n for n, role in enumerate(order) if n > homes[role] and rng.random() < 0.3}
    shapes = {
        role: [(n, rng.choice([1, 2]), rng.choice([1, 2])) for n in sizes for _ in range(rng.choice([1, 2]))] for role in roles
    }
    for node, role in enumerate(order):
        work = rng.randint(5, 40)
        options = []
        for n, pp, tp in shapes[role]:
            seconds = work // n + rng.randint(0, 6)
            held = rng.randint(0, 14) if node == homes[role] else 0
            options.append(Option(n, pp, tp, seconds, held, (rng.randint(0, 30 // n),)))
        style = rng.random()
        after = range(node) if style < 0.4 else [n for n in range(node) if rng.random() < 0.5]
        calls.append(CallNode(f"c{node}", role, frozenset(after), tuple(options), node == homes[role], node in at_home))
    memory = [rng.randint(14, 28)] * size
    if rng.random() < 0.3:
        memory[size // 2 :] = [rng.randint(14, 28)] * (size - size // 2)
    weights = {role: float(rng.choice([0, 4, 8])) for role in roles}
    generating = frozenset({0}) if ahead else frozenset()
    return Problem(tuple(calls), local, tuple(map(float, memory)), weights, 4.0, 1.0, ahead, generating)


def with_kinds(problem: Problem, rng: random.Random) -> Problem:
    """The problem with ranks of two or three kinds: an option takes longer the more its slowest rank's kind, needs bytes of each kind,
    and some kinds lack it."""
    borders = sorted(rng.sample(range(1, problem.size), k=min(rng.choice([1, 1, 2]), problem.size - 1)))
    kinds = tuple(sum(rank >= border for border in borders) for rank in range(problem.size))
    slower = [rng.randint(0, 9) for _ in range(len(borders) + 1)]
    runs = runs_of_equals(kinds)
    extents = range_extents(problem.local_size, runs)
    calls = {}
    for role, home in problem.homes.items():
        lacks = rng.random()
        ways = [
            (option, extent)
            for option in range(len(problem.calls[home].options))
            for extent in extents
            if num_ranks(extent) == problem.calls[home].options[option].size and (lacks > 0.2 or extent != extents[-1])
        ]
        for index in [i for i, call in enumerate(problem.calls) if call.role == role]:
            options = []
            for option, extent in ways:
                same = problem.calls[index].options[option]
                seconds = same.seconds + max(slower[kind] for kind, _ in extent) + rng.randint(0, 2)
                kinds_of = {kind for kind, _ in extent}
                call_bytes = tuple(float(rng.randint(0, 30 // same.size)) for _ in kinds_of)
                options.append(replace(same, seconds=seconds, call_bytes=call_bytes, devices=extent))
            calls[index] = replace(problem.calls[index], options=tuple(options))
    if not all(call.options for call in calls.values()):
        return problem
    of_kind = [float(rng.randint(14, 28)) for _ in slower]
    memory = tuple(of_kind[kind] for kind in kinds) if rng.random() < 0.5 else problem.memory
    return replace(problem, calls=tuple(calls[index] for index in range(len(calls))), kinds=kinds, memory=memory)


def all_plans(problem: Problem) -> list[Plan]:
    ranges, ways = RankRanges(problem), []
    for call in problem.calls:
        choices = [
            Choice(ranks, o) for o, option in enumerate(call.options) for ranks in ranges.by_extent.get(option.extent, [])
        ]
        ways.append([None] if call.shares_home else choices)
    homes = [problem.homes[call.role] for call in problem.calls]
    return [tuple(choice or plan[home] for home, choice in zip(homes, plan, strict=True)) for plan in product(*ways)]


def best_plan(problem: Problem) -> float:
    fitting = [schedule.seconds for plan in all_plans(problem) if (schedule := simulate(problem, plan)).fits]
    return min(fitting, default=float("inf"))


def searched(problem: Problem) -> float:
    try:
        result = exact.search(problem)
    except NoPlanError:
        return float("inf")
    schedule = simulate(problem, result.plan)
    assert schedule.fits and schedule.seconds == pytest.approx(result.seconds)
    assert result.optimal and result.lower_bound == result.seconds
    return result.seconds


@pytest.mark.parametrize("first", tiers(range(0, 300, 50), (0, 50)))
def test_exact_is_the_best_of_all_plans(first: int) -> None:
    bound = 0
    for seed in range(first, first + 50):
        problem = random_problem(seed)
        best = best_plan(problem)
        assert searched(problem) == pytest.approx(best), seed
        bound += best > searched(replace(problem, memory=(1e6,) * problem.size))
    assert bound >= 15  # in so many the memory makes a difference


def test_a_ceiling_ends_the_search_of_problems_without_a_faster_plan() -> None:
    searches = 0
    for seed in range(30):
        problem = random_problem(seed, ahead=seed % 2)
        best = best_plan(problem)
        if best < float("inf"):
            searches += 1
            assert exact.search(replace(problem, ceiling=1.3 * best)).seconds == pytest.approx(best)
            with pytest.raises(NoFasterPlanError) as ending:
                exact.search(replace(problem, ceiling=0.9 * best))
            assert ending.value.lower_bound == pytest.approx(0.9 * best)
    assert searches >= 15


@pytest.mark.parametrize("first", tiers(range(2000, 2200, 50), (2000,)))
def test_exact_is_the_best_of_all_plans_on_unequal_devices(first: int) -> None:
    unequal = 0
    for seed in range(first, first + 50):
        problem = random_problem(seed, ahead=seed % 5 == 0, unequal=True)
        unequal += len(problem.device_runs) > 1
        assert searched(problem) == pytest.approx(best_plan(problem)), seed
    assert unequal >= 40


def test_exact_is_the_best_of_all_plans_of_steps_that_overlap() -> None:
    for seed in range(1000, 1060):
        problem = random_problem(seed, ahead=1)
        assert searched(problem) == pytest.approx(best_plan(problem)), seed


@pytest.mark.parametrize("other", ["mcmc", "enumerate", "grid"])
def test_other_searches_find_plans_that_fit_and_none_that_is_better(other: str) -> None:
    module, fitting = find("plan.search", "rlhf_spmd.planner.search", other, required_attribute="search"), 0
    for seed in range(40):
        problem = random_problem(seed, ahead=seed % 2, unequal=seed % 3 == 0)
        try:
            result = module.search(problem, limit=0.02)
        except NoPlanError:
            continue
        schedule = simulate(problem, result.plan)
        assert schedule.fits and schedule.seconds == pytest.approx(result.seconds)
        assert result.seconds >= searched(problem) - 1e-9
        fitting += 1
    assert fitting >= 15


def test_mcmc_descends_from_a_start_whose_weights_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve models with thirty options each, of 10 s and more; one has a call whose fastest option is impossible, as it shards
    weights unlike its home. A walk that accepts every plan ends at 228 s."""
    options = tuple(Option(1, 1, 1, 10.0 + n, 0.0, (0.0,)) for n in range(30))
    calls = [CallNode(f"home{n}", f"r{n}", frozenset(range(n)), options, home=True) for n in range(12)]
    movable = (*options, Option(1, 1, 1, 1.0, 0.0, (0.0,), zero=1))
    calls.append(CallNode("movable", "r0", frozenset(range(12)), movable))
    problem = Problem(tuple(calls), 1, (1.0,), {f"r{n}": 0.0 for n in range(12)}, 1.0, 1.0)
    clock = iter(range(10_000))
    monkeypatch.setattr(mcmc.time, "perf_counter", lambda: next(clock))
    assert 130.0 <= mcmc.search(problem, limit=3000).seconds <= 1.05 * 130.0  # after 3,000 plans


def test_bounds_are_bounds() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        for plan in all_plans(problem)[::97]:
            schedule = simulate(problem, plan)
            seconds = [end - start for start, end in schedule.spans]
            for decided in range(len(plan) + 1):
                some = [choice.rank_range if node < decided else None for node, choice in enumerate(plan)]
                assert start_times(problem, range(len(plan)), some, seconds)[1] <= schedule.seconds


@pytest.mark.parametrize(("size", "local"), [(4, 4), (8, 4), (6, 2)])
def test_calls_that_wait_for_ranks_alone_are_packed_as_well_as_can_be(size: int, local: int) -> None:
    rng = random.Random(size)
    for _ in range(25):
        options = [tuple(one(n, rng.randint(1, 20)) for n in range(1, size + 1)) for _ in range(3)]
        calls = tuple(call(f"c{number}", set(), *its) for number, its in enumerate(options))
        problem = Problem(calls, local, (1e6,) * size, {c.role: 0.0 for c in calls}, 4.0, 1.0)
        ranges = RankRanges(problem)
        nodes = [ranks for its in ranges.by_size.values() for ranks in its if ranks not in ranges.rests]
        tables = [{option.extent: option.seconds for option in its} for its in options]

        def end(places: Sequence[RankRange], problem: Problem = problem, tables: list[dict[Extent, float]] = tables) -> float:
            seconds = [table[problem.extent(ranks)] for table, ranks in zip(tables, places, strict=True)]
            return start_times(problem, range(3), places, seconds)[1]

        best = HalvesPacking(ranges, tables)
        packing = best.packing()
        assert end([packing[number] for number in range(3)]) == best.seconds == min(map(end, product(nodes, repeat=3)))


@pytest.mark.parametrize(("ranks", "ahead", "limit"), [(64, 0, 0.0), (64, 1, 0.0), (128, 1, 2.0)])
def test_time_that_is_up_leaves_a_plan_and_its_bound(ranks: int, ahead: int, limit: float) -> None:
    problem = step_of_ppo(ranks, ahead)
    result = exact.search(problem, limit=limit)
    assert simulate(problem, result.plan).fits
    assert 0 < result.lower_bound <= result.seconds * (1 + 1e-9)
    assert result.timed and not exact.search(random_problem(3, ahead)).timed
    if limit:
        assert result.seconds / result.lower_bound - 1 < 0.5
    else:
        best = exact.search(step_of_ppo(ranks)).seconds
        assert result.lower_bound <= best * (1 + 1e-9) and (ahead or best <= result.seconds * (1 + 1e-9))


def test_an_option_has_bytes_for_each_kind() -> None:
    option = replace(one(2, 1.0), devices=((0, 1), (1, 1)))
    with pytest.raises(AssertionError, match="a needs bytes for each kind of device"):
        Problem((call("a", set(), option),), 2, (1.0, 1.0), {"a": 0.0}, 1.0, 1.0, kinds=(0, 1))
    Problem((call("a", set(), replace(option, call_bytes=(0.0, 0.0))),), 2, (1.0, 1.0), {"a": 0.0}, 1.0, 1.0, kinds=(0, 1))


def one(size: int, seconds: float, held: float = 0, active: float = 0, tp: int = 1) -> Option:
    return Option(size, 1, tp, seconds, held, (active,))


def call(name: str, after: set[int], *options: Option, role: str = "", home: bool = True) -> CallNode:
    return CallNode(name, role or name, frozenset(after), options, home)


def test_calls_wait_for_their_ranks_and_for_calls_before_them() -> None:
    ends = one(4, 1), one(1, 1)
    calls = (call("a", set(), one(2, 3)), call("b", set(), one(2, 5)), call("c", set(), one(1, 2)), call("d", {1}, *ends))
    problem = Problem(calls, 4, (10.0,) * 4, dict.fromkeys("abcd", 0.0), 1.0, 1.0)
    left, right, every = RankRange(0, 2), RankRange(2, 2), RankRange(0, 4)
    beside = simulate(problem, (Choice(left, 0), Choice(right, 0), Choice(RankRange(1, 1), 0), Choice(every, 0)))
    assert beside.spans == ((0, 3), (0, 5), (3, 5), (5, 6))  # c has one of a's ranks
    assert beside.seconds == 6
    in_turns = simulate(problem, (Choice(left, 0), Choice(left, 0), Choice(RankRange(3, 1), 0), Choice(RankRange(2, 1), 1)))
    assert in_turns.spans == ((0, 3), (3, 8), (0, 2), (8, 9))  # d, whose rank is free, waits for b


def test_weights_that_move_take_time_before_the_call_and_bytes_while_it_runs() -> None:
    train = call("train", {0}, one(2, 4, held=5, active=3, tp=2), role="actor")
    ways = one(2, 1, active=2, tp=2), one(2, 1, active=2), one(1, 1, active=2)
    generate = call("generate", set(), *ways, role="actor", home=False)
    problem = Problem((generate, train), 2, (20.0,) * 4, {"actor": 8.0}, 4.0, 1.0)
    home = Choice(RankRange(0, 2), 0)

    def of(ranks: RankRange, option: int) -> tuple[float, tuple[float, ...]]:
        schedule = simulate(problem, (Choice(ranks, option), home))
        return schedule.seconds, schedule.peaks

    assert of(RankRange(0, 2), 0) == (5, (8, 8, 0, 0))  # nothing moves; 5 held + 3 of training is the most
    assert of(RankRange(0, 2), 1) == (6, (11, 11, 0, 0))  # half of the weights from the other rank, 4 bytes at 4 per second
    assert of(RankRange(2, 2), 0) == (9, (8, 8, 6, 6))  # to another host: shards of 4 bytes at 1 per second
    assert of(RankRange(1, 1), 2) == (7, (8, 15, 0, 0))  # all weights inside the host
    several = replace(generate, options=tuple(replace(option, copies=2) for option in ways))
    ahead = replace(problem, calls=(several, train), ahead=1, generating=frozenset({0}))
    assert simulate(ahead, (Choice(RankRange(2, 2), 0), home)).peaks == (8, 8, 10, 10)  # two versions of a shard
    narrow = replace(problem, memory=(20.0, 14.0, 20.0, 20.0))
    assert simulate(narrow, (Choice(RankRange(1, 1), 2), home)).excess == pytest.approx(1 / 14)


@pytest.mark.parametrize(("home_tp", "tp", "seconds"), [(1, 1, 28 / 4), (4, 2, 12 / 2), (4, 4, 4), (1, 4, 8)])
def test_ranks_of_a_host_share_its_adapters_when_they_gather_the_same_shard(home_tp: int, tp: int, seconds: float) -> None:
    """32 bytes in shards on two hosts of four ranks; an adapter has 1 byte per second. Last: slices that no ring can gather."""
    train = call("train", {0}, replace(one(8, 4, tp=home_tp), zero=1), role="actor")
    generate = call("generate", set(), one(8, 1, tp=tp), role="actor", home=False)
    problem = Problem((generate, train), 4, (99.0,) * 8, {"actor": 32.0}, 9.0, 1.0)
    choice = Choice(RankRange(0, 8), 0)
    assert problem.weight_copy_cost(generate, choice, choice)[0] == seconds


@pytest.mark.parametrize(("ahead", "seconds"), [(0, 9), (1, 5), (2, 5)])
def test_generation_ahead_of_training_runs_beside_it(ahead: int, seconds: float) -> None:
    graph = call("generate", set(), one(1, 4), role="actor", home=False), call("train", {0}, one(1, 5), role="actor")
    problem = Problem(graph, 2, (10.0,) * 2, {"actor": 0.0}, 1.0, 1.0, ahead, frozenset({0}))
    assert simulate(problem, (Choice(RankRange(0, 1), 0), Choice(RankRange(1, 1), 0))).seconds == seconds
    in_turns = simulate(problem, (Choice(RankRange(0, 1), 0), Choice(RankRange(0, 1), 0)))
    assert in_turns.seconds == 9 if ahead == 0 else not in_turns.fits, "what runs ahead has ranks of its own"


def test_a_long_chain_is_spread_over_the_steps_that_generation_is_ahead() -> None:
    generate, score = call("generate", set(), one(1, 4), role="actor", home=False), call("score", {0}, one(1, 3))
    graph = generate, score, call("train", {1}, one(1, 5), role="actor")
    plan = tuple(Choice(RankRange(rank, 1), 0) for rank in range(3))
    for ahead, seconds in ((0, 12), (1, 6), (2, 5)):  # the chain over ahead + 1, at least the busiest rank's
        problem = Problem(graph, 4, (9.0,) * 3, {"actor": 0.0, "score": 0.0}, 1.0, 1.0, ahead, frozenset({0}))
        assert simulate(problem, plan).seconds == pytest.approx(seconds)


def test_ranges_are_halves_and_what_the_first_and_last_leave() -> None:
    def of(size: int, local: int, *counts: int) -> list[tuple[int, int]]:
        options = tuple(one(count, 1) for count in counts)
        result = RankRanges(Problem((call("a", set(), *options),), local, (1.0,) * size, {"a": 0.0}, 1.0, 1.0)).by_size
        return sorted((ranks.count, ranks.first) for ranges in result.values() for ranks in ranges)

    assert of(4, 4, 1, 2, 3, 4) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 2), (3, 0), (3, 1), (4, 0)]
    assert of(12, 4, 4, 8) == [(4, 0), (4, 4), (4, 8), (8, 0), (8, 4)]  # three hosts
    assert of(8, 4, 3, 5) == []


def test_no_plan_names_what_is_missing() -> None:
    ways = one(2, 1, held=90 * GIB, active=30 * GIB), one(4, 1, held=45 * GIB, active=15 * GIB)
    problem = Problem((call("train", set(), *ways, role="actor"),), 4, (40.0 * GIB,) * 4, {"actor": 0.0}, 1.0, 1.0)
    lacks = r"train of actor needs at least 60\.0 GiB on each of 4 ranks, and a rank has 40\.0; 6 "
    for name in ("exact", "mcmc", "enumerate", "grid"):
        module = find("plan.search", "rlhf_spmd.planner.search", name, required_attribute="search")
        with pytest.raises(NoPlanError, match=lacks):
            module.search(problem, limit=0.01)
    pair = tuple(call(name, set(), one(4, 1, held=25 * GIB, active=GIB)) for name in ("actor", "critic"))
    lacks = r"roles hold at least 50\.0 GiB on each of 4 ranks, actor most of it \(25\.0\), and a rank"
    with pytest.raises(NoPlanError, match=lacks):
        exact.search(replace(problem, calls=pair, weights=dict.fromkeys(("actor", "critic"), 0.0)))


def step_of_ppo(ranks: int, ahead: int = 0) -> Problem:
    """A 70B actor and reference, a 7B critic and reward model: time is work over ranks with a loss for each slice and stage."""

    def options(work: float, weights: float, kept: float, active: float) -> tuple[Option, ...]:
        result = []
        sizes = [1 << n for n in range(ranks.bit_length())]
        for size, tp, pp, zero in product(sizes, (1, 2, 4, 8), (1, 4, 16), (False, True)):
            if size % (tp * pp) == 0 and (kept or not zero):
                dp = size // (tp * pp)
                seconds = work / size * (1 + 0.05 * math.log2(tp) + 0.02 * pp + 0.03 * zero) + 0.01 * math.log2(dp)
                held = (weights + (kept / dp if zero else kept)) / (tp * pp)
                result.append(Option(size, pp, tp, seconds, held, (active / tp,)))
        return tuple(result)

    large, small, scored = 141 * GIB, 14 * GIB, frozenset({0, 1, 2, 3})
    calls = (
        CallNode("generate", "actor", frozenset(), options(6000, 0, 0, 40 * GIB), False),
        CallNode("reward", "reward", frozenset({0}), options(200, small, 0, GIB), True),
        CallNode("values", "critic", frozenset({0}), options(200, small, 0, GIB), False),
        CallNode("reference", "reference", frozenset({0}), options(2000, large, 0, 4 * GIB), True),
        CallNode("train_critic", "critic", scored, options(700, small, 7 * small, 20 * GIB), True),
        CallNode("train_actor", "actor", scored, options(7000, large, 7 * large, 60 * GIB), True),
    )
    weights = {"actor": large, "reference": large, "critic": small, "reward": small}
    generating = frozenset({0}) if ahead else frozenset[int]()
    return Problem(calls, 8, (76.0 * GIB,) * ranks, weights, 300e9, 40e9, ahead, generating)


def test_a_step_on_1024_ranks_is_planned_with_proof() -> None:
    problem = step_of_ppo(1024)
    result = exact.search(problem)
    assert result.optimal
    assert result.seconds == pytest.approx(simulate(problem, result.plan).seconds)
    assert result.evaluations < 20_000
    assert result.seconds <= enumerate_roles.search(problem).seconds


def test_of_two_calls_at_home_the_first_does_not_decide() -> None:
    """A home's options come in the order of its first call. One that is too slow in the second call ends nothing."""
    seconds = ((1, 100), (2, 90), (3, 4))
    first, second = (tuple(one(1, each[call]) for each in seconds) for call in (0, 1))
    tied = CallNode("b", "r", frozenset({0}), second, home=False, shares_home=True)
    result = exact.search(Problem((call("a", set(), *first, role="r"), tied), 1, (10.0,), {"r": 0.0}, 1.0, 1.0))
    assert result.optimal and result.seconds == 7
