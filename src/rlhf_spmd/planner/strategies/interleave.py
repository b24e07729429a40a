"""APP's interleaving: models that need not wait for each other on disjoint ranks, generation on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.cluster import (
    Assignment,
    Cluster,
    RoleFacts,
    count_work,
    generating_calls,
    independent_groups,
    part_of,
    work_of,
)


def place(graph: Callable[[], Graph], cluster: Cluster, roles: Mapping[str, RoleFacts]) -> Assignment:
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
        parts = [part_of(group, roles, work_of(group, work)) for group in groups]
        for group, ranks in zip(groups, cluster.cut(parts), strict=True):
            found |= dict.fromkeys(group, ranks)
    calls = {call: cluster.everyone for call in generating if found[call.split(".")[0]] != cluster.everyone}
    return Assignment(found, calls)
