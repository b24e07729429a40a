"""APP's separation: generation on ranks of its own, with a copy of the weights; training and all else on the others."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, Roles, Trace, generating_calls, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return ranks for the generating calls and other ranks for all roles: half each, or by ratio of a generating call or a role.

    Raises PlacementError if no call generates.
    """
    step = graph()
    generating = generating_calls(step, roles)
    if not generating:
        raise PlacementError("no call generates of a role that names no pool; use colocate, or placement.pools")
    generating_ranks, role_ranks = cluster.cut([share_of(generating, roles, graph=step), share_of(roles, roles)])
    return Assignment(dict.fromkeys(roles, role_ranks), dict.fromkeys(generating, generating_ranks))
