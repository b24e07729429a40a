"""Rows that take more than one step (partial rollouts): what one generation replica holds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import GenerationStats, Generator
from rlhf_spmd.generation.progress import Completion, Progress
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.generation.until import Until


class HeldRollouts:
    """The same on every rank of the replica.

    ``groups``: row ids of each group in flight; ``ended``: the completions among them; the others are the generator's ``kept``.
    ``saved``: rows of a checkpoint, by id, which go on where they stood when they are asked for again.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.groups: dict[int, list[int]] = {}
        self.ended: dict[int, Completion] = {}
        self.saved: dict[int, dict[str, Any]] = {}

    def whole_groups(self) -> list[int]:
        """Groups all of whose rows have ended, the oldest first."""
        return sorted(group for group, rows in self.groups.items() if all(row in self.ended for row in rows))

    def advance(
        self, requests: Sequence[Request], sampling: SamplingConfig, number: int, num_groups: int, tick: Callable[[], None]
    ) -> None:
        """Take in ``requests`` and generate until ``num_groups`` whole groups are here.

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        fresh = [request for request in requests if not self._restore(request)]
        for request in requests:
            self.groups.setdefault(request.group_id, []).append(request.row_id)
        num_whole = len(self.whole_groups())
        fraction = (num_groups - num_whole) / max(len(self.groups) - num_whole, 1)
        if fraction <= 0:  # what ended together with the last step's rows is enough
            self.generator.kept += [Progress(request, number) for request in fresh]
            self.generator.stats = GenerationStats()
            return
        until = Until(fraction=fraction)
        ended = self.generator.generate_until(fresh, sampling, sampling.seed, number, until, number, tick)
        self.generator.make_room()  # the weights change before the next call
        self.ended |= {completion.row_id: completion for completion in ended}

    def take(self, row_ids: Sequence[int]) -> list[Completion]:
        """The completions of rows that have ended; they are held no longer."""
        taken = set(row_ids)
        self.groups = {group: rows for group, rows in self.groups.items() if taken.isdisjoint(rows)}
        return [self.ended.pop(row) for row in row_ids]

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """(row id, what :meth:`advance` goes on with) of every row here, for JSON."""
        kept = [(row.request.row_id, row.to_json()) for row in self.generator.kept]
        return kept + [(row, _completion_state(completion)) for row, completion in self.ended.items()]

    def _restore(self, request: Request) -> bool:
        state = self.saved.pop(request.row_id, None)
        if state is None:
            return False
        dtype = torch.float64 if self.generator.decoder.dtype == torch.float64 else torch.float32
        if "parts" in state:
            self.generator.kept.append(Progress.from_json(request, state, dtype))
        else:
            tensors = {name: torch.tensor(state[name], dtype=dtype) for name in ("log_probs", "log_probs_t1")}
            versions = torch.tensor(state["versions"], dtype=torch.int64)
            self.ended[request.row_id] = Completion(**{**state, **tensors, "versions": versions})
        return True


def _completion_state(completion: Completion) -> dict[str, Any]:
    state = {key: value.tolist() if torch.is_tensor(value) else value for key, value in asdict(completion).items()}
    return {**state, "top_log_probs": None}  # nothing in training reads them
