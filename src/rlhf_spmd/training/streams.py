"""``data`` of an algorithm's step: its streams of rows, and references that it keeps.

A step runs twice, first as a trace, then for real. It gets the same rows from ``next()`` both times. Rows that only the trace took
go back to the loader.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.controller import Controller, Graph, PartitionSpec, Reference, source
from rlhf_spmd.data.balance import fill_by_speed, partition_by_tokens
from rlhf_spmd.data.batch import Batch, concat
from rlhf_spmd.data.loader import Loader
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.training.agent_rows import AgentRows
from rlhf_spmd.training.validation import Validation

STREAM_STRIDE = 1 << 56  # distance between the row ids of two streams, so that all row ids of a run differ


class RowStream:
    """Rows of the loader, each ``n`` times as a group. Every rank has the same; nothing is communicated.

    - n: responses to each prompt; with agents, episodes
    - number: index of the stream in the run; ids of rows and groups begin at ``number * STREAM_STRIDE``
    - agent_rows: the form of the rows, if agents answer them
    """

    # number of groups that each generation replica ends in a step; None: all groups that the step began
    num_groups: tuple[int, ...] | None = None

    def __init__(self, loader: Loader, n: int = 1, number: int = 0, agent_rows: AgentRows | None = None) -> None:
        self.loader = loader
        self.agent_rows = agent_rows
        self.n = n * self.rows_per_episode
        self.number = number
        # batches of this step, each with its reference and the state of the loader before it
        self._batches: list[tuple[Batch, Reference, dict[str, Any]]] = []
        self._position = 0  # of the next batch in ``_batches``
        self._numbers_to_keep: list[tuple[str, Tensor, Tensor]] = []  # name, entries and numbers of :meth:`keep`
        self._used: np.ndarray | None = None  # ids of the rows that :meth:`take_reported` returned

    @property
    def rows_per_episode(self) -> int:
        """Return how many row ids each episode has, of which its rows use the first; 1 without agents."""
        return 1 if self.agent_rows is None else self.agent_rows.per_episode

    @property
    def takes_reported(self) -> bool:
        """Return True if the generate call says which rows the step goes on with."""
        return self.num_groups is not None or self.agent_rows is not None

    def next(self, size: int | None = None) -> Reference:
        """Return the next ``size`` rows of the data, by default the batch size, each ``n`` times as a group."""
        size = self.loader.batch_size if size is None else size
        num_rows = size * self.n * self.loader.dataset.group_size
        if self._position < len(self._batches) and len(self._batches[self._position][0]) != num_rows:
            self._return_rows()  # the trace took another number of rows
        if self._position == len(self._batches):
            loader_state = self.loader.state_dict()
            rows = self._with_prompts(self.loader.next_batch(size).repeat(self.n))
            first = self.number * STREAM_STRIDE
            rows = Batch(rows.row_ids + first, rows.group_ids + first, rows.fields)
            self._batches.append((rows, source(rows), loader_state))
        self._position += 1
        return self._batches[self._position - 1][1]

    def _with_prompts(self, rows: Batch) -> Batch:
        return rows if self.agent_rows is None else self.agent_rows.with_prompts(rows)

    def take_reported(self, reports: list[dict[str, Any]]) -> np.ndarray:
        """Return the ids of the rows of :meth:`next` that the step goes on with.

        ``reports``: the values of the generate call. A trace has none.
        """
        ids = concat([rows for rows, *_ in self._batches]).row_ids.numpy()
        self._used = ids if self.agent_rows is None else self.agent_rows.used(ids, reports)
        return self._used

    def keep(self, rows: Reference, name: str, numbers: Tensor) -> None:
        """Keep ``numbers`` float64 [rows], the same on every rank, for rows of :meth:`next`.

        From the next step on, a batch whose rows all have such numbers has them as field ``name``; :meth:`split_by_kept`
        splits other batches. Checkpoints do not contain them: a resumed run computes them again.
        """
        self._numbers_to_keep.append((name, self._entries(rows)["entry"], numbers))

    def split_by_kept(self, rows: Reference, name: str) -> tuple[Reference, Reference]:
        """Split rows of :meth:`next` into those with numbers ``name``, which they get as a field, and the others."""
        batch = self._entries(rows)
        kept = self.loader.dataset.later_numbers.get(name)
        numbers = torch.full((len(batch),), torch.nan) if kept is None else kept[batch["entry"].long()]
        batch = Batch(batch.row_ids, batch.group_ids, {name: numbers})
        with_numbers, others = (source(batch.take(torch.nonzero(mask)[:, 0])) for mask in (~numbers.isnan(), numbers.isnan()))
        return rows.take(with_numbers).union(with_numbers), rows.take(others)

    def _entries(self, rows: Reference) -> Batch:
        """Return the field ``entry`` of rows of :meth:`next`, in their order."""
        assert rows.rows is not None, "rows of next()"
        entries = [Batch(batch.row_ids, batch.group_ids, {"entry": batch["entry"]}) for batch, *_ in self._batches]
        return concat(entries).reorder(torch.from_numpy(rows.rows.row_ids))

    def begin(self) -> None:
        """Begin an execution of the step: the trace and the run get the same rows."""
        self._position = 0
        self._used = None
        self.forget_trace()

    def forget_trace(self) -> None:
        """Forget the numbers that a trace has kept, which are all ones."""
        self._numbers_to_keep.clear()

    def commit(self) -> Batch | None:
        """End a step and return its rows. Rows that only the trace took go back to the loader."""
        self._return_rows()
        for name, entries, numbers in self._numbers_to_keep:
            self.loader.dataset.store_numbers(name, entries, numbers)
        step_rows = [rows for rows, *_ in self._batches]
        self._batches.clear()
        return self._without_unused(concat(step_rows)) if step_rows else None

    def _without_unused(self, rows: Batch) -> Batch:
        return rows if self._used is None else rows.take(np.flatnonzero(np.isin(rows.row_ids.numpy(), self._used)))

    def _return_rows(self) -> None:
        """Give the rows after the current position back to the loader."""
        if self._position < len(self._batches):
            self.loader.load_state_dict(self._batches[self._position][2])
            del self._batches[self._position :]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loader's state. Raises CheckpointError for prompts in flight: only an :class:`InFlightStream` resumes them."""
        if state.get("in_flight"):
            raise CheckpointError(
                f"the checkpoint has {len(state['in_flight'])} prompts in flight; give the rollout.in_flight of the run that wrote it"
            )
        self.loader.load_state_dict(state)


