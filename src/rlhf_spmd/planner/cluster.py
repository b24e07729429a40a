"""Input and output of placement strategies: the ranks of a job, its roles, the work of a step's calls; and an assignment. Pure."""

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

    - weights: those that a token is multiplied with; 0 without a model
    - origin: the directory that they come from
    - unit: its layout needs a multiple of so many ranks, or exactly so many if ``fixed``
    - calls: methods that may run on other ranks than the role's -> their unit
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
    """A strategy's answer. ``roles``: role -> its ranks. ``calls``: ``role.method`` -> its ranks, if they are not the role's."""

    roles: Mapping[str, Sequence[int]]
    calls: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankShare:
    """Roles, or calls as ``role.method``, that get the same ranks.

    ``unit`` and ``fixed``: as of :class:`RoleFacts`. ``work``: relative to other shares. ``replicas``: (ranks of a replica,
    prompts) of each generating call, whose replicas must divide the prompts.
    """

    names: tuple[str, ...]
    unit: int = 1
    fixed: bool = False
    work: float = 1.0
    replicas: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """``size`` ranks, ``local_size`` on each host. ``ratios``: role or ``role.method`` -> its share of the ranks, as APP's model
    placement ratios."""

    size: int
    local_size: int
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def everyone(self) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(range(self.size))

    def count(self, ratio: float, unit: int) -> int:
        """Return the number of ranks nearest to this share that is a multiple of ``unit``, at least one unit."""
        return max(math.floor(ratio * self.size / unit + 0.5), 1) * unit

    def _sizes(self, part: RankShare, ratio: float | None, host: int) -> list[int]:
        """Return the numbers of ranks that a share can have, smallest first. Without a ratio they are multiples of ``host``."""
        if part.fixed:
            return [part.unit]
        if ratio is not None:
            return [self.count(ratio, part.unit)]
        step = math.lcm(part.unit, host)
        counts = range(step, self.size + 1, step)
        fitting = [n for n in counts if all(prompts % max(n // of, 1) == 0 for of, prompts in part.replicas)]
        return fitting or ([step] if host == 1 else [])

    def cut(self, parts: Sequence[RankShare]) -> list[tuple[int, ...]]:
        """Return all ranks in order, cut into one run for each part.

        A part has as many ranks as its ratio or its layout says. The other parts share the rest by their work, in whole hosts
        if possible: again and again the part with most work for each rank grows. Raises PlacementError with the numbers if they
        do not add up to all ranks.
        """
        ratios = [next((self.ratios[name] for name in part.names if name in self.ratios), None) for part in parts]
        if not parts:
            return []
        for host in (self.local_size, 1):
            larger = [self._sizes(part, ratio, host)[::-1] for part, ratio in zip(parts, ratios, strict=True)]
            if not all(larger):  # no number of whole hosts divides the prompts
                continue
            counts = [sizes.pop() for sizes in larger]
            while fitting := [
                i for i, sizes in enumerate(larger) if sizes and sizes[-1] - counts[i] <= self.size - sum(counts)
            ]:
                busiest = max(fitting, key=lambda i: (parts[i].work / counts[i], i))
                counts[busiest] = larger[busiest].pop()
            if sum(counts) == self.size:
                ends = [sum(counts[: i + 1]) for i in range(len(counts))]
                return [tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        few = sum(counts) > self.size
        listed = [
            f"{' + '.join(part.names)} {'at least ' if few and ratio is None and not part.fixed else ''}{count}"
            + ("" if ratio is None else f" by placement.ratios ({ratio:g})")
            for part, ratio, count in zip(parts, ratios, counts, strict=True)
        ]
        raise PlacementError(
            f"needs {'at least ' if few else ''}{sum(counts)} ranks ({', '.join(listed)}), this job has {self.size}; "
            f"{'start more ranks or lower' if few else 'start fewer ranks or change'} placement.ratios and layouts"
        )


def unit_of(name: str, roles: Roles) -> int:
    """Return the unit of a role, or of a method as ``role.method``."""
    role, _, method = name.partition(".")
    return roles[role].calls[method] if method else roles[role].unit


def share_of(
    names: Iterable[str], roles: Roles, work: Mapping[str, float] | None = None, graph: Graph | None = None
) -> RankShare:
    """Return the share of roles, or methods as ``role.method``, that get the same ranks. ``work``: of all calls, see
    :func:`count_work`. ``graph``: a step whose generating calls limit the number of replicas."""
    names = tuple(names)
    unit, fixed = math.lcm(*(unit_of(name, roles) for name in names)), any(roles[n].fixed for n in names if n in roles)
    amount = 1.0 if work is None else sum(amount for call, amount in work.items() if call.split(".")[0] in names)
    replicas = []
    for call in graph.nodes if graph else ():
        role, method = call.role.name, call.spec.name
        if call.spec.kind == "generate" and call.rows is not None and (role in names or f"{role}.{method}" in names):
            replicas.append((roles[role].calls[method], call.rows.num_groups))
    return RankShare(names, unit, fixed, amount, tuple(replicas))


def count_work(graph: Graph, roles: Roles) -> dict[str, float]:
    """Return ``role.method`` -> weights that its calls in a step pass over, summed over rows and epochs."""
    work: dict[str, float] = {}
    for call in graph.nodes:
        name, facts = f"{call.role.name}.{call.spec.name}", roles.get(call.role.name, RoleFacts())
        work[name] = work.get(name, 0.0) + PASSES.get(call.spec.kind, 0) * call.epochs * call.num_rows * facts.weights
    return work


def generating_calls(graph: Graph, roles: Roles) -> list[str]:
    """Return the methods of these roles that generate, as ``role.method``, in program order."""
    calls = [call for call in graph.nodes if call.spec.kind == "generate" and call.role.name in roles]
    return list(dict.fromkeys(f"{call.role.name}.{call.spec.name}" for call in calls))


def waits(graph: Graph) -> list[set[int]]:
    """Return for each call the earlier ones that it waits for, directly or not: those it reads from and those that trained its
    role."""
    read: dict[int, set[int]] = {}
    for producer, consumer, _ in graph.edges():
        read.setdefault(consumer, set()).add(producer)
    waited: list[set[int]] = []
    trained: dict[str, set[int]] = {}
    for call_index, call in enumerate(graph.nodes):
        direct = read.get(call_index, set()) | trained.get(call.role.name, set())
        waited.append(direct.union(*(waited[earlier] for earlier in direct)))
        if call.spec.kind == "train":
            trained.setdefault(call.role.name, set()).add(call_index)
    return waited
