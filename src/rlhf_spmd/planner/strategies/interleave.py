"""APP's interleaving: models that do not wait for each other run on disjoint ranks, generation runs on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.cluster import Assignment, Cluster, Roles, Trace, count_work, generating_calls, share_of, waits


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return an assignment: trained roles divide all ranks among themselves, by ratio or by work; so do frozen roles.

    Roles stay together if one of them trains (or infers) on results of the other's training (or inference). Roles without a model
    run on all ranks.
    """
    step = graph()
    generating = generating_calls(step, roles)
    work = count_work(step, roles)
    for call in generating:
        del work[call]
    ranks_of = dict.fromkeys(roles, cluster.everyone)
    for kind in ("train", "infer"):
        names = [role for role, facts in roles.items() if facts.weights and facts.trained == (kind == "train")]
        groups = independent_groups(step, names, kind)
        shares = [share_of(group, roles, work) for group in groups]
        for group, ranks in zip(groups, cluster.cut(shares), strict=True):
            ranks_of |= dict.fromkeys(group, ranks)
    calls = {call: cluster.everyone for call in generating if ranks_of[call.split(".")[0]] != cluster.everyone}
    return Assignment(ranks_of, calls)


def independent_groups(graph: Graph, names: Sequence[str], kind: str) -> list[list[str]]:
    """Return the roles ``names`` in groups, so that no call of ``kind`` in one group waits for such a call in another."""
    waited = waits(graph)
    nodes = {name: {i for i, c in enumerate(graph.nodes) if c.role.name == name and c.spec.kind == kind} for name in names}
    groups = [[name] for name in names]
    for name in names:
        earlier = set().union(*(waited[i] for i in nodes[name]))
        joined = [group for group in groups if name in group or any(nodes[other] & earlier for other in group)]
        merged = [other for group in joined for other in group]
        groups = [group for group in groups if group not in joined] + [merged]
    order = list(names).index
    return sorted((sorted(group, key=order) for group in groups), key=lambda group: order(group[0]))
