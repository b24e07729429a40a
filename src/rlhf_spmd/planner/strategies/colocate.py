"""Every role on all ranks, in turns: APP's flattening, DeepSpeed-Chat, and ReaL's heuristic."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, Roles, Trace, unit_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return all ranks for each role; roles and calls with a ratio get that share of the ranks.

    Shares follow each other, from the first rank again where the ranks end.
    """
    shares: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, ratio in cluster.ratios.items():
        count = min(cluster.count(ratio, unit_of(name, roles)), cluster.size)
        first = 0 if first + count > cluster.size else first
        shares[name] = tuple(range(first, first + count))
        first += count
    calls = {name: ranks for name, ranks in shares.items() if "." in name}
    return Assignment({role: shares.get(role, cluster.everyone) for role in roles}, calls)
