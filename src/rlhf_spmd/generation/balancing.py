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


def plan_moves(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the moves (from, to, number of rows) that make the replicas' row counts equal to within one.

    There are none while the emptiest replica has at least half as many rows as the fullest.
    """
    if 2 * min(counts) >= max(counts) or max(counts) - min(counts) < 2:
        return []
    least, extra = divmod(sum(counts), len(counts))
    fullest_first = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    surplus = {replica: counts[replica] - least - (rank < extra) for rank, replica in enumerate(fullest_first)}
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
    """Compares every ``every`` steps how many rows each replica of ``group`` has left. All replicas get the same answers.

    A replica compares while it generates (:meth:`interrupts`) and between its runs (:meth:`take`).
    ``waited``: seconds for which it waited for others while it had rows.
    """

    def __init__(self, group: Group, every: int) -> None:
        self.group, self.every = group, every
        self.waited = 0.0
        self.left = self.num_steps = 0
        self._answer: list[int] | None = None

    def begin(self, left: int) -> None:
        """Begin a run on ``left`` rows."""
        self.left, self.num_steps = left, 0

    def interrupts(self, step: ScheduledStep, num_drawn: int) -> bool:
        """Return True if the run ends after this finished step, since rows are to move or none are left anywhere.

        Collective over all replicas: every rank of them must call, in program order, after each step.
        """
        self.left -= sum(work.row.ended for work in step.work)
        self.num_steps += 1
        if self.num_steps % self.every:
            return False
        begun = time.perf_counter()
        counts = self._ask(self.left)
        self.waited += time.perf_counter() - begun
        if any(counts) and not plan_moves(counts):
            return False
        self._answer = counts
        return True

    def take(self, left: int) -> list[int]:
        """Return the row counts that ended the last run, or new ones. Collective as :meth:`interrupts`."""
        answer, self._answer = self._answer, None
        return self._ask(left) if answer is None else answer

    def _ask(self, left: int) -> list[int]:
        return torch.cat(self.group.all_gather(torch.tensor([left]), "generation:moves")).tolist()


def exchange(group: Group, outgoing: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Send JSON values to ranks of ``group`` (by group index). Returns what came here, in the order of the senders.

    Collective over the group: every rank of it must call, in program order.
    """
    payloads = [json.dumps([*outgoing.get(to, ())]).encode() for to in range(group.size)]
    sent = [len(payload) for payload in payloads]
    received = group.all_to_all(torch.tensor(sent), "generation:moves").tolist()
    outward = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
    inward = group.all_to_all_rows(outward, sent, received, "generation:moves")
    return [item for part in inward.split(received) for item in json.loads(bytes(part.numpy()))]


def pack(home: int, row: SequenceState) -> list[Any]:
    """Return a row without its pages as JSON, exactly, for :func:`exchange`. ``home``: the replica that was asked for it."""
    request = vars(row.request) | {"prompt_ids": list(row.request.prompt_ids)}
    noted = row.token_logprobs and [tensor.tolist() for tensor in row.token_logprobs]
    experts, numbers = row.experts, None
    if experts is not None and len(experts):
        data = base64.b64encode(experts.contiguous().view(torch.uint8).numpy().tobytes()).decode()
        numbers = [data, str(experts.dtype).removeprefix("torch."), list(experts.shape)]
    return [home, request, row.step, row.token_ids, noted, row.stopped, row.ended, numbers]


def unpack(packed: list[Any], dtype: torch.dtype) -> tuple[int, SequenceState]:
    """Return the opposite of :func:`pack`. ``dtype``: of the log-probs."""
    home, fields, step, token_ids, noted, stopped, ended, numbers = packed
    kinds = (dtype, dtype, torch.int64, torch.int64, dtype)
    log_probs = noted and TokenLogprobs(*(torch.tensor(values, dtype=kind) for values, kind in zip(noted, kinds, strict=True)))
    request = Request(**fields | {"overrides": fields["overrides"] and SamplingOverrides(*fields["overrides"])})
    experts = None
    if numbers is not None:
        data, kind, shape = numbers
        experts = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, kind)).view(shape)
    return home, SequenceState(request, step, token_ids, log_probs, stopped=stopped, ended=ended, experts=experts)
