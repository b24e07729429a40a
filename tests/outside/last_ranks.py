"""A placement strategy of a user's: roles that are trained have the last ranks, as many as the step has of them."""

from collections.abc import Callable, Mapping

from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.cluster import Assignment, Cluster, RoleFacts


def place(graph: Callable[[], Graph], cluster: Cluster, roles: Mapping[str, RoleFacts]) -> Assignment:
    trained = {call.role.name for call in graph().nodes if call.spec.kind == "train"}
    last = cluster.everyone[-len(trained) :]
    return Assignment({role: last if role in trained else cluster.everyone for role in roles})
