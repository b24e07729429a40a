"""Options for calls whose ranks are given: one role after the other, each the fastest in the memory that is left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_spmd.planner.problem import Choice, Mesh, Plan
from rlhf_spmd.planner.search.ways import Ways


def fill(ways: Ways, homes: Mapping[str, Mesh], lent: Mapping[int, Mesh]) -> dict[int, Choice] | None:
    """The calls of these roles, None where they do not fit in this way. ``lent``: where calls run that may run elsewhere.

    The role whose calls take longest comes first; roles after it are taken to hold the least that they can.
    """
    calls, work = ways.problem.calls, {}
    for role, mesh in homes.items():
        options = ways.homes(role, mesh.count)
        if not options:
            return None
        work[role] = (
            -calls[ways.problem.homes[role]].options[options[0]].seconds,
            min(ways.needs(role, o)[0] for o in options),
        )
    order = sorted(homes, key=lambda role: work[role])
    held, active, found = [], {}, {}
    for at, role in enumerate(order):
        mesh, later = homes[role], [(homes[other], work[other][1]) for other in order[at + 1 :]]
        room = ways.room((*held, *later), mesh)
        option = next((o for o in ways.homes(role, mesh.count) if sum(ways.needs(role, o)) <= room), None)
        if option is None:
            return None
        keeps, active[role] = ways.needs(role, option)
        held.append((mesh, keeps))
        found |= {node: Choice(mesh, option) for node in ways.problem.tied[role]}
    if any(active[role] > ways.room(tuple(held), homes[role]) for role in order):
        return None
    for node, mesh in lent.items():
        home = found[ways.problem.homes[calls[node].role]]
        option = ways.lent(node, (home.mesh, home.option), mesh).within(ways.room(tuple(held), mesh))[1]
        if option < 0:
            return None
        found[node] = Choice(mesh, option)
    return found


def whole_plan(choices: Mapping[int, Choice]) -> Plan:
    return tuple(choices[node] for node in sorted(choices))


def next_to(meshes: Sequence[Mesh], first: int) -> Mesh:
    """The mesh that begins at this rank or soonest after it, else the first one."""
    return next((mesh for mesh in meshes if mesh.first >= first), meshes[0])