class InFlightStream(RowStream):
    """Prompts whose responses may take several steps (``rollout.in_flight``).

    - in_flight: number of prompts that are generated at a time. A step takes as many as a batch of the loader has: on every
      generation replica the oldest groups that have ended
    - speeds: speeds of the replicas; empty if all are equally fast. Each replica has and ends prompts in proportion to its speed, at
      least one

    Every rank knows which rows are in flight on which replica; only the replica knows their tokens.
    ``workers/partial_rollouts.py`` says which object holds which part of a row in flight, and when.
    """

    def __init__(
        self,
        loader: Loader,
        n: int,
        in_flight: int,
        num_replicas: int,
        speeds: tuple[float, ...] = (),
        agent_rows: AgentRows | None = None,
    ) -> None:
        super().__init__(loader, n, agent_rows=agent_rows)
        self.in_flight = in_flight
        self.partition_spec = PartitionSpec(num_replicas, keep_groups=True, speeds=speeds)
        replica_speeds = speeds or (1.0,) * num_replicas
        groups_per_step = fill_by_speed(loader.batch_size, replica_speeds, np.ones(num_replicas, dtype=np.int64))
        self._groups_in_flight = fill_by_speed(in_flight, replica_speeds, groups_per_step)  # of each replica
        self.num_groups = tuple(groups_per_step.tolist())
        self.prompts: Batch | None = None  # one row for each group in flight
        self.replicas = np.empty(0, dtype=np.int64)  # the replica of each prompt
        self._ended: np.ndarray | None = None  # True for groups that ended in this execution of the step
        self._reference: Reference | None = None

    def next(self, size: int | None = None) -> Reference:
        """Return all rows in flight, after adding prompts. Raises ValueError for a ``size``: ``rollout.in_flight`` sets it."""
        if size is not None:
            raise ValueError(
                f"next({size}): with rollout.in_flight all {self.in_flight} prompts in flight are given; leave the size out"
            )
        if self._reference is None:
            missing = self.in_flight - (0 if self.prompts is None else len(self.prompts))
            if missing > 0:
                self._append(self.loader.next_batch(missing))
            assert self.prompts is not None
            rows = self._with_prompts(self.prompts.repeat(self.n))
            self._reference = source(rows, {self.partition_spec: self.replicas.repeat(self.n)})
        return self._reference

    def take_reported(self, reports: list[dict[str, Any]]) -> np.ndarray:
        """Return the ids of the rows that end in this step. A trace has no groups and takes as many as a step does."""
        groups = [group for report in reports for group in report["groups"]]
        assert self.prompts is not None, "next() comes first"
        ids = self.prompts.row_ids.numpy()
        self._ended = np.isin(ids, groups) if groups else np.arange(len(ids)) < self.loader.batch_size
        ids = self.prompts.take(np.flatnonzero(self._ended)).repeat(self.n).row_ids.numpy()
        self._used = ids if self.agent_rows is None else self.agent_rows.used(ids, reports)
        return self._used

    def _entries(self, rows: Reference) -> Batch:
        """Raise ValueError for :meth:`keep` and :meth:`split_by_kept`, which need a batch of the loader."""
        raise ValueError("rollout.in_flight: a stream of prompts in flight keeps no numbers of rows; leave it out")

    def begin(self) -> None:
        self._ended = self._used = None

    def commit(self) -> Batch | None:
        step_rows = None
        if self._reference is not None and self._ended is None:
            raise RuntimeError(
                "rollout.in_flight: the step took prompts in flight and no responses that have ended, so the next step would get the "
                "same ones; sample by rlhf_spmd.algorithms.base.sample, or leave it out"
            )
        if self.prompts is not None and self._ended is not None:
            step_rows = self._without_unused(self._with_prompts(self.prompts.take(np.flatnonzero(self._ended)).repeat(self.n)))
            remaining = np.flatnonzero(~self._ended)
            self.prompts, self.replicas = self.prompts.take(remaining), self.replicas[remaining]
        self._reference = None
        return step_rows

    def state_dict(self) -> dict[str, Any]:
        groups = [] if self.prompts is None else self.prompts.row_ids.tolist()
        in_flight = [
            [group, int(replica), crc] for group, replica, crc in zip(groups, self.replicas, self._fingerprints(), strict=True)
        ]
        return {**self.loader.state_dict(), "in_flight": in_flight, "n": self._num_samples, **self._replica_state()}

    @property
    def _num_samples(self) -> int:
        return self.n // self.rows_per_episode

    def _replica_state(self) -> dict[str, Any]:
        speeds = list(self.partition_spec.speeds)
        return {"num_replicas": self.partition_spec.num_parts, **({"speeds": speeds} if speeds else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loader's state and the prompts in flight. Local: no communication.

        With another number of replicas or other speeds, prompts are redistributed by tokens. Raises CheckpointError if the text of
        prompts in flight, or the number of rows of each, has changed: the tokens would answer other prompts.
        """
        self.loader.load_state_dict(state)
        in_flight = state.get("in_flight") or []
        if in_flight:
            if (n := state["n"]) != self._num_samples:
                raise CheckpointError(
                    f"the checkpoint has {len(in_flight)} prompts in flight with sampling.n={n} responses each, "
                    f"and it is {self._num_samples} now; their rows would answer other prompts"
                )
            is_same_split = {key: state[key] for key in ("num_replicas", "speeds") if key in state} == self._replica_state()
            groups = [group for group, _, _ in in_flight]
            replicas = np.array([replica for _, replica, _ in in_flight]) if is_same_split else None
            self._append(self.loader.rows(groups), replicas)
            changed = [group for (group, _, then), now in zip(in_flight, self._fingerprints(), strict=True) if then != now]
            if changed:
                raise CheckpointError(
                    f"the checkpoint has {len(in_flight)} prompts in flight, and {len(changed)} of them read otherwise in data.path "
                    f"as it is now (the first is sample {changed[0]} of the run); give the data that the run was started with"
                )

    def _fingerprints(self) -> list[int]:
        return [] if self.prompts is None else [zlib.crc32(ids.numpy().tobytes()) for ids in self.prompts["prompt_ids"].rows()]

    def _append(self, prompts: Batch, replicas: np.ndarray | None = None) -> None:
        """Add prompts in flight. ``replicas``: the replica of each; None: balanced by tokens."""
        if replicas is None:
            num_parts = self.partition_spec.num_parts
            lengths = prompts["prompt_ids"].lengths.numpy()
            present = np.bincount(self.replicas, minlength=num_parts)
            counts = fill_by_speed(len(self.replicas) + len(lengths), self._groups_in_flight, present) - present
            replicas = partition_by_tokens(lengths, num_parts, speeds=self.partition_spec.speeds, counts=counts)
        self.prompts = prompts if self.prompts is None else concat([self.prompts, prompts])
        self.replicas = np.concatenate([self.replicas, replicas])


@dataclass(eq=False)
class Data:
    """``data`` of a step.

    - ``data.<name>``: the stream of this name
    - validation: validation rows, and calls on them
    - sampling: how training samples
    - kept: references that an algorithm keeps for later steps
    """

    _controller: Controller
    _streams: Mapping[str, RowStream]
    validation: Validation
    sampling: SamplingConfig
    kept: dict[str, Reference] = field(default_factory=dict)

    def __getattr__(self, name: str) -> RowStream:
        """Return the stream of this name."""
        streams: Mapping[str, RowStream] = self.__dict__["_streams"]
        if name not in streams:
            raise AttributeError(f"the data have no stream {name!r}; there are {', '.join(streams)}")
        return streams[name]

    @property
    def epoch(self) -> float:
        """Passes over the data of the first stream so far."""
        return next(iter(self._streams.values())).loader.epochs

    @property
    def val_sampling(self) -> SamplingConfig:
        return self.validation.sampling

    def run(self, global_step: int, script: Callable[[], Any]) -> tuple[Any, list[Batch]]:
        """Trace and run step ``global_step``. Return the result of ``script``, and the rows of each stream.

        Collective over the world: every rank of it must call, in program order.
        """
        kept = dict(self.kept)

        def execute() -> Any:
            self.kept = dict(kept)
            for stream in self._streams.values():
                stream.begin()
            return script()

        result = self._controller.run_step(global_step, execute)
        step_rows = [stream.commit() for stream in self._streams.values()]
        return result, [rows for rows in step_rows if rows is not None]

    def trace(self, script: Callable[[], Any]) -> Graph:
        """Return the dataflow of a step, and advance the streams as if the step had run. Local: no communication."""
        for stream in self._streams.values():
            stream.begin()
        graph = self._controller.trace(script)
        for stream in self._streams.values():
            stream.forget_trace()
            stream.commit()
        return graph

    def state_dict(self) -> dict[str, Any]:
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of the streams. Raises CheckpointError for a state that these streams cannot resume."""
        if set(state) != set(self._streams):
            raise CheckpointError(f"the checkpoint has the streams {', '.join(state)}, this run {', '.join(self._streams)}")
        for name, stream in self._streams.items():
            stream.load_state_dict(state[name])
