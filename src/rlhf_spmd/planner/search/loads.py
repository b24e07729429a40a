"""When calls can end that wait for nothing but ranks and order: a lower bound of every schedule, by dynamic programming over halves of
halves of the ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from rlhf_spmd.planner.meshes import RankRanges, halves
from rlhf_spmd.planner.problem import RankRange

NEVER = 1e300  # seconds where a call has no option: adds up without becoming not a number


class Loads:
    """Of ``free`` calls in program order, each a table size -> seconds.

    E(node, S), when the calls S can end in a node of the tree of halves, is the least over subsets A, which take the node itself. Ranks
    run calls in program order, so a call on the node begins when both halves have ended what came before it: E = seconds of A + the sum
    over the runs R of the others between them of the least max(E(first half, .), E(second half, .)) over ways to deal R to the halves.
    That is exact for meshes that are nodes. Without ``ordered`` the others count as one run: the seconds of the busiest rank, a bound
    where steps overlap, too. A mesh that is no node, what a first or last node leaves, holds one of the root's halves: a call there
    counts as a call on that half, unless ``nodes_only``.
    """

    def __init__(
        self, meshes: RankRanges, free: Sequence[Mapping[int, float]], ordered: bool, nodes_only: bool = False
    ) -> None:
        self.meshes, self.free, self.ordered = meshes, free, ordered
        self.subsets, self.rests, self.starts = _splits(len(free))
        self.inside = {half.count for half in halves(meshes.whole, meshes.local_size)} if meshes.whole.count > 1 else set()
        self.left = {mesh.count for mesh in meshes.left if not nodes_only}
        self.times, self.ways = cache(self._times), cache(self._ways)

    def least(self, fixed: Sequence[tuple[RankRange, float]] = ()) -> float:
        """Seconds beside the ``fixed`` calls, in which order they may come; inf where there is no way."""
        least = float(self._end(self.meshes.whole, fixed)[-1])
        return least if least < NEVER else math.inf

    def packing(self) -> dict[int, RankRange]:
        """Meshes of the calls, by their numbers, with which they end so soon: with ``nodes_only`` those of a schedule."""
        found: dict[int, RankRange] = {}
        if self.least() < math.inf:
            self._place(self.meshes.whole, (1 << len(self.free)) - 1, found)
        return found

    def _times(self, count: int) -> np.ndarray:
        left = self.left if count in self.inside else ()
        seconds = [min([table.get(count, NEVER), *(table.get(n, NEVER) for n in left)]) for table in self.free]
        return _members(len(self.free)) @ np.array(seconds) if self.free else np.zeros(1)

    def _end(self, mesh: RankRange, among: Sequence[tuple[RankRange, float]]) -> np.ndarray:
        """Of all sets of free calls in a node, beside those ``among`` which lie in it or around it."""
        load, partly = 0.0, []
        for other, seconds in among:
            if other.first <= mesh.first and mesh.end <= other.end:
                load += seconds
            elif other.overlaps(mesh):
                partly.append((other, seconds))
        if not partly:
            return load + self.ways(mesh.count)[0]
        first, second = (self._end(half, partly) for half in halves(mesh, self.meshes.local_size))
        below = np.minimum.reduceat(np.maximum(first[self.subsets], second[self.rests]), self.starts)
        return load + np.minimum.reduceat(self.times(mesh.count)[self.subsets] + below[self.rests], self.starts)

    def _ways(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all sets of calls in a node of ``count`` ranks the least end; of all pairs of a set and a subset the end if the subset has
        the first half, and if it takes the node."""
        if count == 1:
            ends = self.times(1)
            return ends, np.full(len(self.subsets), NEVER), ends[self.subsets] + NEVER * (self.rests > 0)
        first, second = (self.ways(half.count)[0] for half in halves(RankRange(0, count), self.meshes.local_size))
        dealt = np.maximum(first[self.subsets], second[self.rests])
        below = np.minimum.reduceat(dealt, self.starts)
        others = below[_runs(len(self.free))].sum(0) if self.ordered else below[self.rests]
        taken = self.times(count)[self.subsets] + others
        return np.minimum.reduceat(taken, self.starts), dealt, taken

    def _place(self, mesh: RankRange, calls: int, found: dict[int, RankRange]) -> None:
        _, _, taken = self.ways(mesh.count)
        at = self._best(taken, calls)
        found |= {call: mesh for call in range(len(self.free)) if self.subsets[at] >> call & 1}
        for run in _runs(len(self.free))[:, at]:
            if run:
                at = self._best(self.ways(mesh.count)[1], run)
                for half, its in zip(halves(mesh, self.meshes.local_size), (self.subsets[at], self.rests[at]), strict=True):
                    if its:
                        self._place(half, its, found)

    def _best(self, ends: np.ndarray, calls: int) -> int:
        pairs = slice(self.starts[calls], [*self.starts, len(ends)][calls + 1])
        return int(self.starts[calls] + np.argmin(ends[pairs]))


@cache
def _members(calls: int) -> np.ndarray:
    """[sets, calls]: 1 where a set, as bits, has a call."""
    return (np.arange(1 << calls)[:, None] >> np.arange(calls) & 1).astype(float)


@cache
def _splits(calls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each set of calls, as bits, all subsets and what they leave, one set after the other; and where each set's begin."""
    sets = np.arange(1 << calls, dtype=np.int32)
    wholes, rests = np.nonzero(sets & ~sets[:, None] == 0)
    return wholes - rests, rests, np.searchsorted(wholes, sets)


@cache
def _runs(calls: int) -> np.ndarray:
    """[calls + 1, pairs]: what each subset of :func:`_splits` leaves, by the runs between its calls in their order."""
    subsets, rests, _ = _splits(calls)
    run, pairs = np.zeros(len(subsets), dtype=np.int64), np.arange(len(subsets))
    runs = np.zeros((calls + 1, len(subsets)), dtype=np.int64)
    for call in range(calls):
        runs[run, pairs] |= rests & 1 << call
        run += subsets >> call & 1
    return runs
