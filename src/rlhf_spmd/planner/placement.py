"""Placement: which ranks each role gets. ``placement.pools`` names sets of ranks, a strategy chooses for roles that name no pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.controller import ResourcePool

STRATEGIES = ("colocate", "split")


@dataclass(frozen=True)
class PlacementConfig:
    """``placement``. ``colocate``: every role on all ranks. ``split``: actor and reference on the first half, the rest on the second.

    ``pools``: name -> ranks, for roles whose ``pool`` names one of them; that goes before the strategy.
    ``max_staleness``: steps that generation, on ranks of its own, is ahead of training: the responses of a step come from the weights
    that the step so many before began with. 0: both take turns.
    """

    strategy: str = "colocate"
    pools: dict[str, list[int]] = field(default_factory=dict)
    max_staleness: int = 0

    def check(self, where: str) -> None:
        check_bounds(self, where, "max_staleness", least=0)
        if self.strategy not in STRATEGIES:
            hint = nearest(self.strategy, STRATEGIES) or ";"
            raise ValueError(f"unknown {where}.strategy {self.strategy!r}{hint} available: {', '.join(STRATEGIES)}")


def place_roles(config: PlacementConfig, pool_of: Mapping[str, str | None], world_size: int) -> dict[str, ResourcePool]:
    """Role -> pool. ``pool_of``: role (or ``<role>.calls.<method>``) -> the pool it names, or None.

    Raises ValueError for pools that do not exist or fit, that nothing names, and for ranks in none.
    """
    pools = {name: _checked(name, ranks, world_size) for name, ranks in config.pools.items()}
    if config.strategy == "split" and world_size < 2:
        raise ValueError(f"placement.strategy='split' needs at least 2 ranks, this job has {world_size}")
    placed = {}
    for role, name in pool_of.items():
        if name is None:
            placed[role] = _by_strategy(config.strategy, role, world_size)
        elif name in pools:
            placed[role] = pools[name]
        else:
            raise ValueError(
                f"models.{role}.pool={name!r} is not in placement.pools{nearest(name, list(pools)) or ';'} "
                f"available: {', '.join(pools) or 'none'}"
            )
    unused = sorted(set(pools) - set(pool_of.values()))
    if unused:
        raise ValueError(
            f"placement.pools.{unused[0]}: no role's pool names it; give it to a role (models.<role>.pool or "
            f"models.<role>.calls.<method>.pool) or remove it"
        )
    idle = sorted(set(range(world_size)) - {rank for pool in placed.values() for rank in pool.ranks})
    if idle:
        raise ValueError(
            f"ranks {idle} of {world_size} are in no role's pool; start fewer ranks or put them into placement.pools"
        )
    return placed


def _by_strategy(strategy: str, role: str, world_size: int) -> ResourcePool:
    if strategy == "colocate":
        return ResourcePool("all", tuple(range(world_size)))
    half = world_size // 2
    if role in ("actor", "reference"):
        return ResourcePool("first_half", tuple(range(half)))
    return ResourcePool("second_half", tuple(range(half, world_size)))


def _checked(name: str, ranks: Sequence[int], world_size: int) -> ResourcePool:
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"placement.pools.{name}: rank {outside[0]} does not exist; this job has ranks 0 to {world_size - 1}")
    try:
        return ResourcePool(name, tuple(ranks))
    except ValueError as error:
        raise ValueError(f"placement.pools.{name}: {error}") from error
