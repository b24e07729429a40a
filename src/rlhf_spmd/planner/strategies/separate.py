"""APP's separation: generation on ranks of its own, with a copy of the weights; training and all else on the others."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, Roles, Trace, generating_calls, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return half of the ranks each, or by ratio of the generating call or of a role. Raises PlacementError if nothing generates."""
    traced = graph()
    generating = generating_calls(traced, roles)
    if not generating:
        raise PlacementError("no call generates of a role that names no pool; use colocate, or placement.pools")
    calls, rest = cluster.cut([share_of(generating, roles, graph=traced), share_of(roles, roles)])
    return Assignment(dict.fromkeys(roles, rest), dict.fromkeys(generating, calls))
