"""Records of calls: what each takes, what it made, where the data lie; and the dataflow graph that they form.

Records are the same on every rank. The data are in the :class:`CallRecord` of the ranks that made them, and live as long as something
refers to it: a variable of the script until the step ends, or longer if the script keeps one (``data.kept``). A record also refers to
the calls whose token counts decided where its rows go.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller.protocols import EQUAL_SPEEDS, GroupShape, Protocol, ProtocolRanks, RankSpeeds, ResourcePool
from rlhf_spmd.controller.rows import Partition, PartitionSpec, RowIndex, RowPart
from rlhf_spmd.controller.signature import PROMPT, MethodSpec
from rlhf_spmd.data.batch import Batch

_serial = count()


class Role:
    """What the controller knows about a role: its pool, its shape, and hooks around its calls. Every rank has the same object.

    - members(protocol): which of its ranks compute which part of a call's rows, and which hold them after it
    - ignored_inputs: optional input fields that this role does not take
    - omitted_outputs: optional output fields that it does not make
    - weight_sources: ranks that send it weights before each call
    - prefetches: True if :meth:`prefetch` does anything
    - streams_rollouts: True if its generate calls send rows before all have ended (``controller.rollout_streamer``)
    """

    ignored_inputs: frozenset[str] = frozenset()
    omitted_outputs: frozenset[str] = frozenset()
    weight_sources: tuple[int, ...] = ()
    prefetches = False
    streams_rollouts = False

    def __init__(self, name: str, pool: ResourcePool, shape: GroupShape, speeds: RankSpeeds = EQUAL_SPEEDS) -> None:
        assert shape.size == len(pool.ranks), f"{name}: layout of {shape.size} ranks on pool '{pool.name}' of {len(pool.ranks)}"
        self.name = name
        self.pool = pool
        self.shape = shape
        self.members: Callable[[Protocol], ProtocolRanks] = cache(lambda protocol: ProtocolRanks(protocol, shape, pool, speeds))

    def enter(self, call: CallRecord) -> None:
        """Prepare for a call of this role. Runs before each: on every rank of the world, in program order."""

    def leave(self, call: CallRecord) -> None:
        """Clean up after a call of this role. Runs after each: on every rank of the world, in program order."""

    def prefetch(self) -> None:
        """Start to bring the model back to the device. Runs on members, one call before this role's next one on this rank."""

    def starts_early(self, method: str) -> bool:
        """Return True if calls of ``method``, which need no model, may start on whole groups during a generate call on the same rank.

        The answer is the same on every rank.
        """
        return False

    def start_early(self, rows: Batch, num_ranks: int) -> None:
        """Start, on these whole groups, the next call of a method that :meth:`starts_early`.

        ``num_ranks``: the number of ranks that share the rows. It runs between generation steps, so it must return at once. So must
        :meth:`continue_early`, which runs after each step.
        """

    def continue_early(self) -> None:
        """Go on with the call that was started."""

    def drop_early(self) -> None:
        """Forget the call that was started, because the script does not make it."""


