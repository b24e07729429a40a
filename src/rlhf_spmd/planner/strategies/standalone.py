"""Every model on ranks of its own. So is a call that has a ratio: OpenRLHF's second copy of the actor, which generates."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, Roles, Trace, count_work, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return ranks by ratio, or else by work. A role without a model computes where the last of its inputs is made."""
    step = graph()
    work = count_work(step, roles)
    placed_calls = [name for name in cluster.ratios if "." in name]
    for name in placed_calls:
        work.pop(name, None)
    with_placed_calls = {name.split(".")[0] for name in placed_calls}
    models = [role for role, facts in roles.items() if facts.weights]
    shares = [share_of([role], roles, work, None if role in with_placed_calls else step) for role in models]
    shares += [share_of([name], roles, graph=step) for name in placed_calls]
    ranks_of = {share.names[0]: ranks for share, ranks in zip(shares, cluster.cut(shares), strict=True)}
    for producer, consumer, _ in step.edges():
        source = step.nodes[producer]
        reader = step.nodes[consumer].role.name
        if reader in roles and not roles[reader].weights and source.role.name in ranks_of:
            ranks_of[reader] = ranks_of.get(f"{source.role.name}.{source.spec.name}", ranks_of[source.role.name])
    calls = {name: ranks for name, ranks in ranks_of.items() if "." in name}
    return Assignment({role: ranks_of.get(role, cluster.everyone) for role in roles}, calls)
