"""The dataflow graph of one step, as traced from the algorithm's own script."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_spmd.controller.reference import CallRecord


class CallStats(NamedTuple):
    """A call that a script has made, without what it made. ``num_rows``: of all its references together."""

    role: str
    kind: str
    num_rows: int
    epochs: int


@dataclass
class Graph:
    """``nodes``: the calls as they were traced; a call's ``node`` is its place here. ``returned``: those that the script returned."""

    nodes: list[CallRecord] = field(default_factory=list)
    returned: list[CallRecord] = field(default_factory=list)

    def edges(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(producer node, consumer node, fields), in program order. Sources and calls of earlier scripts are no producers."""
        found: dict[tuple[int, int], dict[str, None]] = {}
        for call in self.nodes:
            for intake in call.intakes:
                for name, pieces in intake.fields.items():
                    for made_by in (piece.producer for piece in pieces):
                        if 0 <= made_by.node < len(self.nodes) and self.nodes[made_by.node] is made_by:
                            found.setdefault((made_by.node, call.node), {})[name] = None
        return [(a, b, tuple(sorted(fields))) for (a, b), fields in sorted(found.items())]

    def consumers(self) -> dict[int, list[CallRecord]]:
        """The calls that read what each node makes, in program order."""
        found: dict[int, list[CallRecord]] = {}
        for producer, consumer, _ in self.edges():
            found.setdefault(producer, []).append(self.nodes[consumer])
        return found

    def to_json(self) -> dict[str, object]:
        nodes = [
            {"call": call.name, "kind": call.spec.kind, "site": call.site, "outputs": call.outputs}
            | {"ranks": call.role.pool.ranks, "rows": call.num_rows, "mini_batches": call.num_chunks, "epochs": call.epochs}
            for call in self.nodes
        ]
        return {"nodes": nodes, "edges": [{"from": a, "to": b, "fields": list(fields)} for a, b, fields in self.edges()]}
