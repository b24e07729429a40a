"""Rows in flight: rows whose generation takes more than one step (partial rollouts, ``rollout.in_flight``).

Three objects hold them, each its own part:

- ``training.streams.InFlightStream``, on every rank: the prompts in flight, and which replica generates each.
- :class:`PartialRollouts`, on the ranks of a generation replica: the groups in flight there, and completions of rows that have
  ended while other rows of their group go on.
- ``generation.Generator.kept``, on the same ranks: tokens, log-probs and pages of the rows that have not ended.

A step moves them in this order. ``InFlightStream.next`` fills up with new prompts and returns all rows in flight.
:meth:`PartialRollouts.advance` generates until enough groups have ended; it returns their completions and forgets these groups.
``InFlightStream.take_reported`` reads these groups from the reports, and ``commit`` removes their prompts. A checkpoint between two
steps has ``InFlightStream.state_dict`` in its manifest and :meth:`PartialRollouts.state` of each replica, with the rows of ``kept``, as
a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.data.batch import Batch, Field, Ragged, concat, ragged
from rlhf_spmd.generation.call import GenerationLimits
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.routed_experts import no_experts
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request, SequenceState, TokenLogprobs

REASONS: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")
TOKEN_FIELDS = ("log_probs", "log_probs_t1", "versions")


class SavedRow(NamedTuple):
    """A row in flight, as a checkpoint has it.

    - step: the step of its first call; 0 for rows that have ended
    - reason: why it ended, as an index in ``REASONS``
    - experts: see ``Completion``; None if they are not recorded
    """

    step: int
    reason: int
    token_ids: list[int]
    experts: Tensor | None
    log_probs: Tensor
    log_probs_t1: Tensor
    versions: Tensor


class PartialRollouts:
    """The groups in flight of one replica, the same on each of its ranks.

    - groups: the row ids of each group in flight
    - ended: completions of rows of these groups; the generator's ``kept`` has the rows that have not ended
    - saved: rows from a checkpoint, which continue as soon as :meth:`advance` gets requests for them
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.groups: dict[int, list[int]] = {}
        self.ended: dict[int, Completion] = {}
        self.saved: Batch | None = None

    def advance(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        global_step: int,
        version: int,
        num_groups: int,
        tick: Callable[[], None],
    ) -> tuple[list[Completion], list[int]]:
        """Generate until ``num_groups`` complete groups have ended. Return the completions of the oldest such groups, and their ids.

        - requests: all rows in flight on this replica, new ones among them
        - version: the version of this rank's weights: the step that started with them

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        rows_in_flight = {row for rows in self.groups.values() for row in rows}
        new = [request for request in requests if request.row_id not in rows_in_flight]
        fresh = self._restore(new, sampling.logprobs or 0)
        for request in new:
            self.groups.setdefault(request.group_id, []).append(request.row_id)
        num_complete = len(self._complete_groups())
        fraction = (num_groups - num_complete) / max(len(self.groups) - num_complete, 1)
        if fraction <= 0:  # rows that ended in the last step are enough
            self.generator.kept += [SequenceState(request, global_step) for request in fresh]
            self.generator.stats = GenerationStats()
        else:
            limits = GenerationLimits(fraction=fraction)
            ended = self.generator.generate_until(fresh, sampling, sampling.seed, global_step, limits, version, tick)
            self.generator.before_training()  # the weights change before the next call
            self.ended |= {completion.row_id: completion for completion in ended}
        finished = self._complete_groups()[:num_groups]
        rows = sorted(row for group in finished for row in self.groups.pop(group))
        return [self.ended.pop(row) for row in rows], finished

    def _complete_groups(self) -> list[int]:
        """Return the groups whose rows have all ended, the oldest first."""
        return sorted(group for group, rows in self.groups.items() if all(row in self.ended for row in rows))

    def state(self) -> Batch:
        """Return the rows in flight, for a checkpoint.

        If the run has resumed and has not generated since, it returns the rows of that checkpoint, on every replica the same.
        """
        if self.saved is not None:
            return self.saved
        no_tokens = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
        rows: dict[int, SavedRow] = {}
        for row in self.generator.kept:
            columns = (row.token_logprobs or no_tokens)[:3]
            rows[row.request.row_id] = SavedRow(row.step, 0, row.token_ids, row.experts, *columns)
        for row_id, c in self.ended.items():
            reason = REASONS.index(c.finish_reason)
            rows[row_id] = SavedRow(0, reason, c.token_ids, c.experts, c.log_probs, c.log_probs_t1, c.versions)
        row_ids = torch.tensor(sorted(rows), dtype=torch.int64)
        saved = [rows[row_id] for row_id in row_ids.tolist()]
        fields: dict[str, Field] = {
            "step": torch.tensor([row.step for row in saved], dtype=torch.int64),
            "reason": torch.tensor([row.reason for row in saved], dtype=torch.int64),
            "token_ids": ragged([row.token_ids for row in saved], torch.int64),
        }
        if self.generator.records_experts:
            placeholder = no_experts(self.generator.decoder.spec)
            parts = [placeholder if row.experts is None else row.experts for row in saved]
            lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
            fields["experts"] = Ragged(torch.cat([placeholder, *parts]), lengths)
        for name, dtype in zip(TOKEN_FIELDS, (None, None, torch.int64), strict=True):
            fields[name] = ragged([getattr(row, name) for row in saved], dtype)
        return Batch(row_ids, row_ids, fields)

    def restore(self, states: Sequence[Batch]) -> None:
        """Restore the rows that all replicas saved. Several replicas may have saved the same rows."""
        rows = concat(states)
        _, first = np.unique(rows.row_ids.numpy(), return_index=True)
        self.saved = rows.take(first)

    def _restore(self, requests: Sequence[Request], num_top: int) -> list[Request]:
        """Restore the rows that a checkpoint has. Return the other requests. ``num_top``: number of likeliest tokens per position.

        Raises CheckpointError if a row is longer than its limit now allows.
        """
        if self.saved is None:
            return list(requests)
        saved = self.saved
        self.saved = None
        index_of = {row: i for i, row in enumerate(saved.row_ids.tolist())}
        columns = {name: saved[name].rows() for name in ("token_ids", *TOKEN_FIELDS)}
        records_experts = self.generator.records_experts
        experts: list[Any] = saved["experts"].rows() if records_experts and "experts" in saved else [None] * len(saved)
        for request in requests:
            if request.row_id not in index_of:
                continue
            i = index_of[request.row_id]
            tokens = columns["token_ids"][i].tolist()
            reason = REASONS[int(saved["reason"][i])]
            log_probs, log_probs_t1, versions = (columns[name][i] for name in TOKEN_FIELDS)
            if len(tokens) >= request.max_new_tokens + (reason is not None):
                raise CheckpointError(
                    f"the checkpoint has row {request.row_id} in flight with {len(tokens)} tokens, and max_response_length is "
                    f"{request.max_new_tokens} now; give the limits that the run was started with"
                )
            if records_experts and reason is not None and experts[i] is None:
                raise CheckpointError(
                    f"the checkpoint has row {request.row_id} in flight without its experts; resume with the router_replay that the "
                    "run was started with"
                )
            if reason is not None:
                fields = tokens, log_probs, log_probs_t1, reason, versions
                self.ended[request.row_id] = Completion(request.row_id, *fields, experts=experts[i])
            else:
                top = log_probs.new_zeros(len(tokens), num_top)  # nothing in training reads them
                notes = [TokenLogprobs(log_probs, log_probs_t1, versions, top.long(), top)] if tokens else []
                self.generator.kept.append(SequenceState(request, int(saved["step"][i]), tokens, notes, experts=experts[i]))
        return [request for request in requests if request.row_id not in index_of]
