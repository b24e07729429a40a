"""Where roles live: sets of ranks, and the shape that a role gives to its set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlhf_spmd.parallel.layout import GenerationLayout, Layout


@dataclass(frozen=True)
class ResourcePool:
    """A named set of global ranks, ascending. Roles on one pool are colocated; pools may be equal, disjoint or overlap."""

    name: str
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError(f"pool '{self.name}' has no ranks")
        if sorted(set(self.ranks)) != list(self.ranks):
            raise ValueError(f"pool '{self.name}': ranks {list(self.ranks)} must ascend without repeats")

    def __str__(self) -> str:
        mine = set(self.ranks)
        starts = [rank for rank in self.ranks if rank - 1 not in mine]
        ends = [rank for rank in self.ranks if rank + 1 not in mine]
        runs = (f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
        return f"{self.name} [{', '.join(runs)}]"


@dataclass(frozen=True)
class GroupShape:
    """What a protocol may know of a role: its layout, and its generation layout where it has one."""

    layout: Layout
    generation: GenerationLayout | None = None

    @property
    def size(self) -> int:
        return self.layout.size

    @cached_property
    def generating(self) -> GenerationLayout:
        """The generation layout; without one, the replicas of the training layout generate as they are."""
        return self.generation or GenerationLayout(self.layout, self.layout.pp, self.layout.tp)
