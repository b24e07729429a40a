"""The dataflow graph of one step, as traced from the algorithm's own script."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallNode:
    """One model function call. ``inputs`` maps each input field to the node that makes it (-1: a source such as the loader)
    and its name there (another after ``rename``). ``lengths_from`` is the node whose output set the rows' token counts (-1: the
    loader)."""

    index: int
    role: str
    method: str
    site: str
    inputs: dict[str, tuple[int, str]]
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    lengths_from: int

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass
class Graph:
    nodes: list[CallNode] = field(default_factory=list)

    def edges(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(producer node, consumer node, fields), in program order."""
        found: dict[tuple[int, int], list[str]] = {}
        for node in self.nodes:
            for name, (producer, _) in node.inputs.items():
                if producer >= 0:
                    found.setdefault((producer, node.index), []).append(name)
        return [(a, b, tuple(sorted(fields))) for (a, b), fields in sorted(found.items())]

    def consumers(self) -> dict[int, list[CallNode]]:
        """The nodes that read what each node makes, in program order."""
        found: dict[int, list[CallNode]] = {}
        for producer, consumer, _ in self.edges():
            found.setdefault(producer, []).append(self.nodes[consumer])
        return found

    def readers_of_lengths(self, producer: int) -> list[int]:
        """Global ranks that must know the lengths which ``producer`` made: members of every call on such rows."""
        ranks = set(self.nodes[producer].ranks)
        for node in self.nodes:
            if node.lengths_from == producer:
                ranks.update(node.ranks)
        return sorted(ranks)

    def to_json(self) -> dict[str, object]:
        return {
            "nodes": [{"call": n.name, "site": n.site, "outputs": list(n.outputs), "ranks": list(n.ranks)} for n in self.nodes],
            "edges": [{"from": a, "to": b, "fields": list(fields)} for a, b, fields in self.edges()],
        }
