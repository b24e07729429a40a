"""What a placement strategy works with: the ranks of a job, the roles, how much a step's calls compute; and its answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_spmd.controller import Graph

# Passes over a model's weights for each row. Decoding reads them for every token, which takes about as long as training on it.
PASSES = {"generate": 3, "infer": 1, "train": 3}


class PlacementError(ValueError):
    """A strategy cannot place these roles on these ranks; the sentence goes on from the strategy's name."""


@dataclass(frozen=True)
class RoleFacts:
    """A role, as far as strategies know it.

    ``weights``: those that a token is multiplied with, 0 for a role without a model. ``origin``: the directory that they come from.
    ``unit``: a multiple of so many ranks holds its layout, or where that says all (``fixed``), just as many. ``calls``: methods that
    may run on other ranks than the role's -> the same number for them.
    """

    weights: float = 0.0
    trained: bool = False
    origin: str | None = None
    unit: int = 1
    fixed: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)


Roles = Mapping[str, RoleFacts]
Trace = Callable[[], Graph]  # of a step


@dataclass(frozen=True)
class Assignment:
    """``roles``: role -> its ranks. ``calls``: ``role.method`` -> the ranks of a method that runs elsewhere than its role."""

    roles: Mapping[str, Sequence[int]]
    calls: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Roles, or calls as ``role.method``, that get the same ranks; ``unit`` and ``fixed`` as of :class:`RoleFacts`. ``work``: against
    that of other parts. ``replicas``: (ranks of one, how many prompts), pairs, for generation: so many prompts are dealt evenly."""

    names: tuple[str, ...]
    unit: int = 1
    fixed: bool = False
    work: float = 1.0
    replicas: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """``size`` ranks, ``local_size`` on each host. ``ratios``: role, or ``role.method`` -> its share of the ranks (APP's model
    placement ratios)."""

    size: int
    local_size: int
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def count(self, ratio: float, unit: int) -> int:
        """The multiple of ``unit`` that is nearest to this share of the ranks, at least one."""
        return max(math.floor(ratio * self.size / unit + 0.5), 1) * unit

    def _sizes(self, part: Part, ratio: float | None, host: int) -> list[int]:
        """The numbers of ranks that a part can have, without a ratio in whole hosts of ``host``."""
        if part.fixed:
            return [part.unit]
        if ratio is not None:
            return [self.count(ratio, part.unit)]
        step = math.lcm(part.unit, host)
        counts = range(step, self.size + 1, step)
        fitting = [n for n in counts if all(prompts % max(n // of, 1) == 0 for of, prompts in part.replicas)]
        return fitting or ([step] if host == 1 else [])

    def cut(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        """All ranks, in order, for one part after the other: as many as its ratio or its layout says, of the others so that each has
        about as many as its share of the work, whole hosts where these go round.

        Raises PlacementError with the numbers where that cannot be.
        """
        given = [next((self.ratios[name] for name in part.names if name in self.ratios), None) for part in parts]
        if not parts:
            return []
        for host in (self.local_size, 1):
            larger = [self._sizes(part, ratio, host)[::-1] for part, ratio in zip(parts, given, strict=True)]
            if not all(larger):  # whole hosts of ranks that generate do not divide the prompts
                continue
            counts = [sizes.pop() for sizes in larger]
            while fitting := [i for i, more in enumerate(larger) if more and more[-1] - counts[i] <= self.size - sum(counts)]:
                least = max(fitting, key=lambda i: (parts[i].work / counts[i], i))
                counts[least] = larger[least].pop()
            if sum(counts) == self.size:
                ends = [sum(counts[: i + 1]) for i in range(len(counts))]
                return [tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        few = sum(counts) > self.size
        listed = [
            f"{' + '.join(part.names)} {'at least ' if few and ratio is None and not part.fixed else ''}{count}"
            + ("" if ratio is None else f" by placement.ratios ({ratio:g})")
            for part, ratio, count in zip(parts, given, counts, strict=True)
        ]
        raise PlacementError(
            f"needs {'at least ' if few else ''}{sum(counts)} ranks ({', '.join(listed)}), this job has {self.size}; "
            f"{'start more ranks or lower' if few else 'start fewer ranks or change'} placement.ratios and layouts"
        )


def unit_of(name: str, roles: Roles) -> int:
    """Of a role, or of a method as ``role.method``."""
    role, _, method = name.partition(".")
    return roles[role].calls[method] if method else roles[role].unit


def part_of(names: Iterable[str], roles: Roles, work: Mapping[str, float] | None = None, graph: Graph | None = None) -> Part:
    """Roles, or methods as ``role.method``, that are to have the same ranks. ``work``: of all calls, see :func:`count_work`; that of
    these roles counts. ``graph``: calls of it that generate there say what the ranks must divide."""
    names = tuple(names)
    unit, fixed = math.lcm(*(unit_of(name, roles) for name in names)), any(roles[n].fixed for n in names if n in roles)
    amount = 1.0 if work is None else sum(amount for call, amount in work.items() if call.split(".")[0] in names)
    replicas = []
    for call in graph.nodes if graph else ():
        role, method = call.role.name, call.spec.name
        if call.spec.kind == "generate" and call.rows is not None and (role in names or f"{role}.{method}" in names):
            replicas.append((roles[role].calls[method], call.rows.num_groups))
    return Part(names, unit, fixed, amount, tuple(replicas))


def count_work(graph: Graph, roles: Roles) -> dict[str, float]:
    """``role.method`` -> weights that a step's calls of it pass over, summed over rows and epochs."""
    found: dict[str, float] = {}
    for call in graph.nodes:
        name, facts = f"{call.role.name}.{call.spec.name}", roles.get(call.role.name, RoleFacts())
        found[name] = found.get(name, 0.0) + PASSES.get(call.spec.kind, 0) * call.epochs * call.num_rows * facts.weights
    return found


def generating_calls(graph: Graph, roles: Roles) -> list[str]:
    """The methods of these roles that generate, as ``role.method``, in program order."""
    calls = [call for call in graph.nodes if call.spec.kind == "generate" and call.role.name in roles]
    return list(dict.fromkeys(f"{call.role.name}.{call.spec.name}" for call in calls))


def waits(graph: Graph) -> list[set[int]]:
    """Of each node the earlier ones that it waits for, also by way of others: those it reads from, and those that trained its role."""
    read: dict[int, set[int]] = {}
    for producer, consumer, _ in graph.edges():
        read.setdefault(consumer, set()).add(producer)
    found: list[set[int]] = []
    trained: dict[str, set[int]] = {}
    for node, call in enumerate(graph.nodes):
        direct = read.get(node, set()) | trained.get(call.role.name, set())
        found.append(direct.union(*(found[earlier] for earlier in direct)))
        if call.spec.kind == "train":
            trained.setdefault(call.role.name, set()).add(node)
    return found
