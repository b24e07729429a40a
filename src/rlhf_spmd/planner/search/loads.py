"""How evenly calls can be spread over halves of halves of the ranks: a lower bound of every schedule, by dynamic programming. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from rlhf_spmd.planner.meshes import Meshes, halves
from rlhf_spmd.planner.problem import Mesh

NEVER = 1e300  # seconds where a call has no option: adds up without becoming not a number


def least_load(meshes: Meshes, fixed: Sequence[tuple[Mesh, float]], free: Sequence[Mapping[int, float]]) -> float:
    """The fewest seconds of the busiest rank, over all meshes of the free calls, each a table size -> seconds, beside the fixed ones.

    L(node, S), the load that the calls S need in a node of the tree of halves, is the least over subsets A, which take the node itself,
    and over the others' ways into the two halves: seconds of A + max(L(first half, .), L(second half, .)). No order of calls enters, so
    it is a bound for any order. A mesh that is no node, what a first or last node leaves, holds one of the root's halves: a free call
    there counts as a call on that half.
    """
    subsets, rests, starts = _splits(len(free))
    inside = {half.count for half in halves(meshes.whole, meshes.local_size)} if meshes.whole.count > 1 else set()
    left = {mesh.count for mesh in meshes.left}
    members = np.array([[number >> call & 1 for call in range(len(free))] for number in range(1 << len(free))], dtype=float)

    @cache
    def times(count: int) -> np.ndarray:
        seconds = [min([table.get(count, NEVER), *(table.get(n, NEVER) for n in left if count in inside)]) for table in free]
        return members @ np.array(seconds) if free else np.zeros(1)

    def node(mesh: Mesh, among: Sequence[tuple[Mesh, float]]) -> np.ndarray:
        load, partly = 0.0, []
        for other, seconds in among:
            if other.first <= mesh.first and mesh.end <= other.end:
                load += seconds
            elif other.overlaps(mesh):
                partly.append((other, seconds))
        if not partly:
            return load + empty(mesh.count)
        first, second = (node(half, partly) for half in halves(mesh, meshes.local_size))
        return load + join(mesh.count, first, second)

    @cache
    def empty(count: int) -> np.ndarray:
        if count == 1:
            return times(1)
        first, second = (empty(half.count) for half in halves(Mesh(0, count), meshes.local_size))
        return join(count, first, second)

    def join(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        below = np.minimum.reduceat(np.maximum(first[subsets], second[rests]), starts)
        return np.minimum.reduceat(times(count)[subsets] + below[rests], starts)

    least = float(node(meshes.whole, fixed)[-1])
    return least if least < NEVER else math.inf


@cache
def _splits(calls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each set of calls, as bits, all subsets and what they leave, one set after the other; and where each set's begin."""
    subsets: list[int] = []
    rests: list[int] = []
    starts: list[int] = []
    for whole in range(1 << calls):
        starts.append(len(subsets))
        subset = whole
        while True:
            subsets.append(subset)
            rests.append(whole ^ subset)
            if not subset:
                break
            subset = (subset - 1) & whole
    return np.array(subsets), np.array(rests), np.array(starts)
