"""The calls of a step that a plan places: models, rows, what they wait for, and the layouts that they can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_spmd.controller import CallRecord, Graph
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.quantized import check_quantized
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner.cluster import waits
from rlhf_spmd.planner.plan_file import PlannedCall, span_of
from rlhf_spmd.planner.shape import ModelShape, Workload, divisors, shape_of
from rlhf_spmd.training.roles import RolePlan

KINDS = ("generate", "infer", "train")
MOST_STAGES = 16


@dataclass(frozen=True)
class PlannedNode:
    """A call of the graph that a plan places. ``name``: as ``role.call``; ``method``: as the configuration names it. ``linked``: it
    trains, too, or another call is of the same method, so that it runs where the role is at home. ``dealt``: groups or rows that go
    to its replicas. ``captures``: on replicas of one rank its steps can be CUDA graphs."""

    name: str
    role: str
    method: str
    kind: str
    after: frozenset[int]
    spec: ModelSpec
    shape: ModelShape
    work: Workload
    plan: RolePlan
    dealt: int
    captures: bool = False
    home: bool = False
    linked: bool = False

    @property
    def trained(self) -> bool:
        return self.plan.trained


def planned_nodes(graph: Graph, plans: Mapping[str, RolePlan], work: Workload) -> list[PlannedNode]:
    """The calls of roles with a model, in program order. ``work``: lengths of rows, and how many there are of a prompt."""
    waited = waits(graph)
    places = [i for i, call in enumerate(graph.nodes) if call.spec.kind in KINDS and plans[call.role.name].spec is not None]
    number = {place: i for i, place in enumerate(places)}
    found: list[PlannedNode] = []
    for place in places:
        call = graph.nodes[place]
        role, plan = call.role.name, plans[call.role.name]
        assert plan.spec is not None and call.spec.kind is not None
        head: str = plan.worker.head  # type: ignore[union-attr]
        twins = sum(other.role.name == role and other.spec.name == call.spec.name for other in graph.nodes)
        found.append(
            PlannedNode(
                call.name,
                role,
                call.spec.name,
                call.spec.kind,
                frozenset(number[i] for i in waited[place] if i in number),
                plan.spec,
                shape_of(plan.spec, head),
                replace(work, rows=call.num_rows, mini_batches=call.num_chunks, epochs=call.epochs, group=_group(call)),
                plan,
                _dealt(call),
                plan.spec.experts is None and _may_capture(plan.config.generation),
                # what lies in few bits is not lent to other ranks
                linked=twins > 1 or call.spec.kind == "train" or plan.config.lora.bits is not None,
            )
        )
    for role in dict.fromkeys(node.role for node in found):
        own = [i for i, node in enumerate(found) if node.role == role]
        first = next((i for i in own if found[i].kind == "train"), own[0])
        found[first] = replace(found[first], home=True, linked=False)
    return found


def _may_capture(config: GenerationConfig) -> bool:
    return config.attention not in ("torch", "cpp") and not config.speculative_tokens


def _group(call: CallRecord) -> int:
    """Rows of a group, on average."""
    groups = call.rows.num_groups if call.rows is not None else 1
    return max(round(call.num_rows / max(groups, 1)), 1)


def _dealt(call: CallRecord) -> int:
    """Things that go whole to a replica: groups where they stay together, else rows."""
    together = call.spec.kind == "generate" or (bool(call.intakes) and call.intakes[0].cut.keep_groups)
    return call.rows.num_groups if together and call.rows is not None else call.num_rows


def layouts(node: PlannedNode, size: int, slices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(pp, tp, dp) of ``size`` ranks that the model and its rows allow, tp one of ``slices``: stages of equally many layers."""
    found = []
    work, generates = node.work, node.kind == "generate"
    for tp in (n for n in slices if size % n == 0):
        for pp in (n for n in divisors(size // tp) if n <= MOST_STAGES and node.spec.num_hidden_layers % n == 0):
            dp = size // tp // pp
            least = node.dealt if generates else node.dealt // work.mini_batches
            if dp > least or (generates and least % dp):
                continue
            try:
                check_layout(node.spec, pp, tp, "")
                check_quantized(node.spec, node.plan.config.lora, tp, "")
            except ValueError:
                continue
            found.append((pp, tp, dp))
    return found


def placed_calls(nodes: Sequence[PlannedNode], plans: Mapping[str, RolePlan]) -> dict[str, PlannedCall]:
    """``nodes`` where and how ``plans`` have them. Raises ValueError for pools whose ranks are not in succession."""
    found = {}
    for node in nodes:
        plan = plans[node.role]
        elsewhere = plan.calls.get(node.method)
        pool, shape, config = (elsewhere or plan).pool, (elsewhere or plan).shape, plan.config
        ranks = pool.ranks
        if ranks != tuple(range(ranks[0], ranks[-1] + 1)):
            raise ValueError(
                f"pool '{pool.name}' of {node.name} has ranks {list(ranks)}; a plan's calls have ranks in succession"
            )
        grid, layout = shape.generating if node.kind == "generate" else shape.layout, shape.layout
        found[node.name] = PlannedCall(
            span_of(ranks),
            grid.pp,
            grid.tp,
            len(ranks) // (grid.pp * grid.tp),
            node.home,
            layout.zero if node.kind != "generate" else 0,
            layout.zero_size if node.kind != "generate" else None,
            node.kind == "train" and layout.sequence_parallel,
            config.activation_checkpointing if node.kind == "train" else "none",
            config.offload and node.home,
            config.optim.offload and node.home,
            max_num_seqs=config.generation.max_num_seqs if node.kind == "generate" else None,
        )
    return found
