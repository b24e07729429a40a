"""Good plans of steps that overlap (``Problem.ahead``), with which the exact search begins. Proves nothing. Pure.

Where generation runs ahead of training, the plans of interest give it ranks of its own. Each of these is a beginning: generation on
one part of the cluster, everything else on the rest. From there one role or call after the other moves to the ranks where the step
takes the fewest seconds, until no move helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from rlhf_spmd.planner.problem import Choice, Problem, RankRange, start_times
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, choose_movable, greedy_choices

Homes = Mapping[str, Choice]  # by role
Moved = Mapping[int, RankRange]  # ranks of the movable calls


@dataclass(frozen=True)
class OverlappingPlans:
    """The search of one problem. ``spend``: counts a plan that is tried; it may raise."""

    problem: Problem
    ranges: RankRanges
    tables: CandidateTables
    spend: Callable[[], None]

    def separated(self) -> list[dict[int, Choice]]:
        """Return plans with generation on one part of the cluster and everything else on the rest, the fastest first.

        Parts that differ only in their place are tried once.
        """
        problem = self.problem
        every = self.ranges.all_ranks
        all_ranges = {ranks for same_extent in self.ranges.by_extent.values() for ranks in same_extent}
        plans: dict[object, tuple[float, dict[int, Choice]]] = {}
        for part in sorted(all_ranges):
            at_start = part.first == 0
            rest = RankRange(part.end, every.count - part.count) if at_start else RankRange(0, part.first)
            kind = problem.extent(part), tuple(problem.memory[part.first : part.end])
            if part == every or (not at_start and part.end != every.end) or rest not in all_ranges or kind in plans:
                continue
            homes = dict.fromkeys(problem.homes, rest)
            choices = greedy_choices(
                self.tables, homes, {i: part if i in problem.generating else rest for i in problem.movable}
            )
            if choices:
                plans[kind] = self.seconds(choices), choices
        return [choices for _, choices in sorted(plans.values(), key=lambda plan: plan[0])]

    def improve(self, choices: dict[int, Choice]) -> tuple[float, dict[int, Choice]]:
        """Return the seconds of a step and the plan after moves of single roles and calls, each the best one, as long as one helps."""
        best = self.seconds(choices)
        has_improved = True
        while has_improved:
            has_improved = False
            moves = [partial(self._moves_of_role, role) for role in self.problem.homes]
            moves += [partial(self._moves_of_call, call_index) for call_index in self.problem.movable]
            for plans_after_move in moves:
                for moved in plans_after_move(choices):
                    seconds = self.seconds(moved, best)
                    if seconds < best * (1 - 1e-9):
                        best = seconds
                        choices = moved
                        has_improved = True
        return best, choices

    def _moves_of_role(self, role: str, choices: dict[int, Choice]) -> Iterator[dict[int, Choice]]:
        """Yield plans with another home of this role."""
        homes, movable = self._split(choices)
        others = frozenset(choice.rank_range for i, choice in choices.items() if i not in self.problem.tied[role])
        for extent in self.ranges.by_extent:
            for ranks in self.ranges.ranges_up_to_symmetry(extent, others):
                for option in self.tables.home_options(role, extent):
                    moved = self._fit({**homes, role: Choice(ranks, option)}, movable)
                    if moved:
                        yield moved

    def _moves_of_call(self, call_index: int, choices: dict[int, Choice]) -> Iterator[dict[int, Choice]]:
        """Yield plans with this movable call on other ranks."""
        homes, movable = self._split(choices)
        others = frozenset(choice.rank_range for i, choice in choices.items() if i != call_index)
        for extent in self.ranges.by_extent:
            for ranks in self.ranges.ranges_up_to_symmetry(extent, others):
                moved = self._fit(homes, {**movable, call_index: ranks})
                if moved:
                    yield moved

    def _split(self, choices: dict[int, Choice]) -> tuple[dict[str, Choice], dict[int, RankRange]]:
        """Return the homes of a plan, and the ranks of its movable calls."""
        homes = {role: choices[index] for role, index in self.problem.homes.items()}
        return homes, {index: choices[index].rank_range for index in self.problem.movable}

    def _fit(self, homes: Homes, movable: Moved) -> dict[int, Choice] | None:
        """Return the plan with the fastest options of movable calls, or None if it does not fit into memory."""
        self.spend()
        problem = self.problem
        resident = tuple((home.rank_range, self.tables.home_bytes(role, home.option)[0]) for role, home in homes.items())
        if not all(self.tables.fits_home(resident, role, home) for role, home in homes.items()):
            return None
        at_home = {index: homes[role] for role in homes for index in problem.tied[role]}
        return choose_movable(self.tables, at_home, movable)

    def seconds(self, choices: Mapping[int, Choice], below: float = math.inf) -> float:
        """Return the seconds of a step, or inf if a rank is busy for at least ``below`` seconds."""
        problem = self.problem
        seconds = []
        for index, call in enumerate(problem.calls):
            choice = choices[index]
            copy_seconds, _ = problem.weight_copy_cost(call, choices[problem.homes[call.role]], choice)
            seconds.append(call.options[choice.option].seconds + copy_seconds)
        ranges = [choices[index].rank_range for index in range(len(seconds))]
        edges = {ranks.first for ranks in ranges}
        busy = (sum(s for s, ranks in zip(seconds, ranges, strict=True) if ranks.first <= rank < ranks.end) for rank in edges)
        if max(busy) >= below:
            return math.inf
        return start_times(problem, range(len(seconds)), ranges, seconds)[1]
