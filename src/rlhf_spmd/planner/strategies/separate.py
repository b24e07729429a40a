"""APP's separation: generation on ranks of its own, with a copy of the weights; training and all else on the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, RoleFacts, generating_calls, part_of, part_of_calls


def place(graph: Callable[[], Graph], cluster: Cluster, roles: Mapping[str, RoleFacts]) -> Assignment:
    """Half of the ranks each, or by ratio of the generating call or of a role. Raises PlacementError where nothing generates."""
    traced = graph()
    generating = generating_calls(traced, roles)
    if not generating:
        raise PlacementError("no call generates of a role that names no pool; use colocate, or placement.pools")
    calls, rest = cluster.cut([part_of_calls(generating, roles, traced), part_of(roles, roles)])
    return Assignment(dict.fromkeys(roles, rest), dict.fromkeys(generating, calls))
