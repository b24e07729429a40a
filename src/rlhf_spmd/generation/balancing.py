"""Moves rows between generation replicas when one of them runs out of work. Tokens travel; pages are computed again."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_spmd.generation.sequence import Request, SamplingOverrides, ScheduledStep, SequenceState, TokenLogprobs
from rlhf_spmd.parallel.collectives import Group

HomeRow = tuple[int, SequenceState]  # a row and its home, the replica that was asked for it


def plan_moves(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the moves (from, to, number of rows) that make the replicas' row counts equal to within one.

    There are none while the emptiest replica has at least half as many rows as the fullest.
    """
    if 2 * min(counts) >= max(counts) or max(counts) - min(counts) < 2:
        return []
    equal_share, num_larger = divmod(sum(counts), len(counts))
    fullest_first = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    surplus = {replica: counts[replica] - equal_share - (rank < num_larger) for rank, replica in enumerate(fullest_first)}
    moves = []
    for source in fullest_first:
        for target in reversed(fullest_first):
            number = min(surplus[source], -surplus[target])
            if number > 0:
                moves.append((source, target, number))
                surplus[source] -= number
                surplus[target] += number
    return moves


class ReplicaBalancer:
    """Compares after every ``interval`` steps how many rows each replica of ``group`` has left. All get the same answers.

    A replica compares while it generates (:meth:`interrupts`) and between its runs (:meth:`take`).
    ``waited``: seconds for which it waited for others while it had rows.
    """

    def __init__(self, group: Group, interval: int) -> None:
        self.group, self.interval = group, interval
        self.waited = 0.0
        self.rows_left = self.num_steps = 0
        self._counts: list[int] | None = None  # those that ended the last run

    def begin(self, num_rows: int) -> None:
        """Begin a run on this many rows."""
        self.rows_left = num_rows
        self.num_steps = 0

    def interrupts(self, step: ScheduledStep, num_drawn: int) -> bool:
        """Return True if the run ends after this finished step, since rows are to move or none are left anywhere.

        Collective over all replicas: every rank of them must call, in program order, after each step.
        """
        self.rows_left -= sum(work.row.ended for work in step.work)
        self.num_steps += 1
        if self.num_steps % self.interval:
            return False
        started = time.perf_counter()
        counts = self._gather(self.rows_left)
        self.waited += time.perf_counter() - started
        if any(counts) and not plan_moves(counts):
            return False
        self._counts = counts
        return True

    def take(self, rows_left: int) -> list[int]:
        """Return the row counts that ended the last run, or new ones. Collective as :meth:`interrupts`."""
        counts, self._counts = self._counts, None
        return self._gather(rows_left) if counts is None else counts

    def _gather(self, rows_left: int) -> list[int]:
        """Return the rows that each replica has left."""
        return torch.cat(self.group.all_gather(torch.tensor([rows_left]), "generation:moves")).tolist()


def move_rows(
    group: Group, rows_here: Sequence[HomeRow], moves: Sequence[tuple[int, int, int]], dtype: torch.dtype
) -> tuple[list[HomeRow], list[SequenceState]]:
    """Send rows as ``moves`` says (:func:`plan_moves`). Return the rows that are here now, and those that left.

    Collective over the group: every rank of it must call, in program order.
    """
    staying = sorted(rows_here, key=lambda item: item[1].num_computed)  # the rows with the least in their pages leave
    moved_rows = []
    outgoing: dict[int, list[Any]] = {}
    for source, target, number in moves:
        if source == group.rank:
            leaving, staying = staying[:number], staying[number:]
            outgoing[target] = [_pack(*item) for item in leaving]
            moved_rows += [row for _, row in leaving]
    return staying + [_unpack(packed, dtype) for packed in _exchange(group, outgoing)], moved_rows


def return_rows(group: Group, ended: Sequence[HomeRow], dtype: torch.dtype) -> list[SequenceState]:
    """Send ended rows to their homes. Return those whose home is this replica, wherever they ended.

    Collective over the group: every rank of it must call, in program order.
    """
    outgoing: dict[int, list[Any]] = {}
    for home, row in ended:
        if home != group.rank:
            outgoing.setdefault(home, []).append(_pack(home, row))
    own_rows = [row for home, row in ended if home == group.rank]
    return own_rows + [_unpack(packed, dtype)[1] for packed in _exchange(group, outgoing)]


def _exchange(group: Group, outgoing: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Send JSON values to ranks of ``group`` (by group index). Returns what came here, in the order of the senders.

    Collective over the group: every rank of it must call, in program order.
    """
    payloads = [json.dumps([*outgoing.get(target, ())]).encode() for target in range(group.size)]
    sent = [len(payload) for payload in payloads]
    received = group.all_to_all(torch.tensor(sent), "generation:moves").tolist()
    outward = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
    inward = group.all_to_all_rows(outward, sent, received, "generation:moves")
    return [item for part in inward.split(received) for item in json.loads(bytes(part.numpy()))]


def _pack(home: int, row: SequenceState) -> list[Any]:
    """Return a row without its pages as JSON, exactly."""
    request = vars(row.request) | {"prompt_ids": list(row.request.prompt_ids)}
    token_logprobs = row.token_logprobs and [tensor.tolist() for tensor in row.token_logprobs]
    experts = row.experts
    experts_json = None
    if experts is not None and len(experts):
        data = base64.b64encode(experts.contiguous().view(torch.uint8).numpy().tobytes()).decode()
        experts_json = [data, str(experts.dtype).removeprefix("torch."), list(experts.shape)]
    return [home, request, row.step, row.token_ids, token_logprobs, row.stopped, row.ended, experts_json]


def _unpack(packed: list[Any], dtype: torch.dtype) -> HomeRow:
    """Return the row that :func:`_pack` packed. ``dtype``: the dtype of its log-probs."""
    home, fields, step, token_ids, token_logprobs, stopped, ended, experts_json = packed
    dtypes = (dtype, dtype, torch.int64, torch.int64, dtype)
    if token_logprobs is not None:
        columns = zip(token_logprobs, dtypes, strict=True)
        token_logprobs = TokenLogprobs(*(torch.tensor(values, dtype=column_dtype) for values, column_dtype in columns))
    request = Request(**fields | {"overrides": fields["overrides"] and SamplingOverrides(*fields["overrides"])})
    experts = None
    if experts_json is not None:
        data, dtype_name, shape = experts_json
        experts = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype_name)).view(shape)
    return home, SequenceState(request, step, token_ids, token_logprobs, stopped=stopped, ended=ended, experts=experts)