@dataclass(eq=False)
class ReplicatedBatch:
    """Rows that every rank holds in full, such as the loader's prompts."""

    data: Batch
    seq: int = -1
    node: int = -1
    serial: int = field(default_factory=_serial.__next__)

    def lengths(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens in field ``name`` for each of the rows ``ids``."""
        return _values_at(self.data.row_ids.numpy(), self.data[name].lengths.numpy(), ids)


@dataclass(eq=False, slots=True)
class FieldShard:
    """The rows of a field that one producer made.

    ``name``: the field's name at the producer. ``positions`` int64: the rows' positions in the reference. ``ids`` int64: their ids at
    the producer.
    """

    producer: ReplicatedBatch | CallRecord
    name: str
    positions: np.ndarray
    ids: np.ndarray

    def same(self, other: FieldShard) -> bool:
        """Return True if both are the same data, under whatever name."""
        pairs = (self.positions, other.positions), (self.ids, other.ids)
        is_one_field = self.producer is other.producer and self.name == other.name
        return is_one_field and all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)


@dataclass(eq=False)
class CallInput:
    """What a call takes from one reference: ``fields`` (name -> shards) of ``rows``, partitioned by ``partition_spec``.

    - tokens: the token fields whose lengths balance the parts
    - sources: what comes from each producer for the same rows, in program order: a shard, and the names of its fields (name here ->
      name at the producer)
    - counts_key: identifies the token counts
    - length_producers: the calls whose token counts the partition needs
    """

    rows: RowIndex
    fields: Mapping[str, tuple[FieldShard, ...]]
    tokens: tuple[FieldShard, ...]
    partition_spec: PartitionSpec
    sources: list[tuple[FieldShard, dict[str, str]]] = field(default_factory=list)
    _partition: Partition | None = None

    def __post_init__(self) -> None:
        if self.fields and not self.sources:
            self.sources = _sources(self.fields)
        self.counts_key: Hashable = tuple(
            [(shard.producer.serial, shard.name, _rows_key(shard, self.rows)) for shard in self.tokens]
        )
        self.length_producers: list[CallRecord] = []
        if self.partition_spec.num_parts > 1 and self.partition_spec not in self.rows.fixed_parts:
            self.length_producers = [shard.producer for shard in self.tokens if isinstance(shard.producer, CallRecord)]

    @property
    def partition(self) -> Partition:
        """Return the partition of the rows. May wait for token counts that other ranks send."""
        if self._partition is None:
            self._partition = self.rows.partition(self.partition_spec, self.counts_key, self._count)
        return self._partition

    def _count(self) -> np.ndarray:
        """Return int64 [2, rows]: the tokens of each row, and how many of them are its prompt's, which a group shares.

        If only prompts count, because responses are still to come, the second number is 0.
        """
        counts = np.zeros((2, len(self.rows)), dtype=np.int64)
        for shard in self.tokens:
            lengths = shard.producer.lengths(shard.name, shard.ids)
            counts[0, shard.positions] += lengths
            counts[1, shard.positions] += lengths if shard.name == PROMPT else 0
        if all(shard.name == PROMPT for shard in self.tokens):
            counts[1] = 0
        counts[0] += not self.tokens
        return counts

    def part(self, index: int) -> RowPart:
        return self.partition.part(index)

    def producing_calls(self) -> list[tuple[CallRecord, np.ndarray]]:
        """Return the calls that make the sources, each with the ids of the rows at that call."""
        return [(shard.producer, shard.ids) for shard, _ in self.sources if isinstance(shard.producer, CallRecord)]

    def forget(self) -> None:
        """Release the inputs, once the call has ended."""
        self.fields, self.sources = {}, []


def _rows_key(shard: FieldShard, rows: RowIndex) -> int:
    """Return a number that identifies a shard's row ids at the producer and positions here; 0 if it has exactly ``rows``."""
    if shard.ids is rows.row_ids or (len(shard.positions) == len(rows) and np.array_equal(shard.ids, rows.row_ids)):
        return 0
    return hash((shard.positions.tobytes(), shard.ids.tobytes()))


def _sources(fields: Mapping[str, tuple[FieldShard, ...]]) -> list[tuple[FieldShard, dict[str, str]]]:
    sources: dict[tuple[int, int, int], tuple[FieldShard, dict[str, str]]] = {}
    for name, shards in fields.items():
        for shard in shards:
            rows_key = id(shard.producer), id(shard.positions), id(shard.ids)
            sources.setdefault(rows_key, (shard, {}))[1][name] = shard.name
    return sorted(sources.values(), key=lambda source: source[0].producer.seq)


@dataclass(eq=False)
class CallRecord:
    """One call: its inputs and results, and on the ranks that hold them, the data.

    - seq: the call's number in the run, the same on every rank; -1 in a trace
    - node: its place in the graph of its script
    - version: the version of the role's weights: the number of calls that have trained it
    - read_lengths: returns the token counts that the call made, possibly after waiting for other ranks
    - data: the rows that this rank holds
    - values: the value that the body returned on this rank, for ``Controller.get``
    - lengths_sent_to: the ranks to which its token counts were sent
    - row_lengths: the token counts, once this rank knows them
    - site: in a trace, the line of the script (``ppo.py:31``)
    - in_chunks: it can take its rows while they are generated
    """

    seq: int
    node: int
    role: Role
    spec: MethodSpec
    name: str
    outputs: tuple[str, ...]
    inputs: list[CallInput]
    args: tuple[Any, ...]
    version: int
    read_lengths: Callable[[CallRecord], np.ndarray]
    data: Batch | None = None
    values: Any = None
    lengths_sent_to: set[int] = field(default_factory=set)
    row_lengths: np.ndarray | None = None
    serial: int = field(default_factory=_serial.__next__)
    site: str = ""
    in_chunks: bool = False

    def __post_init__(self) -> None:
        self.members: ProtocolRanks = self.role.members(self.spec.protocol)

    @property
    def rows(self) -> RowIndex | None:
        return self.inputs[0].rows if self.inputs else None

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all references together."""
        return sum(len(call_input.rows) for call_input in self.inputs)

    @property
    def num_mini_batches(self) -> int:
        """Return the number of mini-batches, and so of optimizer steps, in each epoch of a train call."""
        return self.inputs[0].partition_spec.num_mini_batches if self.inputs else 1

    @property
    def epochs(self) -> int:
        return self.inputs[0].partition_spec.epochs if self.inputs else 1

    def store_result(self, result: Any, index: int, rank: int) -> None:
        """Store what the body returned on ``rank`` for part ``index``."""
        data, self.values = result if isinstance(result, tuple) else (result, None)
        if isinstance(data, Batch):
            self._check_result(data, index, rank)
            self.data = data
        elif data is not None:
            self.values = data

    def _check_result(self, data: Batch, index: int, rank: int) -> None:
        """Assert that the body returned the declared fields of the rows of part ``index``, or in a generate call of some of them."""
        missing = set(self.outputs) - set(data.fields)
        is_holder = bool(missing) and rank in self.members.holders(index)
        assert not (is_holder and len(data)), f"{self.name} declares {sorted(missing)}, but did not return it"
        ids = data.row_ids
        part_ids = self.inputs[0].part(index).row_ids
        if not (ids is part_ids or torch.equal(ids, part_ids)):
            is_subset = bool(torch.isin(ids, part_ids).all()) and bool((ids.diff() > 0).all())
            assert self.spec.kind == "generate" and is_subset, (
                f"{self.name} returned other rows than it got, or in another order"
            )

    def lengths(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens in field ``name`` for each of the rows ``ids``. May wait for the ranks that made them."""
        assert name == self.spec.lengths_of, (
            f"{self.name} makes token field {name!r}, but declares lengths_of={self.spec.lengths_of!r}"
        )
        return _values_at(self.inputs[0].rows.row_ids, self.read_lengths(self), ids)

    def parts_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the part of this call that made each of the rows ``ids``, int64."""
        first = self.inputs[0]
        return _values_at(first.rows.row_ids, first.partition.parts[0], ids)


def _values_at(row_ids: np.ndarray, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the ``values`` of the rows ``ids``. ``values`` belong to ``row_ids``, which ascend."""
    if row_ids is ids:
        return values
    positions = np.searchsorted(row_ids, ids)
    assert np.array_equal(row_ids[np.minimum(positions, len(row_ids) - 1)], ids), "rows that the call did not make"
    return values[positions]


class CallStats(NamedTuple):
    """The size of a call that a script has made. ``num_rows``: the rows of all its references together."""

    role: str
    kind: str
    num_rows: int
    epochs: int


@dataclass
class Graph:
    """The dataflow of one step, traced from the algorithm's own script.

    ``nodes``: the traced calls; a call's ``node`` is its place here. ``returned``: the calls that the script returned.
    """

    nodes: list[CallRecord] = field(default_factory=list)
    returned: list[CallRecord] = field(default_factory=list)

    def edges(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """Return (producer node, consumer node, fields) in program order. Only calls of this script are producers."""
        edges: dict[tuple[int, int], dict[str, None]] = {}
        for call in self.nodes:
            for name, shards in (item for call_input in call.inputs for item in call_input.fields.items()):
                for producer in (shard.producer for shard in shards):
                    if 0 <= producer.node < len(self.nodes) and self.nodes[producer.node] is producer:
                        edges.setdefault((producer.node, call.node), {})[name] = None
        return [(a, b, tuple(sorted(fields))) for (a, b), fields in sorted(edges.items())]

    def consumers(self) -> dict[int, list[CallRecord]]:
        """Return node -> the calls that read what it makes, in program order."""
        consumers: dict[int, list[CallRecord]] = {}
        for producer, consumer, _ in self.edges():
            consumers.setdefault(producer, []).append(self.nodes[consumer])
        return consumers

    def to_json(self) -> dict[str, object]:
        nodes = [
            {"call": call.name, "kind": call.spec.kind, "site": call.site, "outputs": call.outputs}
            | {
                "ranks": call.role.pool.ranks,
                "rows": call.num_rows,
                "mini_batches": call.num_mini_batches,
                "epochs": call.epochs,
            }
            for call in self.nodes
        ]
        return {"nodes": nodes, "edges": [{"from": a, "to": b, "fields": list(fields)} for a, b, fields in self.edges()]}
