"""The dataflow graph of one step, as traced from the algorithm's own script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_spmd.controller.reference import Production


@dataclass(eq=False, slots=True)
class CallNode:
    """One model function call. ``kind``: what :func:`register` was told. ``inputs``: each field with the nodes that make it (-1: a
    source such as the loader, or a call of an earlier script) and its name there (another after ``rename``). ``rows``,
    ``mini_batches`` (optimizer steps per epoch) and ``epochs`` are those of the trace. ``call``: as it was traced; ``needs``:
    the calls whose token counts it needs, and the ranks that must know them."""

    index: int
    role: str
    method: str
    kind: str
    site: str
    inputs: tuple[tuple[str, int, str], ...]
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    rows: int
    mini_batches: int
    epochs: int
    call: Production
    needs: Mapping[Production, frozenset[int]]

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass
class Graph:
    nodes: list[CallNode] = field(default_factory=list)

    def edges(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(producer node, consumer node, fields), in program order."""
        found: dict[tuple[int, int], dict[str, None]] = {}
        for node in self.nodes:
            for name, producer, _ in node.inputs:
                if producer >= 0:
                    found.setdefault((producer, node.index), {})[name] = None
        return [(a, b, tuple(sorted(fields))) for (a, b), fields in sorted(found.items())]

    def consumers(self) -> dict[int, list[CallNode]]:
        """The nodes that read what each node makes, in program order."""
        found: dict[int, list[CallNode]] = {}
        for producer, consumer, _ in self.edges():
            found.setdefault(producer, []).append(self.nodes[consumer])
        return found

    def readers_of_lengths(self) -> dict[Production, frozenset[int]]:
        """The calls that make token counts, of this script and of earlier ones, and the global ranks that must know these."""
        found: dict[Production, frozenset[int]] = {}
        for node in self.nodes:
            for maker, ranks in node.needs.items():
                found[maker] = found.get(maker, frozenset()) | ranks
        return found

    def to_json(self) -> dict[str, object]:
        names = ("kind", "site", "outputs", "ranks", "rows", "mini_batches", "epochs")
        nodes = [{"call": node.name, **{name: getattr(node, name) for name in names}} for node in self.nodes]
        return {"nodes": nodes, "edges": [{"from": a, "to": b, "fields": list(fields)} for a, b, fields in self.edges()]}
