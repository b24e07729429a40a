"""HybridFlow's and NeMo-Aligner's split: the policy and roles that start from its weights on one side, all others on the other."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, Roles, Trace, generating_calls, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return an assignment of roles to two sides, which get half of the ranks each, or by ratio.

    The first side has the policy (the roles that generate; if none does, the first trained role) and its followers (the frozen roles
    that start from the same weights). If the other roles have no model, the followers are on the second side. Raises
    PlacementError if all models are on one side.
    """
    step = graph()
    policy = [call.split(".")[0] for call in generating_calls(step, roles)]
    policy = policy or [role for role, facts in roles.items() if facts.trained][:1]
    origins = {roles[role].origin for role in policy}
    followers = {role for role, facts in roles.items() if facts.weights and not facts.trained and facts.origin in origins}
    if not any(facts.weights for role, facts in roles.items() if role not in (*policy, *followers)):
        followers = set()
    first = [role for role in roles if role in policy or role in followers]
    second = [role for role in roles if role not in first]
    if not any(roles[role].weights for role in second):
        raise PlacementError(
            f"needs models for two sides, and those that name no pool are {', '.join(first) or 'none'}; use colocate or separate"
        )
    first_ranks, second_ranks = cluster.cut([share_of(side, roles, graph=step) for side in (first, second)])
    return Assignment(dict.fromkeys(first, first_ranks) | dict.fromkeys(second, second_ranks))
