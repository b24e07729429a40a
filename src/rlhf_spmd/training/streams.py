"""What an algorithm's step finds in ``data``: its streams of rows, references that it keeps, and its validation rows.

A script runs twice, traced and for real, and gets the same rows both times. ``next()`` hands out a step's rows. Rows that only the
trace took go back to the loader.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.controller import Controller, Graph, PartitionSpec, Reference, source
from rlhf_spmd.data.balance import fill_by_speed, partition_by_tokens
from rlhf_spmd.data.batch import Batch, Field, concat
from rlhf_spmd.data.loader import Loader, validation_batches
from rlhf_spmd.data.reasoning import strip_reasoning
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.rewards.eval_metrics import final_answer, measure_sets
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers import Function, GlobalReduce, Rows

STREAM_STRIDE = 1 << 56  # between the ids of two streams, so that no row of one is taken for a row of another


class RowStream:
    """The loader's batches, ``n`` rows for each of theirs. The same on every rank; nothing is communicated.

    ``number``: the stream's among the run's streams; ids of rows and groups begin at ``number * STREAM_STRIDE``.
    """

    num_groups: tuple[int, ...] | None = None  # that each generation replica ends in a step; None: those that the step began

    def __init__(self, loader: Loader, n: int = 1, number: int = 0) -> None:
        self.loader, self.n, self.number = loader, n, number
        self._given: list[tuple[Batch, Reference, dict[str, Any]]] = []  # of this step, each with the loader's state before it
        self._place = 0
        self._to_keep: list[tuple[str, Tensor, Tensor]] = []  # what the script has the data keep, in this execution of it

    def next(self, size: int | None = None) -> Reference:
        """Return the next ``size`` rows of the data, by default the batch size, each ``n`` times as a group."""
        size = self.loader.batch_size if size is None else size
        num_rows = size * self.n * self.loader.dataset.group_size
        if self._place < len(self._given) and len(self._given[self._place][0]) != num_rows:  # the trace asked for others
            self._give_back()
        if self._place == len(self._given):
            before = self.loader.state_dict()
            rows = self.loader.next_batch(size).repeat(self.n)
            first = self.number * STREAM_STRIDE
            rows = Batch(rows.row_ids + first, rows.group_ids + first, rows.fields)
            self._given.append((rows, source(rows), before))
        self._place += 1
        return self._given[self._place - 1][1]

    def keep(self, rows: Reference, name: str, numbers: Tensor) -> None:
        """Keep ``numbers`` float64 [rows], the same on every rank, for rows that ``next`` gave.

        From the next step on, a batch whose rows all have such numbers comes with them as field ``name``; :meth:`split_by_kept`
        splits other batches. Checkpoints do not hold them: a resumed run asks again.
        """
        self._to_keep.append((name, self._entries(rows)["entry"], numbers))

    def split_by_kept(self, rows: Reference, name: str) -> tuple[Reference, Reference]:
        """Split ``rows`` that ``next`` gave into those whose field ``name`` is kept, with it, and the others."""
        batch, kept = self._entries(rows), self.loader.dataset.known.get(name)
        numbers = torch.full((len(batch),), torch.nan) if kept is None else kept[batch["entry"].long()]
        batch = Batch(batch.row_ids, batch.group_ids, {name: numbers})
        known, unknown = (source(batch.take(torch.nonzero(mask)[:, 0])) for mask in (~numbers.isnan(), numbers.isnan()))
        return rows.take(known).union(known), rows.take(unknown)

    def _entries(self, rows: Reference) -> Batch:
        """Return the field ``entry`` of rows that ``next`` gave, in their order."""
        assert rows.rows is not None, "rows that next() gave"
        given = [Batch(batch.row_ids, batch.group_ids, {"entry": batch["entry"]}) for batch, *_ in self._given]
        return concat(given).reorder(torch.from_numpy(rows.rows.row_ids))

    def begin(self) -> None:
        """Begin an execution of the script: the trace and the run get the same rows."""
        self._place = 0
        self.keep_nothing()

    def keep_nothing(self) -> None:
        """Forget what a trace had kept: it computes only ones."""
        self._to_keep.clear()

    def commit(self) -> Batch | None:
        """End a step. Returns its rows; rows that only the trace asked for go back to the loader."""
        self._give_back()
        for name, entries, numbers in self._to_keep:
            self.loader.dataset.keep(name, entries, numbers)
        taken = [rows for rows, *_ in self._given]
        self._given.clear()
        return concat(taken) if taken else None

    def _give_back(self) -> None:
        """Give the rows after the current place back to the loader."""
        if self._place < len(self._given):
            self.loader.load_state_dict(self._given[self._place][2])
            del self._given[self._place :]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the checkpoint has rows in flight, which only an :class:`InFlightStream` can resume."""
        if state.get("in_flight"):
            raise CheckpointError(
                f"the checkpoint has {len(state['in_flight'])} prompts in flight; give the data.gen_batch_size of the run that wrote it"
            )
        self.loader.load_state_dict(state)


