"""When the calls of a plan run and what each rank holds: ReaL's algorithm 1 with this trainer's queue, the script's order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlhf_spmd.planner.problem import Plan, Problem, RankRange


@dataclass(frozen=True)
class Schedule:
    """``spans``: start and end of each call in seconds, what its weights take to come included; of generation that runs ahead in the
    steady state, where each step's are ``seconds`` later than those of the step before. ``peaks``: bytes on each rank. ``fits``:
    whether none of them exceeds its memory, which ``excess`` measures: the largest share of it that is too much, 0 where all fit."""

    spans: tuple[tuple[float, float], ...]
    seconds: float
    peaks: tuple[float, ...]
    excess: float

    @property
    def fits(self) -> bool:
        return self.excess <= 1e-9  # for rounding


def simulate(problem: Problem, plan: Plan) -> Schedule:
    seconds, needs, held = [], [], []
    for call, choice in zip(problem.calls, plan, strict=True):
        option, home = call.options[choice.option], plan[problem.homes[call.role]]
        assert option.size == choice.mesh.count, f"{call.name}: an option of {option.size} ranks on {choice.mesh.count}"
        extra, moved = 0.0, 0.0
        if call.home:
            held.append((choice.mesh, option.held))
        elif call.at_home:
            assert choice == home, f"{call.name}: runs at home"
        else:
            extra, moved = problem.move(call, home, choice)
        seconds.append(option.seconds + extra)
        needs.append((choice.mesh, option.active + moved))
    nodes = range(len(plan))
    starts, period = start_times(problem, nodes, [choice.mesh for choice in plan], seconds)
    peaks = rank_peaks(problem.size, held, needs)
    excess = max(peak / memory - 1 for peak, memory in zip(peaks, problem.memory, strict=True))
    return Schedule(tuple((starts[i], starts[i] + seconds[i]) for i in nodes), period, peaks, max(excess, 0.0))


def rank_peaks(
    size: int, held: Sequence[tuple[RankRange, float]], needs: Sequence[tuple[RankRange, float]]
) -> tuple[float, ...]:
    """Bytes on each rank: all that is held on it and the largest need."""
    cuts = sorted({0, size, *(edge for mesh, _ in (*held, *needs) for edge in (mesh.first, mesh.end))})
    peaks: list[float] = []
    for first, end in pairwise(cuts):
        kept = sum(amount for mesh, amount in held if mesh.first <= first < mesh.end)
        most = max((amount for mesh, amount in needs if mesh.first <= first < mesh.end), default=0.0)
        peaks += [kept + most] * (end - first)
    return tuple(peaks)


def start_times(
    problem: Problem, nodes: Sequence[int], meshes: Sequence[RankRange | None], seconds: Sequence[float]
) -> tuple[list[float], float]:
    """Starts of all nodes (0 for those that are not among ``nodes``), and seconds of a step.

    ``nodes`` ascend and wait for none but each other. One without a mesh takes no ranks, only time: then both are lower bounds.
    """
    if problem.ahead:
        return _steady_state(problem, meshes, seconds)
    starts, ends = [0.0] * len(problem.calls), [0.0] * len(problem.calls)
    last = 0.0
    done: list[int] = []
    for node in nodes:
        start, mesh, after = 0.0, meshes[node], problem.calls[node].after
        for earlier in done:
            if ends[earlier] > start:
                other = meshes[earlier]
                if earlier in after or (mesh is not None and other is not None and mesh.overlaps(other)):
                    start = ends[earlier]
        done.append(node)
        starts[node], ends[node] = start, start + seconds[node]
        last = max(last, ends[node])
    return starts, last


def _steady_state(problem: Problem, meshes: Sequence[RankRange | None], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Steps without end, every rank in program order from one to the next: seconds per step are the largest ratio of seconds to steps
    among the cycles of what waits for what (max-plus algebra), found by Newton's way: a cycle that is slower than the period is the
    next period."""
    edges, size = _waits(problem, meshes), len(seconds)
    period = max(seconds)
    while True:
        starts, cause = [0.0] * size, [-1] * size
        moved = -1
        for _ in range(size + 1):
            moved = -1
            for before, after, steps in edges:
                start = starts[before] + seconds[before] - steps * period
                if start > starts[after] + 1e-12 * period:
                    starts[after], cause[after] = start, before
                    moved = after
            if moved < 0:
                return starts, period
        for _ in range(size):  # back into a cycle that is slower, then once around it
            moved = cause[moved]
        cycle = [moved]
        while cause[cycle[-1]] != moved:
            cycle.append(cause[cycle[-1]])
        pairs = [(cause[node], node) for node in cycle]
        around = sum(min(steps for *ends, steps in edges if tuple(ends) == pair) for pair in pairs)
        slower = sum(seconds[node] for node in cycle) / around
        if slower <= period:  # by no more than rounding
            return starts, period
        period = slower


def _waits(problem: Problem, meshes: Sequence[RankRange | None]) -> list[tuple[int, int, int]]:
    """(before, after, n): ``after`` of a step waits for ``before`` of the step n earlier.

    A call needs the weights that the step before left, one of ``generating`` those of the step ``ahead`` + 1 before.
    """
    edges = []
    for node, call in enumerate(problem.calls):
        edges += [(before, node, 0) for before in sorted(call.after)]
        lag = problem.ahead + 1 if node in problem.generating else 1
        edges += [(train, node, lag) for train in problem.tied[call.role] if train != node]
        for before in range(node):
            mesh, other = meshes[node], meshes[before]
            if mesh is not None and other is not None and mesh.overlaps(other):
                edges += [(before, node, 0), (node, before, 1)]
    return edges
