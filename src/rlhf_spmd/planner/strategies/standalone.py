"""Every model on ranks of its own, and with a ratio for it a call, too: OpenRLHF's second copy of the actor, which generates."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, Roles, Trace, count_work, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return ranks by ratio, or else by work. A role without a model computes where the last of its inputs is made."""
    traced = graph()
    work = count_work(traced, roles)
    apart = [name for name in cluster.ratios if "." in name]
    for name in apart:
        work.pop(name, None)
    graphs = {role: None if any(name.startswith(f"{role}.") for name in apart) else traced for role in roles}
    models = [role for role, facts in roles.items() if facts.weights]
    parts = [share_of([role], roles, work, graphs[role]) for role in models]
    parts += [share_of([name], roles, graph=traced) for name in apart]
    ranks_of = {part.names[0]: ranks for part, ranks in zip(parts, cluster.cut(parts), strict=True)}
    for producer, consumer, _ in traced.edges():
        source, reader = traced.nodes[producer], traced.nodes[consumer].role.name
        if reader in roles and not roles[reader].weights and source.role.name in ranks_of:
            ranks_of[reader] = ranks_of.get(f"{source.role.name}.{source.spec.name}", ranks_of[source.role.name])
    calls = {name: ranks for name, ranks in ranks_of.items() if "." in name}
    return Assignment({role: ranks_of.get(role, cluster.everyone) for role in roles}, calls)
