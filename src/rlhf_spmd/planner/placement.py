"""The ranks of each role: those of a pool that the configuration names, or those that a strategy chooses. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlhf_spmd.config.constraints import PositiveFloat, PositiveFraction
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import ResourcePool
from rlhf_spmd.planner.cluster import Assignment, Cluster, PlacementError, Roles, Trace

AUTO = "auto"


@dataclass(frozen=True)
class PlacementConfig:
    """``placement``.

    - strategy: for roles that name no pool: `colocate`, `split`, `standalone`, `interleave`, `separate`, `auto` ([the run plans
      itself](planner.md#the-run-plans-itself)), or a module of your own by its dotted name or file; see
      [placement.md](placement.md#strategies)
    - pools: name: list of ranks, for roles whose `pool` names one, which goes before the strategy; see
      [placement.md](placement.md)
    - ratios: role, or `role.method`: its share of the ranks, above 0 and at most 1; see [placement.md](placement.md#ratios)
    - speeds: of each rank of the job against the others, above 0: calls deal their rows in this proportion ([Unequal
      devices](placement.md#unequal-devices)); empty: all alike
    - generation_speeds: the same for calls that generate; empty: `placement.speeds`
    - profile: with `placement.strategy=auto`: times of this machine, a file that [`plan profile`](planner.md#profiles) wrote;
      null: formulas, for GPUs of the planner's table
    """

    strategy: str = "colocate"
    pools: dict[str, list[int]] = field(default_factory=dict)
    ratios: dict[str, PositiveFraction] = field(default_factory=dict)
    speeds: list[PositiveFloat] = field(default_factory=list)
    generation_speeds: list[PositiveFloat] = field(default_factory=list)
    profile: str | None = None

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"strategy=auto": ("profile",)}
    rules: ClassVar[Rules] = (
        Rule(
            ("strategy",),
            lambda placement: placement.strategy == AUTO and bool(placement.pools or placement.ratios),
            "the planner chooses pools and ratios",
            "leave placement.pools and placement.ratios out",
        ),
    )

    def check(self, where: str) -> None:
        if self.strategy != AUTO:
            find(
                f"{where}.strategy",
                "rlhf_spmd.planner.strategies",
                self.strategy,
                required_attribute="place",
                other_names=[AUTO],
            )


def place_roles(
    config: PlacementConfig, named: Mapping[str, str | None], world_size: int, local_size: int, roles: Roles, graph: Trace
) -> dict[str, ResourcePool]:
    """Return the pool of each role, and of each method that runs elsewhere as ``<role>.calls.<method>``.

    - named: role or call of the configuration -> the pool that it names, or None
    - graph: traces a step, if the strategy needs it

    Raises ValueError for a pool that does not exist, does not fit or is not used, for ratios that cannot be, and for ranks in no
    pool.
    """
    check_speeds(config, world_size)
    pools = {name: _checked_pool(f"placement.pools.{name}", name, ranks, world_size) for name, ranks in config.pools.items()}
    if "all" in pools and len(pools["all"].ranks) < world_size:
        raise ValueError(f"placement.pools.all={config.pools['all']}: the pool of all ranks is called so; use another name")
    for key, name in named.items():
        if name is not None and name not in pools:
            hint = nearest(name, list(pools)) or ";"
            raise ValueError(
                f"models.{key}.pool={name!r} is not in placement.pools{hint} available: {', '.join(pools) or 'none'}"
            )
    unused = sorted(set(pools) - set(named.values()))
    if unused:
        raise ValueError(
            f"placement.pools.{unused[0]}: no role's pool names it; give it to a role (models.<role>.pool or "
            f"models.<role>.calls.<method>.pool) or remove it"
        )
    placed = {key: pools[name] for key, name in named.items() if name is not None}
    _check_ratios(config, named, roles)
    unplaced = {role: facts for role, facts in roles.items() if role not in placed}
    if unplaced:
        placed |= _by_strategy(config, Cluster(world_size, local_size, config.ratios), named, unplaced, graph)
    idle = sorted(set(range(world_size)) - {rank for pool in placed.values() for rank in pool.ranks})
    if idle:
        raise ValueError(
            f"ranks {idle} of {world_size} are in no role's pool; start fewer ranks or put them into placement.pools"
        )
    return placed


def check_speeds(config: PlacementConfig, world_size: int) -> None:
    """Raise ValueError if there are speeds of another number of ranks."""
    for key, speeds in (("speeds", config.speeds), ("generation_speeds", config.generation_speeds)):
        if speeds and len(speeds) != world_size:
            raise ValueError(
                f"placement.{key} has {len(speeds)} numbers, this job has {world_size} ranks; give one for each, or none"
            )


def _check_ratios(config: PlacementConfig, named: Mapping[str, str | None], roles: Roles) -> None:
    placeable = _placeable(roles)
    for name in config.ratios:
        if name not in placeable:
            hint = nearest(name, placeable) or ";"
            raise ValueError(f"placement.ratios.{name}: no such role or call{hint} there are {', '.join(placeable)}")
        placed_key = next((key for key in (name.split(".")[0], _key(name)) if named.get(key) is not None), None)
        if placed_key is not None:
            raise ValueError(
                f"placement.ratios.{name}: models.{placed_key} says by itself where it runs; leave one of them out"
            )


def _by_strategy(
    config: PlacementConfig, cluster: Cluster, named: Mapping[str, str | None], roles: Roles, graph: Trace
) -> dict[str, ResourcePool]:
    """Return the strategy's pools of ``roles``, and of their calls that the configuration does not place."""
    where = f"placement.strategy={config.strategy!r}"
    assignment = _run_strategy(config, cluster, roles, graph, where)
    _check_assignment(assignment, roles, where)
    ranks_of = {name: tuple(ranks) for name, ranks in (*assignment.roles.items(), *assignment.calls.items())}
    _check_ratios_met(ranks_of, cluster, roles, where)
    pool_names = {
        ranks: "+".join(name for name, name_ranks in ranks_of.items() if name_ranks == ranks) for ranks in ranks_of.values()
    }
    pool_names[cluster.everyone] = "all"
    pools = {_key(name): _checked_pool(where, pool_names[ranks], ranks, cluster.size) for name, ranks in ranks_of.items()}
    return {key: pool for key, pool in pools.items() if named.get(key) is None}


def _run_strategy(config: PlacementConfig, cluster: Cluster, roles: Roles, graph: Trace, where: str) -> Assignment:
    """Return the strategy's assignment. Raises ValueError if it refuses, fails, or returns something else."""
    strategy = find("placement.strategy", "rlhf_spmd.planner.strategies", config.strategy, required_attribute="place")
    try:
        assignment = strategy.place(graph, cluster, roles)
    except PlacementError as error:
        raise ValueError(f"{where} {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:  # in a user's own code
        raise ValueError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(assignment, Assignment):
        raise ValueError(
            f"{where} returned {type(assignment).__name__}; its place() must return an Assignment (rlhf_spmd.planner.cluster)"
        )
    return assignment


def _check_assignment(assignment: Assignment, roles: Roles, where: str) -> None:
    """Raise ValueError if the assignment has unknown names or lacks a role."""
    placeable = _placeable(roles)
    for name in (*assignment.roles, *assignment.calls):
        if name not in placeable:
            raise ValueError(
                f"{where} places {name!r}, which is no role and no call that may run elsewhere; there are {', '.join(placeable)}"
            )
    for role in roles:
        if role not in assignment.roles:
            raise ValueError(f"{where} gives role '{role}' no ranks")


def _check_ratios_met(ranks_of: Mapping[str, tuple[int, ...]], cluster: Cluster, roles: Roles, where: str) -> None:
    """Raise ValueError if a name's number of ranks is not that of its ratio, as nearly as layouts allow."""
    units = [unit for facts in roles.values() for unit in (facts.unit, *facts.calls.values())]
    granularity = math.lcm(*units)
    for name, ratio in cluster.ratios.items():
        ranks = ranks_of.get(name, ())
        if abs(len(ranks) - ratio * cluster.size) >= granularity:
            sharing = " and ".join(other for other, other_ranks in ranks_of.items() if other_ranks == ranks and other != name)
            raise ValueError(
                f"placement.ratios.{name}={ratio:g} of {cluster.size} ranks is {ratio * cluster.size:g}, but {where} gives it "
                f"{len(ranks)}{f', together with {sharing}' if sharing else ''}; change the ratio or leave it out"
            )


def _key(name: str) -> str:
    """Return the key of a role or a call in the section ``models``."""
    return name.replace(".", ".calls.")


def _placeable(roles: Roles) -> list[str]:
    """Return roles, and calls that may run on other ranks than their role."""
    return [*roles, *(f"{role}.{method}" for role, facts in roles.items() for method in facts.calls)]


def _checked_pool(where: str, name: str, ranks: Sequence[int], world_size: int) -> ResourcePool:
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"{where}: rank {outside[0]} does not exist; this job has ranks 0 to {world_size - 1}")
    try:
        return ResourcePool(name, tuple(ranks))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
