"""The sets of ranks that a plan may give a call: halves of halves of the cluster, and what the first or last of them leave. Pure."""

from __future__ import annotations

from functools import cache

from rlhf_spmd.planner.problem import Problem, RankRange


def halves(mesh: RankRange, local_size: int) -> tuple[RankRange, RankRange]:
    """Whole hosts where there are several, the larger half first. Halves of equal size have the same halves again."""
    hosts = -(-mesh.end // local_size) - mesh.first // local_size
    cut = (mesh.first // local_size + -(-hosts // 2)) * local_size if hosts > 1 else mesh.first + -(-mesh.count // 2)
    return RankRange(mesh.first, cut - mesh.first), RankRange(cut, mesh.end - cut)


class RankRanges:
    """Of the sizes for which some call has an option. ``of``: size -> meshes, from the first rank on."""

    def __init__(self, problem: Problem) -> None:
        self.whole, self.local_size = RankRange(0, problem.size), problem.local_size
        sizes = {option.size for call in problem.calls for option in call.options}
        nodes, todo = set(), [self.whole]
        while todo:
            node = todo.pop()
            nodes.add(node)
            todo += halves(node, self.local_size) if node.count > 1 else ()
        left = {RankRange(node.end, problem.size - node.count) for node in nodes if node.first == 0 and node != self.whole}
        left |= {RankRange(0, node.first) for node in nodes if node.end == problem.size and node.first > 0}
        self.left = sorted(mesh for mesh in left - nodes if mesh.count in sizes)
        self.of: dict[int, list[RankRange]] = {}
        for mesh in sorted({*nodes, *self.left}):
            if mesh.count in sizes:
                self.of.setdefault(mesh.count, []).append(mesh)
        self._memory = problem.memory_runs
        self.places = cache(self._places)

    def _places(self, size: int, taken: frozenset[RankRange]) -> tuple[RankRange, ...]:
        """One of all meshes of this size that differ only by a symmetry of what is ``taken``.

        Two halves that are equal in size, memory and what of each taken mesh lies in them can be exchanged, with all that any later
        call gets in them: hosts and halves go over into hosts and halves, and each taken mesh into itself. What the first or the last
        nodes leave goes over into itself as long as halves at the edges of the cluster stay, so these count as different where such
        meshes exist.
        """
        found = [mesh for mesh in self.left if mesh.count == size]
        todo = [self.whole]
        while todo:
            node = todo.pop()
            if node.count == size:
                found.append(node)
            elif node.count > size:
                first, second = halves(node, self.local_size)
                todo.append(first)
                if self._inside(first, taken) != self._inside(second, taken):
                    todo.append(second)
        return tuple(sorted(found))

    def _inside(self, node: RankRange, taken: frozenset[RankRange]) -> tuple[object, ...]:
        edges = (node.first == 0, node.end == self.whole.end) if self.left else ()
        clips = {(mesh, *_clip(mesh, node)) for mesh in taken if mesh.overlaps(node)}
        memory = [(*_clip(mesh, node), amount) for mesh, amount in self._memory if mesh.overlaps(node)]
        return node.count, edges, frozenset(clips), tuple(memory)


def _clip(mesh: RankRange, node: RankRange) -> tuple[int, int]:
    return max(mesh.first - node.first, 0), min(mesh.end - node.first, node.count)