class InFlightStream(RowStream):
    """Prompts whose responses may take several steps (``data.gen_batch_size``).

    ``in_flight`` prompts are under way at a time. A step takes the loader's batch size of them: on every generation replica the oldest
    groups that have ended. Every rank knows which rows are in flight and on which replica; only the replica knows their tokens.
    Each replica holds and ends prompts in proportion to its speed, but one at least. ``speeds``: empty if all are alike.
    """

    def __init__(self, loader: Loader, n: int, in_flight: int, num_replicas: int, speeds: tuple[float, ...] = ()) -> None:
        super().__init__(loader, n)
        self.in_flight = in_flight
        self.cut = PartitionSpec(num_replicas, keep_groups=True, speeds=speeds)
        paces = speeds or (1.0,) * num_replicas
        gives = fill_by_speed(loader.batch_size, paces, np.ones(num_replicas, dtype=np.int64))
        self._has = fill_by_speed(in_flight, paces, gives)  # prompts in flight of each replica
        self.num_groups = tuple(gives.tolist())
        self.prompts: Batch | None = None  # one row for each group in flight
        self.homes = np.empty(0, dtype=np.int64)  # the replica of each
        self._ended: np.ndarray | None = None  # of the groups, in this execution of the script
        self._reference: Reference | None = None

    def next(self, size: int | None = None) -> Reference:
        """Return all rows in flight, filled up from the data. Raises ValueError for a ``size``: ``data.gen_batch_size`` sets it."""
        if size is not None:
            raise ValueError(
                f"next({size}): with data.gen_batch_size all {self.in_flight} prompts in flight are given; leave the size out"
            )
        if self._reference is None:
            missing = self.in_flight - (0 if self.prompts is None else len(self.prompts))
            if missing > 0:
                self._append(self.loader.next_batch(missing))
            assert self.prompts is not None
            self._reference = source(self.prompts.repeat(self.n), {self.cut: self.homes.repeat(self.n)})
        return self._reference

    def take_ended(self, groups: list[int]) -> np.ndarray:
        """Return the row ids of these groups, which are then no longer in flight. A trace has no groups: it takes as many as a step
        does.
        """
        assert self.prompts is not None, "next() comes first"
        ids = self.prompts.row_ids.numpy()
        self._ended = np.isin(ids, groups) if groups else np.arange(len(ids)) < self.loader.batch_size
        rows = self.prompts.take(np.flatnonzero(self._ended)).repeat(self.n)
        return rows.row_ids.numpy()

    def begin(self) -> None:
        self._ended = None

    def commit(self) -> Batch | None:
        taken = None
        if self._reference is not None and self._ended is None:
            raise RuntimeError(
                "data.gen_batch_size: the step took prompts in flight and no responses that have ended, so the next step would get the "
                "same ones; sample by rlhf_spmd.algorithms.base.sample, or leave gen_batch_size out"
            )
        if self.prompts is not None and self._ended is not None:
            taken = self.prompts.take(np.flatnonzero(self._ended)).repeat(self.n)
            left = np.flatnonzero(~self._ended)
            self.prompts, self.homes = self.prompts.take(left), self.homes[left]
        self._reference = None
        return taken

    def state_dict(self) -> dict[str, Any]:
        groups = [] if self.prompts is None else self.prompts.row_ids.tolist()
        flying = [[group, int(home), crc] for group, home, crc in zip(groups, self.homes, self._fingerprints(), strict=True)]
        return {**self.loader.state_dict(), "in_flight": flying, "n": self.n, **self._replicas()}

    def _replicas(self) -> dict[str, Any]:
        return {"num_replicas": self.cut.num_parts, **({"speeds": list(self.cut.speeds)} if self.cut.speeds else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Local: no communication. With another number of replicas, or other speeds, rows are dealt anew by token count.

        Raises CheckpointError if the prompts of rows in flight, or the rows of each, have changed: the tokens would answer
        other prompts.
        """
        self.loader.load_state_dict(state)
        flying = state.get("in_flight") or []
        if flying:
            if (n := state.get("n")) != self.n:  # None: of a version that did not say it
                raise CheckpointError(
                    f"the checkpoint has {len(flying)} prompts in flight with sampling.n={n} responses each, and it is {self.n} now; "
                    "their rows would answer other prompts"
                )
            same = {key: state[key] for key in ("num_replicas", "speeds") if key in state} == self._replicas()
            groups = [group for group, _, _ in flying]
            self._append(self.loader.rows(groups), np.array([home for _, home, _ in flying]) if same else None)
            changed = [group for (group, _, then), now in zip(flying, self._fingerprints(), strict=True) if then != now]
            if changed:
                raise CheckpointError(
                    f"the checkpoint has {len(flying)} prompts in flight, and {len(changed)} of them read otherwise in data.path as it "
                    f"is now (the first is sample {changed[0]} of the run); give the data that the run was started with"
                )

    def _fingerprints(self) -> list[int]:
        return [] if self.prompts is None else [zlib.crc32(ids.numpy().tobytes()) for ids in self.prompts["prompt_ids"].rows()]

    def _append(self, prompts: Batch, homes: np.ndarray | None = None) -> None:
        """Add prompts. ``homes``: the replica of each; None: balanced by tokens."""
        if homes is None:
            held, lengths = np.bincount(self.homes, minlength=self.cut.num_parts), prompts["prompt_ids"].lengths.numpy()
            counts = fill_by_speed(len(self.homes) + len(lengths), self._has, held) - held
            homes = partition_by_tokens(lengths, self.cut.num_parts, speeds=self.cut.speeds, counts=counts)
        self.prompts = prompts if self.prompts is None else concat([self.prompts, prompts])
        self.homes = np.concatenate([self.homes, homes])


class ValidationRows(NamedTuple):
    """``sets``: names of the files that the rows are from. ``batch_size``: None: all at once. ``repeated``: means of rewards
    that another metric reports already.
    """

    dataset: Any
    batch_size: int | None
    sets: list[str]
    repeated: frozenset[str] = frozenset()


@dataclass(eq=False)
class Data:
    """``data`` of a step: the streams by name, ``sampling``, and ``kept``, references that a script keeps for later steps.

    ``validation``: rows by stream; their row ids are positions in the data set. ``num_shown``: prompts of each set whose responses a
    validation keeps in ``shown`` until they are taken.
    """

    _controller: Controller
    _streams: Mapping[str, RowStream]
    validation: Mapping[str, ValidationRows]
    sampling: SamplingConfig
    val_sampling: SamplingConfig
    tokenizer: Any
    num_shown: int
    reasoning_tags: Sequence[str] | None = None
    kept: dict[str, Reference] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> RowStream:
        streams: Mapping[str, RowStream] = self.__dict__["_streams"]
        if name not in streams:
            raise AttributeError(f"the data have no stream {name!r}; there are {', '.join(streams)}")
        return streams[name]

    @property
    def epoch(self) -> float:
        """Passes over the first stream's data so far."""
        return next(iter(self._streams.values())).loader.epochs

    def take_shown(self) -> list[dict[str, Any]]:
        """Return the responses that validations have kept since the last call."""
        taken, self.shown = self.shown, []
        return taken

    def run(self, global_step: int, script: Callable[[], Any]) -> tuple[Any, list[Batch]]:
        """Trace and run step ``global_step``. Returns the script's result, and the step's rows of each stream.

        Collective over the world: every rank of it must call.
        """
        before = dict(self.kept)

        def execute() -> Any:
            self.kept = dict(before)
            for stream in self._streams.values():
                stream.begin()
            return script()

        result = self._controller.run_step(global_step, execute)
        given = [stream.commit() for stream in self._streams.values()]
        return result, [rows for rows in given if rows is not None]

    def trace(self, script: Callable[[], Any]) -> Graph:
        """Return the dataflow of a step and move on as if it had run. Local: no communication."""
        for stream in self._streams.values():
            stream.begin()
        graph = self._controller.trace(script)
        for stream in self._streams.values():
            stream.keep_nothing()
            stream.commit()
        return graph

    def validate_rows(self, name: str, call: Callable[[Reference], Reference]) -> list[Any]:
        """Return the values of a call on all validation rows of a stream: those of its members, batch after batch.

        Collective over the world: every rank of it must call, in program order.
        """
        given = self.validation[name]
        batches = map(source, validation_batches(given.dataset, given.batch_size))
        return [value for rows in batches for value in self._controller.get(self._controller.run(call, rows))[0]]

    def validate_rewards(
        self, name: str, script: Callable[[Reference, SamplingConfig, Function], tuple[Reference, list[Reference]]]
    ) -> dict[str, float]:
        """Return ``val/reward_mean``, the mean of the scores; means of the rewards' extras; and ``val/...`` of
        :func:`eval_metrics.measure_sets` for prompts whose responses all have a score.

        The first prompts of each set go to ``shown``, with a response each. ``script`` gets rows, sampling and a function for
        ``compute.apply``. It returns the rows' ``scores`` (nan: none) and ``answer_codes``, and the calls that report.
        Raises RewardError if no response has a score. Collective over the world: every rank of it must call, in program order.
        """
        given = self.validation[name]
        reports: list[dict[str, Any]] = []
        fields = {"scores": [torch.empty(0)], "answer_codes": [torch.empty(0)]}
        for batch in validation_batches(given.dataset, given.batch_size):
            repeated = batch.repeat(self.val_sampling.n)
            found, calls = self._controller.run(script, source(repeated), self.val_sampling, self._reader(given))
            for wanted, parts in fields.items():
                parts.append(self._controller.get_field(found, wanted))
            reports += [report for members in self._controller.get(*calls) for report in members]
        samples = [sample for report in reports for sample in report.get("answers", [])]
        self.shown += sorted(samples, key=lambda sample: int(sample["row_id"]))
        means = {key: value for key, value in mean_extras(reports).items() if key not in given.repeated}
        scores, codes = (torch.cat(parts).reshape(-1, self.val_sampling.n).numpy() for parts in fields.values())
        scored = ~np.isnan(scores)
        if not scored.any():
            raise RewardError(f"no reward scores any of the {scores.size} responses to validation prompts")
        answers = [[None if code < 0 else code for code in row] for row in codes.tolist()]
        numbers, whole = given.dataset.sources.numpy(), scored.all(1)
        sets = {name: np.flatnonzero((numbers == number) & whole) for number, name in enumerate(given.sets)}
        means = {"reward_mean": float(scores[scored].mean(dtype=np.float64)), **means, **measure_sets(scores, answers, sets)}
        return {f"val/{key}": value for key, value in means.items()}

    def _reader(self, given: ValidationRows) -> Function:
        """Return a function for ``compute.apply`` that gives ``answer_codes`` float64 [rows]: equal for equal final answers,
        -1 for none."""
        n, sources = self.val_sampling.n, given.dataset.sources
        firsts = [int((sources < number).sum()) for number in range(len(given.sets))]
        shown = {first + i for first in firsts for i in range(self.num_shown)}

        def read_answers(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> tuple[dict[str, Field], dict[str, Any]]:
            ids = fields["response_ids"].split(rows.lengths.tolist()) if len(rows) else ()
            texts = decode(self.tokenizer, ids)
            seen_texts = texts
            if self.reasoning_tags is not None:
                prompts = given.dataset.columns["prompt_ids"].take(rows.group_ids.long()).rows() if len(rows) else ()
                pairs = zip(prompts, ids, strict=True)
                seen_texts = [
                    strip_reasoning(self.tokenizer, *map(Tensor.tolist, pair), self.reasoning_tags) or "" for pair in pairs
                ]
            codes, samples = [], []
            of_rows = (rows.row_ids, rows.group_ids, rows.lengths, fields["scores"], fields["stopped"])
            values = zip(texts, seen_texts, *(x.tolist() for x in of_rows), strict=True)
            for text, seen_text, row_id, number, length, score, stopped in values:
                seen = given.dataset.row(number)
                answer = final_answer(seen_text, seen["answer"])
                codes.append(-1.0 if answer is None else float(int.from_bytes(hashlib.sha256(answer.encode()).digest()[:6])))
                if number in shown and row_id == number * n:
                    named = {"set": given.sets[int(sources[number])], "row_id": row_id, "prompt": seen["prompt"]}
                    named |= {"response": text, "answer": seen["answer"], "score": score, "length": length}
                    samples.append({**named, "finish_reason": "stop" if stopped else "length"})
            return {"answer_codes": torch.tensor(codes, dtype=torch.float64)}, {"answers": samples}

        return read_answers

    def state_dict(self) -> dict[str, Any]:
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a state that these streams cannot go on with."""
        if set(state) != set(self._streams):
            raise CheckpointError(f"the checkpoint has the streams {', '.join(state)}, this run {', '.join(self._streams)}")
        for name, stream in self._streams.items():
            stream.load_state_dict(state[name])


def mean_extras(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means over all rows of the other numbers that reward functions returned beside the score."""
    sums: dict[str, list[float]] = {}
    for report in reports:
        for name, (total, count) in report.get("extras", {}).items():
            before = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [before[0] + total, before[1] + count]
    return {name: total / count for name, (total, count) in sums.items()}
