"""HybridFlow's and NeMo-Aligner's split: the policy and roles that start from its weights on one side, the rest on the other."""

from __future__ import annotations

from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, Roles, Trace, generating_calls, share_of


def place(graph: Trace, cluster: Cluster, roles: Roles) -> Assignment:
    """Return two sides. The first has the roles that generate (if none does, the first trained role) and the frozen roles
    that start from the same weights. If the other roles have no model, these frozen roles go to the second side. Each
    side gets half of the ranks, or its ratio.

    Raises PlacementError if all models are on one side.
    """
    traced = graph()
    policy = [call.split(".")[0] for call in generating_calls(traced, roles)]
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
    sides = cluster.cut([share_of(side, roles, graph=traced) for side in (first, second)])
    return Assignment({role: ranks for side, ranks in zip((first, second), sides, strict=True) for role in side})
