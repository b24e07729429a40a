"""Options for calls whose ranks are given: one role after the other, each the fastest in the memory that is left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlhf_spmd.planner.problem import Choice, Plan, RankRange
from rlhf_spmd.planner.search.candidates import Candidates


def fill(
    ways: Candidates,
    homes: Mapping[str, RankRange],
    lent: Mapping[int, RankRange],
    given: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, Choice] | None:
    """The calls of these roles, None where they do not fit in this way. ``lent``: where calls run that may run elsewhere.

    The role whose calls take longest comes first; roles after it are taken to hold the least that they can. ``given``: options of
    some homes.
    """
    calls, work, those = ways.problem.calls, {}, {}
    for role, mesh in homes.items():
        options = [given[role]] if role in given else ways.homes(role, mesh.count)
        if not options:
            return None
        those[role] = options
        work[role] = (
            -calls[ways.problem.homes[role]].options[options[0]].seconds,
            min(ways.needs(role, o)[0] for o in options),
        )
    order = sorted(homes, key=lambda role: (role not in given, work[role]))
    held: list[tuple[RankRange, float]] = []
    active: dict[str, float] = {}
    found: dict[int, Choice] = {}
    for at, role in enumerate(order):
        mesh, later = homes[role], [(homes[other], work[other][1]) for other in order[at + 1 :]]
        for option in those[role]:
            keeps, active[role] = ways.needs(role, option)
            all_held = (*held, (mesh, keeps), *later)
            if all(need <= ways.room(all_held, homes[other]) for other, need in active.items()):
                break
        else:
            return None
        held.append((mesh, keeps))
        found |= {node: Choice(mesh, option) for node in ways.problem.tied[role]}
    for node, mesh in lent.items():
        home = found[ways.problem.homes[calls[node].role]]
        option = ways.lent(node, home, mesh).within(ways.room(tuple(held), mesh))[1]
        if option < 0:
            return None
        found[node] = Choice(mesh, option)
    return found


def whole_plan(choices: Mapping[int, Choice]) -> Plan:
    return tuple(choices[node] for node in sorted(choices))


def next_to(meshes: Sequence[RankRange], first: int) -> RankRange:
    """The mesh that begins at this rank or soonest after it, else the first one."""
    return next((mesh for mesh in meshes if mesh.first >= first), meshes[0])
