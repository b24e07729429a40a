"""APP's interleaving: models that need not wait for each other on disjoint ranks, generation on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.cluster import Assignment, Cluster, Roles, Trace, count_work, generating_calls, part_of, waits


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Trained roles share the ranks out, by ratio or else by work, and so do those that only infer; roles without a model run on all.

    Roles of which one trains (or infers) on what the other's training (or inference) made stay together.
    """
    traced, found = graph(), dict.fromkeys(roles, cluster.everyone)
    generating, work = generating_calls(traced, roles), count_work(traced, roles)
    for call in generating:
        del work[call]
    for kind in ("train", "infer"):
        names = [role for role, facts in roles.items() if facts.weights and facts.trained == (kind == "train")]
        groups = independent_groups(traced, names, kind)
        parts = [part_of(group, roles, work) for group in groups]
        for group, ranks in zip(groups, cluster.cut(parts), strict=True):
            found |= dict.fromkeys(group, ranks)
    calls = {call: cluster.everyone for call in generating if found[call.split(".")[0]] != cluster.everyone}
    return Assignment(found, calls)


def independent_groups(graph: Graph, names: Sequence[str], kind: str) -> list[list[str]]:
    """``names`` in groups, such that no call of ``kind`` of one group's roles waits for one of another's."""
    waited, groups = waits(graph), [[name] for name in names]
    nodes = {name: {i for i, c in enumerate(graph.nodes) if c.role.name == name and c.spec.kind == kind} for name in names}
    for name in names:
        after = set().union(*(waited[i] for i in nodes[name]))
        joined = [group for group in groups if name in group or any(nodes[other] & after for other in group)]
        groups = [group for group in groups if group not in joined] + [[one for group in joined for one in group]]
    return sorted((sorted(group, key=list(names).index) for group in groups), key=lambda group: list(names).index(group[0]))
