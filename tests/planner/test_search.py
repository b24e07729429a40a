"""The searches beside each other: ``exact`` is the best of all plans of small problems, and the others never better."""

from __future__ import annotations

import random
from itertools import product

import pytest

from rlhf_spmd.planner.meshes import Meshes
from rlhf_spmd.planner.problem import Call, Choice, Option, Plan, Problem
from rlhf_spmd.planner.search import NoPlanError, exact
from rlhf_spmd.planner.simulate import simulate


def random_problem(seed: int, ahead: int = 0) -> Problem:
    """4 to 8 ranks, 2 or 3 roles, up to 5 calls, of which some are lent; memory that binds. Whole numbers, so sums are exact."""
    rng = random.Random(seed)
    size, local = rng.choice([(4, 4), (4, 2), (6, 2), (8, 4), (8, 8), (3, 4)])
    roles = [f"r{n}" for n in range(rng.choice([2, 2, 3]))]
    order = roles + rng.choices(roles, k=rng.choice([1, 2]))
    rng.shuffle(order)
    homes = {role: rng.choice([n for n, its in enumerate(order) if its == role]) for role in roles}
    sizes = rng.sample([n for n in (1, 2, 3, 4, 6, 8) if n <= size], k=2)
    calls: list[Call] = []
    at_home = {n for n, role in enumerate(order) if n > homes[role] and rng.random() < 0.3}
    shapes = {
        role: [(n, rng.choice([1, 2]), rng.choice([1, 2])) for n in sizes for _ in range(rng.choice([1, 2]))] for role in roles
    }
    for node, role in enumerate(order):
        work = rng.randint(5, 40)
        options = tuple(
            Option(
                n,
                pp,
                tp,
                work // n + rng.randint(0, 6),
                rng.randint(0, 14) if node == homes[role] else 0,
                rng.randint(0, 30 // n),
            )
            for n, pp, tp in shapes[role]
        )
        style = rng.random()
        after = range(node) if style < 0.4 else [n for n in range(node) if rng.random() < 0.5]
        calls.append(Call(f"c{node}", role, frozenset(after), options, node == homes[role], node in at_home))
    memory = [rng.randint(16, 34)] * size
    if rng.random() < 0.3:
        memory[size // 2 :] = [rng.randint(16, 34)] * (size - size // 2)
    weights = {role: float(rng.choice([0, 4, 8])) for role in roles}
    generating = frozenset({0}) if ahead else frozenset()
    return Problem(tuple(calls), local, tuple(map(float, memory)), weights, 4.0, 1.0, ahead, generating)


def all_plans(problem: Problem) -> list[Plan]:
    meshes, ways = Meshes(problem), []
    for node, call in enumerate(problem.calls):
        some = [Choice(mesh, o) for o, option in enumerate(call.options) for mesh in meshes.of.get(option.size, [])]
        ways.append([None] if call.at_home else some)
        assert not call.at_home or problem.homes[call.role] < node
    homes = [problem.homes[call.role] for call in problem.calls]
    return [tuple(c or plan[homes[n]] for n, c in enumerate(plan)) for plan in product(*ways)]


def best_plan(problem: Problem) -> float:
    fitting = [found.seconds for plan in all_plans(problem) if (found := simulate(problem, plan)).fits]
    return min(fitting, default=float("inf"))


def searched(problem: Problem) -> float:
    try:
        found = exact.search(problem)
    except NoPlanError:
        return float("inf")
    schedule = simulate(problem, found.plan)
    assert schedule.fits
    assert schedule.seconds == pytest.approx(found.seconds)
    assert found.optimal
    assert found.lower_bound == found.seconds
    return found.seconds


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_exact_is_the_best_of_all_plans(first: int) -> None:
    for seed in range(first, first + 50):
        problem = random_problem(seed)
        assert searched(problem) == pytest.approx(best_plan(problem)), seed
