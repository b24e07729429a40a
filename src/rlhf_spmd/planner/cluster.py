"""Input and output of placement strategies: roles, ranks of a job and work of a step's calls; an assignment. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_spmd.controller import Graph

# Passes over a model's weights for each row. Decoding reads the weights for every token, which takes about as long as training.
PASSES = {"generate": 3, "infer": 1, "train": 3}


class PlacementError(ValueError):
    """A strategy cannot place these roles on these ranks. The message continues a sentence that begins with the strategy's
    name."""


@dataclass(frozen=True)
class RoleFacts:
    """Facts of a role that strategies read.

    - weights: number of weights that a token is multiplied with; 0 for a role without a model
    - trained: the step trains its weights
    - origin: the directory that the weights come from
    - unit: number of ranks of which the role's layout needs a multiple
    - fixed: the layout needs exactly ``unit`` ranks
    - calls: method that may run on other ranks than the role's -> its unit
    """

    weights: float = 0.0
    trained: bool = False
    origin: str | None = None
    unit: int = 1
    fixed: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)


Roles = Mapping[str, RoleFacts]
Trace = Callable[[], Graph]  # traces a step


@dataclass(frozen=True)
class Assignment:
    """A strategy's answer.

    - roles: role -> its ranks
    - calls: ``role.method`` -> its ranks, if they are not the role's
    """

    roles: Mapping[str, Sequence[int]]
    calls: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankShare:
    """Roles, or calls as ``role.method``, that get the same ranks.

    - unit, fixed: as in :class:`RoleFacts`
    - work: relative to other shares
    - replicas: (ranks of a replica, prompts) of each generating call; the number of replicas must divide the prompts
    """

    names: tuple[str, ...]
    unit: int = 1
    fixed: bool = False
    work: float = 1.0
    replicas: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job.

    - size: number of all ranks
    - local_size: number of ranks on each host
    - ratios: role or ``role.method`` -> its share of all ranks (APP's model placement ratios)
    """

    size: int
    local_size: int
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def everyone(self) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(range(self.size))

    def count(self, ratio: float, unit: int) -> int:
        """Return the number of ranks nearest to this share of all that is a multiple of ``unit``, at least ``unit``."""
        return max(math.floor(ratio * self.size / unit + 0.5), 1) * unit

    def cut(self, parts: Sequence[RankShare]) -> list[tuple[int, ...]]:
        """Return all ranks in order, cut into consecutive ranks for each part.

        A part has as many ranks as its ratio or its layout says. The other parts share the rest by their work, in complete hosts
        if possible. Raises PlacementError with the numbers if they do not add up to all ranks.
        """
        ratios = [next((self.ratios[name] for name in part.names if name in self.ratios), None) for part in parts]
        if not parts:
            return []
        for multiple in (self.local_size, 1):
            sizes = [self._possible_sizes(part, ratio, multiple) for part, ratio in zip(parts, ratios, strict=True)]
            if not all(sizes):  # no number of complete hosts divides the prompts
                continue
            counts = self._grow_by_work(parts, sizes)
            if sum(counts) == self.size:
                ends = [sum(counts[: i + 1]) for i in range(len(counts))]
                return [tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        raise self._count_error(parts, ratios, counts)

    def _possible_sizes(self, part: RankShare, ratio: float | None, multiple: int) -> list[int]:
        """Return the numbers of ranks that a share can have, ascending. Without a ratio they are multiples of ``multiple``."""
        if part.fixed:
            return [part.unit]
        if ratio is not None:
            return [self.count(ratio, part.unit)]
        step = math.lcm(part.unit, multiple)
        counts = range(step, self.size + 1, step)
        fitting = [n for n in counts if all(prompts % max(n // ranks, 1) == 0 for ranks, prompts in part.replicas)]
        return fitting or ([step] if multiple == 1 else [])

    def _grow_by_work(self, parts: Sequence[RankShare], sizes: Sequence[list[int]]) -> list[int]:
        """Return one of its ``sizes`` for each part: the least, then again and again the part with most work for each rank grows."""
        counts = [part_sizes[0] for part_sizes in sizes]
        larger = [part_sizes[:0:-1] for part_sizes in sizes]
        while fitting := [i for i, rest in enumerate(larger) if rest and rest[-1] - counts[i] <= self.size - sum(counts)]:
            busiest = max(fitting, key=lambda i: (parts[i].work / counts[i], i))
            counts[busiest] = larger[busiest].pop()
        return counts

    def _count_error(self, parts: Sequence[RankShare], ratios: Sequence[float | None], counts: Sequence[int]) -> PlacementError:
        """Return the error for parts whose ``counts`` do not add up to all ranks."""
        needs_more_ranks = sum(counts) > self.size
        listed = [
            f"{' + '.join(part.names)} {'at least ' if needs_more_ranks and ratio is None and not part.fixed else ''}{count}"
            + ("" if ratio is None else f" by placement.ratios ({ratio:g})")
            for part, ratio, count in zip(parts, ratios, counts, strict=True)
        ]
        return PlacementError(
            f"needs {'at least ' if needs_more_ranks else ''}{sum(counts)} ranks ({', '.join(listed)}), this job has {self.size}; "
            f"{'start more ranks or lower' if needs_more_ranks else 'start fewer ranks or change'} placement.ratios and layouts"
        )


def unit_of(name: str, roles: Roles) -> int:
    """Return the unit of a role, or of a method as ``role.method``."""
    role, _, method = name.partition(".")
    return roles[role].calls[method] if method else roles[role].unit


def share_of(
    names: Iterable[str], roles: Roles, work: Mapping[str, float] | None = None, graph: Graph | None = None
) -> RankShare:
    """Return the share of roles, or methods as ``role.method``, that get the same ranks.

    ``work``: :func:`count_work` of the step. ``graph``: a step whose generating calls limit the number of replicas.
    """
    names = tuple(names)
    unit = math.lcm(*(unit_of(name, roles) for name in names))
    fixed = any(roles[name].fixed for name in names if name in roles)
    amount = 1.0 if work is None else sum(amount for call, amount in work.items() if call.split(".")[0] in names)
    replicas = []
    for call in graph.nodes if graph else ():
        role = call.role.name
        method = call.spec.name
        if call.spec.kind == "generate" and call.rows is not None and (role in names or f"{role}.{method}" in names):
            replicas.append((roles[role].calls[method], call.rows.num_groups))
    return RankShare(names, unit, fixed, amount, tuple(replicas))


def count_work(graph: Graph, roles: Roles) -> dict[str, float]:
    """Return ``role.method`` -> weights that its calls in a step pass over, summed over rows and epochs."""
    work: dict[str, float] = {}
    for call in graph.nodes:
        name = f"{call.role.name}.{call.spec.name}"
        facts = roles.get(call.role.name, RoleFacts())
        work[name] = work.get(name, 0.0) + PASSES.get(call.spec.kind, 0) * call.epochs * call.num_rows * facts.weights
    return work


def generating_calls(graph: Graph, roles: Roles) -> list[str]:
    """Return the methods of these roles that generate, as ``role.method``, in program order."""
    calls = [call for call in graph.nodes if call.spec.kind == "generate" and call.role.name in roles]
    return list(dict.fromkeys(f"{call.role.name}.{call.spec.name}" for call in calls))


def waits(graph: Graph) -> list[set[int]]:
    """Return for each call the indices of the earlier calls that it waits for, directly or not.

    A call waits directly for those that it reads from and those that trained its role.
    """
    producers: dict[int, set[int]] = {}
    for producer, consumer, _ in graph.edges():
        producers.setdefault(consumer, set()).add(producer)
    waited: list[set[int]] = []
    trainings: dict[str, set[int]] = {}
    for call_index, call in enumerate(graph.nodes):
        direct = producers.get(call_index, set()) | trainings.get(call.role.name, set())
        waited.append(direct.union(*(waited[earlier] for earlier in direct)))
        if call.spec.kind == "train":
            trainings.setdefault(call.role.name, set()).add(call_index)
    return waited
